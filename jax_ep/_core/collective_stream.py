"""Calls on XLA's collective stream, which run beside what XLA computes meanwhile.

XLA:GPU starts such a call, goes on with whatever does not depend on it, and awaits it before its first user. Since jax
0.12 its latency-hiding scheduler moves start and end apart, as it does for its own collectives.
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

# Since jax 0.11 compute_on is what compute_on2 was before.
compute_on: Callable[..., Any] = getattr(compute_on_module, "compute_on2", compute_on_module.compute_on)

LOGGER = logging.getLogger("jax_ep")
STREAM = "gpu_stream:collective"
SCHEDULED_SINCE = (0, 12)  # before, XLA:GPU puts the end of such a call right behind its start
SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler"


@functools.cache
def warn_unless_scheduled() -> None:
    """Logs, once, why XLA will not move start and end of a call apart."""
    if jax.__version_info__[:2] < SCHEDULED_SINCE:
        LOGGER.warning("async_ops: jax %s does not overlap them with other work; jax 0.12 does", jax.__version__)
    elif f"{SCHEDULER}=false" in os.environ.get("XLA_FLAGS", "").lower():
        LOGGER.warning("async_ops: nothing overlaps them, as XLA_FLAGS turns %s off", SCHEDULER)


def on_collective_stream(
    call: Callable[..., Sequence[jax.Array]], types: Sequence[jax.ShapeDtypeStruct], *operands: jax.Array
) -> list[jax.Array]:
    """The results of `call(*operands)`, which are of `types`.

    Those after the first have 4 bytes a value, and vary over the same axes. XLA would make a call of its own of every
    result that it takes out of such a call, and overlap that one instead, unless the next instruction takes all results
    that are used. So the call returns its first result and one array that holds all others, and a barrier takes both.
    A batch is one call after the other.
    """

    @sequential_vmap
    def packed(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return compute_on(_packed(call), compute_type=STREAM, out_memory_spaces=jax.memory.Space.Device)(*operands)

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
