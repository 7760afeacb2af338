"""sparse_all_reduce: adds up the ranks' rows of a large table, of which each rank holds a few.

The union of all ranks' row ids gives every row its place in the result. Then one of the ranks that hold a row, its
owner, receives the partial sums of the others and writes the sum into every rank's result.
"""

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_ep._kit import checks, gemm, vary
from jax_ep._kit.checks import Implementation, OnOverflow
from jax_ep._kit.linear import linear
from jax_ep._kit.scopes import op_scope
from jax_ep.group import Group, check_group
from jax_ep.ops.sparse import kernels, nodes, pallas, xla
from jax_ep.ops.sparse.types import Method, SparseConfig, SparseOp, SparseRows, Union, check_sparse_rows
from jax_ep.runtime.agreement import Agreement
from jax_ep.runtime.undelivered import nan_on_overflow


@op_scope("sparse_all_reduce")
def sparse_all_reduce(
    rows: SparseRows,
    *,
    group: Group,
    capacity: int,
    op: SparseOp = "sum",
    sharded: bool = False,
    method: Method = "auto",
    on_overflow: OnOverflow = "raise",
    implementation: Implementation = "auto",
) -> SparseRows:
    """Adds up the sparse rows of all ranks: sorted different ids, each with the sum of its entries.

    Call it on every rank, inside `jax.shard_map` over the group's axis. Each rank receives a row once, even if several
    ranks hold it, and sends each of its own rows at most once to each other rank, which is the minimum for a replicated
    result. Sums are in float32: over the entries of a rank in order, 32 by 32, then over ranks in order. So the bits
    are the same on every rank and in every run. Differentiable in `rows.values`.

    In a group across nodes each node adds up its rows in this way. Then the sums of the nodes are added up in order, in
    float32. Sums for all C rows travel between nodes, even if fewer are used.

    Args:
      rows: N entries of this rank, with the same N, D, dtype and `num_rows` on all ranks. Ids may be in any order, with
        duplicates. Ids outside [0, num_rows) are ignored, and counted if they are among the first
        `rows.count`.
      group: the open group of the ranks.
      capacity: C, the rows of the result.
      op: "sum"; "mean", the sum divided by the number of ranks; or "mean_by_count", the sum of a row divided by the
        number of the row's entries.
      sharded: the result of rank r holds only the rows in [r B, (r + 1) B), where B = ceil(num_rows / ranks).
        Its gradient gathers the cotangents of all ranks. Otherwise all ranks have the same result, which does not vary
        over the group's axis.
      method: "bitmap" finds places by prefix sums over a bitmap of the table's rows, "match" by sorting the ids of all
        ranks and searching each id, with the same results. "auto": "bitmap" if the bitmap has at most 4 MiB or an
        eighth of the bytes of all ranks' rows. "xla" and groups across nodes always use "match".
      on_overflow: if there are more than C rows: "raise" (`CapacityError`, nothing is delivered), or "drop": the last
        ids are dropped, and counted in `dropped`.
      implementation: as for `dispatch`; or "pallas": every rank gathers the rows of all ranks and adds up those of its
        result, with the bits of the kernels. "auto" uses it on GPUs without the kernels. A CPU interprets it, slowly,
        and inside `jax.shard_map` only with check_vma=False. With "pallas" and "xla", and across nodes, an overflow
        fills `values` with NaN and is raised by `group.check()` or the next op.

    Returns:
      C entries in the dtypes of `rows`. The first `count` are rows; the others are padding, with id `num_rows` and zero
      values. `ignored` counts entries of all ranks and `dropped` counts ids, in addition to the counts in `rows`.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the op is traced.
      JaxEpError: as for `dispatch`.
    """
    name = "sparse_all_reduce"
    check_group(name, group)
    config = _config(rows, group, capacity, op, sharded, on_overflow)
    checks.check_one_of(name, "method", method, Method)
    by = _resolved(name, group, implementation)

    rows = dataclasses.replace(rows, indices=checks.within_32_bits(rows.indices))
    if rows.indices.shape[0] == 0:  # one entry of padding: buffers of no size have no address
        indices = jnp.full_like(rows.indices, rows.num_rows, shape=1)
        values = jnp.zeros_like(rows.values, shape=(1, rows.values.shape[1]))
        rows = dataclasses.replace(rows, indices=indices, values=values)
    entries, row_values = rows.values.shape
    settings = {"entries": entries, "columns": row_values, "dtype": rows.values.dtype, "by": by}
    agreement = Agreement(group._participants, name, **settings, **dataclasses.asdict(config))
    rows = agreement.enter(*vary.vary_alike(group.axis_name, jax.tree.map(jnp.asarray, rows)))
    if method == "auto":
        method = choose_method(rows.num_rows, group.size, entries, row_values * rows.values.dtype.itemsize)
    inside = by == "kernels" and group.intranode is None  # by kernels of one node alone
    union, entries = _union(group, config, rows, "bitmap" if inside and method == "bitmap" else "match")

    def or_nan(x: jax.Array) -> jax.Array:
        if config.drop or inside:  # kernels report overflow
            return x
        return nan_on_overflow(name, union.needed(config), config.capacity, x, group._keep_error)

    if by == "pallas":  # where scaling the sums would take nearly as long as adding them
        assert entries is not None
        values = _reduce(group, config, rows.values, union, (entries, or_nan(jnp.float32(config.scale))))
    elif by == "xla":
        values = or_nan(xla.reduce(config, group.axis_name, rows.values, union))
    else:
        values = or_nan(_reduce(group, config, rows.values, union))
    values = agreement.leave(values)
    needed = union.needed(config)[jax.lax.axis_index(group.axis_name) if sharded else 0]
    return SparseRows(
        indices=union.indices.astype(rows.indices.dtype),
        values=values,
        count=jnp.minimum(needed, capacity),
        num_rows=rows.num_rows,
        ignored=union.missing[0],
        dropped=union.missing[1] + jnp.maximum(needed - capacity, 0),
        shards=None if sharded else rows.shards,
    )


def choose_method(num_rows: int, ranks: int, entries: int, row_bytes: int) -> Literal["bitmap", "match"]:
    """ "bitmap" if a bit per row of the table takes at most 4 MiB or an eighth of all ranks' rows, else "match"."""
    return "bitmap" if num_rows / 8 <= max(2**22, ranks * entries * row_bytes / 8) else "match"


def _config(
    rows: SparseRows, group: Group, capacity: int, op: SparseOp, sharded: bool, on_overflow: OnOverflow
) -> SparseConfig:
    name = "sparse_all_reduce"
    check_sparse_rows(name, "rows", rows)
    if rows.values.shape[1] == 0:
        raise ValueError(f"{name}: values must have at least one column, got {rows.values.shape}")
    checks.check_int(name, "capacity", capacity)
    checks.check_one_of(name, "op", op, SparseOp)
    checks.check_bool(name, "sharded", sharded)
    checks.check_one_of(name, "on_overflow", on_overflow, OnOverflow)
    if capacity >= 2**31 or group.size * rows.indices.shape[0] >= 2**31:
        raise ValueError(
            f"{name}: capacity and the indices of all ranks must be below 2**31, "
            f"got {capacity} and {group.size} * {rows.indices.shape[0]}"
        )
    return SparseConfig(group.size, rows.num_rows, capacity, op, sharded, on_overflow == "drop")


def _resolved(op: str, group: Group, implementation: Implementation) -> Implementation:
    """ "kernels", "pallas" or "xla", the same answer on every rank."""
    checks.check_one_of(op, "implementation", implementation, Implementation)
    asked = "xla" if implementation == "pallas" else implementation
    by = group._resolve(op, asked, serves_nodes=True)
    gains = implementation == "auto" and group.platform in gemm.pallas_platforms()
    return "pallas" if by == "xla" and (implementation == "pallas" or gains) else by


def _union(group: Group, config: SparseConfig, rows: SparseRows, method: Method) -> tuple[Union, xla.Sorted | None]:
    # Not jnp.stack: JAX cannot batch it with spmd_axis_name if only one of the scalars has a batch axis.
    missing = jnp.concatenate([(rows.ignored + rows.count_outside())[None], rows.dropped[None]])
    operands = vary.vary_alike(group.axis_name, rows.masked_indices.astype(jnp.int32), missing)
    if method == "bitmap":
        return kernels.sparse_union(group, config, *operands), None
    return xla.match(config, group.axis_name, *operands)


def _reduce(
    group: Group,
    config: SparseConfig,
    values: jax.Array,
    union: Union,
    by_pallas: tuple[xla.Sorted, jax.Array] | None = None,
) -> jax.Array:
    name = group.axis_name

    def forward(residuals: tuple[Union, Any], values: jax.Array) -> jax.Array:
        union, by_pallas = residuals
        if by_pallas is not None:
            interpret = group.platform == "cpu"
            return pallas.reduce(config, name, values, union, *by_pallas, interpret=interpret)
        if group.intranode is not None:
            return nodes.reduce(group, config, values, union)
        return kernels.sparse_reduce(group, config, values, union, config.places_kept(values.shape[0]))

    if by_pallas is None:
        _, union = vary.vary_alike(name, values, union)
    return linear(forward, partial(_back, group, config), (union, by_pallas), values)


def _back(group: Group, config: SparseConfig, residuals: tuple[Union, Any], cotangent: jax.Array) -> jax.Array:
    """The cotangent of every entry is the cotangent of its row, on the rank that has the row."""
    (union, _), axis_name, dtype = residuals, group.axis_name, cotangent.dtype
    places = xla.places_of_entries(union, axis_name)
    if config.sharded:
        cotangent = jax.lax.all_gather(cotangent, axis_name)
        owner = jnp.minimum(union.owners(places), group.size - 1)
        rows = places - union.bounds[owner]
        taken = cotangent.at[owner, rows].get(mode="clip")
    else:
        if not vary.tracks_varying(axis_name):  # ranks have parts of the cotangent, as in the transpose of psum
            cotangent = jax.lax.psum(cotangent.astype(jnp.float32), axis_name)
        rows = places
        taken = cotangent.at[places].get(mode="clip")
    present = (places < union.bounds[-1]) & (rows < config.capacity)
    taken = jnp.where(present[:, None], taken.astype(jnp.float32) * config.scale, 0)
    if config.by_count:
        kept = config.places_kept(places.shape[0])
        counts = xla.entries_of_places(union, kept).at[places].get(mode="clip")
        taken = taken / jnp.maximum(counts, 1)[:, None]
    return taken.astype(dtype)
