"""Calls on XLA's collective stream, which overlap XLA's computations.

XLA:GPU starts such a call, runs work that does not depend on it, and awaits it before its first user. Since jax 0.12
XLA's latency-hiding scheduler moves start and end apart, as for its own collectives.
"""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.experimental import compute_on as compute_on_module

# Before jax 0.11 its name was compute_on2.
compute_on: Callable[..., Any] = getattr(compute_on_module, "compute_on2", compute_on_module.compute_on)

LOGGER = logging.getLogger("jax_ep")
STREAM = "gpu_stream:collective"
SCHEDULED_SINCE = (0, 12)  # before, XLA:GPU puts the end of such a call right behind its start
SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler"


def is_scheduled() -> bool:
    """Whether this jax has an XLA that moves start and end of a call apart."""
    return jax.__version_info__[:2] >= SCHEDULED_SINCE


@functools.cache
def warn_unless_scheduled() -> None:
    """Logs once why no op will be overlapped."""
    given = [flag for flag in os.environ.get("XLA_FLAGS", "").lower().split() if flag.startswith(f"{SCHEDULER}=")]
    if not is_scheduled():
        LOGGER.warning("async_ops: the XLA of jax %s does not overlap them; that of jax 0.12 does", jax.__version__)
    elif given and given[-1].endswith(("=false", "=0")):
        LOGGER.warning("async_ops: nothing overlaps them, as XLA_FLAGS turns %s off", SCHEDULER)


def on_collective_stream(
    call: Callable[..., Sequence[jax.Array]], types: Sequence[jax.ShapeDtypeStruct], *operands: jax.Array
) -> list[jax.Array]:
    """`call(*operands)`, with results of `types`. The results after the first have 4 bytes a value, and vary alike.

    `call` must not update an operand in place, as XLA would not see that two calls update one buffer. A batch is a loop
    of marked calls, as XLA:GPU crashes on a loop inside a marked call.
    """
    assert all(x.dtype.itemsize == 4 for x in types[1:])

    @sequential_vmap
    def packed(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return compute_on(_packed(call), compute_type=STREAM, out_memory_spaces=jax.memory.Space.Device)(*operands)

    # XLA splits a call with several results unless one barrier consumes all of them, and an unused result leaves the
    # barrier. So there are two results: the first, and all others packed into one array.
    first, *rest = jax.lax.optimization_barrier(packed(*operands))
    return [first, *(_unpacked(rest[0], types[1:]) if rest else [])]


def _packed(call: Callable[..., Sequence[jax.Array]]) -> Callable[..., tuple[jax.Array, ...]]:
    def packed(*operands: jax.Array) -> tuple[jax.Array, ...]:
        first, *others = call(*operands)
        words = [jax.lax.bitcast_convert_type(x, jnp.int32).reshape(-1) for x in others]
        return (first, jnp.concatenate(words)) if words else (first,)

    return packed


def _unpacked(words: jax.Array, types: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    parts = jnp.split(words, np.cumsum([x.size for x in types])[:-1])
    return [jax.lax.bitcast_convert_type(part.reshape(x.shape), x.dtype) for part, x in zip(parts, types, strict=True)]
