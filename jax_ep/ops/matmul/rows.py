"""Rows of a matrix by index, and sums of rows by index, each the other's derivative."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit import checks
from jax_ep._kit.linear import linear
from jax_ep.pallas_kernels import ZERO_ROW as ZERO_ROW


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatheredRows:
    """Rows [C, K] that are not copied: row i is row indices[i] of `matrix` [M, K], as in `take_rows`.

    For products of float8 operands `matrix` is `Float8Rows`.
    """

    matrix: Any
    indices: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.indices.shape, *self.matrix.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        return self.matrix.dtype


Rows = jax.Array | GatheredRows


def gathered_rows(op: str, matrix: Any, lhs_indices: jax.Array) -> GatheredRows:
    """The rows of a user's matrix that a user's indices name. Raises ValueError or TypeError unless both fit."""
    checks.check_array(op, "lhs_indices", lhs_indices, "[M]", np.integer)
    return GatheredRows(matrix, checks.to_int32(lhs_indices))


def matrix_and_indices(rows: Any) -> tuple[Any, jax.Array | None]:
    """The matrix that holds the rows, and their indices in it; None if the rows are the whole matrix, in order."""
    return (rows.matrix, rows.indices) if isinstance(rows, GatheredRows) else (rows, None)


def dense_rows(rows: Any) -> Any:
    """The rows as an array, or as `Float8Rows`, in which rows of zeros and of NaN have scales of zero and NaN."""
    if not isinstance(rows, GatheredRows):
        return rows
    return jax.tree.map(lambda x: take_rows(x, rows.indices), rows.matrix)


def take_rows(matrix: jax.Array, indices: jax.Array) -> jax.Array:
    """[M, K], int32 [C] -> [C, K]: row indices[i], zeros where that is -1, NaN where it is any other outside [0, M)."""
    return linear(_take, partial(_sum, matrix.shape[0]), indices, matrix)


def sum_rows(rows: jax.Array, indices: jax.Array, count: int) -> jax.Array:
    """[C, K], int32 [C] -> [count, K]: the sum of the rows with each index. Indices outside [0, count) are left out.

    In float32 in the order of the rows, and rounded once: equal operands give equal bits, as a scatter-add may not.
    """
    return linear(partial(_sum, count), _take, indices, rows)


def _take(indices: jax.Array, matrix: jax.Array) -> jax.Array:
    inside = (indices >= 0) & (indices < matrix.shape[0])
    fill = jnp.where(indices == ZERO_ROW, 0, jnp.nan).astype(matrix.dtype)
    if matrix.shape[0] == 0:
        return jnp.broadcast_to(fill[:, None], (indices.shape[0], matrix.shape[1]))
    rows = matrix.at[jnp.where(inside, indices, 0)].get(mode="fill", fill_value=0)
    return jnp.where(inside[:, None], rows, fill[:, None])


def _sum(count: int, indices: jax.Array, rows: jax.Array) -> jax.Array:
    if count == 0 or rows.shape[0] == 0:
        return jnp.zeros_like(rows, shape=(count, rows.shape[1]))
    indices = jnp.where((indices >= 0) & (indices < count), indices, count)
    order = jnp.argsort(indices, stable=True)
    ends = jnp.searchsorted(indices[order], jnp.arange(count), side="right")
    starts = jnp.append(0, ends[:-1])

    def add(now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at, total = now
        here = rows[order.at[at].get(mode="clip")]
        return at + 1, total + jnp.where((at < ends)[:, None], here, 0).astype(jnp.float32)

    # The first turn is before the loop: JAX batches no loop that begins with constants if there is a spmd_axis_name.
    first = add((starts, jnp.zeros_like(rows, jnp.float32, shape=(count, rows.shape[1]))))
    return jax.lax.while_loop(lambda now: jnp.any(now[0] < ends), add, first)[1].astype(rows.dtype)
