"""MoE dispatch and combine from `jax.lax.ragged_all_to_all`: exact, without padding.

Assignments are sorted by expert and every rank sends each other rank just the rows meant for it; the destination
regroups what arrived by expert. The offsets on both sides follow from one all_gather of the row counts.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Exchange = Callable[..., jax.Array]


class Sent(NamedTuple):
    """What combine needs from dispatch. Shapes per rank: R ranks, T tokens, top-K, C rows of room."""

    order: jax.Array  # [T * K] the assignments sorted by expert
    counts: jax.Array  # [R, R] rows from each source rank to each destination
    regrouped: jax.Array  # [C] the received row that stands at each place after regrouping by expert


def dispatch(
    tokens: jax.Array,
    expert_ids: jax.Array,
    *,
    axis_name: str,
    num_experts: int,
    capacity: int,
    exchange: Exchange = jax.lax.ragged_all_to_all,
) -> tuple[jax.Array, jax.Array, Sent]:
    """Tokens [T, H], ids [T, K] -> rows [C, H] grouped by local expert, group_sizes [E / R], and what was sent."""
    size, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    local = num_experts // size
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat)
    send = jnp.bincount(flat // local, length=size).astype(jnp.int32)
    counts = jax.lax.all_gather(send, axis_name)
    plan = (_starts(counts, 1)[me], send, _starts(counts, 0)[me], counts[:, me])

    room = jnp.zeros((capacity, tokens.shape[1]), tokens.dtype)
    rows = exchange(tokens[order // expert_ids.shape[1]], room, *plan, axis_name=axis_name)
    nobody = jnp.full(capacity, num_experts, jnp.int32)
    experts = exchange(flat[order], nobody, *plan, axis_name=axis_name)
    regrouped = jnp.argsort(experts)
    sizes = jnp.bincount(jnp.where(experts < num_experts, experts - me * local, local), length=local + 1)[:local]
    return rows[regrouped], sizes, Sent(order, counts, regrouped)


def combine(
    expert_outputs: jax.Array,
    sent: Sent,
    weights: jax.Array,
    *,
    axis_name: str,
    exchange: Exchange = jax.lax.ragged_all_to_all,
) -> jax.Array:
    """Rows [C, H] in the order of dispatch, weights [T, K] -> weighted sums [T, H]."""
    me, hidden = jax.lax.axis_index(axis_name), expert_outputs.shape[1]
    as_received = expert_outputs[jnp.argsort(sent.regrouped)]
    plan = (_starts(sent.counts, 0)[:, me], sent.counts[:, me], _starts(sent.counts, 1)[:, me], sent.counts[me])
    room = jnp.zeros((weights.size, hidden), expert_outputs.dtype)
    returned = exchange(as_received, room, *plan, axis_name=axis_name)
    rows = returned[jnp.argsort(sent.order)].reshape(*weights.shape, hidden)
    return jnp.einsum("tkh,tk->th", rows.astype(jnp.float32), weights).astype(expert_outputs.dtype)


def _starts(counts: jax.Array, axis: int) -> jax.Array:
    return jnp.cumsum(counts, axis) - counts
