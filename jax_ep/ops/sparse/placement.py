"""The placement of a table's rows on the ranks, for lookups, their gradients and tables."""

from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit import checks
from jax_ep._kit.checks import AnyArray

T = TypeVar("T")  # a pytree
Placement = Literal["ranges", "mod"]


class Shards(NamedTuple):
    """The R parts of a table, of B rows each."""

    placement: Placement
    ranks: int  # R
    height: int  # B

    @property
    def num_rows(self) -> int:
        return self.ranks * self.height

    def locate(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rank that has each row, and the row's place in this rank's part."""
        if self.placement == "mod":
            return ids % self.ranks, ids // self.ranks
        return ids // self.height, ids % self.height

    def ids(self, rank: jax.Array, places: jax.Array) -> jax.Array:
        """The reverse of `locate`."""
        return places * self.ranks + rank if self.placement == "mod" else rank * self.height + places


def shard_table(table: T, ranks: int, *, placement: Placement = "ranges") -> T:
    """A table in the order in which `P(axis_name)` shards it over the ranks, padded with zeros.

    Args:
      table: [V, ...], in the order of ids; or a pytree of such arrays, such as the state of an optimizer. Scalars do
        not change. numpy arrays stay in numpy, so the table may exceed a device.
      ranks: R.
      placement: "ranges", row i is on rank i div B at place i mod B; or "mod", on rank i mod R at place i div R.

    Returns:
      [R B, ...] for each array, where B = ceil(V / R). Ids in [V, R B) read and train rows of padding.
      `stacked_ids(ids, V)` makes them -1.
    """
    _check("shard_table", ranks, placement)

    def shard(x: AnyArray) -> AnyArray:
        if not np.ndim(x):
            return x
        pad = np.pad if isinstance(x, np.ndarray) else jnp.pad
        x = pad(x, [(0, -len(x) % ranks), *[(0, 0)] * (x.ndim - 1)])
        return _transposed(x, (-1, ranks)) if placement == "mod" else x

    return jax.tree.map(shard, table)


def unshard_table(table: T, ranks: int, *, num_rows: int, placement: Placement = "ranges") -> T:
    """The reverse of `shard_table`: [num_rows, ...] in the order of ids, for a checkpoint or another number of ranks.

    Raises:
      ValueError, TypeError: an argument is wrong, or an array does not have R * ceil(num_rows / R) rows.
    """
    op = "unshard_table"
    _check(op, ranks, placement)
    checks.check_int(op, "num_rows", num_rows)

    def unshard(x: AnyArray) -> AnyArray:
        if not np.ndim(x):
            return x
        rows = -(-num_rows // ranks) * ranks
        if len(x) != rows:
            raise ValueError(
                f"{op}: table must have {rows} rows, num_rows={num_rows} and padding for {ranks} ranks, got {len(x)}"
            )
        return (_transposed(x, (ranks, -1)) if placement == "mod" else x)[:num_rows]

    return jax.tree.map(unshard, table)


def _check(op: str, ranks: int, placement: Placement) -> None:
    checks.check_int(op, "ranks", ranks)
    checks.check_one_of(op, "placement", placement, Placement)


def _transposed(x: AnyArray, shape: tuple[int, int]) -> AnyArray:
    """The rows of `x`, transposed as a matrix of rows: XLA's partitioner makes one exchange of it."""
    return x.reshape(*shape, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
