"""The formulations of dispatch and combine that benchmarks compare, as functions of one rank's arrays.

XLA's sorts the assignments by expert, sends each rank the rows meant for it, and regroups by expert what arrived. Rows
move by gathers only: XLA's scatters are slower. Shapes of a rank: R ranks, T tokens, top-K, C rows of room.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_ep

from .in_jit_loop import AXIS


class Formulation(NamedTuple):
    """`dispatch(tokens, ids, weights)` returns a state whose first two leaves are the rows and their group sizes;
    `combine(state, weights)` brings those very rows back."""

    dispatch: Callable[..., Any]
    combine: Callable[..., jax.Array]


class State(NamedTuple):
    """Of `padded_all_to_all`."""

    rows: jax.Array  # [C, H] by local expert
    group_sizes: jax.Array  # [E / R]
    regrouped: jax.Array  # [C] the received row that stands at each place after regrouping
    slots: jax.Array  # [T * K] of each assignment, among the R * B rows sent


def jax_ep_ops(group: jax_ep.Group, experts: int, capacity: int, **options: Any) -> Formulation:
    def dispatch(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax_ep.Dispatched:
        return jax_ep.dispatch(tokens, ids, weights, group=group, num_experts=experts, capacity=capacity, **options)

    def combine(state: jax_ep.Dispatched, weights: jax.Array) -> jax.Array:
        del weights  # they travelled with the dispatch
        return jax_ep.combine(state.rows, state.routing, group=group)

    return Formulation(dispatch, combine)


def padded_all_to_all(experts: int, block: int) -> Formulation:
    """From `jax.lax.all_to_all` alone, the fastest without kernels: each rank sends each other one block of rows.

    A block that overflows loses rows, so choose `block` with room to spare.
    """

    def dispatch(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> State:
        del weights
        size, flat = jax.lax.axis_size(AXIS), ids.reshape(-1)
        local = experts // size
        owners, order = flat // local, jnp.argsort(flat)
        by_rank = jnp.bincount(owners, length=size).astype(jnp.int32)
        starts = jnp.cumsum(by_rank) - by_rank
        within = jnp.arange(block)
        source = order.at[starts[:, None] + within].get(mode="clip")  # [R, B] assignments
        sent_experts = jnp.where(within < by_rank[:, None], flat[source], experts)  # `experts` where a row is padding
        rows = jax.lax.all_to_all(tokens[source // ids.shape[1]], AXIS, 0, 0)
        received = jax.lax.all_to_all(sent_experts, AXIS, 0, 0).reshape(-1)
        regrouped = jnp.argsort(received)
        mine = jnp.where(received < experts, received - jax.lax.axis_index(AXIS) * local, local)
        sizes = jnp.bincount(mine, length=local + 1)[:local]
        slots = owners * block + jnp.argsort(order) - starts[owners]
        return State(rows.reshape(len(received), -1)[regrouped], sizes, regrouped, slots)

    def combine(state: State, weights: jax.Array) -> jax.Array:
        as_received = state.rows[jnp.argsort(state.regrouped)]
        blocks = as_received.reshape(jax.lax.axis_size(AXIS), -1, as_received.shape[1])
        returned = jax.lax.all_to_all(blocks, AXIS, 0, 0).reshape(as_received.shape)
        by_token = returned[state.slots].reshape(*weights.shape, -1).astype(jnp.float32)
        return jnp.einsum("tkh,tk->th", by_token, weights).astype(returned.dtype)

    return Formulation(dispatch, combine)


def result_and_gradients(function: Callable[..., Any], cotangent: jax.Array, *operands: Any) -> Any:
    """What function(*operands) returns, and its gradients.

    The cotangent waits for the result, as in a model: otherwise XLA may keep what only the forward pass needs.
    """
    out, pull = jax.vjp(function, *operands)
    out, cotangent = jax.lax.optimization_barrier((out, cotangent))
    return out, pull(cotangent)
