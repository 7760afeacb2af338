"""The fused ops and their backward passes as chains of unfused ones.

One function a direction, each with one exchange. What the backward pass needs has a name for the policies of
`jax.checkpoint`.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._kit.float8 import Float8Rows, Float8Weights
from jax_ep.group import Group
from jax_ep.ops.matmul.api import add_lhs_gradients, gated_product, lhs_gradient, ragged_dot
from jax_ep.ops.matmul.float8 import quantized_gated_product, rounded_product, rounded_weights
from jax_ep.ops.matmul.quantize import quantize_rows, widened
from jax_ep.ops.moe.gradients import combine, dispatch, return_rows, scatter_all
from jax_ep.ops.moe.types import COMBINED, DISPATCHED, Dispatched, Routing
from jax_ep.ops.moe_fused.types import (
    FIRST_PRODUCTS,
    ActivationName,
    FirstCall,
    LastCall,
    Matrices,
    Matrix,
    Products,
    Rows,
    outcome,
)


def dispatch_multiply(
    call: FirstCall,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    rhs: Matrices,
    beside: jax.Array | None,
    *,
    keep_products: bool,
    quantize: bool = False,
) -> tuple[Any, Products, Dispatched, jax.Array | None]:
    """Tokens to their experts, and the rows that arrived times each right operand. With an activation that is one
    kernel, but for products in float8 that are not quantized again.

    Args:
      quantize: the result is `Float8Rows`, if products are in float8 and rounded to bfloat16, as the next one would
        round it; then no products are kept.

    Returns:
      The result (`outcome` of the products), the products, or () where they need not be kept, what was dispatched, in
      float8 if so are the products, and `beside` as it is. As in `scatter_multiply` nothing uses the rows before it is
      there.
    """
    group, config = call.dispatch.group, call.dispatch.config
    config = dataclasses.replace(config, dequantize=not call.in_float8)
    multiply: Any = partial(rounded_product, dtype=tokens.dtype) if call.in_float8 else ragged_dot
    arrays: Any = rhs  # where products are not in float8
    dispatched = dispatch(group, config, tokens, expert_ids, weights)
    if beside is not None:
        rows, beside = jax.lax.optimization_barrier((dispatched.tokens, beside))
        dispatched = dispatched._replace(tokens=rows)
    dispatched = checkpoint_name(dispatched, DISPATCHED)
    if call.activation is not None and call.in_float8 and quantize and tokens.dtype == jnp.bfloat16:
        matrices = map(rounded_weights, rhs)
        composed = partial(_quantized, call.activation)
        rounded = partial(quantized_gated_product, call.activation, composed)
        return rounded(dispatched.tokens, dispatched.group_sizes, *matrices), (), dispatched, beside
    if call.activation is not None and not call.in_float8:
        gated = partial(gated_product, call.activation, partial(_gated, call.activation, keep_products))
        made = gated(dispatched.tokens, dispatched.group_sizes, *arrays, keep_products=keep_products)
        out, products = checkpoint_name(made, FIRST_PRODUCTS)
        return out, products, dispatched, beside
    products = tuple(multiply(dispatched.tokens, matrix, dispatched.group_sizes) for matrix in rhs)
    products = checkpoint_name(products, FIRST_PRODUCTS)
    return outcome(call.activation, products), products, dispatched, beside


def _gated(
    activation: ActivationName, keep_products: bool, rows: jax.Array, group_sizes: jax.Array, *rhs: jax.Array
) -> tuple[jax.Array, Products]:
    products = tuple(ragged_dot(rows, matrix, group_sizes) for matrix in rhs)
    return outcome(activation, products), products if keep_products else ()


def _quantized(activation: ActivationName, rows: Float8Rows, group_sizes: jax.Array, *rhs: Float8Weights) -> Float8Rows:
    products = tuple(rounded_product(rows, matrix, group_sizes) for matrix in rhs)
    return quantize_rows(outcome(activation, products))


def multiply_return(
    group: Group, d_products: Products, rhs: Matrices, d_rows: jax.Array, d_weights: jax.Array, routing: Routing
) -> tuple[jax.Array, jax.Array]:
    """The backward pass of `dispatch_multiply`, but for its right operands: cotangents [T, H] and [T, K].

    Args:
      d_products: of each product.
      d_rows, d_weights: of what `dispatch` delivered, for whoever used that besides.
    """
    arrays = tuple(widened(matrix, d_products[0].dtype) for matrix in rhs)
    d_rows = add_lhs_gradients(d_rows, d_products, arrays, routing.group_sizes)
    return return_rows(group, d_rows, d_weights, routing)


def multiply_combine(call: LastCall, lhs: Rows, rhs: Matrix, weights: jax.Array, routing: Routing) -> jax.Array:
    """Rows times the matrices of their experts, summed up at their tokens."""
    multiply: Any = rounded_product if call.in_float8 else ragged_dot
    product = multiply(lhs, rhs, routing.group_sizes)
    return checkpoint_name(combine(call.group, product, weights, routing), COMBINED)


def scatter_multiply(
    group: Group, cotangent: jax.Array, rhs: Matrix, routing: Routing, beside: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The exchange and the product in the backward pass of `multiply_combine`, both without weights.

    `beside` is returned as it is. Nothing uses the rows that arrive before it is there: else XLA would compute it
    behind an asynchronous exchange, not beside it.

    Returns:
      The cotangent [C, H'] of its token at each row; that times the row's matrix transposed, [C, F]; and `beside`.
    """
    arrived = scatter_all(group, [cotangent], [routing])
    if beside is not None:
        arrived, beside = jax.lax.optimization_barrier((arrived, beside))
    return arrived, lhs_gradient(arrived, widened(rhs, arrived.dtype), routing.group_sizes), beside
