"""float8 operands: rows with a scale per 128 values, weights with a scale per 128 x 128 (as in DeepGEMM)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep import pallas_kernels
from jax_ep._kit import checks, float8, gemm
from jax_ep._kit.batches import by_platform
from jax_ep._kit.float8 import BITS, BLOCK, FLOAT8, Float8, Float8Rows, Float8Weights
from jax_ep._kit.linear import without_gradient
from jax_ep._kit.scopes import op_scope
from jax_ep.pallas_kernels.call import HAS_TRITON


@op_scope("quantize_rows")
def quantize_rows(rows: jax.Array) -> Float8Rows:
    """Rows [M, H] of bfloat16, float16 or float32 as `Float8Rows`: a scale per 128 values of a row.

    Raises:
      ValueError, TypeError: H is no multiple of 128, or the dtype is another.
    """
    op = "quantize_rows"
    checks.check_array(op, "rows", rows, "[M, H]", checks.TOKEN_DTYPES)
    check_blocks(op, "rows", rows.shape[1:])
    return float8.rows_to_float8(rows)


@op_scope("quantize_weights")
def quantize_weights(weights: jax.Array) -> Float8Weights:
    """Matrices [K, N] or [G, K, N] of bfloat16, float16 or float32 as `Float8Weights`: a scale per 128 x 128 weights.

    The bits are transposed. Matrices of more than 2 GiB are quantized in parts, with up to twice the memory.

    Raises:
      ValueError, TypeError: K or N is no multiple of 128, or the dtype is another.
    """
    op = "quantize_weights"
    checks.check_array(op, "weights", weights, dtype=checks.TOKEN_DTYPES)
    if weights.ndim not in (2, 3):
        raise ValueError(f"{op}: weights must have shape [K, N] or [G, K, N], got {weights.shape}")
    check_blocks(op, "weights", weights.shape[-2:])
    return as_float8_weights(weights)


@op_scope("dequantize")
def dequantize(quantized: Float8, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """The rows or weights that `quantize_rows` or `quantize_weights` quantized, with the rounding of float8.

    Raises:
      ValueError, TypeError: `quantized` is neither, its arrays do not fit together, or `dtype` is not a float.
    """
    op, name = "dequantize", "quantized"
    result = checks.canonical_dtype(op, "dtype", dtype)
    if result is None or not jnp.issubdtype(result, jnp.floating):
        raise TypeError(f"{op}: dtype must be one of floats, got {dtype!r}")
    if isinstance(quantized, Float8Rows):
        check_rows(op, name, quantized)
        return float8.rows_from_float8(quantized, result)
    if isinstance(quantized, Float8Weights):
        checks.check_array(op, f"{name}.bits", quantized.bits)
        if quantized.bits.ndim not in (2, 3):
            raise ValueError(f"{op}: {name}.bits must have shape [N, K] or [G, N, K], got {quantized.bits.shape}")
        check_weights(op, name, quantized, quantized.shape, "[G, K, N]")
        return float8.weights_from_float8(quantized, result)
    raise TypeError(f"{op}: {name} must be Float8Rows or Float8Weights, got {checks.describe(quantized)}")


def as_float8_weights(weights: jax.Array | Float8Weights) -> Float8Weights:
    """Checked matrices [..., K, N] in float8, quantized if necessary.

    On Hopper a kernel reads each matrix once. XLA reads it twice, and transposes slowly.
    """
    if isinstance(weights, Float8Weights):
        return weights
    by_kernel = gemm.has_gemm() and HAS_TRITON and weights.size
    return _to_float8_on_hopper(weights) if by_kernel else float8.weights_to_float8(weights)


@jax.custom_jvp
def _to_float8_on_hopper(weights: jax.Array) -> Float8Weights:
    def by_kernel(weights: jax.Array) -> Float8Weights:
        groups = weights.shape[:-2]
        found = pallas_kernels.quantize_matrices(weights.reshape(-1, *weights.shape[-2:]))
        return Float8Weights(*(x.reshape(*groups, *x.shape[1:]) for x in found))

    return by_platform(float8.weights_to_float8, cuda=by_kernel)(weights)


_to_float8_on_hopper.defjvp(partial(jax.jvp, float8.weights_to_float8))


def check_rows(op: str, name: str, rows: Float8Rows) -> None:
    """Raises ValueError or TypeError unless `rows` are quantized rows [M, K]."""
    checks.check_array(op, f"{name}.bits", rows.bits, "[M, K]", BITS)
    m, k = rows.bits.shape
    check_blocks(op, f"{name}.bits", (k,))
    checks.check_array(op, f"{name}.scales", rows.scales, "[M, K / 128]", np.float32, shape=(m, k // BLOCK))


def check_weights(op: str, name: str, weights: Float8Weights, shape: tuple[int, ...], layout: str) -> None:
    """Raises ValueError or TypeError unless `weights` are quantized matrices of `shape`, [G, K, N] or [K, N]."""
    if weights.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {layout} = {shape}, got Float8Weights of {weights.shape}")
    checks.check_array(op, f"{name}.bits", weights.bits, dtype=(BITS, FLOAT8))
    *groups, k, n = shape
    check_blocks(op, f"{name}.bits", (n, k))
    scales, layout = (*groups, n // BLOCK, k // BLOCK), f"[{'G, ' if groups else ''}N / 128, K / 128]"
    checks.check_array(op, f"{name}.scales", weights.scales, layout, np.float32, shape=scales)


def as_array(operand: jax.Array | Float8, dtype: DTypeLike) -> jax.Array:
    """An operand of a product in the backward pass: the array, or dequantized float8 values."""
    return dequantize(operand, dtype) if isinstance(operand, Float8) else operand


def frozen(op: str, name: str, operand: jax.Array | Float8Weights) -> jax.Array | Float8Weights:
    """The operand. Differentiating a float8 operand raises a TypeError that names `op` and the argument."""
    message = f"{op}: {name} in float8 has no gradient: differentiate one of another dtype"
    return without_gradient(message, operand) if isinstance(operand, Float8) else operand


def check_blocks(op: str, name: str, shape: tuple[int, ...]) -> None:
    if any(size % BLOCK for size in shape):
        raise ValueError(f"{op}: {name} must have sizes that are multiples of {BLOCK}, got {shape}")
