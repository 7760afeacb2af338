"""What ops do with a batch (`jax.vmap`)."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax.custom_batching import sequential_vmap

from jax_ep._kit import vary
from jax_ep._kit.checks import PyTree

_T = TypeVar("_T")


def by_platform(default: Callable[..., _T], **platforms: Callable[..., _T]) -> Callable[..., _T]:
    """`jax.lax.platform_dependent` as a function of the operands.

    Under `jax.vmap` it runs once per element, and operands without a batch are not copied.
    JAX cannot batch the choice itself if operands vary over a `spmd_axis_name`, nor every `jax.lax.ragged_dot`.
    It has no reverse mode: the caller gives it a derivative.
    """

    def choose(*operands: PyTree) -> _T:
        # Elements of a batch vary over a `spmd_axis_name`, and operands without a batch do not.
        return jax.lax.platform_dependent(*vary.vary_alike(None, *operands), **platforms, default=default)

    return sequential_vmap(choose)
