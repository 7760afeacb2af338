"""A dispatch in a group of one GPU, which moves nothing: products gather the rows of the tokens."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep.group import Group
from jax_ep.ops.matmul.rows import ZERO_ROW, GatheredRows
from jax_ep.ops.moe.types import DISPATCHED, DispatchConfig, Routing
from jax_ep.ops.moe.xla import layout


def stays_in_place(group: Group, config: DispatchConfig, assignments: int) -> bool:
    """Whether rows need not move: one rank owns all experts, no wire format converts rows, and the capacity suffices.

    If the capacity may not suffice the dispatch kernel runs, which reports overflow. On CPUs the protocol always runs.
    """
    padding = config.num_experts * (config.alignment - 1)
    has_room = config.drop or config.capacity >= assignments + padding
    return group.size == 1 and group.platform != "cpu" and config.wire is None and has_room


def dispatch_in_place(
    config: DispatchConfig, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> tuple[GatheredRows, jax.Array, Routing]:
    """Rows, group sizes and routing of `jax_ep.dispatch`; rows of nobody have the index -1. Differentiable by JAX."""
    shape = expert_ids.shape
    placed = layout(expert_ids.reshape(-1), config, 1)
    row_of = placed.row.reshape(1, *shape)
    invalid = (expert_ids < -1) | (expert_ids >= config.num_experts)
    routing = Routing(
        targets=placed.row.reshape(shape),
        row_of=row_of,
        weights=jnp.where(row_of >= 0, weights[None], 0),
        counts=placed.counts,
        dropped=placed.dropped.sum(dtype=jnp.int32)[None],
        invalid=invalid.sum(dtype=jnp.int32)[None],
        config=config,
    )
    token = jnp.broadcast_to(jnp.arange(shape[0], dtype=jnp.int32)[:, None], row_of.shape)
    indices = routing.by_row(token, ZERO_ROW)
    indices, group_sizes, routing = checkpoint_name((indices, placed.group_sizes[0], routing), DISPATCHED)
    return GatheredRows(tokens, indices), group_sizes, routing
