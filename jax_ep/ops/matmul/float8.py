"""Products of float8 operands, as in DeepGEMM. The gradients of `ragged_dot` pass straight through the rounding.

Tensor cores add up 128 terms of the contraction. Each sum of 128 terms is scaled, and accumulated in float32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep._kit import checks, float8, gemm, vary
from jax_ep._kit.batches import by_platform
from jax_ep._kit.checks import PyTree
from jax_ep._kit.float8 import BLOCK, Float8Rows, Float8Weights
from jax_ep._kit.linear import linear, without_gradient
from jax_ep._kit.scopes import op_scope
from jax_ep.ops.matmul import api, kernels
from jax_ep.ops.matmul.quantize import (
    as_array,
    as_float8_weights,
    check_blocks,
    check_rows,
    check_weights,
    dequantize,
    frozen,
)
from jax_ep.ops.matmul.rows import GatheredRows, dense_rows, gathered_rows

_T = TypeVar("_T")
RESULTS = (np.dtype(jnp.bfloat16), np.dtype(np.float32))
NO_PRODUCT_GRADIENT = (
    "products of float8 operands have no gradient: differentiate moe_mlp(precision='float8'), or wrap the product in a "
    "jax.custom_vjp"
)


@op_scope("float8.dot")
def dot(lhs: Float8Rows, rhs: Float8Weights, *, preferred_element_type: DTypeLike | None = None) -> jax.Array:
    """The product of rows and a matrix in float8. It has no gradient.

    Args:
      lhs: rows [M, K].
      rhs: a quantized matrix [K, N]; N is a multiple of 128.
      preferred_element_type: the dtype of the result: bfloat16, the default, or float32.

    Returns:
      [M, N].
    """
    dtype = _check_operands("float8.dot", lhs, rhs, preferred_element_type, ndim=2)
    one_group = jax.tree.map(lambda x: x[None], rhs)
    return float8_product(dtype, lhs, one_group, jnp.array([lhs.bits.shape[0]], jnp.int32))


@op_scope("float8.ragged_dot")
def ragged_dot(
    lhs: jax.Array | Float8Rows,
    rhs: jax.Array | Float8Weights,
    group_sizes: jax.Array,
    preferred_element_type: DTypeLike | None = None,
    *,
    lhs_indices: jax.Array | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` of operands in float8. Arrays are quantized first.

    Row i of the result is row i of `lhs` times the matrix of its group. Rows after the last group are zero. Quantizing
    weights reads more bytes than the product, so quantize constant weights once, by `quantize_weights`.

    Gradients of arrays are those of `jax_ep.lax.ragged_dot` (the straight-through estimator: Bengio et al., 2013).
    Operands in float8 have no gradient. With `Float8Rows`, `rhs` has no gradient either.

    Args:
      lhs: [M, K] bfloat16, float16 or float32, with adjacent rows for a group; or `Float8Rows`.
      rhs: [G, K, N] in the dtype of `lhs`, a matrix per group, K and N multiples of 128; or `Float8Weights`.
      group_sizes: [G] integers, the rows of each group; their sum may be less than M.
      preferred_element_type: the dtype of the result; default: the dtype of `lhs`. For `Float8Rows`: bfloat16, the
        default, or float32.
      lhs_indices: [M] integers as in `jax_ep.lax.ragged_dot`, only for `Float8Rows`.

    Returns:
      [M, N].

    Raises:
      ValueError, TypeError: an argument is wrong, or an operand in float8 is differentiated; raised when traced.
    """
    op = "float8.ragged_dot"
    if not isinstance(rhs, (*checks.ARRAYS, Float8Weights)):
        raise TypeError(f"{op}: rhs must be an array or Float8Weights, got {checks.describe(rhs)}")
    if isinstance(rhs, Float8Weights):
        checks.check_array(op, "rhs.bits", rhs.bits, "[G, N, K]")
    else:
        checks.check_array(op, "rhs", rhs, "[G, K, N]", checks.TOKEN_DTYPES)
        check_blocks(op, "rhs", rhs.shape[1:])
    checks.check_array(op, "group_sizes", group_sizes, "[G]", shape=rhs.shape[:1])
    if isinstance(lhs, Float8Rows):
        rhs = as_float8_weights(rhs)
        dtype = _check_operands(op, lhs, rhs, preferred_element_type, ndim=3)
        rows = lhs if lhs_indices is None else gathered_rows(op, lhs, lhs_indices)
        count = len(lhs.bits if lhs_indices is None else lhs_indices)
        return float8_product(dtype, rows, rhs, api.to_sizes(op, group_sizes, count))
    if lhs_indices is not None:
        raise ValueError(f"{op}: lhs_indices must be None unless lhs is Float8Rows, got {checks.describe(lhs_indices)}")
    checks.check_array(op, "lhs", lhs, "[M, K]", checks.TOKEN_DTYPES)
    shape = (rhs.shape[0], lhs.shape[1], rhs.shape[-1])
    if isinstance(rhs, Float8Weights):
        check_weights(op, "rhs", rhs, shape, "[G, K, N]")
    else:
        checks.check_array(op, "rhs", rhs, "[G, K, N]", lhs.dtype, shape=shape)
    dtype = checks.canonical_dtype(op, "preferred_element_type", preferred_element_type) or np.dtype(lhs.dtype)
    if dtype not in checks.TOKEN_DTYPES:
        raise TypeError(f"{op}: preferred_element_type must be one of floats or None, got {preferred_element_type!r}")
    sizes = api.to_sizes(op, group_sizes, len(lhs))
    return straight_through_product(dtype, *vary.vary_alike(None, lhs, frozen(op, "rhs", rhs), sizes))


def _check_operands(op: str, lhs: Any, rhs: Any, preferred_element_type: DTypeLike | None, *, ndim: int) -> np.dtype:
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
                f"{op}: {name} must be {kind.__name__} as the other one is in float8, got {checks.describe(operand)}"
            )
    check_rows(op, "lhs", lhs)
    checks.check_array(op, "rhs.bits", rhs.bits, "[G, N, K]" if ndim == 3 else "[N, K]")
    k = lhs.bits.shape[1]
    if rhs.bits.shape[-1] != k:
        raise ValueError(f"{op}: rhs.bits must have {k} columns, as lhs.bits has, got {rhs.bits.shape}")
    check_weights(op, "rhs", rhs, rhs.shape, "[G, K, N]" if ndim == 3 else "[K, N]")
    result = checks.canonical_dtype(op, "preferred_element_type", preferred_element_type) or RESULTS[0]
    if result not in RESULTS:
        raise TypeError(f"{op}: preferred_element_type must be bfloat16, float32 or None, got {result}")
    return result


def float8_product(dtype: Any, lhs: Float8Rows | GatheredRows, rhs: Float8Weights, group_sizes: jax.Array) -> jax.Array:
    """The product of checked operands: by the GEMM core on Hopper, elsewhere by XLA in bfloat16.

    The error of XLA's result is at most 2^-7 of the sum of the terms' magnitudes.
    """
    lhs, rhs = without_gradient(NO_PRODUCT_GRADIENT, (lhs, rhs))
    lhs, rhs, group_sizes = vary.vary_alike(None, lhs, rhs, group_sizes)
    core, by_xla = partial(kernels.grouped_matmul, dtype=dtype), partial(_by_xla, dtype=dtype)
    return _on_hopper(core, by_xla, lhs, rhs, group_sizes)


def _on_hopper(core: Callable[..., _T], by_xla: Callable[..., _T], *operands: PyTree) -> _T:
    """core(*operands) where the GEMM core runs and no operand is empty, else by_xla(*operands)."""
    has_core = gemm.has_gemm() and all(x.size for x in jax.tree.leaves(operands))
    return by_platform(by_xla, **({"cuda": core} if has_core else {}))(*operands)


def _by_xla(lhs: Float8Rows | GatheredRows, rhs: Float8Weights, group_sizes: jax.Array, *, dtype: Any) -> jax.Array:
    return jax.lax.ragged_dot(dequantize(dense_rows(lhs)), dequantize(rhs), group_sizes, preferred_element_type=dtype)


def quantize_and_multiply(
    lhs: jax.Array | Float8Rows,
    rhs: jax.Array | Float8Weights,
    group_sizes: jax.Array,
    *,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """The product of operands, without a gradient. Arrays are quantized first.

    Args:
      dtype: of the result; None: the dtype of `lhs`, or bfloat16 if `lhs` is in float8.
    """
    if not isinstance(lhs, Float8Rows):
        dtype, lhs = dtype or lhs.dtype, float8.rows_to_float8(lhs)
    dtype = np.dtype(dtype or RESULTS[0])
    kept = RESULTS[dtype != RESULTS[0]]
    return float8_product(kept, lhs, as_float8_weights(rhs), group_sizes).astype(dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def straight_through_product(
    dtype: np.dtype, lhs: jax.Array, rhs: jax.Array | Float8Weights, group_sizes: jax.Array
) -> jax.Array:
    return quantize_and_multiply(lhs, rhs, group_sizes, dtype=dtype)


@straight_through_product.defjvp
def _product_jvp(dtype: np.dtype, primals: PyTree, tangents: PyTree) -> tuple[jax.Array, jax.Array]:
    (lhs, rhs, group_sizes), (d_lhs, d_rhs, _) = primals, tangents
    narrow = lhs.dtype
    if isinstance(rhs, Float8Weights):
        lhs = d_rhs = None

    def forward(residuals: PyTree, tangents: PyTree) -> jax.Array:
        (lhs, rhs, group_sizes), (d_lhs, d_rhs) = residuals, tangents
        by_lhs = api.ragged_dot(d_lhs, as_array(rhs, d_lhs.dtype), group_sizes)
        return (by_lhs if d_rhs is None else by_lhs + api.ragged_dot(lhs, d_rhs, group_sizes)).astype(dtype)

    def backward(residuals: PyTree, cotangent: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        lhs, rhs, group_sizes = residuals
        cotangent = cotangent.astype(narrow)
        d_rhs = None if lhs is None else api.rhs_gradient(lhs, cotangent, group_sizes)
        return api.lhs_gradient(cotangent, as_array(rhs, narrow), group_sizes), d_rhs

    tangent = linear(forward, backward, (lhs, rhs, group_sizes), (d_lhs, d_rhs))
    return straight_through_product(dtype, *primals), tangent


def gated_product_to_float8(
    activation: str,
    composed: Callable[..., Float8Rows],
    rows: Float8Rows,
    group_sizes: jax.Array,
    *rhs: Float8Weights,
) -> Float8Rows:
    """activation(rows gate) * (rows up) of groups of rows [M, K], both products rounded to bfloat16: [M, F], quantized.

    On Hopper one kernel multiplies and quantizes. It has no gradient.

    Args:
      activation: "silu", "gelu" or "relu", which the GEMM core has in float8.
      composed: the same function of rows, group sizes and matrices, for calls that the core does not support.
      rhs: gate and up, each [G, K, F], or one matrix [G, K, 2 F] of both.
    """
    columns = rhs[0].shape[-1] // (2 if len(rhs) == 1 else 1)
    if columns % BLOCK:
        return composed(rows, group_sizes, *rhs)
    core = partial(kernels.gated_matmul_float8, activation=activation)
    return _on_hopper(core, composed, rows, group_sizes, *rhs)
