"""Grouped products by Pallas kernels, with the signatures of kernels.py, for GPUs and operands without the core."""

from typing import Any

import jax

from jax_ep import pallas_kernels
from jax_ep.ops.matmul.gated import KnownUnit
from jax_ep.ops.matmul.rows import Rows, matrix_and_indices


def grouped_matmul(lhs: Rows, rhs: jax.Array, group_sizes: jax.Array, **options: Any) -> jax.Array:
    matrix, indices = matrix_and_indices(lhs)
    return pallas_kernels.grouped_matmul(matrix, (rhs,), group_sizes, indices=indices, **options)[0]


def grouped_outer(lhs: Rows, rhs: Rows, group_sizes: jax.Array, **options: Any) -> jax.Array:
    (left, at), (right, other_at) = matrix_and_indices(lhs), matrix_and_indices(rhs)
    return pallas_kernels.grouped_outer(left, right, group_sizes, lhs_indices=at, rhs_indices=other_at, **options)


def gated_matmul(
    rows: Rows, group_sizes: jax.Array, *rhs: jax.Array, matrices: int, unit: KnownUnit, **options: Any
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    assert matrices == len(rhs) == 2
    matrix, indices = matrix_and_indices(rows)
    options |= {"indices": indices, "unit": unit.function}
    out, *products = pallas_kernels.grouped_matmul(matrix, rhs, group_sizes, **options)
    return out, tuple(products)
