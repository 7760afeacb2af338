"""Sparse rows of a large table, and the union of the rows of all ranks."""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from jax_ep._kit import checks
from jax_ep._kit.sums import sum_by_ids
from jax_ep.ops.sparse.placement import Shards

Tree: TypeAlias = Any  # a pytree
Scalar: TypeAlias = float | jax.Array
SparseOp = Literal["sum", "mean", "mean_by_count"]
Method = Literal["auto", "bitmap", "match"]
INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)


def _guard() -> jax.Array:
    """Returns a PRNG key, because orbax and `jax.export` can write keys, and arithmetic on keys raises."""
    return jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32")


class Shared(NamedTuple):
    """Values [N, D] of a gradient as weights[j] * rows[place[j]]."""

    rows: jax.Array  # [M, D] float32
    place: jax.Array  # [N] int32
    weights: jax.Array  # [N] float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseRows:
    """N entries (row id, row) of a [num_rows, D] table that is zero elsewhere. A pytree.

    Arithmetic on all leaves would change row ids. So `jax.tree.map(jnp.add, a, b)`, `jax.lax.psum`, `optax.tree.norm`
    and similar functions raise when traced: they do not accept the `guard`, whose dtype is `key<fry>`. Use `add`,
    `scale`, `global_norm` and `clip_by_global_norm` of `jax_ep.embedding`, and `sparse_all_reduce`.

    Entries of the same row add up. An entry stands for a row if it is among the first `count` and its id is in [0,
    num_rows); other entries are padding. Functions of this package pad with id `num_rows` and zero values, so
    `table.at[rows.places].add(rows.values, mode="drop")` adds them to a table, or to this rank's part of one.

    Attributes:
      indices: [N] int32 or int64.
      values: [N, D].
      count: int32 scalar. Leading entries that count: N for raw rows, the number of different ids after `coalesce`.
      num_rows: static; the height of the table, of all ranks' parts if it is sharded.
      ignored: int32 scalar. Entries that earlier functions ignored, because their ids were not in [0, num_rows).
      dropped: int32 scalar. Row ids that found no room in the capacity of earlier functions.
      guard: a constant PRNG key, on which JAX refuses arithmetic.
      shards: static; the placement of the table if this rank has a part of it, as in the gradient of a sharded lookup.
        Ids are those of the whole table, and this rank has all of these rows.
    """

    indices: jax.Array
    values: jax.Array
    count: jax.Array
    num_rows: int = dataclasses.field(metadata={"static": True})
    ignored: jax.Array = dataclasses.field(default_factory=_zero)
    dropped: jax.Array = dataclasses.field(default_factory=_zero)
    guard: jax.Array = dataclasses.field(default_factory=_guard)
    shards: Shards | None = dataclasses.field(default=None, metadata={"static": True})
    _shared: ClassVar[Shared | None] = None  # copies have none

    def _sharing(self, shared: Shared | None) -> "SparseRows":
        """A copy with `shared` values."""
        copy = dataclasses.replace(self)
        object.__setattr__(copy, "_shared", shared)
        return copy

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in ("indices", "values", "count", "num_rows")}
        return f"SparseRows({checks.described(**fields)})"

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
          ValueError, TypeError: the matrix is batched or not a BCOO, or its entries are not rows.
        """
        if not isinstance(matrix, BCOO):
            raise TypeError(f"SparseRows.from_bcoo: matrix must be BCOO, got {checks.describe(matrix)}")
        if (matrix.n_batch, matrix.n_sparse, matrix.n_dense) != (0, 1, 1):
            raise ValueError(
                "SparseRows.from_bcoo: matrix must have n_batch, n_sparse, n_dense = 0, 1, 1; "
                f"got {matrix.n_batch}, {matrix.n_sparse}, {matrix.n_dense}"
            )
        return cls.from_entries(matrix.indices[:, 0], matrix.data, num_rows=matrix.shape[0])

    def to_bcoo(self) -> BCOO:
        """Returns a BCOO matrix of shape [num_rows, D]; padding has the index `num_rows`, which BCOO ignores."""
        self.check("SparseRows.to_bcoo")
        values = jnp.where(self.present[:, None], self.values, 0)
        shape = (self.num_rows, self.values.shape[1])
        return BCOO((values, self.masked_indices[:, None]), shape=shape)

    def todense(self) -> jax.Array:
        """[num_rows, D] in the dtype of `values`; duplicates are added in float32."""
        self.check("SparseRows.todense")
        return sum_by_ids(self.values, self.masked_indices, self.num_rows, self.values.dtype)

    @property
    def present(self) -> jax.Array:
        """[N] bool: which entries are rows, not padding."""
        return self._counted & (self.indices >= 0) & (self.indices < self.num_rows)

    @property
    def masked_indices(self) -> jax.Array:
        """[N]: `indices`, with `num_rows` for padding."""
        return jnp.where(self.present, self.indices, self.num_rows)

    @property
    def height(self) -> int:
        """The rows of the table that this rank has."""
        return self.shards.height if self.shards else self.num_rows

    @property
    def places(self) -> jax.Array:
        """[N]: the place of each row in this rank's table, or `height` for padding."""
        ids = self.masked_indices
        return jnp.where(ids < self.num_rows, self.shards.locate(ids)[1], self.height) if self.shards else ids

    def count_outside(self) -> jax.Array:
        """int32 scalar: entries among the first `count` whose id is not in [0, num_rows)."""
        return jnp.sum(self._counted & ~self.present, dtype=jnp.int32)

    def check(self, op: str) -> None:
        """Raises ValueError or TypeError, naming `op`, unless shapes and dtypes fit."""
        checks.check_array(op, "indices", self.indices, "[N]", INDEX_DTYPES)
        checks.check_array(op, "values", self.values, "[N, D]", checks.TOKEN_DTYPES)
        if self.values.shape[0] != self.indices.shape[0]:
            raise ValueError(
                f"{op}: values must have as many rows as indices, {self.indices.shape[0]}, got {self.values.shape}"
            )
        checks.check_int(op, "num_rows", self.num_rows, below_32_bits=True)
        for name in ("count", "ignored", "dropped"):
            checks.check_array(op, name, getattr(self, name), "[]", np.int32, shape=())

    @property
    def _counted(self) -> jax.Array:
        return jnp.arange(self.indices.shape[0], dtype=jnp.int32) < self.count


def is_sparse_rows(x: Any) -> TypeGuard[SparseRows]:
    return isinstance(x, SparseRows)


def check_sparse_rows(op: str, name: str, rows: Any) -> None:
    if not isinstance(rows, SparseRows):
        raise TypeError(f"{op}: {name} must be SparseRows, got {checks.describe(rows)}")
    rows.check(op)


def check_table(op: str, table: Any) -> None:
    checks.check_array(op, "table", table, "[V, D]")
    if not len(table):
        raise ValueError(f"{op}: table must have at least one row, got {table.shape}")


@dataclasses.dataclass(frozen=True)
class SparseConfig:
    size: int
    num_rows: int
    capacity: int
    op: SparseOp
    sharded: bool
    drop: bool

    @property
    def rank_rows(self) -> int:
        """Rows of the table in the range of one rank; the last ranks may have fewer."""
        return -(-self.num_rows // self.size)

    @property
    def scale(self) -> float:
        return 1 / self.size if self.op == "mean" else 1.0

    @property
    def by_count(self) -> bool:
        return self.op == "mean_by_count"

    def places_kept(self, entries: int) -> int:
        """The places of the union that a result may use: a replicated result has at most its capacity."""
        return min(self.size * entries, self.num_rows) if self.sharded else self.capacity


class Union(NamedTuple):
    """The union of all ranks' row ids: the U different ids have the places 0 .. U - 1. For R ranks, N entries, capacity
    C.

    Attributes:
      indices: [C] int32. The sorted ids of this rank's result, padded with `num_rows`.
      places: [R, N] int32. The place of each entry of each rank, or U for padding.
      bounds: [R + 1] int32. The number of ids below the range of each rank, then U.
      missing: [2] int32. `SparseRows.ignored` and `.dropped`, over all ranks.
    """

    indices: jax.Array
    places: jax.Array
    bounds: jax.Array
    missing: jax.Array

    def owners(self, places: jax.Array) -> jax.Array:
        """int32: the rank whose range has each of the places; R for U.

        The type of `jnp.searchsorted` varies over a `spmd_axis_name` even if its operands do not.
        """
        bounds = self.bounds.reshape(-1, *[1] * places.ndim)
        return jnp.sum(bounds <= places[None], axis=0, dtype=jnp.int32) - 1

    def needed(self, config: SparseConfig) -> jax.Array:
        """[R] int32: the rows of each rank's result."""
        return jnp.diff(self.bounds) if config.sharded else jnp.broadcast_to(self.bounds[-1:], (config.size,))
