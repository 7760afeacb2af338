"""Rows of a large table of which few are present: the gradient of an embedding, for instance."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from jax_ep import _checks

INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseRows:
    """N entries (row id, row) of a [num_rows, D] table that is zero elsewhere. A pytree.

    Entries that name the same row add up. An entry stands for a row if it is among the first `count` and its id is in
    [0, num_rows); the others are padding. Functions of this package pad with id `num_rows` and zero values, so
    `table.at[rows.indices].add(rows.values, mode="drop")` is right.

    Attributes:
      indices: [N] int32 or int64.
      values: [N, D].
      count: int32 scalar. Leading entries that count: N for raw rows, the number of different ids after `coalesce`.
      num_rows: static; the height of the table.
      ignored: int32 scalar. Entries that some function before ignored because their id was not in [0, num_rows).
      dropped: int32 scalar. Row ids that found no room in the capacity of some function before.
    """

    indices: jax.Array
    values: jax.Array
    count: jax.Array
    num_rows: int = dataclasses.field(metadata={"static": True})
    ignored: jax.Array = dataclasses.field(default_factory=_zero)
    dropped: jax.Array = dataclasses.field(default_factory=_zero)

    @classmethod
    def from_entries(cls, indices: jax.Array, values: jax.Array, *, num_rows: int) -> "SparseRows":
        """Raw rows: ids in any order, with duplicates.

        Raises:
          ValueError, TypeError: shapes are not [N] and [N, D], ids are not int32 or int64, num_rows is not positive.
        """
        rows = cls(indices, values, jnp.full((), np.size(indices), jnp.int32), num_rows)
        rows.check("SparseRows")
        return rows

    @classmethod
    def from_bcoo(cls, matrix: BCOO) -> "SparseRows":
        """The rows of a BCOO matrix of shape [num_rows, D] whose entries are whole rows (n_sparse = n_dense = 1).

        Raises:
          ValueError, TypeError: the matrix is batched or no BCOO, or its entries are not rows.
        """
        if not isinstance(matrix, BCOO):
            raise TypeError(f"SparseRows.from_bcoo: matrix must be BCOO, got {_checks.describe(matrix)}")
        if (matrix.n_batch, matrix.n_sparse, matrix.n_dense) != (0, 1, 1):
            raise ValueError(
                "SparseRows.from_bcoo: matrix must have n_batch, n_sparse, n_dense = 0, 1, 1; "
                f"got {matrix.n_batch}, {matrix.n_sparse}, {matrix.n_dense}"
            )
        return cls.from_entries(matrix.indices[:, 0], matrix.data, num_rows=matrix.shape[0])

    def to_bcoo(self) -> BCOO:
        """As a BCOO matrix of shape [num_rows, D]; padding has the index `num_rows`, which BCOO ignores."""
        values = jnp.where(self.present[:, None], self.values, 0)
        shape = (self.num_rows, self.values.shape[1])
        return BCOO((values, self.masked_indices[:, None]), shape=shape)

    def todense(self) -> jax.Array:
        """[num_rows, D] in the dtype of `values`; duplicates are added in float32."""
        table = jnp.zeros((self.num_rows, self.values.shape[1]), jnp.float32)
        table = table.at[self.masked_indices].add(self.values.astype(jnp.float32), mode="drop")
        return table.astype(self.values.dtype)

    @property
    def present(self) -> jax.Array:
        """[N] bool: whether an entry stands for a row."""
        return self._counted & (self.indices >= 0) & (self.indices < self.num_rows)

    @property
    def masked_indices(self) -> jax.Array:
        """[N]: `indices`, with `num_rows` where an entry stands for no row."""
        return jnp.where(self.present, self.indices, self.num_rows)

    def count_outside(self) -> jax.Array:
        """int32 scalar: entries among the first `count` whose id is not in [0, num_rows)."""
        return jnp.sum(self._counted & ~self.present, dtype=jnp.int32)

    def check(self, op: str) -> None:
        """Raises ValueError or TypeError, naming `op`, unless shapes and dtypes are those of sparse rows."""
        _checks.check_rank(op, "indices", self.indices, 1, "[N]")
        _checks.check_dtype(op, "indices", self.indices, INDEX_DTYPES)
        _checks.check_rank(op, "values", self.values, 2, "[N, D]")
        _checks.check_dtype(op, "values", self.values, _checks.TOKEN_DTYPES)
        if self.values.shape[0] != self.indices.shape[0]:
            raise ValueError(
                f"{op}: values must have as many rows as indices, {self.indices.shape[0]}, got {self.values.shape}"
            )
        _checks.check_positive(op, "num_rows", self.num_rows)
        if self.num_rows >= 2**31:
            raise ValueError(f"{op}: num_rows must be below 2**31, got {self.num_rows}")
        for name in ("count", "ignored", "dropped"):
            _checks.check_shape(op, name, getattr(self, name), (), "[]")
            _checks.check_dtype(op, name, getattr(self, name), (np.dtype(np.int32),))

    @property
    def _counted(self) -> jax.Array:
        return jnp.arange(self.indices.shape[0], dtype=jnp.int32) < self.count


def check_sparse_rows(op: str, name: str, rows: SparseRows) -> None:
    if not isinstance(rows, SparseRows):
        raise TypeError(f"{op}: {name} must be SparseRows, got {_checks.describe(rows)}")
    rows.check(op)


def coalesce(rows: SparseRows, *, capacity: int | None = None) -> SparseRows:
    """Adds up the entries of each row: sorted different ids, padded with id `num_rows` and zero values.

    Duplicates are added in float32 and rounded once to the dtype of `values`. Differentiable in `values`.

    Args:
      rows: N entries in any order.
      capacity: C, entries of the result; default N. If there are more ids than that, the last find no room.

    Returns:
      C entries, `count` of them different ids. `ignored` and `dropped` say what is missing.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the function is traced.
    """
    op = "coalesce"
    check_sparse_rows(op, "rows", rows)
    capacity = rows.indices.shape[0] if capacity is None else capacity
    if capacity != 0 or rows.indices.shape[0]:
        _checks.check_positive(op, "capacity", capacity)
    order = jnp.argsort(rows.masked_indices, stable=True)
    ids = rows.masked_indices[order]
    slots, unique = slots_of_sorted(ids, rows.num_rows)
    summed = jax.ops.segment_sum(
        rows.values[order].astype(jnp.float32), slots, capacity, indices_are_sorted=True, mode="drop"
    )
    return SparseRows(
        indices=jnp.full((capacity,), rows.num_rows, ids.dtype).at[slots].set(ids, mode="drop"),
        values=summed.astype(rows.values.dtype),
        count=jnp.minimum(unique, capacity),
        num_rows=rows.num_rows,
        ignored=rows.ignored + rows.count_outside(),
        dropped=rows.dropped + jnp.maximum(unique - capacity, 0),
    )


def slots_of_sorted(ids: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """For sorted ids [N], where `num_rows` stands for none: each one's place among the different ids, and their number.

    The place of `num_rows` is 2**31 - 1, outside of everything.
    """
    valid = ids < num_rows
    first = valid & (ids != jnp.concatenate([jnp.full((1,), -1, ids.dtype), ids[:-1]])[: ids.shape[0]])
    slots = jnp.cumsum(first, dtype=jnp.int32) - 1
    return jnp.where(valid, slots, 2**31 - 1), jnp.sum(first, dtype=jnp.int32)
