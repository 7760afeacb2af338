"""The fused ops as chains of the others, which JAX differentiates: over several nodes, and in plain jax.lax."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_ep.group import Group
from jax_ep.ops.matmul.api import plain_ragged_dot, ragged_dot
from jax_ep.ops.moe.api import checked_combine, checked_dispatch
from jax_ep.ops.moe.types import Dispatched, Routing
from jax_ep.ops.moe_fused.types import FIRST_PRODUCTS, LAST_PRODUCT, FirstCall, Matrices, outcome


def dispatch_dot(
    call: FirstCall, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array, rhs: Matrices
) -> tuple[Any, Dispatched]:
    multiply = ragged_dot if call.dispatch.by_kernels else plain_ragged_dot
    dispatched = checked_dispatch(call.dispatch, tokens, expert_ids, weights)
    products = tuple(multiply(dispatched.tokens, matrix, dispatched.group_sizes) for matrix in rhs)
    return outcome(call.activation, checkpoint_name(products, FIRST_PRODUCTS)), dispatched


def dot_combine(group: Group, lhs: jax.Array, rhs: jax.Array, routing: Routing, *, by_kernels: bool) -> jax.Array:
    multiply = ragged_dot if by_kernels else plain_ragged_dot
    product = checkpoint_name(multiply(lhs, rhs, routing.group_sizes), LAST_PRODUCT)
    return checked_combine(group, product, routing, by_kernels=by_kernels)
