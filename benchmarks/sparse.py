"""sparse_all_reduce beside XLA's collectives: `python -m jax_ep bench sparse`."""

import argparse
import dataclasses
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_ep

from . import sparse_formulations as forms
from .in_jit_loop import Loop, draw, microseconds, on_ranks
from .provenance import header
from .sparse_formulations import AXIS, Formulation
from .tables import heading

SEED = 0
LINK_GB_PER_S = 370  # of an H200's NVLink, one way

KINDS = ("uniform", "Zipf", "identical")


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


CPU_SHAPE = Shape(1_000_000, 64, 4_000)
GPU_SHAPE = Shape(5_000_000, 2048, 50_000)


@dataclasses.dataclass(frozen=True)
class Load:
    """What the ids of all ranks ask for, in rows."""

    union: int
    largest_share: int  # of a rank's range of the table
    replicated: float  # a rank must receive, on average
    sharded: int  # the rank that receives most


def draw_ids(kind: str, shape: Shape, ranks: int) -> np.ndarray:
    """[R, N]: uniform and Zipf with duplicates, a row of rank k in the order of popularity 1 / k times as often."""
    rng = np.random.default_rng(SEED)
    if kind == "identical":
        one = rng.choice(shape.num_rows, shape.entries, replace=False)
        return np.tile(one.astype(np.int32), (ranks, 1))
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


def place_entries(ids: np.ndarray, width: int, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """The ids of all ranks one after the other, on their devices, and a row of random values for each."""
    place = NamedSharding(mesh, P(AXIS))
    return jax.device_put(ids.reshape(-1), place), draw(mesh, SEED, ids.size, width, dtype=np.float32)


def round_up(rows: int) -> int:
    return -(-rows // 128) * 128


def measure(
    kind: str, shape: Shape, group: jax_ep.Group, implementation: jax_ep.Implementation, calls: int, repeats: int
) -> str:
    """Checks the formulations against each other, times them in turns and gives a markdown table."""
    ids = draw_ids(kind, shape, group.size)
    needed = load(ids, shape.num_rows)
    capacity, own_capacity = round_up(needed.union), round_up(needed.largest_share)
    ours = partial(forms.ours, group, shape.num_rows, implementation=implementation)
    gathered = (group.size - 1) * shape.entries
    summed = 2 * capacity * (group.size - 1) / group.size
    rows: list[tuple[Formulation, float]] = [  # with the rows that a rank receives
        (ours(capacity, method="bitmap"), needed.replicated),
        (ours(capacity, method="match"), needed.replicated),
        (forms.gather_and_segment_sum(shape.num_rows, capacity), gathered),
        (forms.union_and_psum(shape.num_rows, capacity), summed),
        (ours(own_capacity, sharded=True), needed.sharded),
    ]
    flat_ids, values = place_entries(ids, shape.width, group.mesh)
    check_equal([one for one, _ in rows[:4]], group, flat_ids, values)
    times = microseconds([Loop(one.run, (flat_ids,), values, calls) for one, _ in rows], group.mesh, repeats)
    group.check()
    return table(kind, shape, rows, times, on_gpu=group.platform != "cpu")


def check_equal(formulations: list[Formulation], group: jax_ep.Group, ids: jax.Array, values: jax.Array) -> None:
    """Raises unless all have the same ids, and sums that differ by rounding only."""
    expected = None
    for one in formulations:
        indices, sums = (x[: x.shape[0] // group.size] for x in on_ranks(one.run, group.mesh)(ids, values))
        if expected is None:
            expected = indices, sums
        np.testing.assert_array_equal(indices, expected[0], one.name)
        largest = float(abs(expected[1]).max())
        assert float(abs(sums - expected[1]).max()) <= 1e-5 * largest, one.name


def table(kind: str, shape: Shape, rows: list[tuple[Formulation, float]], times: list[float], on_gpu: bool) -> str:
    of_link = f" | of {LINK_GB_PER_S} GB/s" * on_gpu
    lines = [heading(f"{kind} ids, {shape} | us | received MB a rank | GB/s{of_link}")]
    for (one, received), time in zip(rows, times, strict=True):
        rate = received * shape.row_bytes / time / 1e3
        share = f" {100 * rate / LINK_GB_PER_S:.0f}% |" * on_gpu
        lines.append(f"| {one.name} | {time:,.0f} | {received * shape.row_bytes / 1e6:,.1f} | {rate:,.1f} |{share}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep bench sparse", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of ids")
    parser.add_argument("--repeats", type=int, default=5, help="loops of calls")
    parser.add_argument("--calls", type=int, help="in a loop (CPU, default 3; GPU, 20)")
    parser.add_argument("--implementation", choices=("auto", "ffi", "xla"), default="auto")
    options = parser.parse_args(arguments)

    with jax_ep.Group(Mesh(np.array(jax.devices()), (AXIS,)), AXIS) as group:
        on_gpu = group.platform != "cpu"
        print(
            header(
                list(group.mesh.devices.flat),
                repr(group._resolve("bench", options.implementation)),
                ["sparse", *arguments],
            ),
            flush=True,
        )
        shape, calls = (GPU_SHAPE, options.calls or 20) if on_gpu else (CPU_SHAPE, options.calls or 3)
        for kind in options.kinds:
            print("\n" + measure(kind, shape, group, options.implementation, calls, options.repeats), flush=True)
    return 0
