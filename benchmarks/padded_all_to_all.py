"""MoE dispatch and combine from `jax.lax.all_to_all` alone: the fastest that a JAX user can write without kernels.

Assignments are sorted by expert and cut into one block per destination, padded to a fixed number of rows, so that
one dense all_to_all moves them; the destination regroups what arrived by expert. Rows move by gathers only: XLA's
scatters are slower. A block that overflows loses rows, so choose `block` with room to spare.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sent(NamedTuple):
    """What combine needs from dispatch. Shapes per rank: R ranks, T tokens, top-K, B rows a block."""

    slots: jax.Array  # [T * K] of each assignment, its row among the R * B sent
    regrouped: jax.Array  # [R * B] the received row that stands at each place after regrouping by expert


def block_rows(mean_rows: float) -> int:
    """Rows a block for uniform routing: 5% and 64 rows of slack, rounded up to 8."""
    return math.ceil((1.05 * mean_rows + 64) / 8) * 8


def dispatch(
    tokens: jax.Array, expert_ids: jax.Array, *, axis_name: str, num_experts: int, block: int
) -> tuple[jax.Array, jax.Array, Sent]:
    """Tokens [T, H], ids [T, K] -> rows [R * B, H] grouped by local expert, group_sizes [E / R], and what was sent."""
    size = jax.lax.axis_size(axis_name)
    local = num_experts // size
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat)
    by_rank = jnp.bincount(flat // local, length=size)
    starts = jnp.cumsum(by_rank) - by_rank

    within = jnp.arange(block)
    source = order.at[starts[:, None] + within].get(mode="clip")  # [R, B] assignments
    used = within < by_rank[:, None]
    sent_rows = tokens[source // expert_ids.shape[1]]
    sent_experts = jnp.where(used, flat[source], num_experts)

    rows = jax.lax.all_to_all(sent_rows, axis_name, 0, 0).reshape(size * block, -1)
    experts = jax.lax.all_to_all(sent_experts, axis_name, 0, 0).reshape(-1)
    regrouped = jnp.argsort(experts)
    first = jax.lax.axis_index(axis_name) * local
    sizes = jnp.bincount(jnp.where(experts < num_experts, experts - first, local), length=local + 1)[:local]

    destination = flat // local
    slots = destination * block + jnp.argsort(order) - starts[destination]
    return rows[regrouped], sizes, Sent(slots, regrouped)


def combine(expert_outputs: jax.Array, sent: Sent, weights: jax.Array, *, axis_name: str) -> jax.Array:
    """Rows [R * B, H] in the order of dispatch, weights [T, K] -> weighted sums [T, H]."""
    size, hidden = jax.lax.axis_size(axis_name), expert_outputs.shape[1]
    as_received = expert_outputs[jnp.argsort(sent.regrouped)].reshape(size, -1, hidden)
    returned = jax.lax.all_to_all(as_received, axis_name, 0, 0).reshape(-1, hidden)
    rows = returned[sent.slots].reshape(*weights.shape, hidden)
    return jnp.einsum("tkh,tk->th", rows.astype(jnp.float32), weights).astype(expert_outputs.dtype)
