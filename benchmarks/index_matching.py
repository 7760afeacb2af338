"""Index matching, step by step: from a search per id to a kernel. Part of `python -m jax_ep bench sparse`."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep.pallas_kernels import index_match

from .in_jit_loop import CarryingLoop, microseconds

SEED = 0


@dataclasses.dataclass(frozen=True)
class Problem:
    """`local` sorted ids are to be found among `union` sorted ids, of a table of `num_rows`; the last is padding."""

    num_rows: int
    union: int
    local: int

    def __str__(self) -> str:
        return f"{self.local:,} ids in {self.union:,}, of {self.num_rows:,} rows"

    def draw(self) -> tuple[jax.Array, jax.Array]:
        rng = np.random.default_rng(SEED)
        union = np.sort(rng.choice(self.num_rows, self.union, replace=False)).astype(np.int32)
        union[-self.union // 20 :] = self.num_rows
        found = rng.choice(np.flatnonzero(union < self.num_rows), self.local, replace=False)
        return jnp.asarray(union), jnp.asarray(union[np.sort(found)])


GPU_PROBLEM = Problem(num_rows=5_000_000, union=200_000, local=50_000)
CPU_PROBLEM = Problem(num_rows=1_000_000, union=32_000, local=4_000)


@dataclasses.dataclass(frozen=True)
class Step:
    name: str
    match: Callable[[jax.Array, jax.Array], jax.Array]  # global ids [U], local ids [N] -> positions [N]
    calls: int = 100  # in one timed loop


def one_by_one(global_ids: jax.Array, local_ids: jax.Array) -> jax.Array:
    """For one id after the other, all global ids are looked at."""
    return jax.lax.map(lambda one: jnp.argmax(global_ids == one), local_ids)


def broadcast_compare(global_ids: jax.Array, local_ids: jax.Array) -> jax.Array:
    """Every id with every other at once: N U comparisons."""
    return jnp.argmax(global_ids[None, :] == local_ids[:, None], axis=1)


def bitmap(num_rows: int, global_ids: jax.Array, local_ids: jax.Array) -> jax.Array:
    """A bit per row of the table: an id's position is the number of bits below its own. Making the bitmap counts."""
    words = -(-num_rows // 32)
    one = jnp.uint32(1)
    word, bit = global_ids // 32, (global_ids % 32).astype(jnp.uint32)
    word = jnp.where(global_ids < num_rows, word, words)
    bits = jnp.zeros(words, jnp.uint32).at[word].add(one << bit, mode="drop")  # all ids differ: a sum is an OR
    counts = jax.lax.population_count(bits).astype(jnp.int32)
    below = jnp.cumsum(counts) - counts
    word, bit = local_ids // 32, (local_ids % 32).astype(jnp.uint32)
    return below[word] + jax.lax.population_count(bits[word] & ((one << bit) - 1)).astype(jnp.int32)


def steps(num_rows: int, interpret: bool) -> list[Step]:
    searched = [
        Step(f"jnp.searchsorted, {method!r}", partial(jnp.searchsorted, method=method))
        for method in ("scan", "scan_unrolled", "sort")
    ]
    kernel = "Pallas kernel" + " (interpreted)" * interpret
    return [
        Step("one id after the other", one_by_one, calls=1),
        Step("broadcast compare", broadcast_compare, calls=1),
        *searched,
        Step("bitmap, popcount prefix", partial(bitmap, num_rows)),
        Step(kernel, partial(index_match, interpret=interpret)),
    ]


def table(mesh: Mesh, *, repeats: int = 5) -> str:
    """Checks all steps against numpy, times them on one device of the mesh, and gives a markdown table."""
    mesh = Mesh(mesh.devices.flat[:1], ("one",))
    device = mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    problem = CPU_PROBLEM if on_cpu else GPU_PROBLEM
    with jax.default_device(device):
        global_ids, local_ids = problem.draw()
        all_steps = steps(problem.num_rows, interpret=on_cpu)
        expected = np.searchsorted(np.asarray(global_ids), np.asarray(local_ids))
        for step in all_steps:
            np.testing.assert_array_equal(jax.jit(step.match)(global_ids, local_ids), expected, step.name)
        loops = [CarryingLoop(step.match, (global_ids,), local_ids, step.calls) for step in all_steps]
        times = microseconds(loops, mesh, repeats)
    lines = [f"| index matching: {problem} | us |", "|---|---|"]
    return "\n".join(lines + [f"| {step.name} | {time:,.1f} |" for step, time in zip(all_steps, times, strict=True)])
