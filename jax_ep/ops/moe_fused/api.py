"""dispatch with the products behind it, and combine with the product before it: the halves of a mixture of experts."""

from typing import Any, Literal

import jax
import numpy as np
from jax.typing import DTypeLike

from jax_ep._core import checks
from jax_ep._core.checks import FusedImplementation, Implementation, OnOverflow
from jax_ep.group import Group, check_group
from jax_ep.ops.moe.arguments import check_combined, dispatch_config, node_chunks, node_tokens, operands
from jax_ep.ops.moe.types import DispatchCall, Dispatched, Routing
from jax_ep.ops.moe_fused import gradients, unfused
from jax_ep.ops.moe_fused.kernels import check_fused
from jax_ep.ops.moe_fused.types import (
    ACTIVATIONS,
    Activation,
    ActivationName,
    FirstCall,
    Matrices,
    activated,
    gate_and_up,
)


def dispatch_ragged_dot(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None,
    rhs: jax.Array | tuple[jax.Array, jax.Array],
    *,
    group: Group,
    num_experts: int,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    activation: ActivationName | Activation | None = None,
    node_capacity: int | Literal["auto"] | None = None,
    chunks: int = 1,
    wire_dtype: DTypeLike | None = None,
    on_overflow: OnOverflow = "raise",
    implementation: FusedImplementation = "auto",
) -> tuple[jax.Array, Dispatched]:
    """`jax_ep.dispatch`, and the product of the rows that arrive with the matrices of their experts.

    It stands for `rows, group_sizes, routing = dispatch(...)` and `ragged_dot(rows, rhs, group_sizes)`; or, with an
    activation, for the gated unit activation(rows gate) * (rows up) (Shazeer, "GLU Variants Improve Transformer",
    2020), which on Hopper is one product where nobody differentiates and the activation is known by name. Every product
    and the result are rounded to the dtype of `tokens`, as there, so the bits are equal, forward and backward. Called
    on every rank, inside `jax.shard_map` over the group's axis. Differentiable in `tokens`, `weights` and `rhs`: the
    backward pass keeps the rows and, for an activation it knows, the two products, each once.

    Args:
      tokens: [T, H] bfloat16, float16 or float32.
      expert_ids: [T, K] integers in [0, num_experts); -1 skips.
      weights: [T, K] floats for the combine, or None for 1.
      rhs: [E / R, H, N] in the dtype of `tokens`, of the rank's own experts; of a gated unit a pair (gate, up), each
        [E / R, H, F], or both in one array [E / R, H, 2 F], gate in front.
      activation: of a gated unit: "silu", "gelu" or "relu", which stand for `jax.nn.silu`, `jax.nn.gelu` (by tanh) and
        `jax.nn.relu`, or an elementwise function with activation(0) finite. None: `rhs` is one array, and no such unit.
      group, num_experts, capacity, capacity_factor, node_capacity, chunks, wire_dtype, on_overflow: as for
        `jax_ep.dispatch`.
      implementation: as for `jax_ep.dispatch`; "xla" also takes `jax.lax.ragged_dot`. "fused": the dispatch and the
        product, that with gate of a pair, are one kernel. It has not been timed, and "auto" does not choose it. It
        needs a Hopper GPU, bfloat16 or float16 and H and N (or F) that are multiples of 8; or a CPU, where it is slow,
        for tests. The group must be of one node, and `wire_dtype` None.

    Returns:
      [C, N], or [C, F] of a gated unit, zero behind the last expert's rows, and the `Dispatched` of the dispatch.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the op is traced.
      JaxEpError: as for `jax_ep.dispatch`.
    """
    op = "dispatch_ragged_dot"
    check_group(op, group)
    config = dispatch_config(
        op,
        tokens,
        expert_ids,
        weights,
        group=group,
        num_experts=num_experts,
        capacity=capacity,
        capacity_factor=capacity_factor,
        wire_dtype=wire_dtype,
        on_overflow=on_overflow,
    )
    to_nodes = node_tokens(op, node_capacity, group, num_experts, expert_ids)
    checks.check_one_of(op, "implementation", implementation, checks.FUSED_IMPLEMENTATIONS)
    matrices = _first_matrices(op, rhs, config.local_experts, tokens, is_gated=activation is not None)
    name, function = _activation(op, activation, pair=len(matrices) == 2)
    by_kernels = group.resolve(op, implementation) == "ffi"
    if implementation == "fused":
        check_fused(op, group, config, tokens, matrices)
    tokens, expert_ids, weights, *varying = operands(group, tokens, expert_ids, weights, *matrices)
    matrices = tuple(varying)
    cut = node_chunks(op, chunks, group, by_kernels=by_kernels)
    call = FirstCall(DispatchCall(group, config, to_nodes, cut, by_kernels), name, implementation == "fused")
    if by_kernels and group.intranode is None:
        out, dispatched = gradients.dispatch_dot(call, tokens, expert_ids, weights, matrices)
    else:
        out, dispatched = unfused.dispatch_dot(call, tokens, expert_ids, weights, matrices)
    if name is None:
        out = out[0] if function is None else activated(function, *gate_and_up(out))
    return out, dispatched


def ragged_dot_combine(
    lhs: jax.Array, rhs: jax.Array, routing: Routing, *, group: Group, implementation: Implementation = "auto"
) -> jax.Array:
    """The product of rows with the matrices of their experts, and `jax_ep.combine` of it.

    It stands for `combine(ragged_dot(lhs, rhs, group_sizes), routing)` with the `group_sizes` of the dispatch, to the
    bit, forward and backward. Called on every rank, inside `jax.shard_map` over the group's axis. Differentiable in
    `lhs`, `rhs` and `routing.weights`: the backward pass keeps `lhs` and the product.

    Args:
      lhs: [C, F] bfloat16, float16 or float32: one row per row of the dispatch.
      rhs: [E / R, F, H'] in the dtype of `lhs`, of the rank's own experts.
      routing: of the dispatch.
      group: the group of the dispatch.
      implementation: as for `jax_ep.dispatch`; "xla" also takes `jax.lax.ragged_dot`.

    Returns:
      [T, H'] in the dtype of `lhs`.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the op is traced.
      JaxEpError: as for `jax_ep.combine`.
    """
    op = "ragged_dot_combine"
    check_group(op, group)
    checks.check_one_of(op, "implementation", implementation, checks.IMPLEMENTATIONS)
    check_combined(op, "lhs", lhs, routing, group)
    _check_matrix(op, "rhs", rhs, (routing.config.local_experts, lhs.shape[1]), "[E / R, F, H']", lhs)
    leaves, treedef = jax.tree.flatten(routing)
    lhs, rhs, *leaves = checks.vary_alike(group.axis_name, lhs, rhs, *leaves)
    routing = jax.tree.unflatten(treedef, leaves)
    by_kernels = group.resolve(op, implementation) == "ffi"
    if by_kernels and group.intranode is None:
        return gradients.dot_combine(group, lhs, rhs, routing.weights, routing)
    return unfused.dot_combine(group, lhs, rhs, routing, by_kernels=by_kernels)


def _first_matrices(op: str, rhs: Any, local_experts: int, tokens: jax.Array, *, is_gated: bool) -> Matrices:
    """The right operands of `dispatch_ragged_dot`, checked."""
    if not isinstance(rhs, tuple | list):
        layout = "[E / R, H, 2 F]" if is_gated else "[E / R, H, N]"
        _check_matrix(op, "rhs", rhs, (local_experts, tokens.shape[1]), layout, tokens)
        if is_gated and rhs.shape[2] % 2:
            raise ValueError(f"{op}: rhs must have shape {layout} with an activation, got {rhs.shape}")
        return (rhs,)
    if len(rhs) != 2:
        raise ValueError(f"{op}: rhs must be an array or a pair (gate, up), got {len(rhs)} arrays")
    for i, matrix in enumerate(rhs):
        _check_matrix(op, f"rhs[{i}]", matrix, (local_experts, tokens.shape[1]), "[E / R, H, F]", tokens)
    if rhs[0].shape != rhs[1].shape:
        raise ValueError(f"{op}: rhs[1] must have the shape of rhs[0] {rhs[0].shape}, got {rhs[1].shape}")
    return tuple(rhs)


def _check_matrix(op: str, name: str, matrix: Any, leading: tuple[int, int], layout: str, rows: jax.Array) -> None:
    checks.check_rank(op, name, matrix, 3, layout)
    checks.check_shape(op, name, matrix, (*leading, matrix.shape[2]), layout)
    checks.check_dtype(op, name, matrix, (np.dtype(rows.dtype),))


def _activation(
    op: str, activation: ActivationName | Activation | None, *, pair: bool
) -> tuple[ActivationName | None, Activation | None]:
    """Its name in ACTIVATIONS, also where it was given as that very function, and the function."""
    if activation is None and not pair:
        return None, None
    if callable(activation):
        return next((name for name, known in ACTIVATIONS.items() if known is activation), None), activation
    if not isinstance(activation, str):
        raise TypeError(
            f"{op}: activation must be a function, or one of {', '.join(map(repr, ACTIVATIONS))}, or None where rhs is "
            f"one array; got {activation!r}"
        )
    checks.check_one_of(op, "activation", activation, tuple(ACTIVATIONS))
    return activation, ACTIVATIONS[activation]
