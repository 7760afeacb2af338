"""Sums, multiples and norms of gradients, which are pytrees of `SparseRows` and arrays."""

from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_ep._kit import checks
from jax_ep.ops.sparse.coalesce import coalesce, with_different_ids
from jax_ep.ops.sparse.types import Scalar, SparseRows, Tree, check_sparse_rows, is_sparse_rows

T = TypeVar("T")  # a pytree


def add(a: T, b: T, *, capacity: int | None = None) -> T:
    """The sum of two gradients of the same tables, as `jax.tree.map(jnp.add, a, b)` is for arrays.

    Entries of the same row are added up in float32, as by `coalesce`. `ignored` and `dropped` are sums too.

    Args:
      a, b: pytrees alike, of `SparseRows` with the same `num_rows` and D, N and M entries; and of arrays.
      capacity: C, entries of every sum; default N + M. If there are more ids, the last ids find no room.

    Returns:
      A pytree like `a`: C sorted entries, in the dtype of a's values; and sums of arrays.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the function is traced.
    """

    def sums(x: Any, y: Any) -> SparseRows | jax.Array:
        if not isinstance(x, SparseRows) and not isinstance(y, SparseRows):
            return jnp.add(x, y)
        for name, rows in (("a", x), ("b", y)):
            check_sparse_rows("add", name, rows)
        if (x.num_rows, x.values.shape[1]) != (y.num_rows, y.values.shape[1]):
            raise ValueError(
                f"add: b must be of a table of {x.num_rows} x {x.values.shape[1]} as a is, "
                f"got {y.num_rows} x {y.values.shape[1]}"
            )
        entries = (
            jnp.concatenate([x.masked_indices, y.masked_indices]),
            jnp.concatenate([x.values, y.values.astype(x.values.dtype)]),
        )
        total = coalesce(SparseRows.from_entries(*entries, num_rows=x.num_rows), capacity=capacity)
        ignored = x.ignored + x.count_outside() + y.ignored + y.count_outside()
        return replace(total, ignored=ignored, dropped=total.dropped + x.dropped + y.dropped, guard=x.guard)

    return jax.tree.map(sums, a, b, is_leaf=is_sparse_rows)


def scale(tree: T, factor: Scalar) -> T:
    """`factor` times every row and array of `tree`, multiplied in float32. Dtypes stay.

    Raises:
      TypeError: the factor is no number, or a leaf no array.
    """
    checks.check_number("scale", "factor", factor)

    def scaled(x: SparseRows | jax.Array) -> SparseRows | jax.Array:
        if isinstance(x, SparseRows):
            check_sparse_rows("scale", "tree", x)
            return replace(x, values=scaled(x.values))
        checks.check_array("scale", "tree", x)
        return (x.astype(jnp.float32) * factor).astype(x.dtype)

    return jax.tree.map(scaled, tree, is_leaf=is_sparse_rows)


def global_norm(tree: Tree) -> jax.Array:
    """float32 scalar: the Euclidean norm of all rows and arrays of `tree`. Entries of the same row are added up first.

    Where ranks hold different rows (`sparse_all_reduce(sharded=True)`, `sharded_lookup`), the norm over all ranks is
    `jnp.sqrt(jax.lax.psum(global_norm(tree) ** 2, axis_name))`.

    Raises:
      TypeError: a leaf is no array.
    """

    def squares(x: SparseRows | jax.Array) -> jax.Array:
        if isinstance(x, SparseRows):
            check_sparse_rows("global_norm", "tree", x)
            x = with_different_ids(x)
            x = jnp.where(x.present[:, None], x.values, 0)
        checks.check_array("global_norm", "tree", x)
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    return jnp.sqrt(sum(map(squares, jax.tree.leaves(tree, is_leaf=is_sparse_rows)), jnp.float32(0)))


def clip_by_global_norm(tree: T, max_norm: Scalar) -> T:
    """`tree`, scaled down to the norm `max_norm` if `global_norm` is above it, as `optax.clip_by_global_norm` does.

    Raises:
      TypeError: `max_norm` is no number, or a leaf no array.
    """
    checks.check_number("clip_by_global_norm", "max_norm", max_norm)
    norm = global_norm(tree)
    return scale(tree, jnp.where(norm < max_norm, 1, max_norm / norm))
