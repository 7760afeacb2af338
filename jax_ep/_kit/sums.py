"""Sums of rows by segment and by id, with derivatives: equal operands give equal bits on every platform.

GPUs sum by the Pallas kernels, entries in parts of 32. On other platforms `jax.ops.segment_sum` adds the entries in
order; on a GPU it would add by atomics, in no order. Segments are often the runs of equal ids among sorted ids.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from jax_ep import pallas_kernels
from jax_ep._kit import checks
from jax_ep._kit.batches import by_kernel_on_gpus
from jax_ep._kit.checks import PyTree
from jax_ep._kit.linear import linear

NO_PLACE = 2**31 - 1


class Segments(NamedTuple):
    """Which entries of `rows` are added up: those of a segment are neighbours.

    Attributes:
      of: [M] int32. The segment of each entry, not decreasing; any outside [0, S) for the entries of none.
      starts: [S + 1] int32. The first entry of each segment, and the end of the last one.
      order: [M] int32, the row of each entry; all differ. None: entry j is row j.
    """

    of: jax.Array
    starts: jax.Array
    order: jax.Array | None = None


def sum_segments(rows: jax.Array, segments: Segments, dtype: DTypeLike) -> jax.Array:
    """[N, D] -> [S, D]: the sum of each segment's rows in float32, rounded to `dtype`. Differentiable in `rows`."""
    count, like = segments.starts.shape[0] - 1, rows.dtype
    if not (count and rows.size):  # the type of an empty `jax.ops.segment_sum` varies over no axis
        return jnp.zeros_like(rows, dtype, shape=(count, rows.shape[1]))

    def by_xla(rows: jax.Array, segments: Segments) -> jax.Array:
        taken = rows if segments.order is None else rows[segments.order]
        return _segment_sum(taken, segments.of, count, dtype, are_sorted=True)

    def by_kernel(rows: jax.Array, segments: Segments, interpret: bool) -> jax.Array:
        _, starts, order = segments
        return _by_pallas(rows, starts, dtype, order=order, interpret=interpret)

    def back(segments: Segments, cotangent: jax.Array) -> jax.Array:
        taken = _read(cotangent, segments.of).astype(like)
        if segments.order is None:
            return taken
        home = jnp.zeros_like(taken, shape=rows.shape)
        return home.at[segments.order].set(taken, unique_indices=True)

    return linear(lambda segments, rows: by_kernel_on_gpus(by_kernel, by_xla)(rows, segments), back, segments, rows)


def sum_by_ids(rows: jax.Array, ids: jax.Array, count: int, dtype: Any, weights: jax.Array | None = None) -> jax.Array:
    """[N, D], integers [N] -> [count, D]: the sum of the rows of each id in float32, rounded once to `dtype`.

    Ids outside [0, count) are left out. Differentiable in `rows` and in `weights`.

    Args:
      weights: [N] floats, by which rows are multiplied in float32. None: 1.
    """
    if not (count and rows.size):
        return jnp.zeros_like(rows, dtype, shape=(count, rows.shape[1]))
    sums = _sums_of_rows if weights is None else _sum_by_ids
    return sums(count, np.dtype(dtype), ids, rows, weights)


def _sums_of_rows(count: int, dtype: np.dtype, ids: jax.Array, rows: jax.Array, weights: jax.Array | None) -> jax.Array:
    """`_sum_by_ids` as a linear function of the rows. JAX can also transpose it if the rows are tangents."""
    like = rows.dtype

    def forward(residuals: tuple[jax.Array, jax.Array | None], rows: jax.Array) -> jax.Array:
        ids, weights = residuals
        return _sum_by_ids(count, dtype, ids, rows, weights)

    def back(residuals: tuple[jax.Array, jax.Array | None], cotangent: jax.Array) -> jax.Array:
        ids, weights = residuals
        return _times(_read(cotangent, ids), weights).astype(like)

    return linear(forward, back, (ids, weights), rows)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _sum_by_ids(count: int, dtype: np.dtype, ids: jax.Array, rows: jax.Array, weights: jax.Array | None) -> jax.Array:
    def by_xla(ids: jax.Array, rows: jax.Array, *weights: jax.Array) -> jax.Array:
        return _segment_sum(_times(rows, *weights), ids, count, dtype)

    def by_kernel(ids: jax.Array, rows: jax.Array, *weights: jax.Array, interpret: bool) -> jax.Array:
        narrow = jnp.uint16 if count < 2**16 else jnp.int32  # halves the passes of a radix sort
        ids, order = sorted_with_order(jnp.where((ids >= 0) & (ids < count), ids, count).astype(narrow))
        starts = places_in_sorted(ids, jnp.arange(count + 1, dtype=jnp.int32))
        sorted_weights = weights[0][order] if weights else None
        return _by_pallas(rows, starts, dtype, order=order, weights=sorted_weights, interpret=interpret)

    return by_kernel_on_gpus(by_kernel, by_xla)(ids, rows, *([] if weights is None else [weights]))


@partial(_sum_by_ids.defjvp, symbolic_zeros=True)
def _sum_by_ids_jvp(count: int, dtype: np.dtype, primals: PyTree, tangents: PyTree) -> tuple[jax.Array, jax.Array]:
    """The sum is linear in the rows, and in the weights."""
    (ids, rows, weights), (_, d_rows, d_weights) = primals, tangents
    of = partial(_sum_by_ids, count, dtype)

    def to_weights(residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> jax.Array:
        ids, rows = residuals
        products = _read(cotangent, ids).astype(jnp.float32) * rows.astype(jnp.float32)
        return products.sum(axis=1).astype(d_weights.dtype)

    moved = []
    if not isinstance(d_rows, SymbolicZero):
        moved.append(_sums_of_rows(count, dtype, ids, d_rows, weights))
    if weights is not None and not isinstance(d_weights, SymbolicZero):
        moved.append(linear(lambda kept, x: of(*kept, x), to_weights, (ids, rows), d_weights))
    return of(*primals), sum(moved[1:], moved[0])


def runs_of_sorted(ids: jax.Array, limit: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The runs of equal ids among sorted int32 ids [N]; those outside [0, limit) are padding.

    Returns:
      int32 [N + 1], where each run begins, then the end of the last one; [N], the id of each run, then `limit`; and
      int32 [], the number of runs.
    """

    def by_xla(ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        places, count = places_of_sorted(ids, limit)
        entry = jnp.arange(ids.shape[0], dtype=jnp.int32)
        at = jnp.where(jnp.diff(places, prepend=-1) != 0, places, NO_PLACE)
        end = jnp.sum(ids < limit, dtype=jnp.int32)
        starts = jnp.full((ids.shape[0] + 1,), end).at[at].set(entry, mode="drop")
        different = ids.at[starts[:-1]].get(mode="fill", fill_value=limit, indices_are_sorted=True)
        return starts, jnp.minimum(different, limit), count

    def by_kernel(ids: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        return pallas_kernels.runs_of_sorted(ids, limit, interpret=interpret)

    return by_kernel_on_gpus(by_kernel, by_xla)(ids)


def places_of_sorted(ids: jax.Array, limit: int) -> tuple[jax.Array, jax.Array]:
    """The run of each of the sorted ids [N], and the number of runs.

    Ids outside [0, limit), which stand for nothing, have the place 2**31 - 1.
    """
    valid = (ids >= 0) & (ids < limit)
    first = valid & (jnp.diff(ids, prepend=-1) > 0)
    places = jnp.cumsum(first, dtype=jnp.int32) - 1
    return jnp.where(valid, places, NO_PLACE), jnp.sum(first, dtype=jnp.int32)


def sorted_with_order(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sorted ids [N], and int32 [N]: where each was. Equal ids stay in order."""
    order = jnp.arange(ids.shape[0], dtype=jnp.int32)
    ids, order = jax.lax.sort((ids, order), num_keys=1, is_stable=True)
    return ids, order


def places_in_sorted(union: jax.Array, ids: jax.Array) -> jax.Array:
    """int32 [N]: how many of the sorted integers [U] are below each of the int32 ids [N].

    By halving. The type of `jnp.searchsorted` varies over a `spmd_axis_name` even where its operands do not.
    """

    def by_xla(union: jax.Array, ids: jax.Array) -> jax.Array:
        below = jnp.zeros_like(ids)
        for bit in reversed(range(union.shape[0].bit_length())):
            more = below + (1 << bit)
            here = union.at[more - 1].get(mode="fill", fill_value=0).astype(ids.dtype)
            below = jnp.where((more <= union.shape[0]) & (here < ids), more, below)
        return below

    return by_kernel_on_gpus(pallas_kernels.places_in_sorted, by_xla)(union, ids)


def _segment_sum(rows: jax.Array, of: jax.Array, count: int, dtype: DTypeLike, are_sorted: bool = False) -> jax.Array:
    return jax.ops.segment_sum(rows.astype(jnp.float32), of, count, are_sorted, mode="drop").astype(dtype)


def _by_pallas(rows: jax.Array, starts: jax.Array, dtype: DTypeLike, **options: Any) -> jax.Array:
    """`pallas_kernels.sum_segments`. It has no float64, and the sums are in float32 on every platform."""

    def known(given: Any) -> Any:
        return given if np.dtype(given) in checks.TOKEN_DTYPES else jnp.float32

    summed = pallas_kernels.sum_segments(rows.astype(known(rows.dtype)), starts, dtype=known(dtype), **options)
    return summed.astype(dtype)


def _times(rows: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    return rows if weights is None else rows.astype(jnp.float32) * weights.astype(jnp.float32)[:, None]


def _read(rows: jax.Array, at: jax.Array) -> jax.Array:
    return rows.at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False)
