"""The kernels of the two steps of sparse_all_reduce as FFI calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._core import checks, ffi
from jax_ep.group import Group
from jax_ep.ops.sparse.types import SparseConfig, Union


def sparse_union(group: Group, config: SparseConfig, ids: jax.Array, missing: jax.Array) -> Union:
    """From this rank's ids [N]: the union of all ranks' ids."""
    table = (config.size, ids.shape[0])
    same = functools.partial(checks.result_type, like=ids, unvarying=frozenset({group.axis_name}))
    mine = functools.partial(checks.result_type, like=ids) if config.sharded else same
    return Union(
        *ffi.call(
            "sparse_union",
            (
                mine((config.capacity,), jnp.int32),
                same(table, jnp.int32),
                same((config.size + 1,), jnp.int32),
                same((2,), jnp.int32),
                mine((ffi.library(group.platform).bitmap_scratch(config.num_rows),), jnp.int32),
            ),
            ids,
            missing,
            op="sparse_all_reduce",
            group=group,
            num_rows=np.int32(config.num_rows),
            sharded=config.sharded,
        )[:-1]
    )


def sparse_reduce(group: Group, config: SparseConfig, values: jax.Array, union: Union) -> jax.Array:
    """Rows [N, D] of every rank, added up in the slots of the union: [capacity, D]."""
    (entries, hidden), unvarying = values.shape, frozenset() if config.sharded else frozenset({group.axis_name})
    result, slots = functools.partial(checks.result_type, like=values), config.slots_kept(entries)
    row_bytes = hidden * values.dtype.itemsize
    landing = ffi.library(group.platform).sparse_landing_bytes(config.size, slots, entries, config.sharded, row_bytes)
    return ffi.call(
        "sparse_reduce",
        (
            result((config.capacity, hidden), values.dtype, unvarying=unvarying),
            result((config.size, slots, 2), jnp.int32),
            result((slots,), jnp.int32),
            result((entries,), jnp.int32),
            result((entries,), jnp.int32),
            result((slots,), jnp.int32),
            result((1,), jnp.int32),
            result((entries,), jnp.int32),
            result((1,), jnp.int32),
            result((config.size,), jnp.int32),
            result((landing,), jnp.uint8),
            result((entries, hidden), jnp.float32),  # sums over entries of one rank
        ),
        values,
        union.slots,
        union.bounds,
        op="sparse_all_reduce",
        group=group,
        scale=np.float32(config.scale),
        by_count=config.by_count,
        sharded=config.sharded,
        drop=config.drop,
    )[0]
