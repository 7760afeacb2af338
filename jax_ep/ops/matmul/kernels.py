"""The GEMM core's grouped products as FFI calls."""

from typing import Any

import jax
import numpy as np

from jax_ep._kit import ffi


def grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, dtype: Any, transpose_rhs: bool
) -> jax.Array:
    """[M, K], [G, K, N] (or [G, N, K], to be transposed), [G] -> [M, N]: a group's rows times its matrix."""
    called = ffi.call_alone(
        "grouped_matmul",
        lhs,
        rhs,
        group_sizes,
        dtype=np.dtype(dtype),
        operand_dtype=np.dtype(lhs.dtype),
        m=lhs.shape[0],
        n=rhs.shape[1 if transpose_rhs else 2],
        k=lhs.shape[1],
        groups=rhs.shape[0],
        rhs_is_k_by_n=not transpose_rhs,
    )
    return called["product"]


def gated_matmul(
    rows: jax.Array, group_sizes: jax.Array, *rhs: jax.Array, activation: str, keep_products: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """[M, K], [G], gate and up [G, K, F] or both in one [G, K, 2 F] -> [M, F]: activation(rows gate) * (rows up).

    And the product by each of `rhs`, if they are kept.
    """
    gate, up = rhs if len(rhs) == 2 else rhs * 2
    called = ffi.call_alone(
        "gated_matmul",
        rows,
        gate,
        up,
        group_sizes,
        dtype=np.dtype(rows.dtype),
        activation=activation,
        keeps_products=keep_products,
        m=rows.shape[0],
        n=gate.shape[2] // (2 if len(rhs) == 1 else 1),
        k=rows.shape[1],
        groups=gate.shape[0],
        columns=gate.shape[2],
    )
    return called["product"], tuple(called[name] for name in ("of_gate", "of_up") if name in called)


def summed_matmul(
    first: jax.Array, second: jax.Array, first_rhs: jax.Array, second_rhs: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """Two [M, K], two [G, N, K], [G] -> [M, N]: rows times matrices transposed, the sum of both products."""
    called = ffi.call_alone(
        "summed_matmul",
        first,
        first_rhs,
        second,
        second_rhs,
        group_sizes,
        dtype=np.dtype(first.dtype),
        m=first.shape[0],
        n=first_rhs.shape[1],
        k=first.shape[1],
        groups=first_rhs.shape[0],
    )
    return called["product"]


def grouped_matmul_float8(
    lhs: jax.Array,
    lhs_scales: jax.Array,
    rhs: jax.Array,
    rhs_scales: jax.Array,
    group_sizes: jax.Array,
    *,
    dtype: Any,
) -> jax.Array:
    """[M, K], [M, K / 128], [G, N, K], [G, N / 128, K / 128], [G] -> [M, N]: a group's rows times its matrix."""
    called = ffi.call_alone(
        "grouped_matmul_float8",
        lhs,
        lhs_scales,
        rhs,
        rhs_scales,
        group_sizes,
        dtype=np.dtype(dtype),
        m=lhs.shape[0],
        n=rhs.shape[1],
        k=lhs.shape[1],
        groups=rhs.shape[0],
    )
    return called["product"]


def gated_matmul_float8(
    rows: jax.Array, rows_scales: jax.Array, group_sizes: jax.Array, *rhs: jax.Array, activation: str
) -> tuple[jax.Array, jax.Array]:
    """[M, K], [M, K / 128], [G], and of gate and of up, or of both in one, values and scales as in `Float8Weights`
    -> values [M, F] and scales [M, F / 128] of activation(rows gate) * (rows up)."""
    gate, gate_scales, up, up_scales = rhs if len(rhs) == 4 else rhs * 2
    called = ffi.call_alone(
        "gated_matmul_float8",
        rows,
        rows_scales,
        gate,
        gate_scales,
        up,
        up_scales,
        group_sizes,
        activation=activation,
        m=rows.shape[0],
        n=gate.shape[1] // (2 if len(rhs) == 2 else 1),
        k=rows.shape[1],
        groups=gate.shape[0],
        columns=gate.shape[1],
    )
    return called["product"], called["scales"]


def grouped_outer(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, dtype: Any) -> jax.Array:
    """[M, K], [M, N], [G] -> [G, K, N]: over a group's rows, `lhs` transposed times `rhs`."""
    called = ffi.call_alone(
        "grouped_outer",
        lhs,
        rhs,
        group_sizes,
        dtype=np.dtype(dtype),
        m=lhs.shape[1],
        n=rhs.shape[1],
        k=lhs.shape[0],
        groups=group_sizes.shape[0],
    )
    return called["product"]
