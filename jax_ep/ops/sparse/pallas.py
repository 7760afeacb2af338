"""The second step of sparse_all_reduce by Pallas kernels: `implementation="pallas"`.

Every rank gathers the rows of all ranks and adds up those of its own result: a rank's entries of a row in order, 32 by
32, then the ranks in order, as the CUDA kernels do.
"""

import jax
import jax.numpy as jnp

from jax_ep import pallas_kernels
from jax_ep._kit.checks import AxisName
from jax_ep.ops.sparse.types import SparseConfig, Union
from jax_ep.ops.sparse.xla import Sorted


def reduce(
    config: SparseConfig,
    axis_name: AxisName,
    values: jax.Array,
    union: Union,
    entries: Sorted,
    scale: jax.Array,
    *,
    interpret: bool,
) -> jax.Array:
    """Adds up rows [N, D] of every rank in the places of the union, times a scale []: [capacity, D]. Other places are
    zero."""
    rows = jax.lax.all_gather(values, axis_name, tiled=True, to="invarying")
    # A segment has the entries of one rank for one row, and a group the segments of a row.
    rank = entries.order // values.shape[0]
    valid = entries.ids < config.num_rows
    begins = valid & ((jnp.diff(entries.ids, prepend=-1) != 0) | (jnp.diff(rank, prepend=-1) != 0))
    begun = jnp.cumsum(begins, dtype=jnp.int32)
    segment = jnp.where(valid, begun - 1, rank.size)
    starts, _, _ = pallas_kernels.runs_of_sorted(segment, rank.size, interpret=interpret)

    me = jax.lax.axis_index(axis_name)
    begin, end = (union.bounds[me], union.bounds[me + 1]) if config.sharded else (0, union.bounds[-1])
    place = jnp.minimum(begin + jnp.arange(config.capacity + 1, dtype=jnp.int32), end)
    first = entries.starts[place]
    groups = jnp.where(first > 0, begun[first - 1], 0)
    scale = jnp.full(config.capacity, scale)
    if config.by_count:
        scale = scale / jnp.maximum(jnp.diff(first), 1).astype(jnp.float32)
    return pallas_kernels.sum_segments(
        rows, starts, order=entries.order, groups=groups, scale=scale, interpret=interpret
    )
