"""Rows of a matrix by index, and sums of rows by index. Each is the other's derivative."""

import dataclasses
from functools import partial
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit import checks, vary
from jax_ep._kit.float8 import Float8Rows
from jax_ep._kit.linear import linear
from jax_ep._kit.sums import sum_by_ids
from jax_ep.pallas_kernels import ZERO_ROW as ZERO_ROW

MatrixT = TypeVar("MatrixT", jax.Array, Float8Rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatheredRows(Generic[MatrixT]):
    """Rows [C, K] that are not copied: row i is row indices[i] of `matrix` [M, K], as in `take_rows`.

    For products of float8 operands `matrix` is `Float8Rows`.
    """

    matrix: MatrixT
    indices: jax.Array

    @property
    def shape(self: "GatheredRows[jax.Array]") -> tuple[int, ...]:
        return *self.indices.shape, *self.matrix.shape[1:]

    @property
    def dtype(self: "GatheredRows[jax.Array]") -> np.dtype:
        return self.matrix.dtype


Rows = jax.Array | GatheredRows[jax.Array]


def gathered_rows(op: str, matrix: MatrixT, lhs_indices: jax.Array) -> GatheredRows[MatrixT]:
    """Rows of a user's matrix by a user's indices. Raises ValueError or TypeError if an argument is wrong."""
    checks.check_array(op, "lhs_indices", lhs_indices, "[M]", np.integer)
    return GatheredRows(matrix, checks.to_int32(lhs_indices))


def matrix_and_indices(rows: MatrixT | GatheredRows[MatrixT]) -> tuple[MatrixT, jax.Array | None]:
    """The matrix with the rows, and their indices, or None for the whole matrix in order."""
    return (rows.matrix, rows.indices) if isinstance(rows, GatheredRows) else (rows, None)


def dense_rows(rows: MatrixT | GatheredRows[MatrixT]) -> MatrixT:
    """The rows as an array or `Float8Rows`. Rows of zeros and NaN have scales of zero and NaN."""
    if not isinstance(rows, GatheredRows):
        return rows
    return jax.tree.map(lambda x: take_rows(x, rows.indices), rows.matrix)


def take_rows(matrix: jax.Array, indices: jax.Array) -> jax.Array:
    """[M, K], int32 [C] -> [C, K]: row indices[i], zeros where that is -1, NaN where it is any other outside [0, M)."""
    return linear(_take, partial(_sum, matrix.shape[0]), indices, matrix)


def sum_rows(rows: jax.Array, indices: jax.Array, count: int) -> jax.Array:
    """[C, K], int32 [C] -> [count, K]: the sum of the rows with each index. Indices outside [0, count) are left out.

    Summed in float32 in one order, and rounded once (`_kit/sums.py`).
    """
    return linear(partial(_sum, count), _take, indices, rows)


def _take(indices: jax.Array, matrix: jax.Array) -> jax.Array:
    inside = (indices >= 0) & (indices < matrix.shape[0])
    fill = jnp.where(indices == ZERO_ROW, 0, jnp.nan).astype(matrix.dtype)
    if matrix.shape[0] == 0:
        fill, _ = vary.vary_alike(None, fill, matrix)
        return jnp.broadcast_to(fill[:, None], (indices.shape[0], matrix.shape[1]))
    rows = matrix.at[jnp.where(inside, indices, 0)].get(mode="fill", fill_value=0)
    return jnp.where(inside[:, None], rows, fill[:, None])


def _sum(count: int, indices: jax.Array, rows: jax.Array) -> jax.Array:
    return sum_by_ids(rows, indices, count, rows.dtype)
