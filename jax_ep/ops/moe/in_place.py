"""Dispatches that do not expand rows, for grouped products that read rows through an index list. Tokens stay in their
landing slots; in a group of one GPU they are not copied at all."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep.group import Group
from jax_ep.ops.matmul.rows import ZERO_ROW
from jax_ep.ops.moe.routing import layout, routing_of
from jax_ep.ops.moe.types import DISPATCHED, DispatchCall, DispatchConfig, Dispatched


def may_land(call: DispatchCall, num_tokens: int) -> bool:
    """Whether tokens can stay where they land: the group has one node, and fewer slots than rows."""
    group = call.group
    return group.intranode is None and 0 < group.size * num_tokens < call.config.capacity


def always_fits(config: DispatchConfig, assignments: int) -> bool:
    """Whether no ids can overflow the capacity of one rank, even if a token names an expert twice."""
    padding = config.num_experts * (config.alignment - 1)
    return config.drop or config.capacity >= assignments + padding


def exchanges_nothing(group: Group) -> bool:
    """Whether a rank is alone on a GPU. On CPUs the protocol always runs."""
    return group.size == 1 and group.platform != "cpu"


def stays_in_place(group: Group, config: DispatchConfig, assignments: int) -> bool:
    """Whether tokens need not even be copied to slots: one rank, no wire format, and the capacity suffices.

    If ids may overflow the capacity, the dispatch kernel runs, because it reports the overflow.
    """
    return exchanges_nothing(group) and not config.expand and config.wire is None and always_fits(config, assignments)


def dispatch_in_place(
    config: DispatchConfig, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> Dispatched:
    """`jax_ep.dispatch` with expand=False, whose rows are `tokens`. Differentiable by JAX."""
    shape = expert_ids.shape
    placed = layout(expert_ids.reshape(-1), config, 1)
    routing = routing_of(placed, weights[None], 0, config, expert_ids)
    token = jnp.broadcast_to(jnp.arange(shape[0], dtype=jnp.int32)[:, None], (1, *shape))
    routing = dataclasses.replace(routing, indices=routing.by_row(token, ZERO_ROW))
    group_sizes, routing = checkpoint_name((placed.group_sizes[0], routing), DISPATCHED)
    return Dispatched(tokens, group_sizes, routing)
