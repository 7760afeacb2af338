"""Six ways to find the place of every id of a rank in the union of all ranks' ids.

`jax_ep.sparse_all_reduce` adds up rows of a table of which every rank holds some. The result has a row for each id that
any rank holds, in order, so a rank must know the places of its own ids there. Of the ways below, the first three do
more compares at a time, and the last three compare an id with fewer others.

    python examples/index_matching.py

checks all ways against numpy, and prints and plots their times. A CPU interprets the Pallas kernels, so they are not
timed there.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jax_ep.pallas_kernels import places_in_sorted

SEED, RANKS, TABLE_ROWS = 0, 4, 5_000_000
AT_ONCE = 64  # ids
TILE = 128  # ids, and numbers of the union

Way = Callable[[jax.Array, jax.Array], jax.Array]  # of the union [U] and a rank's ids [N], both sorted: int32 [N]


def loop_over_ids(union: jax.Array, ids: jax.Array) -> jax.Array:
    """A step per id. A GPU takes some microseconds to start each step, and its U compares take less."""
    return jax.lax.map(lambda own: place_where(union == own), ids)


def where(union: jax.Array, ids: jax.Array) -> jax.Array:
    """Some ids a step."""
    return jax.lax.map(lambda own: place_where(union == own), ids, batch_size=AT_ONCE)


def broadcast_compare(union: jax.Array, ids: jax.Array) -> jax.Array:
    """All in one step, N * U compares. XLA fuses them with the sum, so no array [N, U] is stored."""
    return place_where(union == ids[:, None])


def place_where(equal: jax.Array) -> jax.Array:
    """[..., U] -> [...]: the one place that is equal."""
    return jnp.sum(jnp.where(equal, jnp.arange(equal.shape[-1], dtype=jnp.int32), 0), axis=-1, dtype=jnp.int32)


def tiles(union: jax.Array, ids: jax.Array, *, interpret: bool, ordered: bool = False) -> jax.Array:
    """A program has a tile of ids, and compares it with one tile of the union after the other.

    Args:
      ordered: the program begins at the first tile that can hold its ids, and ends where they are all found. As ids are
        sorted and all in the union, id i is at place i or behind it.
    """

    def body(union: Any, ids: Any, places: Any) -> None:
        lane, first = jnp.arange(TILE, dtype=jnp.int32), pl.program_id(0)
        at = first * TILE + lane
        own = triton.load(ids.at[jnp.minimum(at, ids.size - 1)])
        last_own = jnp.max(own)

        def is_left(state: tuple[Any, jax.Array, jax.Array]) -> jax.Array:
            tile, _, seen = state
            left = tile * TILE < union.size
            return left & (seen < last_own) if ordered else left

        def compare(state: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
            tile, found, _ = state
            place = tile * TILE + lane
            here = triton.load(union.at[jnp.minimum(place, union.size - 1)])
            equal = (own[:, None] == here[None, :]) & (place < union.size)[None, :]
            return tile + 1, found + jnp.sum(jnp.where(equal, place[None, :], 0), axis=1), jnp.max(here)

        begin = first if ordered else jnp.int32(0)
        _, found, _ = jax.lax.while_loop(is_left, compare, (begin, jnp.zeros(TILE, jnp.int32), jnp.int32(-1)))
        triton.store(places.at[jnp.where(at < ids.size, at, ids.size)], found, mask=at < ids.size)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(ids.shape, np.int32),
        grid=(pl.cdiv(ids.size, TILE),),
        in_specs=[anywhere, anywhere],
        out_specs=anywhere,
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
    )(union, ids)


class Rung(NamedTuple):
    name: str
    way: Way
    compares: float  # of an id
    is_kernel: bool = False


def ladder(union: np.ndarray, ids: np.ndarray, interpret: bool) -> list[Rung]:
    """The ways, the slowest first."""
    size, place = union.size, np.searchsorted(union, ids)
    last_places = place[np.minimum(np.arange(TILE - 1, ids.size + TILE - 1, TILE), ids.size - 1)]
    visited = last_places // TILE + 1 - np.arange(last_places.size)  # tiles of the union, by program
    by_tiles = partial(tiles, interpret=interpret)
    return [
        Rung("loop over ids", loop_over_ids, size),
        Rung(f"where, {AT_ONCE} ids a step", where, size),
        Rung("broadcast compare", broadcast_compare, size),
        Rung("kernel over tiles", by_tiles, size, True),
        Rung("early exit, ordered start", partial(by_tiles, ordered=True), TILE * visited.mean(), True),
        Rung("jax_ep: halving", partial(places_in_sorted, interpret=interpret), size.bit_length(), True),
    ]


def draw(entries: int) -> tuple[np.ndarray, np.ndarray]:
    """The sorted union of the ids of all ranks, and the sorted ids of one of them."""
    rng = np.random.default_rng(SEED)
    ids = [np.unique(rng.integers(0, TABLE_ROWS, entries, dtype=np.int32)) for _ in range(RANKS)]
    return np.unique(np.concatenate(ids)), ids[0]


def microseconds(way: Way, union: jax.Array, ids: jax.Array) -> float:
    """Of a call inside one jitted loop, so that the host's part of a call does not count."""

    @partial(jax.jit, static_argnums=0)  # with a traced number a GPU would ask the host before each call
    def loop(calls: int, union: jax.Array, ids: jax.Array) -> jax.Array:
        def call(_: Any, found: jax.Array) -> jax.Array:
            held, _ = jax.lax.optimization_barrier((ids, found))  # a call depends on the one before
            return way(union, held)

        return jax.lax.fori_loop(0, calls, call, jnp.zeros_like(ids))

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(calls, union, ids))
        return time.perf_counter() - start

    seconds(1)  # compiles
    calls = max(1, min(1000, int(0.1 / seconds(1))))
    return 1e6 * min(seconds(calls) for _ in range(4)) / calls  # the first compiles


def plot(times: dict[str, float], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(times), list(times.values()))
    axes.bar_label(bars, [f"{x:,.0f}" for x in times.values()], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xscale="log", xlabel="microseconds", title=title)
    figure.savefig(path, dpi=120)


def main(arguments: list[str]) -> int:
    """Returns 0 if all ways found the places that numpy finds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, help="of a rank; default: 50,000 on a GPU, 2,000 on a CPU")
    parser.add_argument("--out", type=Path, default=Path("index_matching.png"), help="PNG file; default: %(default)s")
    options = parser.parse_args(arguments)
    on_gpu = jax.default_backend() == "gpu"
    entries = (50_000 if on_gpu else 2_000) if options.ids is None else options.ids
    if not 1 <= entries <= TABLE_ROWS:
        parser.error(f"--ids must be in [1, {TABLE_ROWS}], got {entries}")
    union, ids = draw(entries)
    wanted, operands = np.searchsorted(union, ids), (jnp.asarray(union), jnp.asarray(ids))
    title = f"{ids.size:,} ids in a union of {union.size:,}, on {jax.devices()[0].device_kind}"
    print(title, "", "| way | us | compares of an id | right |", "|---|---|---|---|", sep="\n")
    times: dict[str, float] = {}
    all_right = True
    for name, way, compares, is_kernel in ladder(union, ids, interpret=not on_gpu):
        right = np.array_equal(jax.jit(way)(*operands), wanted)
        all_right = all_right and right
        if on_gpu or not is_kernel:
            times[name] = microseconds(way, *operands)
        us = f"{times[name]:,.1f}" if name in times else "-"
        print(f"| {name} | {us} | {compares:,.0f} | {'yes' if right else 'NO'} |", flush=True)
    plot(times, title, options.out)
    print(f"\nwrote {options.out}")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
