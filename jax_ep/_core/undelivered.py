"""What the "xla" implementation returns where an op delivers nothing: the same as kernels on a GPU."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jax_ep.errors import JaxEpError


def undelivered_if(
    wrong: jax.Array, result: jax.Array, error: JaxEpError, keep_error: Callable[[JaxEpError], None]
) -> jax.Array:
    """`result`, or NaN, -1 in integers, and `error` for `group.check()`.

    Args:
      wrong: bool scalar, the same on all ranks.
      keep_error: of the group.
    """
    jax.lax.cond(wrong, lambda: jax.debug.callback(partial(keep_error, error)), lambda: None)
    nothing = jnp.asarray(jnp.nan if jnp.issubdtype(result.dtype, jnp.inexact) else -1)
    return jnp.where(wrong, nothing.astype(result.dtype), result)
