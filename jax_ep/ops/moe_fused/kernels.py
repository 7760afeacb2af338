"""The kernels of a dispatch and the product of its rows, and of a product and its combine, as FFI calls."""

import jax
import numpy as np

from jax_ep._core import ffi, gemm
from jax_ep.errors import PlatformError
from jax_ep.group import Group
from jax_ep.ops.moe.kernels import delivered
from jax_ep.ops.moe.types import DispatchConfig, Dispatched, Routing
from jax_ep.ops.moe_fused.types import ActivationName


def dispatch_dot(
    group: Group,
    config: DispatchConfig,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    rhs: tuple[jax.Array, ...],
    *,
    activation: ActivationName | None = None,
    keep_products: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, ...], Dispatched]:
    """The rows that arrive times `rhs` [E / R, H, N]: [C, N]; no more products; and what was dispatched.

    Args:
      activation: of a gated unit: `rhs` are gate and up, or one array of both, gate in front; the result is [C, F].
      keep_products: then the products by each of `rhs` are returned, too.
    """
    called = ffi.call(
        "dispatch_ragged_dot",
        tokens,
        expert_ids,
        weights,
        *rhs,
        group=group,
        computes=True,
        dtype=tokens.dtype,
        num_tokens=tokens.shape[0],
        top_k=expert_ids.shape[1],
        hidden=tokens.shape[1],
        num_experts=config.num_experts,
        capacity=config.capacity,
        drop=config.drop,
        columns=rhs[0].shape[2],
        gated=activation is not None,
        pair=len(rhs) == 2,
        keeps_products=keep_products,
        activation=activation or "silu",
    )
    products = tuple(called[name] for name in ("of_gate", "of_up") if name in called)
    return called["product"], products, delivered(called, config)


def dot_combine(group: Group, lhs: jax.Array, rhs: jax.Array, weights: jax.Array, routing: Routing) -> jax.Array:
    """Rows times `rhs` [E / R, F, H], summed up at their tokens: [T, H]."""
    called = ffi.call(
        "ragged_dot_combine",
        lhs,
        rhs,
        routing.group_sizes,
        weights,
        routing.targets,
        routing.rows,
        group=group,
        computes=True,
        dtype=lhs.dtype,
        num_tokens=routing.targets.shape[0],
        top_k=routing.targets.shape[1],
        hidden=rhs.shape[2],
        capacity=lhs.shape[0],
        contraction=lhs.shape[1],
        local_experts=rhs.shape[0],
    )
    return called["combined"]


def check_fused(op: str, group: Group, name: str, rows: jax.Array, sizes: tuple[tuple[str, int], ...]) -> None:
    """Raises PlatformError, TypeError or ValueError where implementation="fused" cannot be.

    Args:
      name: of `rows`, the left operand of the product.
      sizes: of what is contracted and of the result's rows, by their names.
    """
    if group.intranode is not None:
        raise PlatformError(f"{op}: implementation='fused' does not leave a node, and group {group!r} is across nodes")
    if group.platform == "hip" or (group.platform == "cuda" and not gemm.has_gemm()):
        raise PlatformError(f"{op}: implementation='fused' has kernels for CPUs and Hopper GPUs alone")
    if group.platform == "cuda" and np.dtype(rows.dtype) not in gemm.CORE_DTYPES:
        raise TypeError(
            f"{op}: {name} must be bfloat16 or float16 where implementation='fused' on a GPU, got {rows.dtype}"
        )
    multiple = gemm.CORE_MULTIPLE if group.platform == "cuda" else 1
    for size_name, size in sizes:
        if size == 0 or size % multiple:
            raise ValueError(
                f"{op}: {size_name} must be a positive multiple of {multiple} where implementation='fused', got {size}"
            )
