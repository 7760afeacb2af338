"""Which row of a sparse result each entry of each rank belongs to: what the two steps of sparse_all_reduce share."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class SparseConfig:
    """Everything about a sparse_all_reduce that is known when it is traced."""

    size: int
    num_rows: int
    capacity: int
    op: str
    sharded: bool
    drop: bool

    @property
    def rank_rows(self) -> int:
        """Rows of the table in the range of one rank; the last ranks may have fewer."""
        return -(-self.num_rows // self.size)

    @property
    def scale(self) -> float:
        return 1 / self.size if self.op == "mean" else 1.0

    @property
    def by_count(self) -> bool:
        return self.op == "mean_by_count"

    def slots_kept(self, entries: int) -> int:
        """How many slots of the union matter: a replicated result has no more than its capacity."""
        return min(self.size * entries, self.num_rows) if self.sharded else self.capacity


class Union(NamedTuple):
    """The U different row ids of all ranks number the slots 0 .. U - 1. For R ranks, N entries each, C capacity.

    Attributes:
      indices: [C] int32. The sorted ids of this rank's result, padded with `num_rows`.
      slots: [R, N] int32. The slot of each entry of each rank; U where it stands for no row.
      bounds: [R + 1] int32. How many ids lie below the range of each rank; at last U.
      missing: [2] int32. Over all ranks, what `SparseRows.ignored` and `.dropped` count.
    """

    indices: jax.Array
    slots: jax.Array
    bounds: jax.Array
    missing: jax.Array

    def needed(self, config: SparseConfig) -> jax.Array:
        """[R] int32: the rows that each rank's result should hold."""
        return jnp.diff(self.bounds) if config.sharded else jnp.broadcast_to(self.bounds[-1:], (config.size,))


def choose_method(num_rows: int, ranks: int, entries: int, row_bytes: int) -> str:
    """ "bitmap" while a bit per row of the table weighs at most 4 MiB or an eighth of all ranks' rows, else "match"."""
    return "bitmap" if num_rows / 8 <= max(2**22, ranks * entries * row_bytes / 8) else "match"


def search(union: jax.Array, ids: jax.Array) -> jax.Array:
    """[N] int32: the place of each id in the sorted union; that of the padding is where it begins."""
    return jnp.searchsorted(union, ids).astype(jnp.int32)


def match(
    config: SparseConfig,
    axis_name: str,
    ids: jax.Array,
    missing: jax.Array,
    find: Callable[[jax.Array, jax.Array], jax.Array] = search,
) -> Union:
    """The union by sorting all ranks' ids, and finding each of this rank's in it. Arguments as of `_ffi`'s."""
    gather = partial(jax.lax.all_gather, axis_name=axis_name, to="invarying")
    all_ids = jnp.sort(gather(ids, tiled=True))
    first = (all_ids < config.num_rows) & (jnp.diff(all_ids, prepend=-1) > 0)
    place = jnp.where(first, jnp.cumsum(first, dtype=jnp.int32) - 1, all_ids.shape[0])
    union = jnp.full(all_ids.shape, config.num_rows, jnp.int32).at[place].set(all_ids, mode="drop")

    starts = np.minimum(np.arange(config.size + 1) * config.rank_rows, config.num_rows).astype(np.int32)
    bounds = search(union, jnp.asarray(starts))
    me = jax.lax.axis_index(axis_name) if config.sharded else 0
    begin, end = (bounds[me], bounds[me + 1]) if config.sharded else (0, bounds[-1])
    slot = begin + jnp.arange(config.capacity, dtype=jnp.int32)
    return Union(
        indices=jnp.where(slot < end, union.at[slot].get(mode="clip"), config.num_rows),
        slots=gather(find(union, ids)),
        bounds=bounds,
        missing=jax.lax.psum(missing, axis_name),
    )
