"""Embedding tables that train with sparse gradients: nothing as high as the table is built, read or written.

    gradients = sparse_value_and_grad(loss)(table, ids, ...)  # SparseRows: only the rows that `ids` name
    gradients = sparse_all_reduce(gradients, ...)             # their sum over the ranks, inside jax.shard_map
    table, state = optimizer.step(table, state, gradients)    # optimizer = by_rows(optax.adam(1e-3)), say

Wherever one table [V, D] is expected there may be a pytree of tables. A table that exceeds a device is sharded over the
ranks: `sparse_value_and_grad(loss, group=group)` looks its rows up at their owners, and its gradients need no sum.
Donate tables and states to the jitted step, or carry them through `jax.lax.scan`: then they change in place. A learning
rate may be traced, so an optimizer may be made inside the step, with the rate of that step.
"""

from jax_ep.ops.sparse.arithmetic import add, clip_by_global_norm, global_norm, scale
from jax_ep.ops.sparse.bags import bag
from jax_ep.ops.sparse.embedding import lookup, rows_needed, sharded_lookup, sparse_value_and_grad, stacked_ids
from jax_ep.ops.sparse.optimizers import RowOptimizer, apply_updates, by_rows, rowwise_adagrad
from jax_ep.ops.sparse.placement import Placement, shard_table, unshard_table
from jax_ep.ops.sparse.types import Scalar, Tree

__all__ = [
    "Placement", "RowOptimizer", "Scalar", "Tree", "add", "apply_updates", "bag", "by_rows", "clip_by_global_norm",
    "global_norm", "lookup", "rows_needed", "rowwise_adagrad", "scale", "shard_table", "sharded_lookup",
    "sparse_value_and_grad", "stacked_ids", "unshard_table",
]  # fmt: skip
