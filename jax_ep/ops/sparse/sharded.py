"""Lookups in a table that is sharded over the ranks: a `dispatch` of ids to their owners, a `combine` of their rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep.group import Group, check_group
from jax_ep.ops.moe.api import combine, dispatch
from jax_ep.ops.sparse.types import Tree

_HALF = 1 << 16  # an id travels as two halves of 16 bits, which float32 holds exactly


class Entries(NamedTuple):
    """Rows of a table that a lookup reads on this rank.

    Attributes:
      indices: [N] row ids; outside the table where none is read.
      used: int32 scalar. Entries beyond it are padding.
      dropped: int32 scalar. This rank's ids that found no room at their owners.
      rows_of_ids: a function from the rows [N, D] of the entries to the rows that the lookup returns.
    """

    indices: jax.Array
    used: jax.Array
    dropped: jax.Array
    rows_of_ids: Callable[[jax.Array], Tree]


def entries_at_owners(op: str, ids: jax.Array, height: int, group: Group, options: dict[str, Any]) -> Entries:
    """The rows of this rank's part of the table, of `height` rows, that all ranks' ids [N] name.

    `rows_of_ids` returns [N, D]. Each rank asks for each row once, so at most R entries name one row.
    """
    check_group(op, group)
    num_rows = group.size * height
    if num_rows >= 2**31:
        raise ValueError(f"{op}: table must have fewer than 2**31 rows on all ranks, got {group.size} * {height}")
    inside = jnp.where((ids >= 0) & (ids < num_rows), ids, num_rows).astype(jnp.int32)
    asked, place = jnp.unique(inside, size=max(ids.size, 1), fill_value=num_rows, return_inverse=True)
    owner, row = jnp.where(asked < num_rows, asked // height, -1), asked % height
    halves = jnp.stack([row // _HALF, row % _HALF], axis=1).astype(jnp.float32)
    given: dict[str, Any] = {"group": group, "implementation": options["implementation"]}
    sent = dispatch(halves, owner[:, None], num_experts=group.size, **given | options)
    received = jnp.nan_to_num(sent.rows).astype(jnp.int32)
    present = jnp.arange(len(received)) < sent.group_sizes[0]
    indices = jnp.where(present, received[:, 0] * _HALF + received[:, 1], height)
    failed = jnp.where(jnp.isnan(sent.rows[:, :1]), jnp.nan, 0)  # so that rows are NaN where no id was delivered

    def rows_of_ids(rows: jax.Array) -> jax.Array:
        home = combine(rows + failed.astype(rows.dtype), sent.routing, **given)
        return home.at[place].get(mode="clip")

    return Entries(indices, sent.group_sizes[0], sent.routing.dropped[0], rows_of_ids)
