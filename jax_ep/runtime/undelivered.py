"""The results of the "xla" implementation if an op delivers nothing: as those of kernels on a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.errors import JaxEpError
from jax_ep.runtime import native


def undelivered_if(
    wrong: jax.Array, result: jax.Array, error: JaxEpError, keep_error: Callable[[JaxEpError], None]
) -> jax.Array:
    """`result`, or NaN, -1 in integers, and `error` for `group.check()`.

    Args:
      wrong: bool scalar, the same on all ranks.
      keep_error: of the group.
    """
    jax.lax.cond(wrong, lambda: jax.debug.callback(partial(_report, error, keep_error), wrong), lambda: None)
    return jnp.where(wrong, _nothing(result), result)


def nan_on_overflow(
    op: str,
    needed: jax.Array,
    capacity: int,
    rows: Any,
    keep_error: Callable[[JaxEpError], None],
    error: Callable[[str, int, int, int], JaxEpError] = native.capacity_error,
) -> Any:
    """`rows`, or NaN, and an error for `group.check()`, if a rank needs more than it holds.

    Args:
      op: that needs the rows.
      needed: [R] rows that each rank needs, the same on all ranks.
      capacity: rows that each can hold.
      rows: what to return if they fit; a pytree.
      keep_error: of the group.
      error: of `op`, the first rank that needs more, what it needs, and `capacity`.
    """
    overflow = jnp.any(needed > capacity)

    def report() -> None:
        jax.debug.callback(partial(_report_overflow, op, capacity, keep_error, error), needed)

    jax.lax.cond(overflow, report, lambda: None)
    return jax.tree.map(lambda x: jnp.where(overflow, _nothing(x), x), rows)


def _nothing(result: jax.Array) -> jax.Array:
    """NaN, or all bits of an integer: -1, and NaN where uint8 holds float8 values."""
    return jnp.asarray(jnp.nan if jnp.issubdtype(result.dtype, jnp.inexact) else -1).astype(result.dtype)


def _report_overflow(
    op: str,
    capacity: int,
    keep_error: Callable[[JaxEpError], None],
    error: Callable[[str, int, int, int], JaxEpError],
    needed: np.ndarray,
) -> None:
    over = np.asarray(needed) > capacity
    if over.any():  # under jax.vmap both branches of a cond run
        rank = int(np.argmax(over))
        keep_error(error(op, rank, int(needed[rank]), capacity))


def _report(error: JaxEpError, keep_error: Callable[[JaxEpError], None], wrong: np.ndarray) -> None:
    if wrong:  # under jax.vmap both branches of a cond run
        keep_error(error)
