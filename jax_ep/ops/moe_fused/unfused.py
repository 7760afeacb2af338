"""The fused ops as chains of the others, which JAX differentiates: over several nodes, and in plain jax.lax."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_ep.ops.matmul.api import plain_ragged_dot, ragged_dot
from jax_ep.ops.matmul.straight_through import ragged_dot as float8_ragged_dot
from jax_ep.ops.moe.api import checked_combine, checked_dispatch
from jax_ep.ops.moe.types import Dispatched, Routing
from jax_ep.ops.moe_fused.types import (
    FIRST_PRODUCTS,
    LAST_PRODUCT,
    FirstCall,
    LastCall,
    Matrices,
    Matrix,
    Rows,
    outcome,
)


def dispatch_dot(
    call: FirstCall, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array, rhs: Matrices
) -> tuple[Any, Dispatched]:
    dispatched = checked_dispatch(call.dispatch, tokens, expert_ids, weights)
    multiply = _product(in_float8=call.in_float8, by_kernels=call.dispatch.by_kernels)
    products = tuple(multiply(dispatched.tokens, matrix, dispatched.group_sizes) for matrix in rhs)
    return outcome(call.activation, checkpoint_name(products, FIRST_PRODUCTS)), dispatched


def dot_combine(call: LastCall, lhs: Rows, rhs: Matrix, routing: Routing, *, by_kernels: bool) -> jax.Array:
    multiply = _product(in_float8=call.in_float8, by_kernels=by_kernels)
    product = checkpoint_name(multiply(lhs, rhs, routing.group_sizes), LAST_PRODUCT)
    return checked_combine(call.group, product, routing, by_kernels=by_kernels)


def _product(*, in_float8: bool, by_kernels: bool) -> Callable[..., jax.Array]:
    """What multiplies rows. Those that a dispatch brought in float8 were dequantized, and are quantized again."""
    if in_float8:
        return float8_ragged_dot
    return ragged_dot if by_kernels else plain_ragged_dot
