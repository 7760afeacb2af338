"""coalesce: adds up the entries of one rank for the same row."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_ep._kit import checks, vary
from jax_ep._kit.sums import Segments, places_of_sorted, runs_of_sorted, sorted_with_order, sum_segments
from jax_ep.ops.sparse.types import SparseRows, check_sparse_rows


def coalesce(rows: SparseRows, *, capacity: int | None = None) -> SparseRows:
    """Adds up the entries of each row: sorted different ids, padded with id `num_rows` and zero values.

    Duplicates are added in float32 and rounded once to the dtype of `values`. Differentiable in `values`.

    Args:
      rows: N entries in any order.
      capacity: C, entries of the result; default N. If there are more ids, the last ids find no room.

    Returns:
      C entries, `count` of them different ids. `ignored` and `dropped` count missing entries and ids.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the function is traced.
    """
    op = "coalesce"
    check_sparse_rows(op, "rows", rows)
    capacity = rows.indices.shape[0] if capacity is None else capacity
    checks.check_int(op, "capacity", capacity, least=1 if rows.indices.shape[0] else 0, below_32_bits=True)
    ids, order = sorted_with_order(rows.masked_indices.astype(jnp.int32))
    starts, different, unique = runs_of_sorted(ids, rows.num_rows)
    places, _ = places_of_sorted(ids, rows.num_rows)
    more = max(0, capacity - ids.shape[0])
    starts = jnp.pad(starts, (0, more), mode="edge")[: capacity + 1]
    different = jnp.pad(different, (0, more), constant_values=rows.num_rows)[:capacity]
    return replace(
        rows,
        indices=different.astype(rows.indices.dtype),
        values=sum_segments(rows.values, Segments(places, starts, order), rows.values.dtype),
        count=jnp.minimum(unique, capacity),
        ignored=rows.ignored + rows.count_outside(),
        dropped=rows.dropped + jnp.maximum(unique - capacity, 0),
    )


def with_different_ids(rows: SparseRows) -> SparseRows:
    """`rows` in float32 with sorted ids that all differ, padded with `num_rows`."""

    def mixed(entries: tuple[jax.Array, jax.Array]) -> jax.Array:
        ids, _ = entries
        return ~jnp.all((ids[:-1] < ids[1:]) | (ids[1:] == rows.num_rows))

    def added_up(entries: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        added = coalesce(SparseRows.from_entries(*entries, num_rows=rows.num_rows))
        return added.indices, added.values

    # A while_loop of at most one iteration does not copy the rows, as a cond would.
    entries = rows.masked_indices, rows.values.astype(jnp.float32)
    ids, values = jax.lax.while_loop(mixed, added_up, vary.vary_alike(None, *entries))
    return replace(rows, indices=ids, values=values, count=jnp.sum(ids < rows.num_rows, dtype=jnp.int32))
