"""The kernel of a dispatch and the product of its rows as an FFI call, and what it can be called with."""

import jax
import numpy as np

from jax_ep._core import ffi, gemm
from jax_ep.errors import PlatformError
from jax_ep.group import Group
from jax_ep.ops.moe.kernels import delivered
from jax_ep.ops.moe.types import DispatchConfig, Dispatched
from jax_ep.ops.moe_fused.types import Matrices


def dispatch_dot(
    group: Group,
    config: DispatchConfig,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    rhs: jax.Array,
) -> tuple[jax.Array, Dispatched]:
    """The rows that arrive times `rhs` [E / R, H, N]: [C, N], and what was dispatched."""
    called = ffi.call(
        "dispatch_ragged_dot",
        tokens,
        expert_ids,
        weights,
        rhs,
        group=group,
        computes=True,
        dtype=tokens.dtype,
        num_tokens=tokens.shape[0],
        top_k=expert_ids.shape[1],
        hidden=tokens.shape[1],
        num_experts=config.num_experts,
        capacity=config.capacity,
        drop=config.drop,
        columns=rhs.shape[2],
    )
    return called["product"], delivered(called, config)


def check_fused(op: str, group: Group, config: DispatchConfig, tokens: jax.Array, matrices: Matrices) -> None:
    """Raises PlatformError, TypeError or ValueError where implementation="fused" cannot be."""
    if group.intranode is not None:
        raise PlatformError(f"{op}: implementation='fused' does not leave a node, and group {group!r} is across nodes")
    if group.platform == "hip" or (group.platform == "cuda" and not gemm.has_gemm()):
        raise PlatformError(f"{op}: implementation='fused' has kernels for CPUs and Hopper GPUs alone")
    if config.wire_dtype is not None:
        raise ValueError(f"{op}: wire_dtype must be None where implementation='fused', got {config.wire_dtype}")
    if group.platform == "cuda" and np.dtype(tokens.dtype) not in gemm.CORE_DTYPES:
        raise TypeError(
            f"{op}: tokens must be bfloat16 or float16 where implementation='fused' on a GPU, got {tokens.dtype}"
        )
    multiple = gemm.CORE_MULTIPLE if group.platform == "cuda" else 1
    for name, size in (("H", tokens.shape[1]), ("the columns of rhs", matrices[0].shape[2])):
        if size == 0 or size % multiple:
            raise ValueError(
                f"{op}: {name} must be a positive multiple of {multiple} where implementation='fused', got {size}"
            )
