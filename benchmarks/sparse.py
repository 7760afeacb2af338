"""sparse_all_reduce beside XLA's collectives, and beside `psum` of a dense table: `python -m jax_ep bench sparse`."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_ep
from jax_ep import SparseRows

from .in_jit_loop import AXIS, Loop, check_alike, draw, on_ranks
from .runner import Bench, Row, Run

SEED = 0
KINDS = ("uniform", "Zipf")


@dataclasses.dataclass(frozen=True)
class Shape:
    num_rows: int
    width: int
    entries: int  # of a rank

    def __str__(self) -> str:
        return f"table {self.num_rows:,} x {self.width}, {self.entries:,} rows a rank, float32"

    @property
    def row_bytes(self) -> int:
        return 4 * self.width


@dataclasses.dataclass(frozen=True)
class Case:
    """`dense`: the table is small enough for a dense gradient, of which a rank has the rows of its ids."""

    kind: str
    shape: Shape
    dense: bool = False
    quick: bool = True

    def __str__(self) -> str:
        zeros = 100 - 100 * self.shape.entries / self.shape.num_rows
        return f"{self.kind}, {f'{zeros:g} % zeros, ' if self.dense else ''}{self.shape}"


CPU_CASES = [
    *(Case(kind, Shape(1_000_000, 64, 4_000)) for kind in KINDS),
    Case("uniform", Shape(10_000, 16, 100), dense=True),
]
GPU_CASES = [
    *(Case(kind, Shape(5_000_000, 2048, 50_000)) for kind in KINDS),
    *(Case("uniform", Shape(500_000, 512, n), dense=True, quick=n == 5_000) for n in (50_000, 15_000, 5_000, 500, 50)),
]

Formulation = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]  # of a rank's ids and values


@dataclasses.dataclass(frozen=True)
class Load:
    """What the ids of all ranks ask for, in rows."""

    union: int
    largest_share: int  # of a rank's range of the table
    replicated: float  # a rank must receive, on average
    sharded: int  # the rank that receives most


def draw_ids(kind: str, shape: Shape, ranks: int) -> np.ndarray:
    """[R, N] with duplicates; Zipf: a row of rank k in the order of popularity 1 / k times as often."""
    rng = np.random.default_rng(SEED)
    if kind == "uniform":
        return rng.integers(0, shape.num_rows, (ranks, shape.entries), dtype=np.int32)
    popularity = np.cumsum(1 / np.arange(1, shape.num_rows + 1))
    places = np.searchsorted(popularity, rng.random((ranks, shape.entries)) * popularity[-1])
    return rng.permutation(shape.num_rows).astype(np.int32)[places]


def load(ids: np.ndarray, num_rows: int) -> Load:
    """A rank receives n + U (P - 2) / P rows if all holders of a row take equal turns in adding it up."""
    ranks = len(ids)
    held = [np.unique(own) for own in ids]
    union, holders = np.unique(np.concatenate(held), return_counts=True)
    owner = union // -(-num_rows // ranks)
    from_others = np.bincount(owner, holders, minlength=ranks)
    for rank, own in enumerate(held):
        from_others[rank] -= np.count_nonzero(own // -(-num_rows // ranks) == rank)
    return Load(
        union=len(union),
        largest_share=int(np.bincount(owner, minlength=ranks).max()),
        replicated=sum(map(len, held)) / ranks + len(union) * (ranks - 2) / ranks,
        sharded=int(from_others.max()),
    )


def round_up(rows: int) -> int:
    return -(-rows // 128) * 128


def ours(group: jax_ep.Group, num_rows: int, capacity: int, **options: Any) -> Formulation:
    def run(ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = SparseRows.from_entries(ids, values, num_rows=num_rows)
        out = jax_ep.sparse_all_reduce(rows, group=group, capacity=capacity, **options)
        return out.indices, out.values

    return run


def gather_and_segment_sum(num_rows: int, capacity: int) -> Formulation:
    """Every rank gathers the rows of all ranks, sorts their ids and adds up the rows of each id."""

    def run(ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids = jax.lax.all_gather(ids, AXIS, tiled=True)
        values = jax.lax.all_gather(values, AXIS, tiled=True)
        order = jnp.argsort(ids)
        first = jnp.diff(ids[order], prepend=-1) > 0
        places = jnp.zeros_like(order).at[order].set(jnp.cumsum(first) - 1)
        indices = jnp.full(capacity, num_rows, ids.dtype).at[places].set(ids, mode="drop")
        return indices, jax.ops.segment_sum(values, places, capacity)

    return run


def union_and_psum(num_rows: int, capacity: int) -> Formulation:
    """The union of a mask per rank gives every id its place; then `psum` of all places, most of them zero on a rank."""

    def run(ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        mask = jax.lax.pmax(jnp.zeros(num_rows, jnp.int8).at[ids].set(1), AXIS)
        places = jnp.cumsum(mask, dtype=jnp.int32)[ids] - 1
        indices = jnp.nonzero(mask, size=capacity, fill_value=num_rows)[0].astype(ids.dtype)
        rows = jnp.zeros((capacity, values.shape[1]), values.dtype).at[places].add(values, mode="drop")
        return indices, jax.lax.psum(rows, AXIS)

    return run


def rows(case: Case, run: Run) -> Iterator[Row]:
    """Checks the formulations against each other, and times them."""
    group, shape = run.group, case.shape
    ids = draw_ids(case.kind, shape, group.size)
    needed = load(ids, shape.num_rows)
    capacity, own_capacity = round_up(needed.union), round_up(needed.largest_share)
    mine = partial(ours, group, shape.num_rows)
    gathered, summed = (group.size - 1) * shape.entries, 2 * (group.size - 1) / group.size
    replicated = {  # and the rows that a rank receives
        "jax_ep, bitmap": (mine(capacity, method="bitmap"), needed.replicated),
        "jax_ep, match": (mine(capacity, method="match"), needed.replicated),
        "jax_ep, pallas": (mine(capacity, implementation="pallas"), gathered),
        # As XLA's formulations, which drop what has no room: an error that is raised makes the host wait for the op.
        "jax_ep, pallas, drop": (mine(capacity, implementation="pallas", on_overflow="drop"), gathered),
        "all-gather, segment_sum": (gather_and_segment_sum(shape.num_rows, capacity), gathered),
        "union, psum": (union_and_psum(shape.num_rows, capacity), summed * capacity),
    }
    if run.on_cpu:
        replicated = {name: one for name, one in replicated.items() if "pallas" not in name}  # it would be interpreted
    flat_ids = jax.device_put(ids.reshape(-1), NamedSharding(group.mesh, P(AXIS)))
    values = draw(group.mesh, SEED, ids.size, shape.width, dtype=np.float32)
    check_equal({name: one for name, (one, _) in replicated.items()}, group, flat_ids, values)
    formulations = replicated | {"jax_ep, sharded": (mine(own_capacity, sharded=True), needed.sharded)}
    calls = 3 if run.on_cpu else 20
    loops = {name: Loop(one, (flat_ids,), values, calls) for name, (one, _) in formulations.items()}
    received = {name: count for name, (_, count) in formulations.items()}
    if case.dense:
        table = draw(group.mesh, SEED, group.size * shape.num_rows, shape.width, dtype=np.float32)
        loops["dense psum"] = Loop(lambda table: jax.lax.psum(table, AXIS), (), table, calls)
        received["dense psum"] = summed * shape.num_rows
    for name, time in run.time(loops).items():
        size = received[name] * shape.row_bytes
        yield {
            "ids": case,
            "formulation": name,
            "us": f"{time:,.0f}",
            "received MB a rank": f"{size / 1e6:,.1f}",
            "GB/s": f"{size / time / 1e3:,.1f}",
        }


def check_equal(formulations: dict[str, Formulation], group: jax_ep.Group, ids: jax.Array, values: jax.Array) -> None:
    """Raises unless all have the same ids, and sums that differ by rounding only."""
    expected = None
    for name, one in formulations.items():
        indices, sums = (x[: x.shape[0] // group.size] for x in on_ranks(one, group.mesh)(ids, values))
        if expected is None:
            expected = indices, sums
        np.testing.assert_array_equal(indices, expected[0], name)
        check_alike(name, sums, expected[1], 1e-5)


BENCH = Bench(__doc__, lambda run: CPU_CASES if run.on_cpu else GPU_CASES, rows, quick="fewer dense tables")
