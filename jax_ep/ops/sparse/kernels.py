"""The kernels of the two steps of sparse_all_reduce as FFI calls."""

import jax

from jax_ep._kit import ffi
from jax_ep.group import Group
from jax_ep.ops.sparse.types import SparseConfig, Union


def sparse_union(group: Group, config: SparseConfig, ids: jax.Array, missing: jax.Array) -> Union:
    """From this rank's ids [N]: the union of all ranks' ids."""
    called = ffi.call(
        "sparse_union",
        ids,
        missing,
        ranks=group._ranks,
        entries=ids.shape[0],
        num_rows=config.num_rows,
        capacity=config.capacity,
        sharded=config.sharded,
    )
    return Union(called["indices"], called["places"], called["bounds"], called["all_missing"])


def sparse_reduce(group: Group, config: SparseConfig, values: jax.Array, union: Union, places_kept: int) -> jax.Array:
    """Adds up rows [N, D] of every rank in the places of the union: [capacity, D].

    Places from `places_kept` on are dropped. A place without an entry on any rank is undefined.
    """
    entries, hidden = values.shape
    called = ffi.call(
        "sparse_reduce",
        values,
        union.places,
        union.bounds,
        ranks=group._ranks,
        dtype=values.dtype,
        entries=entries,
        hidden=hidden,
        capacity=config.capacity,
        places_kept=places_kept,
        scale=float(config.scale),
        sharded=config.sharded,
        drop=config.drop,
        by_count=config.by_count,
    )
    return called["result"]
