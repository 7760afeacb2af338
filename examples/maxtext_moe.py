"""MaxText's mixture of experts on jax_ep: the same path with its exchange replaced, and all of it in four lines.

`sparse_matmul` takes the steps of MaxText's layer of that name (src/MaxText/layers/moe.py, 2025) where the batch is
sharded over the axis "expert". Four lines make it one of jax_ep: `import jax_ep`, an open `jax_ep.Group` over the mesh
and that axis, and the two exchanges, which were by `jax.lax`. `dispatched_matmul` replaces the sorting and the
exchange of sizes too.

Both run inside `jax.shard_map`, so arrays are what one device sees: T tokens of D values, K of E experts for each
token, E / R experts here.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_ep

AXIS = "expert"
TOP_K = 2
BATCH = P(("data", "fsdp", AXIS))  # tokens and logits: no two devices have the same


class Experts(NamedTuple):
    """The matrices of the E / R experts of a device."""

    w0: jax.Array  # [E / R, D, F]
    w1: jax.Array  # [E / R, D, F]
    wo: jax.Array  # [E / R, F, D]


# At rest they are sharded over "fsdp" too; a layer wants whole matrices, so XLA gathers them in front of it.
AT_REST = Experts(P(AXIS, "fsdp"), P(AXIS, "fsdp"), P(AXIS, None, "fsdp"))  # pyright: ignore
IN_LAYER = Experts(P(AXIS), P(AXIS), P(AXIS))  # pyright: ignore


def over_devices(layer: Any, group: jax_ep.Group) -> Any:
    """`layer` as a function of whole arrays: tokens [N, D], logits [N, E] and `Experts`."""
    in_specs = BATCH, BATCH, IN_LAYER
    body = partial(layer, group=group)
    return jax.shard_map(body, mesh=group.mesh, in_specs=in_specs, out_specs=BATCH, check_vma=False)


def route(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The best experts [T, K] of each token, and their weights: a softmax over them alone."""
    best, ids = jax.lax.top_k(logits, TOP_K)
    return ids, jax.nn.softmax(best)


def gated(rows: jax.Array, experts: Experts, group_sizes: jax.Array) -> jax.Array:
    """The experts' answers [C, D] to rows [C, D] that are sorted by expert; MaxText calls the product `gmm`."""
    gmm = partial(jax_ep.lax.ragged_dot, group_sizes=group_sizes)
    return gmm(jax.nn.silu(gmm(rows, experts.w0)) * gmm(rows, experts.w1), experts.wo)


def dispatched_matmul(x: jax.Array, logits: jax.Array, experts: Experts, *, group: jax_ep.Group) -> jax.Array:
    """Tokens [T, D] -> the weighted sums [T, D] of their experts' answers."""
    ids, weights = route(logits)
    rows, group_sizes, routing = jax_ep.dispatch(x, ids, weights, group=group, num_experts=logits.shape[1])
    answers = gated(rows, experts, group_sizes)
    return jax_ep.combine(answers, routing, group=group)


def sparse_matmul(x: jax.Array, logits: jax.Array, experts: Experts, *, group: jax_ep.Group) -> jax.Array:
    """`dispatched_matmul` by hand: sort, exchange, sort; and the way back."""
    shard, shards, local = jax.lax.axis_index(AXIS), group.size, len(experts.w0)
    ids, weights = route(logits)
    rows, order, sizes = permute(x, ids, logits.shape[1])
    all_sizes = jax.lax.all_gather(sizes, AXIS)  # [R, E]: of each device, for each expert
    between = all_sizes.reshape(shards, shards, local).sum(axis=2)  # [R, R]: from each device to each

    most = shards * len(x) * min(TOP_K, local)
    arrived = jax_ep.lax.ragged_all_to_all(  # was: jax.lax.ragged_all_to_all(
        rows, jnp.zeros((most, x.shape[1]), x.dtype), *slices(between, shard), axis_name=AXIS
    )
    arrived, local_order, group_sizes = local_permute(arrived, all_sizes, shard, local)
    answers = gated(arrived, experts, group_sizes)[jnp.argsort(local_order)]
    returned = jax_ep.lax.ragged_all_to_all(  # was: jax.lax.ragged_all_to_all(
        answers, jnp.zeros_like(rows), *slices(between.T, shard), axis_name=AXIS
    )
    return unpermute(returned, order, weights)


def permute(x: jax.Array, ids: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """K copies of each token, sorted by expert [T K, D]; which copies they are [T K]; how many of each expert [E]."""
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    return x[order // TOP_K], order, jnp.bincount(flat, length=num_experts)


def local_permute(
    rows: jax.Array, all_sizes: jax.Array, shard: jax.Array, local: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows that lie by source, and there by expert, sorted by expert; where each lay; how many are of each expert.

    What lies behind the last source's rows stays behind all others.
    """
    mine = jax.lax.dynamic_slice_in_dim(all_sizes, shard * local, local, axis=1)  # [R, E / R]
    expert = jnp.tile(jnp.arange(local), len(mine))
    order = jnp.argsort(jnp.repeat(expert, mine.reshape(-1), total_repeat_length=len(rows)))
    return rows[order], order, mine.sum(axis=0)


def slices(between: jax.Array, shard: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """input_offsets, send_sizes, output_offsets and recv_sizes, where between[a, b] rows go from device a to b."""
    starts = jnp.cumsum(between, axis=1) - between  # in the sender's rows
    there = jnp.cumsum(between, axis=0) - between  # in the receiver's
    return starts[shard], between[shard], there[shard], between[:, shard]


def unpermute(rows: jax.Array, order: jax.Array, weights: jax.Array) -> jax.Array:
    """The copies of each token in its own place again, and their weighted sums [T, D]."""
    copies = rows[jnp.argsort(order)].reshape(*weights.shape, rows.shape[1])
    return jnp.einsum("tkd,tk->td", copies, weights)
