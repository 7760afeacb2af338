"""The two steps of sparse_all_reduce in plain jax.numpy and jax.lax: `implementation="xla"`.

With `method="match"` kernels run the second step.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._kit.checks import AxisName
from jax_ep._kit.sums import NO_PLACE, places_in_sorted, runs_of_sorted, sorted_with_order, sum_by_ids
from jax_ep.ops.sparse.types import SparseConfig, Union


class Sorted(NamedTuple):
    """The entries of all ranks, R N of them, in the order of their ids; equal ids in the order of ranks and entries.

    Attributes:
      ids: [R N] int32; `num_rows` for padding.
      order: [R N] int32, the entry: N r + n for entry n of rank r.
      starts: [R N + 1] int32. The first entry of each place, then the end of the last.
    """

    ids: jax.Array
    order: jax.Array
    starts: jax.Array


def match(config: SparseConfig, axis_name: AxisName, ids: jax.Array, missing: jax.Array) -> tuple[Union, Sorted]:
    """The union, by sorting all ranks' ids and finding this rank's ids among them. Arguments as for the kernel."""
    gather = partial(jax.lax.all_gather, axis_name=axis_name, to="invarying")
    all_ids, order = sorted_with_order(gather(ids, tiled=True))
    first, union, _ = runs_of_sorted(all_ids, config.num_rows)

    starts = jnp.minimum(jnp.arange(config.size + 1, dtype=jnp.uint32) * config.rank_rows, config.num_rows)
    bounds = jnp.sum(union[None] < starts.astype(jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    me = jax.lax.axis_index(axis_name) if config.sharded else 0
    begin, end = (bounds[me], bounds[me + 1]) if config.sharded else (0, bounds[-1])
    place = begin + jnp.arange(config.capacity, dtype=jnp.int32)
    found = Union(
        indices=jnp.where(place < end, union.at[place].get(mode="clip"), config.num_rows),
        places=gather(places_in_sorted(union, ids)),
        bounds=bounds,
        missing=jax.lax.psum(missing, axis_name),
    )
    return found, Sorted(all_ids, order, first)


def reduce(config: SparseConfig, axis_name: AxisName, values: jax.Array, union: Union) -> jax.Array:
    """As the kernel: every rank adds up its rows in float32 in an array of all places, and `psum` adds the arrays."""
    places = places_of_entries(union, axis_name)
    kept = config.places_kept(values.shape[0])
    rows = jax.lax.psum(sum_by_ids(values, places, kept, jnp.float32), axis_name)
    rows = rows * (1 / jnp.maximum(entries_of_places(union, kept), 1)[:, None] if config.by_count else config.scale)
    if config.sharded:
        row = jnp.arange(config.capacity, dtype=jnp.int32)
        mine = rows.at[union.bounds[jax.lax.axis_index(axis_name)] + row].get(mode="clip")
        present = row < union.needed(config)[jax.lax.axis_index(axis_name)]
        rows = jnp.where(present[:, None], mine, 0)
    return rows.astype(values.dtype)


def places_of_entries(union: Union, axis_name: AxisName) -> jax.Array:
    """[N] int32: the place of each entry of this rank, in the order of the entries; 2**31 - 1 for no row."""
    places = union.places[jax.lax.axis_index(axis_name)]
    return jnp.where(places < union.bounds[-1], places, NO_PLACE)


def entries_of_places(union: Union, places: int) -> jax.Array:
    """[places] float32: the entries of all ranks in each of the first places."""
    return jnp.zeros(places, jnp.float32).at[union.places.reshape(-1)].add(1, mode="drop")
