"""Sums of rows by id beside XLA's gather and segment_sum: `python -m jax_ep bench sums`."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import SparseRows, coalesce
from jax_ep.lax import ragged_dot

from .in_jit_loop import Loop, check_alike
from .runner import Bench, Row, Run
from .sparse import KINDS, SEED, Shape, draw_ids

Ways = tuple[Callable[..., Any], Callable[..., Any], tuple[jax.Array, ...]]  # ours, XLA's, their operands


@dataclasses.dataclass(frozen=True)
class Coalesced:
    """`coalesce` of rows with ids of one kind."""

    kind: str
    shape: Shape
    quick: bool = True

    def __str__(self) -> str:
        return f"coalesce {self.shape.entries:,} x {self.shape.width} float32, {self.kind} ids"

    def ways(self) -> Ways:
        """Of ids and values: the sums, and the ids that they are of."""
        num_rows = self.shape.num_rows

        def ours(ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = coalesce(SparseRows.from_entries(ids, values, num_rows=num_rows))
            return out.values, out.indices

        def by_xla(ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
            order = jnp.argsort(ids, stable=True)
            ids = ids[order]
            places = jnp.cumsum(jnp.diff(ids, prepend=-1) > 0) - 1
            sums = jax.ops.segment_sum(values[order], places, ids.shape[0], indices_are_sorted=True)
            return sums, jnp.full_like(ids, num_rows).at[places].set(ids)

        ids = jnp.asarray(draw_ids(self.kind, self.shape, 1)[0])
        return ours, by_xla, (ids, jax.random.normal(jax.random.key(SEED), (len(ids), self.shape.width)))


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The gradient of gathered rows of a product: each of `tokens` rows goes to `top` experts."""

    tokens: int
    hidden: int
    width: int
    experts: int
    top: int
    quick: bool = True

    def __str__(self) -> str:
        return f"gradient of gathered rows [{self.tokens:,}, {self.hidden}], top-{self.top} of {self.experts}, bfloat16"

    def ways(self) -> Ways:
        """Of indices, group sizes, matrices, the cotangent and the rows. XLA gathers the rows, and its scatter-add sums
        their gradient."""

        def ours(indices: jax.Array, sizes: jax.Array, rhs: jax.Array, d_out: jax.Array, rows: jax.Array) -> jax.Array:
            return jax.vjp(lambda x: ragged_dot(x, rhs, sizes, lhs_indices=indices), rows)[1](d_out)[0]

        def by_xla(indices: jax.Array, sizes: jax.Array, rhs: jax.Array, d_out: Any, rows: jax.Array) -> jax.Array:
            return jax.vjp(lambda x: ragged_dot(x[indices], rhs, sizes), rows)[1](d_out)[0]

        chosen = np.argsort(np.random.default_rng(SEED).random((self.tokens, self.experts)), axis=1)[:, : self.top]
        indices = (np.argsort(chosen.reshape(-1), kind="stable") // self.top).astype(np.int32)
        sizes = np.bincount(chosen.reshape(-1), minlength=self.experts).astype(np.int32)
        shapes = (self.experts, self.hidden, self.width), (len(indices), self.width), (self.tokens, self.hidden)
        keys = jax.random.split(jax.random.key(SEED), len(shapes))
        arrays = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
        return ours, by_xla, (jnp.asarray(indices), jnp.asarray(sizes), *arrays)


CPU_CASES = [Coalesced("Zipf", Shape(10_000, 16, 2_000)), Gathered(32, 16, 16, 4, 2)]
GPU_CASES = [
    *(Coalesced(kind, Shape(5_000_000, 2048, 50_000)) for kind in KINDS),
    *(Coalesced(kind, Shape(10_000_000, 128, 524_288), quick=False) for kind in KINDS),
    *(Coalesced(kind, Shape(10_000_000, 64, 1_048_576)) for kind in KINDS),
    Gathered(32_768, 2048, 768, 128, 8),
]


def rows(case: Coalesced | Gathered, run: Run) -> Iterator[Row]:
    """Checks both against each other, and times them in turns."""
    ours, others, operands = case.ways()
    mine, wanted = (jax.tree.leaves(jax.jit(one)(*operands))[0] for one in (ours, others))
    check_alike(str(case), mine, wanted, 2.0**-6 if mine.dtype == jnp.bfloat16 else 1e-5)
    calls = 3 if run.on_cpu else 20
    loops = {name: Loop(one, operands[:-1], operands[-1], calls) for name, one in (("jax_ep", ours), ("XLA", others))}
    times = run.time(loops, hot=True)
    yield {
        "sums": case,
        **{f"{name}, us": f"{time:,.0f}" for name, time in times.items()},
        "of XLA": f"{times['jax_ep'] / times['XLA']:.2f}",
    }


BENCH = Bench(
    __doc__,
    lambda run: CPU_CASES if run.on_cpu else GPU_CASES,
    rows,
    quick="fewer shapes",
    open=lambda _: None,
)
