"""coalesce: adds up the entries of one rank for the same row."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_derivatives import zero_from_primal

from jax_ep._kit import checks, vary
from jax_ep._kit.checks import OnOverflow, PyTree
from jax_ep._kit.scopes import op_scope
from jax_ep._kit.sums import (
    NO_PLACE,
    Segments,
    places_in_sorted,
    places_of_sorted,
    runs_of_sorted,
    sorted_with_order,
    sum_by_ids,
    sum_segments,
)
from jax_ep.group import keep_or_raise
from jax_ep.ops.sparse.types import SparseRows, check_sparse_rows
from jax_ep.runtime.undelivered import capacity_error, undelivered_if


@op_scope("coalesce")
def coalesce(rows: SparseRows, *, capacity: int | None = None, on_overflow: OnOverflow = "raise") -> SparseRows:
    """Adds up the entries of each row: sorted different ids, padded with id `num_rows` and zero values.

    Duplicates are added in float32 and rounded once to the dtype of `values`. Differentiable in `values`.

    Args:
      rows: N entries in any order.
      capacity: C, entries of the result; default N.
      on_overflow: if there are more than C ids: "raise" (`CapacityError`), or "drop": the last ids are dropped. With
        "raise" an overflow fills `values` with NaN. `group.check()` of an open group raises the error. If no group is
        open, the program fails with its message.

    Returns:
      C entries, `count` of them different ids. `ignored` and `dropped` count missing entries and ids.
    """
    return added_up("coalesce", rows, capacity, on_overflow)


def added_up(op: str, rows: SparseRows, capacity: int | None, on_overflow: OnOverflow) -> SparseRows:
    """`coalesce` for `op`, which errors name."""
    check_sparse_rows(op, "rows", rows)
    checks.check_one_of(op, "on_overflow", on_overflow, OnOverflow)
    capacity = rows.indices.shape[0] if capacity is None else capacity
    checks.check_int(op, "capacity", capacity, least=1 if rows.indices.shape[0] else 0, below_32_bits=True)
    ids, order = sorted_with_order(rows.masked_indices.astype(jnp.int32))
    starts, different, unique = runs_of_sorted(ids, rows.num_rows)
    places, _ = places_of_sorted(ids, rows.num_rows)
    more = max(0, capacity - ids.shape[0])
    starts = jnp.pad(starts, (0, more), mode="edge")[: capacity + 1]
    different = jnp.pad(different, (0, more), constant_values=rows.num_rows)[:capacity]
    values = sum_segments(rows.values, Segments(places, starts, order), rows.values.dtype)
    if on_overflow == "raise" and capacity < min(rows.indices.shape[0], rows.num_rows):
        values = undelivered_if(
            unique > capacity,
            values,
            keep_or_raise,
            lambda needed: capacity_error(op, None, int(needed), capacity),
            unique,
        )
    return replace(
        rows,
        indices=different.astype(rows.indices.dtype),
        values=values,
        count=jnp.minimum(unique, capacity),
        ignored=rows.ignored + rows.count_outside(),
        dropped=rows.dropped + jnp.maximum(unique - capacity, 0),
    )


def with_different_ids(rows: SparseRows) -> SparseRows:
    """`rows` in float32 with sorted ids that all differ, padded with `num_rows`. Differentiable in `values`."""
    entries = vary.vary_alike(None, rows.masked_indices, rows.values.astype(jnp.float32))
    ids, values = _with_different_ids(rows.num_rows, *entries)
    return replace(rows, indices=ids, values=values, count=jnp.sum(ids < rows.num_rows, dtype=jnp.int32))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_different_ids(num_rows: int, ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    def mixed(entries: tuple[jax.Array, jax.Array]) -> jax.Array:
        ids, _ = entries
        return ~jnp.all((ids[:-1] < ids[1:]) | (ids[1:] == num_rows))

    def sums(entries: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        added = coalesce(SparseRows.from_entries(*entries, num_rows=num_rows))
        return added.indices, added.values

    # A cond would copy the rows. A while_loop of at most one iteration does not, but has no reverse mode.
    return jax.lax.while_loop(mixed, sums, (ids, values))


@_with_different_ids.defjvp
def _with_different_ids_jvp(num_rows: int, primals: PyTree, tangents: PyTree) -> PyTree:
    ids, different = primals[0].astype(jnp.int32), _with_different_ids(num_rows, *primals)
    places = jnp.where(ids < num_rows, places_in_sorted(different[0].astype(jnp.int32), ids), NO_PLACE)
    tangent = sum_by_ids(tangents[1], places, ids.shape[0], jnp.float32)
    return different, (zero_from_primal(different[0]), tangent)
