"""Cases of sparse_all_reduce, programs that run them, and what they must return in numpy and plain loops.

Every array has a leading axis of ranks. The oracle shares no code with jax_ep.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from helpers import Rng

from jax_ep import Group, SparseRows, sparse_all_reduce

Array = np.ndarray
Program = Callable[[Array, Array], Any]
OPS = ("sum", "mean", "mean_by_count")


class Expected(NamedTuple):
    """On all ranks; `exact` and `magnitude` in float64, `needed` rows before any is dropped."""

    indices: Array  # [R, C]
    exact: Array  # [R, C, D]
    magnitude: Array  # [R, C, D]: the sum of absolute values
    entries: Array  # [R, C]
    used: Array  # [R]
    ignored: int
    dropped: Array  # [R]
    needed: Array  # [R]


def expected(
    ids: Array, values: Array, *, num_rows: int, capacity: int, op: str = "sum", sharded: bool = False
) -> Expected:
    size, _, width = values.shape
    block, valid = -(-num_rows // size), (ids >= 0) & (ids < num_rows)
    rows = {index: values[ids == index].astype(np.float64) for index in np.unique(ids[valid]).tolist()}
    of_ranks = [[index for index in rows if not sharded or index // block == rank] for rank in range(size)]
    needed = np.array([len(mine) for mine in of_ranks])
    used = np.minimum(needed, capacity)
    indices, entries = np.full((size, capacity), num_rows, ids.dtype), np.zeros((size, capacity), int)
    exact, magnitude = np.zeros((2, size, capacity, width))
    for rank, mine in enumerate(of_ranks):
        for place, index in enumerate(mine[:capacity]):
            terms = rows[index]
            divisor = {"sum": 1, "mean": size, "mean_by_count": len(terms)}[op]
            indices[rank, place], entries[rank, place] = index, len(terms)
            exact[rank, place] = terms.sum(axis=0) / divisor
            magnitude[rank, place] = np.abs(terms).sum(axis=0) / divisor
    return Expected(indices, exact, magnitude, entries, used, int((~valid).sum()), needed - used, needed)


def assert_reduced(actual: SparseRows, wanted: Expected, dtype: Any) -> None:
    """Ids and counts are equal; values differ by the rounding of float32 sums and of the result at most."""
    np.testing.assert_array_equal(actual.indices, wanted.indices)
    np.testing.assert_array_equal(actual.count, wanted.used)
    np.testing.assert_array_equal(actual.ignored, np.full_like(wanted.used, wanted.ignored))
    np.testing.assert_array_equal(actual.dropped, wanted.dropped)
    assert actual.values.dtype == dtype
    info = jnp.finfo(dtype)
    unit = float(info.eps) / 2 + (wanted.entries[..., None] + 2) * 2.0**-24
    error = np.abs(np.asarray(actual.values).astype(np.float64) - wanted.exact)
    assert np.all(error <= unit * wanted.magnitude + float(info.smallest_subnormal)), error.max()


def dense(ids: Array, values: Array, num_rows: int) -> Array:
    """[num_rows, D] in float64: the sums of the rows [N, D] that have an id inside."""
    table, inside = np.zeros((num_rows, values.shape[-1])), (ids >= 0) & (ids < num_rows)
    np.add.at(table, ids[inside], helpers.wide(values)[inside])
    return table


def gradient(ids: Array, weights: Array, op: str) -> Array:
    """[R, N, D]: by the values of all entries, of the sum over rows of weights[id] * row; weights [num_rows, D]."""
    num_rows = len(weights)
    valid = (ids >= 0) & (ids < num_rows)
    row = np.clip(ids, 0, num_rows - 1)
    taken = np.where(valid[..., None], weights[row], 0)
    if op == "mean":
        return taken / len(ids)
    if op == "mean_by_count":
        return taken / np.maximum(np.bincount(ids[valid], minlength=num_rows), 1)[row][..., None]
    return taken


def reduced(group: Group, num_rows: int, **options: Any) -> Callable[[jax.Array, jax.Array], SparseRows]:
    """On one rank: (ids [N], values [N, D]) -> the result of `sparse_all_reduce`, without the guard, for numpy."""

    def run(ids: jax.Array, values: jax.Array) -> SparseRows:
        rows = SparseRows.from_entries(ids, values, num_rows=num_rows)
        out = sparse_all_reduce(rows, group=group, **options)
        return replace(out, guard=None)  # pyright: ignore[reportArgumentType]

    return run


def program(group: Group, num_rows: int, **options: Any) -> Program:
    """`reduced` over all ranks, each with its own copy of the result."""
    return helpers.per_rank(reduced(group, num_rows, **options), group.mesh)


def draw_values(rng: Rng, ids: Array, width: int, dtype: Any = np.float32) -> Array:
    return rng.standard_normal((*ids.shape, width)).astype(dtype)


def uniform(rng: Rng, size: int, entries: int, num_rows: int) -> Array:
    return rng.integers(0, num_rows, (size, entries), dtype=np.int32)


def zipf(rng: Rng, size: int, entries: int, num_rows: int) -> Array:
    """A few rows are in nearly every draw."""
    return ((rng.zipf(1.3, (size, entries)) * 7919) % num_rows).astype(np.int32)


def identical(rng: Rng, size: int, entries: int, num_rows: int) -> Array:
    return np.stack([rng.choice(num_rows, entries, replace=False).astype(np.int32)] * size)


def disjoint(rng: Rng, size: int, entries: int, num_rows: int) -> Array:
    return rng.permutation(num_rows)[: size * entries].reshape(size, entries).astype(np.int32)


def empty_on_some(rng: Rng, size: int, entries: int, num_rows: int) -> Array:
    return np.where(np.arange(size)[:, None] % 2, uniform(rng, size, entries, num_rows), num_rows).astype(np.int32)


def all_duplicates(rng: Rng, size: int, entries: int, num_rows: int) -> Array:
    return np.full((size, entries), rng.integers(num_rows), np.int32)


def out_of_range(rng: Rng, size: int, entries: int, num_rows: int) -> Array:
    edges = [-(2**31), -1, 0, 1, num_rows - 1, num_rows, num_rows + 1, 2**31 - 1]
    return rng.choice(np.array(edges, np.int32), (size, entries))


DRAWS: dict[str, Callable[..., Array]] = {
    "uniform": uniform,
    "zipf": zipf,
    "identical": identical,
    # More parts of rows go from one rank to another than its landing has room for.
    "identical in pairs": lambda rng, size, *of: uniform(rng, size, *of)[np.arange(size) // 2 * 2],
    # All rows belong to one rank, where results are sharded.
    "identical in one range": lambda rng, size, n, rows: identical(rng, size, n, max(rows // size, n)),
    "disjoint": disjoint,
    "empty on some": empty_on_some,
    "all duplicates": all_duplicates,
    "out of range": out_of_range,
}
