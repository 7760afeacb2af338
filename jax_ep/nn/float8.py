"""Products of a layer whose operands are rounded to float8 on the way, with gradients straight through the rounding."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._core.float8 import Float8Rows, Float8Weights
from jax_ep.ops.matmul.api import lhs_gradient, ragged_dot, rhs_gradient
from jax_ep.ops.matmul.float8 import dequantize, quantize_rows, quantize_weights


def float8_ragged_dot(lhs: jax.Array, rhs: jax.Array | Float8Weights, group_sizes: jax.Array) -> jax.Array:
    """`ragged_dot` of operands [M, K] and [G, K, N], K and N multiples of 128, that are quantized first.

    `rhs` may be quantized already: quantizing reads more bytes than the product does. The result has the dtype of
    `lhs`. The gradients are those of `ragged_dot`, as if nothing had been rounded (the straight-through estimator:
    Bengio et al., 2013).

    Raises:
      TypeError: `rhs` has another dtype than `lhs`; or it is differentiated though it is in float8.
    """
    return product_of_quantized(quantize_rows(lhs), lhs, rhs, group_sizes)


def product_of_quantized(
    quantized: Float8Rows, lhs: jax.Array, rhs: jax.Array | Float8Weights, group_sizes: jax.Array
) -> jax.Array:
    """`float8_ragged_dot` of rows that are quantized already: `lhs` is what has a gradient, and is not multiplied."""
    quantized = jax.lax.stop_gradient(quantized)
    if isinstance(rhs, Float8Weights):
        return _frozen_product(lhs, quantized, Float8Weights(*map(_frozen, rhs)), group_sizes)
    if lhs.dtype != rhs.dtype:
        raise TypeError(f"float8_ragged_dot: rhs must be of the dtype of lhs, {lhs.dtype}, got {rhs.dtype}")
    return _product(lhs, quantized, rhs, group_sizes)


def _multiplied(dtype: Any, quantized: Float8Rows, rhs: Float8Weights, group_sizes: jax.Array) -> jax.Array:
    kept = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    return ragged_dot(quantized, rhs, group_sizes, preferred_element_type=kept).astype(dtype)


@jax.custom_vjp
def _product(lhs: jax.Array, quantized: Float8Rows, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return _multiplied(lhs.dtype, quantized, quantize_weights(rhs), group_sizes)


def _forward(lhs: jax.Array, quantized: Float8Rows, rhs: jax.Array, group_sizes: jax.Array) -> Any:
    return _product(lhs, quantized, rhs, group_sizes), (lhs, rhs, group_sizes)


def _backward(residuals: Any, cotangent: jax.Array) -> Any:
    lhs, rhs, group_sizes = residuals
    return lhs_gradient(cotangent, rhs, group_sizes), None, rhs_gradient(lhs, cotangent, group_sizes), None


_product.defvjp(_forward, _backward)


@jax.custom_vjp
def _frozen_product(lhs: jax.Array, quantized: Float8Rows, rhs: Float8Weights, group_sizes: jax.Array) -> jax.Array:
    return _multiplied(lhs.dtype, quantized, rhs, group_sizes)


def _frozen_forward(lhs: jax.Array, quantized: Float8Rows, rhs: Float8Weights, group_sizes: jax.Array) -> Any:
    return _frozen_product(lhs, quantized, rhs, group_sizes), (rhs, group_sizes)


def _frozen_backward(residuals: Any, cotangent: jax.Array) -> Any:
    rhs, group_sizes = residuals
    return lhs_gradient(cotangent, dequantize(rhs, cotangent.dtype), group_sizes), None, None, None


_frozen_product.defvjp(_frozen_forward, _frozen_backward)


@jax.custom_jvp
def _frozen(part: jax.Array) -> jax.Array:
    return part


@_frozen.defjvp
def _no_gradient(*_: Any) -> Any:
    raise TypeError("float8_ragged_dot: rhs in float8 has no gradient: train weights of another dtype")
