"""Sums, multiples and norms of gradients, which are pytrees of `SparseRows` and arrays."""

from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit import checks, meshes, vary
from jax_ep._kit.checks import AxisName, OnOverflow
from jax_ep.ops.sparse.coalesce import added_up, with_different_ids
from jax_ep.ops.sparse.types import Scalar, SparseRows, Tree, check_sparse_rows, is_sparse_rows

T = TypeVar("T")  # a pytree


def add(a: T, b: T, *, capacity: int | None = None, on_overflow: OnOverflow = "raise") -> T:
    """The sum of two gradients of the same tables, as `jax.tree.map(jnp.add, a, b)` is for arrays.

    Entries of the same row are added up in float32, as by `coalesce`. `ignored` and `dropped` are sums too.

    Args:
      a, b: pytrees of one structure, of arrays and of `SparseRows` with the same `num_rows`, `shards` and D, and N and
        M entries.
      capacity: C, entries of every sum; default N + M.
      on_overflow: when a sum has more than C ids, as in `coalesce`.

    Returns:
      A pytree like `a`: C sorted entries, in the dtype of a's values; and sums of arrays.
    """

    def sums(x: Any, y: Any) -> SparseRows | jax.Array:
        if not isinstance(x, SparseRows) and not isinstance(y, SparseRows):
            return jnp.add(x, y)
        for name, rows in (("a", x), ("b", y)):
            check_sparse_rows("add", name, rows)
        if x.shards != y.shards:
            raise ValueError(f"add: b must have the shards of a, {x.shards}, got {y.shards}")
        if (x.num_rows, x.values.shape[1]) != (y.num_rows, y.values.shape[1]):
            raise ValueError(
                f"add: b must be of a table of {x.num_rows} x {x.values.shape[1]} as a is, "
                f"got {y.num_rows} x {y.values.shape[1]}"
            )
        id_dtype = np.promote_types(x.indices.dtype, y.indices.dtype)
        entries = (
            jnp.concatenate([rows.masked_indices.astype(id_dtype) for rows in (x, y)]),
            jnp.concatenate([x.values, y.values.astype(x.values.dtype)]),
        )
        total = added_up("add", SparseRows.from_entries(*entries, num_rows=x.num_rows), capacity, on_overflow)
        ignored = x.ignored + x.count_outside() + y.ignored + y.count_outside()
        dropped = total.dropped + x.dropped + y.dropped
        return replace(total, ignored=ignored, dropped=dropped, guard=x.guard, shards=x.shards)

    return jax.tree.map(sums, a, b, is_leaf=is_sparse_rows)


def scale(tree: T, factor: Scalar) -> T:
    """`factor` times every row and array of `tree`, multiplied in float32. Dtypes do not change.

    Raises:
      TypeError: the factor is not a number, or a leaf is not an array.
    """
    checks.check_number("scale", "factor", factor)
    factor = jnp.asarray(factor, jnp.float32)

    def scaled(x: SparseRows | jax.Array) -> SparseRows | jax.Array:
        if isinstance(x, SparseRows):
            check_sparse_rows("scale", "tree", x)
            return replace(x, values=scaled(x.values))
        checks.check_array("scale", "tree", x)
        return (x.astype(jnp.float32) * factor).astype(x.dtype)

    return jax.tree.map(scaled, tree, is_leaf=is_sparse_rows)


def global_norm(tree: Tree, *, axis_name: AxisName | tuple[()] | None = None) -> jax.Array:
    """float32 scalar: the Euclidean norm of all rows and arrays of `tree`. Entries of the same row are added up first.

    Args:
      axis_name: the mesh axis or axes over which ranks hold different rows of one gradient, as after
        `sparse_value_and_grad(group=...)` and `sparse_all_reduce(sharded=True)`. The norm covers all ranks' rows.
        Leaves that do not vary over an axis count once. With check_vma=False all leaves count once per rank. `()`:
        every rank has its own gradient and norm.

    Raises:
      TypeError: a leaf is not an array, or axis_name is not an axis.
      ValueError: a leaf varies over a mesh axis and axis_name is None, or `jax.shard_map` has no such axis here.
    """
    return _norm("global_norm", tree, axis_name)


def clip_by_global_norm(tree: T, max_norm: Scalar, *, axis_name: AxisName | tuple[()] | None = None) -> T:
    """`tree`, scaled down to the norm `max_norm` if `global_norm` is above it, as `optax.clip_by_global_norm` does.

    Args:
      axis_name: as in `global_norm`.

    Raises:
      TypeError, ValueError: as for `global_norm`; or `max_norm` is not a number.
    """
    op = "clip_by_global_norm"
    checks.check_number(op, "max_norm", max_norm)
    norm, limit = _norm(op, tree, axis_name), jnp.asarray(max_norm, jnp.float32)
    return scale(tree, jnp.where(norm < limit, 1, limit / norm))


def _norm(op: str, tree: Tree, axis_name: AxisName | tuple[()] | None) -> jax.Array:
    if axis_name:
        checks.check_axis(op, axis_name)
        meshes.check_manual_axis(op, axis_name)

    def squares(x: SparseRows | jax.Array) -> jax.Array:
        if isinstance(x, SparseRows):
            check_sparse_rows(op, "tree", x)
            x = with_different_ids(x)
            x = jnp.where(x.present[:, None], x.values, 0)
        checks.check_array(op, "tree", x)
        return over_ranks(jnp.sum(jnp.square(x.astype(jnp.float32))))

    def over_ranks(square: jax.Array) -> jax.Array:
        varying = jax.typeof(square).manual_axis_type.varying
        if axis_name is None and varying:
            raise ValueError(
                f"{op}: axis_name must be given, as tree varies over the mesh axes {tuple(sorted(varying))}: the axes "
                "over which ranks hold different rows of one gradient, or () if every rank has a gradient of its own"
            )
        axes = checks.axes_of(axis_name or ())
        if axes and vary.tracks_varying(axes):
            axes = tuple(axis for axis in axes if axis in varying)
        return jax.lax.psum(square, axes) if axes else square

    return jnp.sqrt(sum(map(squares, jax.tree.leaves(tree, is_leaf=is_sparse_rows)), jnp.float32(0)))
