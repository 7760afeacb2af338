"""Sums of sparse rows over ranks, as `sparse_all_reduce` and as XLA's collectives: on a rank, (ids, values) -> rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep import SparseRows

AXIS = "ep"

Result = tuple[jax.Array, jax.Array]  # ids [C], values [C, D]


class Formulation(NamedTuple):
    name: str
    run: Callable[[jax.Array, jax.Array], Result]


def ours(group: jax_ep.Group, num_rows: int, capacity: int, **options: Any) -> Formulation:
    def run(ids: jax.Array, values: jax.Array) -> Result:
        rows = SparseRows.from_entries(ids, values, num_rows=num_rows)
        out = jax_ep.sparse_all_reduce(rows, group=group, capacity=capacity, **options)
        return out.indices, out.values

    how = "sharded" if options.get("sharded") else options.get("method", "auto")
    return Formulation(f"jax_ep, {how}", run)


def gather_and_segment_sum(num_rows: int, capacity: int) -> Formulation:
    """Every rank gathers the rows of all ranks, sorts their ids and adds up the rows of each id."""

    def run(ids: jax.Array, values: jax.Array) -> Result:
        ids = jax.lax.all_gather(ids, AXIS, tiled=True)
        values = jax.lax.all_gather(values, AXIS, tiled=True)
        order = jnp.argsort(ids)
        first = jnp.diff(ids[order], prepend=-1) > 0
        places = jnp.zeros_like(order).at[order].set(jnp.cumsum(first) - 1)
        indices = jnp.full(capacity, num_rows, ids.dtype).at[places].set(ids, mode="drop")
        return indices, jax.ops.segment_sum(values, places, capacity)

    return Formulation("all-gather, segment_sum", run)


def union_and_psum(num_rows: int, capacity: int) -> Formulation:
    """The union of a mask per rank gives every id its place; then `psum` of all places, most of them zero on a rank."""

    def run(ids: jax.Array, values: jax.Array) -> Result:
        mask = jax.lax.pmax(jnp.zeros(num_rows, jnp.int8).at[ids].set(1), AXIS)
        places = jnp.cumsum(mask, dtype=jnp.int32)[ids] - 1
        indices = jnp.nonzero(mask, size=capacity, fill_value=num_rows)[0].astype(ids.dtype)
        rows = jnp.zeros((capacity, values.shape[1]), values.dtype).at[places].add(values, mode="drop")
        return indices, jax.lax.psum(rows, AXIS)

    return Formulation("union, psum", run)
