"""What the fused ops ask of their arguments."""

from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from jax_ep._kit import checks
from jax_ep._kit.checks import Implementation, OnOverflow
from jax_ep._kit.float8 import Float8, Float8Weights
from jax_ep.group import Group, check_group
from jax_ep.ops.matmul.quantize import FLOAT8, check_blocks, check_weights, without_gradient
from jax_ep.ops.moe.arguments import dispatch_config, node_chunks, node_tokens, operands
from jax_ep.ops.moe.types import DispatchCall
from jax_ep.ops.moe_fused.types import (
    ACTIVATIONS,
    Activation,
    ActivationName,
    FirstCall,
    Matrices,
    Matrix,
    Precision,
    wants_float8,
)


class First(NamedTuple):
    """A call of `dispatch_ragged_dot`, checked."""

    call: FirstCall
    operands: tuple[jax.Array, jax.Array, jax.Array, Matrices]
    function: Activation | None  # the activation

    @property
    def by_kernels(self) -> bool:
        return self.call.dispatch.by_kernels and self.call.dispatch.group.intranode is None

    @property
    def in_one_op(self) -> bool:
        return self.by_kernels and self.call.activation is not None


def checked_first(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None,
    rhs: Matrix | tuple[Matrix, Matrix],
    *,
    group: Group,
    num_experts: int,
    capacity: int | None,
    capacity_factor: float | None,
    activation: ActivationName | Activation | None,
    node_capacity: int | Literal["auto"] | None,
    chunks: int,
    precision: Precision | None,
    wire_dtype: DTypeLike | None,
    on_overflow: OnOverflow,
    implementation: Implementation,
) -> First:
    """Checks the arguments of `dispatch_ragged_dot`."""
    op = "dispatch_ragged_dot"
    check_group(op, group)
    in_float8 = is_in_float8(op, precision, *(rhs if _is_pair(rhs) else (rhs,)))
    if in_float8:
        checks.check_rank(op, "tokens", tokens, 2, "[T, H]")
        check_blocks(op, "the rows of tokens", tokens.shape[1:])
    config = dispatch_config(
        op,
        tokens,
        expert_ids,
        weights,
        group=group,
        num_experts=num_experts,
        capacity=capacity,
        capacity_factor=capacity_factor,
        wire_dtype=FLOAT8 if in_float8 and wire_dtype is None else wire_dtype,
        on_overflow=on_overflow,
    )
    to_nodes = node_tokens(op, node_capacity, group, num_experts, expert_ids)
    checks.check_one_of(op, "implementation", implementation, checks.IMPLEMENTATIONS)
    matrices = _first_matrices(op, rhs, config.local_experts, tokens, is_gated=activation is not None)
    if in_float8:
        check_blocks(op, "rhs", tuple(size for matrix in matrices for size in matrix.shape[1:]))
    name, function = _activation(op, activation)
    by_kernels = group._resolve(op, implementation, across_nodes=True) == "ffi"
    leaves, treedef = jax.tree.flatten(matrices)
    tokens, expert_ids, weights, *leaves = operands(group, tokens, expert_ids, weights, *leaves)
    matrices = tuple(without_gradient(op, "rhs", matrix) for matrix in jax.tree.unflatten(treedef, leaves))
    cut = node_chunks(op, chunks, group, by_kernels=by_kernels)
    sent = DispatchCall(group, config, to_nodes, cut, by_kernels)
    return First(FirstCall(sent, name, in_float8), (tokens, expert_ids, weights, matrices), function)


def is_in_float8(op: str, precision: Any, *operands: Any) -> bool:
    """Whether the product is of float8 operands: because one is, or because that is asked for."""
    return wants_float8(op, precision) or any(isinstance(x, Float8) for x in operands)


def _first_matrices(op: str, rhs: Any, local_experts: int, tokens: jax.Array, *, is_gated: bool) -> Matrices:
    """The right operands of `dispatch_ragged_dot`, checked."""
    if not _is_pair(rhs):
        layout = "[E / R, H, 2 F]" if is_gated else "[E / R, H, N]"
        check_matrix(op, "rhs", rhs, (local_experts, tokens.shape[1]), layout, tokens)
        if is_gated and rhs.shape[2] % 2:
            raise ValueError(f"{op}: rhs must have shape {layout} with an activation, got {rhs.shape}")
        return (rhs,)
    if len(rhs) != 2:
        raise ValueError(f"{op}: rhs must be an array or a pair (gate, up), got {len(rhs)} arrays")
    for i, matrix in enumerate(rhs):
        check_matrix(op, f"rhs[{i}]", matrix, (local_experts, tokens.shape[1]), "[E / R, H, F]", tokens)
    if rhs[0].shape != rhs[1].shape:
        raise ValueError(f"{op}: rhs[1] must have the shape of rhs[0] {rhs[0].shape}, got {rhs[1].shape}")
    return tuple(rhs)


def _is_pair(rhs: Any) -> bool:
    return isinstance(rhs, tuple | list) and not isinstance(rhs, Float8Weights)


def check_matrix(op: str, name: str, matrix: Any, leading: tuple[int, int], layout: str, rows: jax.Array) -> None:
    if isinstance(matrix, Float8Weights):
        checks.check_rank(op, f"{name}.bits", matrix.bits, 3, "[E / R, N, K]")
        check_weights(op, name, matrix, (*leading, matrix.shape[2]), layout)
        return
    checks.check_rank(op, name, matrix, 3, layout)
    checks.check_shape(op, name, matrix, (*leading, matrix.shape[2]), layout)
    checks.check_dtype(op, name, matrix, (np.dtype(rows.dtype),))


def _activation(
    op: str, activation: ActivationName | Activation | None
) -> tuple[ActivationName | None, Activation | None]:
    """Its name in ACTIVATIONS, also where it was given as that very function, and the function."""
    if activation is None:
        return None, None
    if callable(activation):
        return next((name for name, known in ACTIVATIONS.items() if known is activation), None), activation
    if not isinstance(activation, str):
        raise TypeError(
            f"{op}: activation must be a function, or one of {', '.join(map(repr, ACTIVATIONS))}, or None; got "
            f"{activation!r}"
        )
    checks.check_one_of(op, "activation", activation, tuple(ACTIVATIONS))
    return activation, ACTIVATIONS[activation]
