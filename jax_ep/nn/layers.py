"""Whole layers made of the ops."""

from collections.abc import Callable

import jax
import numpy as np
from jax.typing import DTypeLike

from jax_ep._core import checks
from jax_ep.group import Group
from jax_ep.ops.matmul.api import ragged_dot
from jax_ep.ops.moe.api import combine, dispatch


def moe_mlp(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    group: Group,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    capacity: int | None = None,
    wire_dtype: DTypeLike | None = None,
    on_overflow: str = "raise",
    implementation: str = "auto",
) -> jax.Array:
    """A mixture of gated MLPs: each token's weighted sum of (activation(x gate_e) * (x up_e)) down_e over its experts.

    Called on every rank, inside `jax.shard_map` over the group's axis, with the matrices of the rank's own experts:
    rank r owns experts [r E/R, (r + 1) E/R). Grouped products run by `jax_ep.lax.ragged_dot`. Differentiable in
    `tokens`, `weights` and the matrices. (Gated MLPs: Shazeer, "GLU Variants Improve Transformer", 2020.)

    Args:
      tokens: [T, H] bfloat16, float16 or float32.
      expert_ids: [T, K] int32 in [0, E); -1 skips.
      weights: [T, K] float32, or None for 1.
      gate, up: [E / R, H, F] in the dtype of `tokens`.
      down: [E / R, F, H] in the dtype of `tokens`.
      group: the open group of the ranks.
      activation: elementwise, with activation(0) finite.
      capacity, wire_dtype, on_overflow: as for `jax_ep.dispatch`.
      implementation: as for `jax_ep.dispatch`; "xla" also takes `jax.lax.ragged_dot`.

    Returns:
      [T, H] in the dtype of `tokens`.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the op is traced.
      JaxEpError: as for `jax_ep.dispatch`.
    """
    _check_experts(tokens, gate, up, down)
    rows, group_sizes, routing = dispatch(
        tokens,
        expert_ids,
        weights,
        group=group,
        num_experts=group.size * gate.shape[0],
        capacity=capacity,
        wire_dtype=wire_dtype,
        on_overflow=on_overflow,
        implementation=implementation,
    )
    by_xla = group.resolve("moe_mlp", implementation) == "xla"
    multiply = jax.lax.ragged_dot if by_xla else ragged_dot
    inner = activation(multiply(rows, gate, group_sizes)) * multiply(rows, up, group_sizes)
    outputs = multiply(inner.astype(tokens.dtype), down, group_sizes)
    return combine(outputs, routing, group=group, implementation=implementation)


def _check_experts(tokens: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> None:
    op = "moe_mlp"
    checks.check_rank(op, "tokens", tokens, 2, "[T, H]")
    checks.check_dtype(op, "tokens", tokens, checks.TOKEN_DTYPES)
    checks.check_rank(op, "gate", gate, 3, "[E / R, H, F]")
    if gate.shape[0] == 0:
        raise ValueError(f"{op}: gate must have at least one expert on every rank, got {gate.shape}")
    experts, hidden, width = gate.shape[0], tokens.shape[1], gate.shape[2]
    for name, matrix, shape, layout in (
        ("gate", gate, (experts, hidden, width), "[E / R, H, F]"),
        ("up", up, (experts, hidden, width), "[E / R, H, F]"),
        ("down", down, (experts, width, hidden), "[E / R, F, H]"),
    ):
        checks.check_shape(op, name, matrix, shape, layout)
        checks.check_dtype(op, name, matrix, (np.dtype(tokens.dtype),))
