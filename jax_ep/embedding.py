"""Embedding tables that train with sparse gradients: nothing as high as the table is built, read or written.

    gradients = sparse_value_and_grad(loss)(table, ids, ...)  # SparseRows: only the rows that `ids` name
    gradients = sparse_all_reduce(gradients, ...)             # their sum over the ranks, inside jax.shard_map
    updates, state = optimizer.update(gradients, state)       # optimizer = rowwise_adagrad(0.05), say
    table = apply_updates(table, updates)

Wherever one table [V, D] is expected there may be a pytree of tables. Optimizers are (init, update) pairs as in optax.
On the rows that a gradient names they do what optax does to a dense table; all other rows, and the state of those rows,
keep their bits. Donate tables and states to the jitted step, or carry them through `jax.lax.scan`: then they change in
place. A learning rate may be traced, so an optimizer may be made inside the step, with the rate of that step.
"""

from jax_ep.ops.sparse.arithmetic import (
    add as add,
    clip_by_global_norm as clip_by_global_norm,
    global_norm as global_norm,
    scale as scale,
)
from jax_ep.ops.sparse.embedding import (
    LazyAdamState as LazyAdamState,
    RowOptimizer as RowOptimizer,
    adagrad as adagrad,
    apply_updates as apply_updates,
    lazy_adam as lazy_adam,
    lookup as lookup,
    rowwise_adagrad as rowwise_adagrad,
    sgd as sgd,
    sparse_value_and_grad as sparse_value_and_grad,
)
from jax_ep.ops.sparse.types import Scalar as Scalar, Tree as Tree
