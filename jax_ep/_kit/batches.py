"""What ops choose when they are lowered, and do with a batch (`jax.vmap`)."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
from jax.custom_batching import sequential_vmap

from jax_ep._kit import gemm, vary
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


def by_kernel_on_gpus(by_kernel: Callable[..., _T], by_xla: Callable[..., _T]) -> Callable[..., _T]:
    """A function of the operands: a Pallas kernel on GPUs that Triton compiles for, and `by_xla` elsewhere.

    Args:
      by_kernel: takes `interpret=` besides the operands.
    """
    kernels = {name: partial(by_kernel, interpret=name == "cpu") for name in gemm.pallas_platforms()}
    return by_platform(by_xla, **kernels) if kernels else by_xla
