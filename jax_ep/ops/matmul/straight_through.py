"""Grouped products that quantize their operands to float8, with gradients straight through the rounding."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jax_ep._kit import checks
from jax_ep._kit.float8 import Float8Rows, Float8Weights
from jax_ep._kit.linear import linear
from jax_ep.ops.matmul import api
from jax_ep.ops.matmul.float8 import check_operands, float8_product, quantized_product
from jax_ep.ops.matmul.quantize import check_blocks, check_weights, dequantized, frozen, quantized_weights
from jax_ep.ops.matmul.rows import gathered_rows


def ragged_dot(
    lhs: jax.Array | Float8Rows,
    rhs: jax.Array | Float8Weights,
    group_sizes: jax.Array,
    preferred_element_type: DTypeLike | None = None,
    *,
    lhs_indices: jax.Array | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` of operands in float8. Arrays are quantized first.

    Row i of the result is row i of `lhs` times the matrix of its group; rows after the last group are zero. Quantizing
    weights reads more bytes than the product, so quantize constant weights once, by `quantize_weights`.

    Gradients of arrays are as by `jax_ep.lax.ragged_dot`, without rounding (the straight-through estimator: Bengio
    et al., 2013). Operands given in float8 have no gradient. With `Float8Rows`, `rhs` has no gradient either.

    Args:
      lhs: [M, K] bfloat16, float16 or float32 rows, the rows of a group next to each other; or `Float8Rows`.
      rhs: [G, K, N] in the dtype of `lhs`, a matrix per group, K and N multiples of 128; or `Float8Weights`.
      group_sizes: [G] integers, the rows of each group; their sum may be less than M.
      preferred_element_type: the dtype of the result; default: the dtype of `lhs`. For `Float8Rows`: bfloat16, the
        default, or float32.
      lhs_indices: [M] integers, for `Float8Rows` alone: as in `jax_ep.lax.ragged_dot`.

    Returns:
      [M, N].

    Raises:
      ValueError, TypeError: an argument is wrong, or an operand given in float8 is differentiated; raised when traced.
    """
    op = "float8.ragged_dot"
    checks.check_array(op, "group_sizes", group_sizes, "[G]", np.integer, shape=rhs.shape[:1])
    groups = checks.to_int32(group_sizes)
    if isinstance(lhs, Float8Rows):
        rhs = quantized_weights(rhs)
        dtype = check_operands(op, lhs, rhs, preferred_element_type, ndim=3)
        rows = lhs if lhs_indices is None else gathered_rows(op, lhs, lhs_indices)
        return float8_product(dtype, rows, rhs, groups)
    if lhs_indices is not None:
        raise ValueError(f"{op}: lhs_indices must be None unless lhs is Float8Rows, got {checks.describe(lhs_indices)}")
    _check_mixed(op, lhs, rhs)
    dtype = checks.canonical_dtype(op, "preferred_element_type", preferred_element_type) or np.dtype(lhs.dtype)
    if dtype not in checks.TOKEN_DTYPES:
        raise TypeError(f"{op}: preferred_element_type must be one of floats or None, got {preferred_element_type!r}")
    return straight_through_product(dtype, lhs, frozen(op, "rhs", rhs), groups)


def _check_mixed(op: str, lhs: Any, rhs: Any) -> None:
    checks.check_array(op, "lhs", lhs, "[M, K]", checks.TOKEN_DTYPES)
    shape = (rhs.shape[0], lhs.shape[1], rhs.shape[-1])
    if isinstance(rhs, Float8Weights):
        check_weights(op, "rhs", rhs, shape, "[G, K, N]")
        return
    checks.check_array(op, "rhs", rhs, "[G, K, N]", lhs.dtype, shape=shape)
    check_blocks(op, "rhs", shape[1:])


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def straight_through_product(
    dtype: np.dtype, lhs: jax.Array, rhs: jax.Array | Float8Weights, group_sizes: jax.Array
) -> jax.Array:
    """`ragged_dot` of checked operands. For other families, too."""
    return quantized_product(lhs, rhs, group_sizes, dtype=dtype)


@straight_through_product.defjvp
def _product_jvp(dtype: np.dtype, primals: Any, tangents: Any) -> Any:
    (lhs, rhs, group_sizes), (d_lhs, d_rhs, _) = primals, tangents
    narrow = lhs.dtype
    if isinstance(rhs, Float8Weights):
        lhs = d_rhs = None

    def forward(kept: Any, changes: Any) -> jax.Array:
        (lhs, rhs, group_sizes), (d_lhs, d_rhs) = kept, changes
        by_lhs = api.ragged_dot(d_lhs, dequantized(rhs, d_lhs.dtype), group_sizes)
        return (by_lhs if d_rhs is None else by_lhs + api.ragged_dot(lhs, d_rhs, group_sizes)).astype(dtype)

    def backward(kept: Any, cotangent: jax.Array) -> Any:
        lhs, rhs, group_sizes = kept
        cotangent = cotangent.astype(narrow)
        d_rhs = None if lhs is None else api.rhs_gradient(lhs, cotangent, group_sizes)
        return api.lhs_gradient(cotangent, dequantized(rhs, narrow), group_sizes), d_rhs

    tangent = linear(forward, backward, (lhs, rhs, group_sizes), (d_lhs, d_rhs))
    return straight_through_product(dtype, *primals), tangent
