"""Lookups in embedding tables and their sparse gradients, over `SparseRows`.

A lookup in a table that is sharded over the ranks is a `dispatch` of ids to their owners and a `combine` of their rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_ep._kit import checks
from jax_ep._kit.checks import Implementation, OnOverflow
from jax_ep.group import Group, check_group
from jax_ep.ops.moe.api import combine, dispatch
from jax_ep.ops.sparse.bags import with_shared_rows
from jax_ep.ops.sparse.types import INDEX_DTYPES, SparseRows, Tree, check_table

T = TypeVar("T")  # a pytree
Value = TypeVar("Value", covariant=True)  # what a loss returns
Gradient = TypeVar("Gradient", covariant=True)
WithFurther: TypeAlias = tuple[SparseRows, *tuple[Any, ...]]  # the gradients of a table and of `argnums`
_HALF = 1 << 16  # an id travels as two halves of 16 bits, which float32 holds exactly


class ValueAndGrad(Protocol[Value, Gradient]):
    """What `sparse_value_and_grad` returns. The gradient of a pytree of tables has no type of its own."""

    @overload
    def __call__(self, table: jax.Array, ids: Tree, *args: Any, **keywords: Any) -> tuple[Value, Gradient]: ...
    @overload
    def __call__(self, table: Tree, ids: Tree, *args: Any, **keywords: Any) -> tuple[Value, Any]: ...


class Entries(NamedTuple):
    """Rows of a table that a lookup reads on this rank."""

    indices: jax.Array  # [N] row ids; outside the table where none is read
    used: jax.Array  # int32 scalar; entries beyond it are padding
    dropped: jax.Array  # int32 scalar; this rank's ids that found no room at their owners
    rows_of_ids: Callable[[jax.Array], Tree]  # from the rows [N, D] of the entries to the rows that the lookup returns


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of `table` [V, D] for `ids` [...] int32 or int64: [..., D]. An id outside [0, V) reads zeros.

    Raises:
      ValueError, TypeError: the table is not [V, D], or the ids are no array of int32 or int64.
    """
    check_table("lookup", table)
    checks.check_array("lookup", "ids", ids, dtype=INDEX_DTYPES)
    return _read(table, ids)


def _read(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def sharded_lookup(
    table: jax.Array,
    ids: T,
    *,
    group: Group,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    on_overflow: OnOverflow = "raise",
    implementation: Implementation = "auto",
) -> T:
    """`lookup` in a table that is sharded over the ranks: rank r holds the rows [r B, (r + 1) B).

    Called on every rank, inside `jax.shard_map` over the group's axis. The different ids of a rank go to their owners,
    and their rows come home: one `dispatch` and one `combine`, each row once per rank. Differentiable in `table`; the
    gradient is dense; `sparse_value_and_grad(group=...)` has sparse ones.

    Args:
      table: [B, D] bfloat16, float16 or float32; B is the same on all ranks, so pad a table to a multiple of R rows.
      ids: [...] int32 or int64, or a pytree of them; one exchange brings the rows of all. An id outside [0, R B) reads
        zeros.
      group: the open group of the R ranks.
      capacity: C, the ids that an owner has room for. Default: R N for the N ids of each rank, the most there can be.
      capacity_factor: instead of `capacity`: C as a multiple of N, as in `dispatch`.
      on_overflow: when an owner would get more than C ids: "raise" (`CapacityError`), or "drop": ids without room read
        zeros.
      implementation: as for `dispatch`.

    Returns:
      [..., D] for ids [...]: a pytree like `ids`.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the function is traced.
      JaxEpError: as for `dispatch`.
    """
    op = "sharded_lookup"
    check_group(op, group)
    options: dict[str, Any] = {"capacity": capacity, "capacity_factor": capacity_factor}
    options |= {"on_overflow": on_overflow, "implementation": implementation}
    entries = _entries(op, table, ids, group, options)
    return entries.rows_of_ids(_read(table, entries.indices))


def _entries(op: str, table: jax.Array, ids: Tree, group: Group | None, options: dict[str, Any]) -> Entries:
    """The rows of one table to read for `ids`, a pytree, and the function that arranges them like `ids`."""
    check_table(op, table)
    leaves, structure = jax.tree.flatten(ids)
    if not leaves:
        raise ValueError(f"{op}: ids must hold an array at least for every table, got {ids!r}")
    for x in leaves:
        checks.check_array(op, "ids", x, dtype=INDEX_DTYPES)
    flat = jnp.concatenate([x.ravel() for x in leaves])

    def apart(rows: jax.Array) -> Tree:
        parts = jnp.split(rows, np.cumsum([x.size for x in leaves])[:-1])
        return structure.unflatten(y.reshape(*x.shape, y.shape[1]) for x, y in zip(leaves, parts, strict=True))

    if group is None:
        return Entries(flat, jnp.int32(flat.size), jnp.int32(0), apart)
    found = _entries_at_owners(op, flat, table.shape[0], group, options)
    return found._replace(rows_of_ids=lambda rows: apart(found.rows_of_ids(rows)))


def _entries_at_owners(op: str, ids: jax.Array, height: int, group: Group, options: dict[str, Any]) -> Entries:
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
    present = jnp.arange(len(received), dtype=jnp.int32) < sent.group_sizes[0]
    indices = jnp.where(present, received[:, 0] * _HALF + received[:, 1], height)
    failed = jnp.where(jnp.isnan(sent.rows[:, :1]), jnp.nan, 0)  # so that rows are NaN where no id was delivered

    def rows_of_ids(rows: jax.Array) -> jax.Array:
        home = combine(rows + failed.astype(rows.dtype), sent.routing, **given)
        return home.at[place].get(mode="clip")

    return Entries(indices, sent.group_sizes[0], sent.routing.dropped[0], rows_of_ids)


class Options(TypedDict, total=False):
    """Further arguments of `sparse_value_and_grad`, for the overloads that type its gradients by `argnums`."""

    has_aux: bool
    group: Group | None
    capacity: int | None
    capacity_factor: float | None
    on_overflow: OnOverflow
    implementation: Implementation


@overload
def sparse_value_and_grad(
    loss: Callable[..., Value], argnums: tuple[()] = ..., **options: Unpack[Options]
) -> ValueAndGrad[Value, SparseRows]: ...
@overload
def sparse_value_and_grad(
    loss: Callable[..., Value], argnums: int | Sequence[int], **options: Unpack[Options]
) -> ValueAndGrad[Value, WithFurther]: ...
def sparse_value_and_grad(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = (),
    *,
    has_aux: bool = False,
    group: Group | None = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    on_overflow: OnOverflow = "raise",
    implementation: Implementation = "auto",
) -> ValueAndGrad[Any, Any]:
    """`jax.value_and_grad` for a loss of embedding rows: the gradient of a table is `SparseRows`, never a table.

    Inside `jax.shard_map`, `loss` is the loss of one rank, and the gradient is this rank's part: let
    `sparse_all_reduce(..., op="sum")` or "mean" do what `jax.lax.psum` or `pmean` would do to the loss. The gradients
    of `argnums` are as by `jax.grad` there, which sums them over the ranks if check_vma=True.

    With `group`, tables are sharded over its ranks as in `sharded_lookup`. A rank gets the gradient of
    the sum of all ranks' losses by its own rows, so nothing remains to be added up; `scale` makes a mean of it.

    Args:
      loss: `loss(rows, *args)` gives a scalar, or (scalar, aux) with `has_aux`; `rows` is [..., D] for ids [...].
      argnums: position or positions of further arguments of `loss` to differentiate by; position 0 is `rows`.
      has_aux: as in `jax.value_and_grad`.
      group, capacity, capacity_factor, on_overflow, implementation: as in `sharded_lookup`; without a group every rank
        has the table.

    Returns:
      A function of (table, ids, *args) and of the loss' keywords that gives (value, gradient). `table` is [V, D]; `ids`
      is int32 or int64 of any shape, and an id outside [0, V) reads zeros and has no gradient. The gradient has an
      entry for every id, in the order of `ids`: N = ids.size. With `group` it has C entries, of row ids in [0, B).
      With `argnums` it is a tuple: `SparseRows`, then a dense gradient per position.
      `table` may be a pytree of tables, and for every table `ids` may be a pytree: `rows` has the structure of `ids`,
      the gradient has the structure of `table`, and a table's entries come one array of ids after the other.

    Raises:
      ValueError, TypeError: a table is not [V, D], ids are no int32 or int64, structures differ, argnums has 0.
      JaxEpError: with `group`, as for `dispatch`.
    """
    op = "sparse_value_and_grad"
    further = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    if not all(isinstance(n, int) for n in further):
        raise TypeError(f"{op}: argnums must be an int or a sequence of them, got {argnums!r}")
    if any(n < 1 for n in further):
        raise ValueError(f"{op}: argnums must be at least 1, after the rows; got {further}")
    options: dict[str, Any] = {"capacity": capacity, "capacity_factor": capacity_factor}
    options |= {"on_overflow": on_overflow, "implementation": implementation}

    def value_and_grad(table: Tree, ids: Tree, *args: Any, **keywords: Any) -> tuple[Any, Any]:
        tables, structure = jax.tree.flatten(table)
        named = [_entries(op, *one, group, options) for one in zip(tables, structure.flatten_up_to(ids), strict=True)]

        def of_rows(rows: list[jax.Array], *args: Any) -> Any:
            looked_up = [entries.rows_of_ids(x) for entries, x in zip(named, rows, strict=True)]
            return loss(structure.unflatten(looked_up), *args, **keywords)

        rows = [_read(one, entries.indices) for one, entries in zip(tables, named, strict=True)]
        differentiated = jax.value_and_grad(of_rows, argnums=(0, *further), has_aux=has_aux)

        def of_tables(rows: list[jax.Array]) -> Any:
            value, (by_row, *others) = differentiated(rows, *args)
            return by_row, (value, others)

        traced = group is None and not has_aux and all(isinstance(x, Tracer) for x in rows)
        run = with_shared_rows(of_tables) if traced else lambda rows: (*of_tables(rows), [None] * len(rows))
        by_row, (value, others), shared = run(rows)
        gradient = structure.unflatten(
            SparseRows(entries.indices, values, entries.used, len(one), dropped=entries.dropped)._sharing(of_bags)
            for one, entries, values, of_bags in zip(tables, named, by_row, shared, strict=True)
        )
        return value, (gradient, *others) if further else gradient

    return value_and_grad


def stacked_ids(ids: T, num_rows: Tree) -> T:
    """Ids of several tables as ids of one table, in which the tables lie one below the other, in the order of the tree.

    So one lookup, one exchange and one optimizer serve all tables of one width D.

    Args:
      ids: for every table int32 or int64 ids [...], or a pytree of them.
      num_rows: a pytree of ints: the height of every table. Ids outside [0, height) become -1.

    Raises:
      ValueError, TypeError: ids are no int32 or int64, or structures differ.
    """
    op = "stacked_ids"
    heights, structure = jax.tree.flatten(num_rows)
    for height in heights:
        checks.check_int(op, "num_rows", height)
    heights = [int(height) for height in heights]  # of Python: those of numpy have a dtype
    checks.check_int(op, "the sum of num_rows", sum(heights), below_32_bits=True)
    below, stacked = 0, []
    for height, its_ids in zip(heights, structure.flatten_up_to(ids), strict=True):
        for x in jax.tree.leaves(its_ids):
            checks.check_array(op, "ids", x, dtype=INDEX_DTYPES)
        begin = below
        stacked.append(jax.tree.map(lambda x, n=height, i=begin: jnp.where((x >= 0) & (x < n), x + i, -1), its_ids))
        below += height
    return structure.unflatten(stacked)
