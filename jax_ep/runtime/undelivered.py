"""What an op with implementation="xla" leaves if it delivers nothing: NaN in floats, -1 in integers.

Kernels leave the same in all results, dispatch in plain JAX in its rows alone.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.errors import CapacityError, JaxEpError

_Results = TypeVar("_Results")  # a pytree
KeepError = Callable[[JaxEpError], None]  # `Group._keep_error`


def undelivered_if(
    wrong: jax.Array, results: _Results, keep_error: KeepError, error: Callable[..., JaxEpError], *data: jax.Array
) -> _Results:
    """Returns `results`, a pytree. If `wrong`, they become NaN, or -1 in integers, and `group.check()` raises
    `error(*data)`.

    Args:
      wrong: bool scalar, the same on all ranks that share the results.
      data: arrays. `error` gets them as numpy arrays.
    """

    def report(wrong: np.ndarray, *data: np.ndarray) -> None:
        if wrong:  # under jax.vmap both branches of a cond run
            keep_error(error(*data))

    jax.lax.cond(wrong, lambda: jax.debug.callback(report, wrong, *data), lambda: None)
    return jax.tree.map(lambda x: jnp.where(wrong, _nothing(x), x), results)


def capacity_error(op: str, rank: int | None, needed: int, capacity: int) -> CapacityError:
    """The error of an overflow that no kernel reports, in the words of ffi/runtime/group_errors.cc.

    Args:
      rank: None for an op that exchanges nothing.
    """
    who = "the result" if rank is None else f"rank {rank}"
    return CapacityError(
        f"{op}: {who} needs {needed} rows but capacity is {capacity}; raise the capacity or pass on_overflow='drop'"
    )


def nan_on_overflow(
    op: str,
    needed: jax.Array,
    capacity: int,
    rows: _Results,
    keep_error: KeepError,
    error: Callable[[str, int, int, int], JaxEpError] = capacity_error,
) -> _Results:
    """Returns `rows`, a pytree. If a rank needs more than `capacity`, they become NaN, and `group.check()` raises.

    Args:
      op: the op that needs the rows.
      needed: [R] rows that each rank needs, the same on all ranks.
      error: makes the exception from `op`, the first rank that needs more, what that rank needs, and `capacity`.
    """

    def of_first(needed: np.ndarray) -> JaxEpError:
        needed = np.asarray(needed)
        rank = int(np.argmax(needed > capacity))
        return error(op, rank, int(needed[rank]), capacity)

    return undelivered_if(jnp.any(needed > capacity), rows, keep_error, of_first, needed)


def _nothing(result: jax.Array) -> jax.Array:
    """NaN, or all bits of an integer: -1, and NaN where uint8 holds float8 values."""
    return jnp.asarray(jnp.nan if jnp.issubdtype(result.dtype, jnp.inexact) else -1).astype(result.dtype)
