"""The fused ops with their backward passes: five products and two exchanges for a layer of gate, up and down.

Kept for the backward pass, each once: dispatched rows and their routing, the products before the activation, what it
makes of them, and the product that is combined. Products by the transposed right operands go with the exchanges
(chain.py); the gradients of the right operands, grouped by the contraction, wait for nothing but their operands.
"""

import dataclasses
from functools import partial
from typing import Any

import jax

from jax_ep._core.float8 import Float8Rows, Float8Weights
from jax_ep.ops.matmul.api import rhs_gradient
from jax_ep.ops.matmul.float8 import widened
from jax_ep.ops.moe.types import Dispatched, Routing
from jax_ep.ops.moe_fused import chain
from jax_ep.ops.moe_fused.types import FirstCall, LastCall, Matrices, Matrix, Rows, outcome


def _dispatch_dot(
    call: FirstCall, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array, rhs: Matrices
) -> tuple[Any, Dispatched]:
    out, _, dispatched = chain.dispatch_multiply(call, tokens, expert_ids, weights, rhs, keep_products=False)
    return out, _delivered(call, tokens.dtype, dispatched)


def _dispatch_dot_fwd(
    call: FirstCall, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array, rhs: Matrices
) -> Any:
    keep = call.activation is not None
    out, products, dispatched = chain.dispatch_multiply(call, tokens, expert_ids, weights, rhs, keep_products=keep)
    return (out, _delivered(call, tokens.dtype, dispatched)), (rhs, products if keep else None, dispatched)


def _delivered(call: FirstCall, dtype: Any, dispatched: Dispatched) -> Dispatched:
    """What was dispatched, with the rows in `dtype`: XLA leaves them out where nobody looks at them."""
    routing = dataclasses.replace(dispatched.routing, config=call.dispatch.config)
    return dispatched._replace(tokens=widened(dispatched.tokens, dtype), routing=routing)


def _dispatch_dot_bwd(call: FirstCall, residuals: Any, cotangents: tuple[Any, Dispatched]) -> Any:
    (rhs, products, dispatched), (d_products, arrived) = residuals, cotangents
    if call.activation is not None:
        (d_products,) = jax.vjp(partial(outcome, call.activation), products)[1](d_products)
    d_rhs = tuple(
        _rhs_gradient(dispatched.tokens, matrix, each, dispatched.group_sizes)
        for matrix, each in zip(rhs, d_products, strict=True)
    )
    d_tokens, d_weights = chain.multiply_return(
        call.dispatch.group, d_products, rhs, arrived.tokens, arrived.routing.weights, dispatched.routing
    )
    return d_tokens, None, d_weights, d_rhs


def _rhs_gradient(rows: Rows, rhs: Matrix, cotangent: jax.Array, group_sizes: jax.Array) -> jax.Array | None:
    """None of a matrix in float8."""
    if isinstance(rhs, Float8Weights):
        return None
    return rhs_gradient(widened(rows, cotangent.dtype), cotangent, group_sizes)


def _dot_combine(call: LastCall, lhs: Rows, rhs: Matrix, weights: jax.Array, routing: Routing) -> jax.Array:
    return chain.multiply_combine(call, lhs, rhs, weights, routing)[0]


def _dot_combine_fwd(call: LastCall, lhs: Rows, rhs: Matrix, weights: jax.Array, routing: Routing) -> Any:
    combined, product = chain.multiply_combine(call, lhs, rhs, weights, routing)
    return combined, (lhs, rhs, product, weights, routing)


def _dot_combine_bwd(call: LastCall, residuals: Any, cotangent: jax.Array) -> Any:
    lhs, rhs, product, weights, routing = residuals
    d_lhs, d_product, d_weights = chain.scatter_multiply(call.group, cotangent, rhs, product, weights, routing)
    d_rhs = _rhs_gradient(lhs, rhs, d_product, routing.group_sizes)
    return None if isinstance(lhs, Float8Rows) else d_lhs, d_rhs, d_weights, None


dispatch_dot = jax.custom_vjp(_dispatch_dot, nondiff_argnums=(0,))
dot_combine = jax.custom_vjp(_dot_combine, nondiff_argnums=(0,))
dispatch_dot.defvjp(_dispatch_dot_fwd, _dispatch_dot_bwd)
dot_combine.defvjp(_dot_combine_fwd, _dot_combine_bwd)
