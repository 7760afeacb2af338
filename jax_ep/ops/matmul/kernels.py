"""The GEMM core's grouped products as FFI calls."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._core import checks, ffi


def grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, dtype: Any, transpose_rhs: bool
) -> jax.Array:
    """[M, K], [G, K, N] (or [G, N, K], to be transposed), [G] -> [M, N]: a group's rows times its matrix."""
    columns = rhs.shape[1 if transpose_rhs else 2]
    out = checks.result_type((lhs.shape[0], columns), dtype, lhs)
    return ffi.call_alone("grouped_matmul", (out, _counter(lhs)), lhs, rhs, group_sizes, transpose_rhs=transpose_rhs)[0]


def gated_matmul(rows: jax.Array, group_sizes: jax.Array, *rhs: jax.Array, activation: str) -> jax.Array:
    """[M, K], [G], gate and up [G, K, F] or both in one [G, K, 2 F] -> [M, F]: activation(rows gate) * (rows up)."""
    gate, up = rhs if len(rhs) == 2 else rhs * 2
    columns = gate.shape[2] // (2 if len(rhs) == 1 else 1)
    out = checks.result_type((rows.shape[0], columns), rows.dtype, rows)
    called = ffi.call_alone("gated_matmul", (out, _counter(rows)), rows, gate, up, group_sizes, activation=activation)
    return called[0]


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
    out = checks.result_type((lhs.shape[0], rhs.shape[1]), dtype, lhs)
    return ffi.call_alone("grouped_matmul_float8", (out,), lhs, lhs_scales, rhs, rhs_scales, group_sizes)[0]


def grouped_outer(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, dtype: Any) -> jax.Array:
    """[M, K], [M, N], [G] -> [G, K, N]: over a group's rows, `lhs` transposed times `rhs`."""
    out = checks.result_type((group_sizes.shape[0], lhs.shape[1], rhs.shape[1]), dtype, lhs)
    return ffi.call_alone("grouped_outer", (out,), lhs, rhs, group_sizes)[0]


def _counter(like: jax.Array) -> jax.ShapeDtypeStruct:
    """Memory of a kernel whose CTAs take tiles one by one."""
    return checks.result_type((1,), jnp.uint32, like)
