"""Products of a layer whose operands are rounded to float8 on the way, with gradients straight through the rounding."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.ops.matmul.api import lhs_gradient, ragged_dot, rhs_gradient
from jax_ep.ops.matmul.float8 import quantize_rows, quantize_weights


@jax.custom_vjp
def float8_ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`ragged_dot` of operands [M, K] and [G, K, N], K and N multiples of 128, that are quantized first.

    The result has their dtype. The gradients are those of `ragged_dot`, as if nothing had been rounded (the
    straight-through estimator: Bengio et al., 2013).
    """
    if lhs.dtype != rhs.dtype:
        raise TypeError(f"float8_ragged_dot: rhs must be of the dtype of lhs, {lhs.dtype}, got {rhs.dtype}")
    dtype = jnp.bfloat16 if lhs.dtype == jnp.bfloat16 else jnp.float32
    product = ragged_dot(quantize_rows(lhs), quantize_weights(rhs), group_sizes, preferred_element_type=dtype)
    return product.astype(lhs.dtype)


def _forward(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> Any:
    return float8_ragged_dot(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _backward(residuals: Any, cotangent: jax.Array) -> Any:
    lhs, rhs, group_sizes = residuals
    return lhs_gradient(cotangent, rhs, group_sizes), rhs_gradient(lhs, cotangent, group_sizes), None


float8_ragged_dot.defvjp(_forward, _backward)
