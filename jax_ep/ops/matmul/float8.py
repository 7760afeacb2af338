"""Quantizing to float8: rows with a scale per 128 values, weights with one per 128 x 128 (DeepGEMM's recipe)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep._core import checks, float8
from jax_ep._core.float8 import BLOCK, Float8Rows, Float8Weights

RESULTS = (np.dtype(jnp.bfloat16), np.dtype(np.float32))
FLOAT8 = np.dtype(jnp.float8_e4m3fn)


def quantize_rows(rows: jax.Array) -> Float8Rows:
    """Rows [M, H] of bfloat16, float16 or float32 as `Float8Rows`: a scale per 128 values of a row.

    Raises:
      ValueError, TypeError: H is no multiple of 128, or the dtype is another.
    """
    op = "quantize_rows"
    checks.check_rank(op, "rows", rows, 2, "[M, H]")
    checks.check_dtype(op, "rows", rows, checks.TOKEN_DTYPES)
    _check_blocks(op, "rows", rows.shape[1:])
    return float8.quantize_rows(rows)


def quantize_weights(weights: jax.Array) -> Float8Weights:
    """Matrices [K, N] or [G, K, N] of bfloat16, float16 or float32 as `Float8Weights`: a scale per 128 x 128 weights.

    Raises:
      ValueError, TypeError: K or N is no multiple of 128, or the dtype is another.
    """
    op = "quantize_weights"
    checks.check_dtype(op, "weights", weights, checks.TOKEN_DTYPES)
    if weights.ndim not in (2, 3):
        raise ValueError(f"{op}: weights must have shape [K, N] or [G, K, N], got {weights.shape}")
    _check_blocks(op, "weights", weights.shape[-2:])
    return float8.quantize_weights(weights)


def dequantize(quantized: Float8Rows | Float8Weights, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """The rows or weights that `quantize_rows` or `quantize_weights` was given, as far as float8 holds them."""
    if isinstance(quantized, Float8Rows):
        return float8.dequantize_rows(quantized, dtype)
    if isinstance(quantized, Float8Weights):
        return float8.dequantize_weights(quantized, dtype)
    raise TypeError(f"dequantize: quantized must be Float8Rows or Float8Weights, got {checks.describe(quantized)}")


def operands(
    op: str, lhs: Any, rhs: Any, preferred_element_type: DTypeLike | None, *, ndim: int, layout: str
) -> tuple[jax.Array, jax.Array, np.dtype]:
    """For a product of `Float8Rows` and `Float8Weights`: both in bfloat16, and the dtype of the result.

    So operands are multiplied so far, everywhere: a result is off by at most 2^-7 of the sum of its terms' magnitudes.

    Args:
      preferred_element_type: bfloat16 or float32; None: bfloat16.
      ndim, layout: of `rhs.values`.

    Raises:
      TypeError, ValueError: an operand is wrong, or not in float8.
    """
    for name, operand, kind in (("lhs", lhs, Float8Rows), ("rhs", rhs, Float8Weights)):
        if not isinstance(operand, kind):
            raise TypeError(
                f"{op}: {name} must be {kind.__name__} as the other one is in float8, got {describe(operand)}"
            )
        checks.check_dtype(op, f"{name}.values", operand.values, (FLOAT8,))
        checks.check_dtype(op, f"{name}.scales", operand.scales, (np.dtype(np.float32),))
    checks.check_rank(op, "lhs.values", lhs.values, 2, "[M, K]")
    checks.check_rank(op, "rhs.values", rhs.values, ndim, layout)
    (rows, k), (rhs_k, n) = lhs.values.shape, rhs.values.shape[-2:]
    if k != rhs_k:
        raise ValueError(f"{op}: rhs.values must have {k} rows, as lhs.values has columns, got {rhs.values.shape}")
    _check_blocks(op, "rhs.values", (k, n))
    checks.check_shape(op, "lhs.scales", lhs.scales, (rows, k // BLOCK), "[M, K / 128]")
    scales = (*rhs.values.shape[:-2], k // BLOCK, n // BLOCK)
    checks.check_shape(op, "rhs.scales", rhs.scales, scales, "[..., K / 128, N / 128]")
    result = checks.canonical_dtype(op, "preferred_element_type", preferred_element_type) or RESULTS[0]
    if result not in RESULTS:
        raise TypeError(f"{op}: preferred_element_type must be bfloat16, float32 or None, got {result}")
    return dequantize(lhs), dequantize(rhs), result


def describe(operand: Any) -> str:
    return type(operand).__name__ if isinstance(operand, Float8Rows | Float8Weights) else checks.describe(operand)


def _check_blocks(op: str, name: str, shape: tuple[int, ...]) -> None:
    if any(size % BLOCK for size in shape):
        raise ValueError(f"{op}: {name} must have sizes that are multiples of {BLOCK}, got {shape}")
