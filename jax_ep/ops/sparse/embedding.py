"""Lookups in embedding tables and their sparse gradients, over `SparseRows`.

A lookup in a sharded table is a `dispatch` of ids to their owners (`Shards`) and a `combine` of their rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_ep._kit import checks
from jax_ep._kit.checks import Implementation, OnOverflow
from jax_ep._kit.scopes import op_scope
from jax_ep.group import Group, check_group
from jax_ep.ops.moe.api import combine, run_dispatch
from jax_ep.ops.moe.settings import validated
from jax_ep.ops.moe.types import Dispatched
from jax_ep.ops.sparse.bags import with_shared_rows
from jax_ep.ops.sparse.placement import Placement, Shards
from jax_ep.ops.sparse.types import INDEX_DTYPES, SparseRows, Tree, check_table
from jax_ep.runtime.agreement import Agreement

T = TypeVar("T")  # a pytree
Value = TypeVar("Value", covariant=True)  # returned by a loss
Gradient = TypeVar("Gradient", covariant=True)
WithFurther: TypeAlias = tuple[SparseRows, *tuple[Any, ...]]  # the gradients of a table and of `argnums`
_HALF = 1 << 16  # an id travels as two halves of 16 bits, which float32 holds exactly


class ValueAndGrad(Protocol[Value, Gradient]):
    """The result of `sparse_value_and_grad`. The gradient of a pytree of tables has no specific type."""

    @overload
    def __call__(self, table: jax.Array, ids: Tree, *args: Any, **keywords: Any) -> tuple[Value, Gradient]: ...
    @overload
    def __call__(self, table: Tree, ids: Tree, *args: Any, **keywords: Any) -> tuple[Value, Any]: ...


class Entries(NamedTuple):
    places: jax.Array  # [N] places in this rank's table, or outside it if no row is read
    indices: jax.Array  # [N] their ids in the whole table
    num_rows: int  # of the whole table
    shards: Shards | None
    used: jax.Array  # int32 scalar; later entries are padding
    dropped: jax.Array  # int32 scalar; this rank's ids that found no room at their owners
    rows_of_ids: Callable[[jax.Array], Tree]  # from rows [N, D] of entries to the lookup's result


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of `table` [V, D] for `ids` [...] int32 or int64: [..., D]. An id outside [0, V) reads zeros.

    Raises:
      ValueError, TypeError: the table is not [V, D], or the ids are not an array of int32 or int64.
    """
    check_table("lookup", table)
    checks.check_array("lookup", "ids", ids, dtype=INDEX_DTYPES)
    return _read(table, ids)


def _read(table: jax.Array, ids: jax.Array) -> jax.Array:
    at = checks.to_int32(ids)  # JAX cuts 64-bit ids to 32 bits
    return jnp.asarray(table).at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False)


@op_scope("sharded_lookup")
def sharded_lookup(
    table: jax.Array,
    ids: T,
    *,
    group: Group,
    placement: Placement = "ranges",
    capacity: int | None = None,
    capacity_factor: float | None = None,
    on_overflow: OnOverflow = "raise",
    implementation: Implementation = "auto",
) -> T:
    """`lookup` in a table that is sharded over the ranks, as `shard_table` makes it.

    Call it on every rank, inside `jax.shard_map` over the group's axis. The different ids of a rank go to their owners,
    and their rows come back: one `dispatch` and one `combine`, each row once per rank. Differentiable in `table`. The
    gradient is dense; `sparse_value_and_grad(group=...)` has sparse gradients.

    Args:
      table: [B, D] bfloat16, float16 or float32, this rank's part; B is the same on all ranks.
      ids: [...] int32 or int64, or a pytree of them, which shares one exchange. An id outside [0, R B) reads zeros.
      group: the open group of the R ranks.
      placement: which rows a rank has. "ranges": rows in [r B, (r + 1) B). "mod": row i is on rank i mod R at place i
        div R, which spreads busy rows if ids are sorted by frequency.
      capacity: C, the ids for which an owner has room. Default: R N for the N ids of each rank, the maximum.
        `rows_needed` counts the need of a batch.
      capacity_factor: instead of `capacity`: C as a multiple of N, as in `dispatch`.
      on_overflow: if an owner would get more than C ids: "raise" (`CapacityError`), or "drop": ids without room read
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
    entries = _entries(op, table, ids, group, placement, options)
    return entries.rows_of_ids(_read(table, entries.places))


@op_scope("rows_needed")
def rows_needed(ids: Tree, num_rows: int, *, group: Group, placement: Placement = "ranges") -> jax.Array:
    """The rows that a lookup of all ranks' `ids` requests from each rank. The largest number is the least capacity.

    Call it inside `jax.shard_map`, like `sharded_lookup`, without a table. It costs a sort of the ids, and a sum of R
    numbers over the ranks.

    Args:
      ids, group, placement: as for `sharded_lookup`.
      num_rows: V, the height of the whole table.

    Returns:
      [R] int32, the same on all ranks.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the function is traced.
      JaxEpError: as for `dispatch`.
    """
    op = "rows_needed"
    check_group(op, group)
    checks.check_int(op, "num_rows", num_rows)
    shards, flat = _shards(op, group, -(-num_rows // group.size), placement), _flat(op, ids)
    agreement = Agreement(group._participants, op, entries=flat.size, **shards._asdict())
    owner = _asked(agreement.enter(flat), shards)[0]
    asked = jnp.sum(owner[:, None] == jnp.arange(group.size, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    return agreement.leave(jax.lax.psum(asked, group.axis_name))


def _flat(op: str, ids: Tree) -> jax.Array:
    leaves = jax.tree.leaves(ids)
    if not leaves:
        raise ValueError(f"{op}: ids must hold an array at least for every table, got {ids!r}")
    for x in leaves:
        checks.check_array(op, "ids", x, dtype=INDEX_DTYPES)
    return jnp.concatenate([checks.within_32_bits(x).ravel() for x in leaves])


def _shards(op: str, group: Group, height: int, placement: Placement) -> Shards:
    checks.check_one_of(op, "placement", placement, Placement)
    shards = Shards(placement, group.size, height)
    if shards.num_rows >= 2**31:
        raise ValueError(f"{op}: table must have fewer than 2**31 rows on all ranks, got {group.size} * {height}")
    return shards


def _asked(ids: jax.Array, shards: Shards) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The owner of each different id among `ids` [N], -1 if there is none; its place there; the number of each id."""
    num_rows = shards.num_rows
    inside = jnp.where((ids >= 0) & (ids < num_rows), ids, num_rows).astype(jnp.int32)
    asked, number = jnp.unique(inside, size=max(ids.size, 1), fill_value=num_rows, return_inverse=True)
    owner, place = shards.locate(asked)
    return jnp.where(asked < num_rows, owner, -1), place, number


def _entries(
    op: str, table: jax.Array, ids: Tree, group: Group | None, placement: Placement, options: dict[str, Any]
) -> Entries:
    """The rows of one table for `ids`, a pytree, and the function that arranges them like `ids`."""
    check_table(op, table)
    flat = _flat(op, ids)
    leaves, structure = jax.tree.flatten(ids)

    def apart(rows: jax.Array) -> Tree:
        parts = jnp.split(rows, np.cumsum([x.size for x in leaves])[:-1])
        return structure.unflatten(y.reshape(*x.shape, y.shape[1]) for x, y in zip(leaves, parts, strict=True))

    if group is None:
        return Entries(flat, flat, len(table), None, jnp.int32(flat.size), jnp.int32(0), apart)
    check_group(op, group)
    checks.check_array(op, "table", table, dtype=checks.TOKEN_DTYPES)
    found = _entries_at_owners(op, flat, _shards(op, group, table.shape[0], placement), group, options)
    return found._replace(rows_of_ids=lambda rows: apart(found.rows_of_ids(rows)))


def _entries_at_owners(op: str, ids: jax.Array, shards: Shards, group: Group, options: dict[str, Any]) -> Entries:
    """The rows of this rank's part of the table that all ranks' ids [N] name.

    `rows_of_ids` returns [N, D]. Each rank requests each row once, so at most R entries name one row.
    """
    owner, place, number = _asked(ids, shards)
    halves = jnp.stack([place // _HALF, place % _HALF], axis=1).astype(jnp.float32)
    call, operands = validated(op, halves, owner[:, None], None, group=group, num_experts=group.size, **options)
    sent = run_dispatch(call, *operands)
    assert isinstance(sent, Dispatched)
    received = jnp.nan_to_num(sent.rows).astype(jnp.int32)
    present = jnp.arange(len(received), dtype=jnp.int32) < sent.group_sizes[0]
    places = jnp.where(present, received[:, 0] * _HALF + received[:, 1], shards.height)
    indices = jnp.where(present, shards.ids(jax.lax.axis_index(group.axis_name), places), shards.num_rows)
    failed = jnp.where(jnp.isnan(sent.rows[:, :1]), jnp.nan, 0)  # so that rows of undelivered ids are NaN

    def rows_of_ids(rows: jax.Array) -> jax.Array:
        answers = rows + failed.astype(rows.dtype)
        home = combine(answers, sent.routing, group=group, implementation=options["implementation"])
        return home.at[number].get(mode="clip")

    return Entries(places, indices, shards.num_rows, shards, sent.group_sizes[0], sent.routing.dropped[0], rows_of_ids)


class Options(TypedDict, total=False):
    """Further arguments of `sparse_value_and_grad`, for the overloads that type its gradients by `argnums`."""

    has_aux: bool
    group: Group | None
    placement: Placement
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
    placement: Placement = "ranges",
    capacity: int | None = None,
    capacity_factor: float | None = None,
    on_overflow: OnOverflow = "raise",
    implementation: Implementation = "auto",
) -> ValueAndGrad[Any, Any]:
    """`jax.value_and_grad` for a loss of embedding rows: the gradient of a table is `SparseRows`, never a table.

    Inside `jax.shard_map`, `loss` is the loss of one rank, and the gradient is this rank's part. Use
    `sparse_all_reduce` with op="sum" or "mean" where a dense loss has `jax.lax.psum` or `pmean`. The gradients of
    `argnums` are those of `jax.grad`, which sums them over the ranks if check_vma=True.

    With `group`, tables are sharded over its ranks as in `sharded_lookup`. A rank gets the gradient of the sum of all
    ranks' losses with respect to its own rows. `scale` turns the sum into a mean.

    Args:
      loss: `loss(rows, *args)` returns a scalar, or (scalar, aux) with `has_aux`. `rows` is [..., D] for ids [...].
      argnums: position or positions of further arguments of `loss` to differentiate. Position 0 is `rows`.
      has_aux: as in `jax.value_and_grad`.
      group, placement, capacity, capacity_factor, on_overflow, implementation: as in `sharded_lookup`. Without a group
        every rank has the table.

    Returns:
      A function of (table, ids, *args) and of the loss's keywords that returns (value, gradient). `table` is [V, D];
      `ids` is int32 or int64 of any shape, and an id outside [0, V) reads zeros and has no gradient. The gradient has
      an entry for every id, in the order of `ids`: N = ids.size. With `group` it has C entries of this rank's rows, by
      their ids in the whole table; `count` is the number that this rank was asked for and has room for. With `argnums`
      it is a tuple: `SparseRows`, then a dense gradient per position. `table` may be a pytree of tables, and for every
      table `ids` may be a pytree: `rows` has the structure of `ids`, the gradient has the structure of `table`, and a
      table's entries come one array of ids after the other.

    Raises:
      ValueError, TypeError: a table is not [V, D], ids are not int32 or int64, structures differ, or argnums has 0.
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
        named = [
            _entries(op, *one, group, placement, options)
            for one in zip(tables, structure.flatten_up_to(ids), strict=True)
        ]

        def of_rows(rows: list[jax.Array], *args: Any) -> Any:
            looked_up = [entries.rows_of_ids(x) for entries, x in zip(named, rows, strict=True)]
            return loss(structure.unflatten(looked_up), *args, **keywords)

        rows = [_read(one, entries.places) for one, entries in zip(tables, named, strict=True)]
        differentiated = jax.value_and_grad(of_rows, argnums=(0, *further), has_aux=has_aux)

        def of_tables(rows: list[jax.Array]) -> Any:
            value, (by_row, *others) = differentiated(rows, *args)
            return by_row, (value, others)

        traced = group is None and not has_aux and all(isinstance(x, Tracer) for x in rows)
        run = with_shared_rows(of_tables) if traced else lambda rows: (*of_tables(rows), [None] * len(rows))
        by_row, (value, others), shared = run(rows)
        gradient = structure.unflatten(
            SparseRows(its.indices, values, its.used, its.num_rows, dropped=its.dropped, shards=its.shards)._sharing(
                of_bags
            )
            for its, values, of_bags in zip(named, by_row, shared, strict=True)
        )
        return value, (gradient, *others) if further else gradient

    return value_and_grad


def stacked_ids(ids: T, num_rows: Tree) -> T:
    """Ids of several tables as ids of one table, in which the tables are stacked in the order of the tree.

    Then one lookup, one exchange and one optimizer serve all tables of one width D.

    Args:
      ids: for every table int32 or int64 ids [...], or a pytree of them.
      num_rows: a pytree of ints: the height of every table. Ids outside [0, height) become -1.

    Raises:
      ValueError, TypeError: ids are not int32 or int64, or structures differ.
    """
    op = "stacked_ids"
    heights, structure = jax.tree.flatten(num_rows)
    for height in heights:
        checks.check_int(op, "num_rows", height)
    heights = [int(height) for height in heights]  # ints of numpy have a dtype
    checks.check_int(op, "the sum of num_rows", sum(heights), below_32_bits=True)
    below, stacked = 0, []
    for height, its_ids in zip(heights, structure.flatten_up_to(ids), strict=True):
        for x in jax.tree.leaves(its_ids):
            checks.check_array(op, "ids", x, dtype=INDEX_DTYPES)
        begin = below
        stacked.append(jax.tree.map(lambda x, n=height, i=begin: jnp.where((x >= 0) & (x < n), x + i, -1), its_ids))
        below += height
    return structure.unflatten(stacked)
