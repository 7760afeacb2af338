"""Grouped products whose operands are rounded to float8 on the way, with gradients straight through the rounding."""

from typing import Any

import jax

from jax_ep._kit.float8 import Float8Weights
from jax_ep._kit.linear import linear
from jax_ep.ops.matmul.api import lhs_gradient, product_tangent, rhs_gradient
from jax_ep.ops.matmul.float8 import check_blocks, rounded_product, widened, without_gradient


def float8_ragged_dot(lhs: jax.Array, rhs: jax.Array | Float8Weights, group_sizes: jax.Array) -> jax.Array:
    """`ragged_dot` of operands [M, K] and [G, K, N], K and N multiples of 128, that are quantized first.

    `rhs` may be quantized already: quantizing reads more bytes than the product does. The result has the dtype of
    `lhs`. The gradients are those of `ragged_dot`, as if nothing had been rounded (the straight-through estimator:
    Bengio et al., 2013).

    Raises:
      ValueError, TypeError: K or N is no multiple of 128; `rhs` has another dtype than `lhs`; or it is differentiated
        though it is in float8.
    """
    op = "float8_ragged_dot"
    check_blocks(op, "rhs", rhs.shape[1:])
    if not isinstance(rhs, Float8Weights) and lhs.dtype != rhs.dtype:
        raise TypeError(f"{op}: rhs must be of the dtype of lhs, {lhs.dtype}, got {rhs.dtype}")
    return _product(lhs, without_gradient(op, "rhs", rhs), group_sizes)


@jax.custom_jvp
def _product(lhs: jax.Array, rhs: jax.Array | Float8Weights, group_sizes: jax.Array) -> jax.Array:
    return rounded_product(lhs, rhs, group_sizes)


@_product.defjvp
def _product_jvp(primals: Any, tangents: Any) -> Any:
    (lhs, rhs, group_sizes), (d_lhs, d_rhs, _) = primals, tangents
    if isinstance(rhs, Float8Weights):
        lhs = d_rhs = None
    return _product(*primals), linear(_forward, _backward, (lhs, rhs, group_sizes), (d_lhs, d_rhs))


def _forward(kept: Any, changes: Any) -> jax.Array:
    return product_tangent(*kept, *changes)


def _backward(kept: Any, cotangent: jax.Array) -> Any:
    lhs, rhs, group_sizes = kept
    d_rhs = None if lhs is None else rhs_gradient(lhs, cotangent, group_sizes)
    return lhs_gradient(cotangent, widened(rhs, cotangent.dtype), group_sizes), d_rhs
