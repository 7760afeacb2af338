"""The calls of the two kernels of sparse_all_reduce."""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _checks, _ffi
from jax_ep.sparse_union import SparseConfig, Union

if TYPE_CHECKING:
    from jax_ep.group import Group


def sparse_union(group: "Group", config: SparseConfig, ids: jax.Array, order: jax.Array, missing: jax.Array) -> Union:
    """From this rank's sorted ids [N] and the entries they were: the union of all ranks' ids."""
    table = (config.size, ids.shape[0])
    same = functools.partial(_checks.result_type, like=ids, unvarying=frozenset({group.axis_name}))
    mine = functools.partial(_checks.result_type, like=ids) if config.sharded else same
    return Union(
        *_ffi._call(
            "sparse_union",
            (
                mine((config.capacity,), jnp.int32),
                same(table, jnp.int32),
                same(table, jnp.int32),
                same((config.size + 1,), jnp.int32),
                same((2,), jnp.int32),
                mine((_ffi._library(group.platform).bitmap_scratch(config.num_rows),), jnp.int32),
            ),
            ids,
            order,
            missing,
            group=np.int64(group.native_id),
            num_rows=np.int32(config.num_rows),
            sharded=config.sharded,
        )[:-1]
    )


def sparse_reduce(group: "Group", config: SparseConfig, values: jax.Array, union: Union) -> jax.Array:
    """Rows [N, D] of every rank, added up in the slots of the union: [capacity, D]."""
    (entries, hidden), unvarying = values.shape, frozenset() if config.sharded else frozenset({group.axis_name})
    result = functools.partial(_checks.result_type, like=values)
    return _ffi._call(
        "sparse_reduce",
        (
            result((config.capacity, hidden), values.dtype, unvarying=unvarying),
            result((config.size, config.slots_kept(entries), 2), jnp.int32),
            result((entries, hidden), jnp.float32),  # sums over entries of one rank
        ),
        values,
        union.slots,
        union.orders,
        union.bounds,
        group=np.int64(group.native_id),
        scale=np.float32(config.scale),
        by_count=config.by_count,
        sharded=config.sharded,
        drop=config.drop,
    )[0]
