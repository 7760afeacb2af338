"""float8: rows with a scale per 128 values, weights with one per 128 x 128, and their products (DeepGEMM's recipe)."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep._kit import checks, float8, gemm
from jax_ep._kit.batches import batched_alike
from jax_ep._kit.float8 import BITS, BLOCK, Float8Rows, Float8Weights
from jax_ep.ops.matmul import kernels
from jax_ep.ops.matmul.kernels import FLOAT8 as FLOAT8

RESULTS = (np.dtype(jnp.bfloat16), np.dtype(np.float32))
Operand = TypeVar("Operand", bound=jax.Array | Float8Rows | Float8Weights)


def quantize_rows(rows: jax.Array) -> Float8Rows:
    """Rows [M, H] of bfloat16, float16 or float32 as `Float8Rows`: a scale per 128 values of a row.

    Raises:
      ValueError, TypeError: H is no multiple of 128, or the dtype is another.
    """
    op = "quantize_rows"
    checks.check_rank(op, "rows", rows, 2, "[M, H]")
    checks.check_dtype(op, "rows", rows, checks.TOKEN_DTYPES)
    check_blocks(op, "rows", rows.shape[1:])
    return float8.quantize_rows(rows)


def quantize_weights(weights: jax.Array) -> Float8Weights:
    """Matrices [K, N] or [G, K, N] of bfloat16, float16 or float32 as `Float8Weights`: a scale per 128 x 128 weights.

    `Float8Weights` hold them transposed.

    Raises:
      ValueError, TypeError: K or N is no multiple of 128, or the dtype is another.
    """
    op = "quantize_weights"
    checks.check_dtype(op, "weights", weights, checks.TOKEN_DTYPES)
    if weights.ndim not in (2, 3):
        raise ValueError(f"{op}: weights must have shape [K, N] or [G, K, N], got {weights.shape}")
    check_blocks(op, "weights", weights.shape[-2:])
    return float8.quantize_weights(weights)


def dequantize(quantized: Float8Rows | Float8Weights, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """The rows or weights that `quantize_rows` or `quantize_weights` was given, as far as float8 holds them.

    Raises:
      TypeError: `quantized` is neither, or `dtype` is none of floats.
    """
    result = checks.canonical_dtype("dequantize", "dtype", dtype)
    if result is None or not jnp.issubdtype(result, jnp.floating):
        raise TypeError(f"dequantize: dtype must be one of floats, got {dtype!r}")
    if isinstance(quantized, Float8Rows):
        return float8.dequantize_rows(quantized, result)
    if isinstance(quantized, Float8Weights):
        return float8.dequantize_weights(quantized, result)
    raise TypeError(f"dequantize: quantized must be Float8Rows or Float8Weights, got {checks.describe(quantized)}")


def check_operands(op: str, lhs: Any, rhs: Any, preferred_element_type: DTypeLike | None, *, ndim: int) -> np.dtype:
    """Returns the dtype of the product of `Float8Rows` and `Float8Weights`.

    Args:
      preferred_element_type: bfloat16 or float32; None: bfloat16.
      ndim: of `rhs.bits`, 2 or 3.

    Raises:
      TypeError, ValueError: an operand is wrong, or not in float8.
    """
    for name, operand, kind in (("lhs", lhs, Float8Rows), ("rhs", rhs, Float8Weights)):
        if not isinstance(operand, kind):
            raise TypeError(
                f"{op}: {name} must be {kind.__name__} as the other one is in float8, got {describe(operand)}"
            )
        checks.check_dtype(op, f"{name}.bits", operand.bits, (BITS,))
        checks.check_dtype(op, f"{name}.scales", operand.scales, (np.dtype(np.float32),))
    checks.check_rank(op, "lhs.bits", lhs.bits, 2, "[M, K]")
    checks.check_rank(op, "rhs.bits", rhs.bits, ndim, "[G, N, K]" if ndim == 3 else "[N, K]")
    (rows, k), (n, rhs_k) = lhs.bits.shape, rhs.bits.shape[-2:]
    if k != rhs_k:
        raise ValueError(f"{op}: rhs.bits must have {k} columns, as lhs.bits has, got {rhs.bits.shape}")
    check_blocks(op, "rhs.bits", (n, k))
    checks.check_shape(op, "lhs.scales", lhs.scales, (rows, k // BLOCK), "[M, K / 128]")
    scales = (*rhs.bits.shape[:-2], n // BLOCK, k // BLOCK)
    checks.check_shape(op, "rhs.scales", rhs.scales, scales, "[..., N / 128, K / 128]")
    result = checks.canonical_dtype(op, "preferred_element_type", preferred_element_type) or RESULTS[0]
    if result not in RESULTS:
        raise TypeError(f"{op}: preferred_element_type must be bfloat16, float32 or None, got {result}")
    return result


def check_weights(op: str, name: str, weights: Float8Weights, shape: tuple[int, ...], layout: str) -> None:
    """Raises ValueError or TypeError unless `weights` are quantized matrices of `shape` [G, K, N]."""
    if weights.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {layout} = {shape}, got Float8Weights of {weights.shape}")
    checks.check_dtype(op, f"{name}.bits", weights.bits, (BITS,))
    checks.check_dtype(op, f"{name}.scales", weights.scales, (np.dtype(np.float32),))
    groups, k, n = shape
    checks.check_shape(op, f"{name}.scales", weights.scales, (groups, n // BLOCK, k // BLOCK), "[G, N / 128, K / 128]")


def check_group_sizes(groups: int, group_sizes: Any) -> jax.Array:
    """Returns `group_sizes` of `ragged_dot` as int32."""
    checks.check_kind("ragged_dot", "group_sizes", group_sizes, jnp.integer, "an integer")
    checks.check_shape("ragged_dot", "group_sizes", group_sizes, (groups,), "[G]")
    return checks.to_int32(group_sizes)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def grouped_product(dtype: Any, lhs: Float8Rows, rhs: Float8Weights, group_sizes: jax.Array) -> jax.Array:
    """The product of checked operands: on Hopper by the GEMM core, elsewhere by XLA of both in bfloat16.

    XLA's is off by at most 2^-7 of the sum of the terms' magnitudes.
    """
    leaves, structure = jax.tree.flatten((lhs, rhs, group_sizes))
    leaves = batched_alike(*leaves)
    by_xla, core = partial(_by_xla, dtype=dtype), partial(kernels.grouped_matmul, dtype=dtype)
    if not (gemm.has_gemm() and all(size > 0 for x in leaves for size in x.shape)):
        return by_xla(*structure.unflatten(leaves))
    operands = structure.unflatten(checks.vary_as_any(*leaves))
    return jax.lax.platform_dependent(*operands, cuda=core, default=by_xla)


def _by_xla(lhs: Float8Rows, rhs: Float8Weights, group_sizes: jax.Array, *, dtype: Any) -> jax.Array:
    return jax.lax.ragged_dot(dequantize(lhs), dequantize(rhs), group_sizes, preferred_element_type=dtype)


@grouped_product.defjvp
def _no_gradient(*_: Any) -> Any:
    raise TypeError(
        "products of float8 operands have no gradient: differentiate moe_mlp(precision='float8'), or wrap the product "
        "in a jax.custom_vjp"
    )


def rounded_product(
    lhs: jax.Array | Float8Rows,
    rhs: jax.Array | Float8Weights,
    group_sizes: jax.Array,
    *,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """The product of operands that are quantized here, if they are not yet. It has no gradient.

    Args:
      dtype: of the result; None: that of `lhs`, and of rows in float8 bfloat16.
    """
    if not isinstance(lhs, Float8Rows):
        dtype, lhs = dtype or lhs.dtype, float8.quantize_rows(lhs)
    dtype = np.dtype(dtype or RESULTS[0])
    rhs = rounded_weights(rhs)
    kept = RESULTS[dtype != RESULTS[0]]
    return grouped_product(kept, lhs, rhs, group_sizes).astype(dtype)


def rounded_weights(weights: jax.Array | Float8Weights) -> Float8Weights:
    return weights if isinstance(weights, Float8Weights) else float8.quantize_weights(weights)


def quantized_gated_product(
    activation: str,
    composed: Callable[..., Float8Rows],
    rows: Float8Rows,
    group_sizes: jax.Array,
    *rhs: Float8Weights,
) -> Float8Rows:
    """activation(rows gate) * (rows up) of groups of rows [M, K], both products rounded to bfloat16: [M, F], quantized.

    For other families. On Hopper one kernel quantizes what it makes. It has no gradient.

    Args:
      activation: one that the GEMM core knows: "silu", "gelu" or "relu".
      composed: what it stands for, of rows, group sizes and matrices; taken where the core does not serve.
      rhs: gate and up, each [G, K, F], or one matrix [G, K, 2 F] of both.
    """
    leaves, structure = jax.tree.flatten((rows, group_sizes, *rhs))
    leaves = batched_alike(*leaves)
    columns = rhs[0].shape[-1] // (2 if len(rhs) == 1 else 1)
    if not gemm.has_gemm() or columns % BLOCK or not all(size > 0 for x in leaves for size in x.shape):
        return composed(*structure.unflatten(leaves))
    operands = structure.unflatten(checks.vary_as_any(*leaves))
    core = partial(kernels.gated_matmul_float8, activation=activation)
    return jax.lax.platform_dependent(*operands, cuda=core, default=composed)


def widened(operand: jax.Array | Float8Rows | Float8Weights, dtype: DTypeLike) -> jax.Array:
    """What a backward pass multiplies by: an operand as it is, or, of one that is in float8, what that holds."""
    return dequantize(operand, dtype) if isinstance(operand, Float8Rows | Float8Weights) else operand


def without_gradient(op: str, name: str, operand: Operand) -> Operand:
    """The operand; if it is in float8, differentiating it raises a TypeError that names `op` and the argument."""
    if not isinstance(operand, Float8Rows | Float8Weights):
        return operand
    return jax.tree.map(partial(_frozen, op, name), operand)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _frozen(op: str, name: str, part: jax.Array) -> jax.Array:
    return part


@_frozen.defjvp
def _no_gradient_of_float8(op: str, name: str, *_: Any) -> Any:
    raise TypeError(f"{op}: {name} in float8 has no gradient: differentiate one of another dtype")


def describe(operand: Any) -> str:
    return type(operand).__name__ if isinstance(operand, Float8Rows | Float8Weights) else checks.describe(operand)


def check_blocks(op: str, name: str, shape: tuple[int, ...]) -> None:
    if any(size % BLOCK for size in shape):
        raise ValueError(f"{op}: {name} must have sizes that are multiples of {BLOCK}, got {shape}")
