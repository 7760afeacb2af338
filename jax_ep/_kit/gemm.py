"""Which kernels of ours multiply matrices here: the GEMM core (ffi/gemm/), on Hopper GPUs, or Pallas kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit import ffi
from jax_ep.pallas_kernels.call import HAS_TRITON

CORE_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))
CORE_MULTIPLE = ffi.TMA_MULTIPLE
ROCM_SHARED_BYTES = 2**16  # of a CU of an MI300X, for Pallas kernels


@functools.cache
def has_gemm() -> bool:
    """Whether every CUDA device of this process has the GEMM core: the library is built, the device is a Hopper."""
    if not ffi.is_built("cuda"):
        return False
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # no such backend
        return False
    if not all(device.compute_capability.startswith("9.") for device in devices):
        return False
    ffi.library("cuda")
    return True


@functools.cache
def pallas_platforms() -> tuple[str, ...]:
    """The platforms for which programs of this process take the Pallas kernels: GPUs for which Triton compiles."""
    if jax.default_backend() != "gpu" or not all(map(runs_pallas, jax.local_devices())):
        return ()
    return "cuda", "rocm"


def runs_pallas(device: Any) -> bool:
    """Whether Triton compiles for a device."""
    capability = str(getattr(device, "compute_capability", ""))  # AMD's are names, such as gfx942
    return device.platform == "gpu" and HAS_TRITON and not (capability[:1].isdigit() and float(capability) < 8)


def splits_contraction(m: int, n: int, k: int, groups: int) -> bool:
    """Whether the GEMM core computes a grouped product as two halves of its contraction, and adds them at the end.

    The kernel of gated units never splits the contraction, so its products have other bits than split ones.
    """
    sms = max(device.core_count for device in jax.local_devices(backend="cuda"))
    return ffi.library("cuda").splits_contraction(m, n, k, groups, sms)
