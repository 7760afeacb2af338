"""dispatch with the products behind it, and combine with the product before it: the halves of a mixture of experts."""

import dataclasses
from typing import Any, Literal

import jax
from jax.typing import DTypeLike

from jax_ep._kit import checks, gemm, vary
from jax_ep._kit.checks import Implementation, OnOverflow
from jax_ep._kit.float8 import BITS, Float8Rows
from jax_ep.group import Group, check_group
from jax_ep.ops.matmul.float8 import check_operands
from jax_ep.ops.matmul.quantize import check_blocks, without_gradient
from jax_ep.ops.moe.arguments import check_combined
from jax_ep.ops.moe.types import Dispatched, Routing
from jax_ep.ops.moe_fused import gradients, unfused
from jax_ep.ops.moe_fused.arguments import First, check_matrix, checked_first, is_in_float8
from jax_ep.ops.moe_fused.types import (
    Activation,
    ActivationName,
    Counted,
    LastCall,
    Matrix,
    Precision,
    Rows,
    activated,
    elementwise,
    gate_and_up,
)


def dispatch_ragged_dot(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None,
    rhs: Matrix | tuple[Matrix, Matrix],
    *,
    group: Group,
    num_experts: int,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    activation: ActivationName | Activation | None = None,
    node_capacity: int | Literal["auto"] | None = None,
    chunks: int = 1,
    precision: Precision | None = None,
    wire_dtype: DTypeLike | None = None,
    on_overflow: OnOverflow = "raise",
    implementation: Implementation = "auto",
) -> tuple[Any, Dispatched]:
    """`jax_ep.dispatch`, and the product of the rows that arrive with the matrices of their experts.

    It stands for `rows, group_sizes, routing = dispatch(...)` and `ragged_dot(rows, rhs, group_sizes)`; or, with an
    activation, for the gated unit activation(rows gate) * (rows up) (Shazeer, "GLU Variants Improve Transformer",
    2020), which on Hopper is one product where the activation is known by name. Every product and the result are
    rounded to the dtype of `tokens`, as there, so the bits are equal; gradients differ by rounding.

    Called on every rank, inside `jax.shard_map` over the group's axis. Differentiable in `tokens`, `weights` and `rhs`:
    the backward pass keeps the rows and, for an activation it knows, the two products, each once.

    Args:
      tokens: [T, H] bfloat16, float16 or float32.
      expert_ids: [T, K] integers in [0, num_experts); -1 skips.
      weights: [T, K] floats for the combine, or None for 1.
      rhs: [E / R, H, N] in the dtype of `tokens`, of the rank's own experts, or `Float8Weights` of that shape; of a
        gated unit a pair (gate, up), each [E / R, H, F], or both in one, [E / R, H, 2 F], gate in front.
      activation: of a gated unit: "silu", "gelu" or "relu", which stand for `jax.nn.silu`, `jax.nn.gelu` (by tanh) and
        `jax.nn.relu`, or an elementwise function with activation(0) finite. None: the products themselves are wanted.
      precision: None, or "float8": rows travel in float8 (`wire_dtype`) and are multiplied as they arrive, by matrices
        that are quantized first (`jax_ep.float8.quantize_weights`): H and N (or F) are multiples of 128. Gradients pass
        straight through the rounding, in the dtype of `tokens`. `Float8Weights` are not quantized at every call; they
        have no gradient, and stand for "float8".
      group, num_experts, capacity, capacity_factor, node_capacity, chunks, wire_dtype, on_overflow: as for
        `jax_ep.dispatch`.
      implementation: as for `jax_ep.dispatch`; "xla" also takes `jax.lax.ragged_dot`.

    Returns:
      [C, N] in the dtype of `tokens`, or [C, F] of a gated unit, or of a pair without an activation both products; zero
      behind the last expert's rows. And the `Dispatched` of the dispatch.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the op is traced.
      JaxEpError: as for `jax_ep.dispatch`.
    """
    out, dispatched, _ = dispatch_beside(
        tokens,
        expert_ids,
        weights,
        rhs,
        None,
        group=group,
        num_experts=num_experts,
        capacity=capacity,
        capacity_factor=capacity_factor,
        activation=activation,
        node_capacity=node_capacity,
        chunks=chunks,
        precision=precision,
        wire_dtype=wire_dtype,
        on_overflow=on_overflow,
        implementation=implementation,
    )
    return out, dispatched


def dispatch_beside(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None,
    rhs: Matrix | tuple[Matrix, Matrix],
    beside: jax.Array | None,
    **options: Any,
) -> tuple[Any, Dispatched, jax.Array | None]:
    """`dispatch_ragged_dot` with all its options, and `beside` as it is, which asynchronous ops compute beside the
    exchange."""
    return _dispatch_dot(checked_first(tokens, expert_ids, weights, rhs, **options), beside)


def experts_beside(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None,
    rhs: Matrix | tuple[Matrix, Matrix],
    down: Matrix,
    beside: jax.Array | None,
    **options: Any,
) -> tuple[jax.Array, Routing | Counted, jax.Array | None]:
    """`dispatch_beside` with an activation, and `combine_beside` of its result: the sums, what was counted, and
    `beside`. By kernels inside a node it is one op, which keeps less for its backward pass.

    `down` [E / R, F, H] was checked, and is in float8 only if the call is.
    """
    first = checked_first(tokens, expert_ids, weights, rhs, **options)
    if not first.in_one_op:
        inner, dispatched, beside = _dispatch_dot(first, beside)
        where = {name: options[name] for name in ("group", "precision", "implementation")}
        out, beside = combine_beside(inner, down, dispatched.routing, beside, **where)
        return out, dispatched.routing, beside
    group = first.call.dispatch.group
    leaves, treedef = jax.tree.flatten((first.operands, down))
    operands, down = jax.tree.unflatten(treedef, vary.vary_alike(group.axis_name, *leaves))
    down = without_gradient("ragged_dot_combine", "rhs", down)
    sent = first.call.dispatch
    sent = sent._replace(config=dataclasses.replace(sent.config, zero_unused=_zeroes_unused(group)))
    last = LastCall(group, first.call.in_float8)
    return gradients.experts(first.call._replace(dispatch=sent), last, *operands, down, beside)


def _zeroes_unused(group: Group) -> bool:
    """Whether rows that nobody else sees are zeroed. The GEMM core and XLA on CPUs use none of them; libraries that XLA
    calls on other GPUs may take them for the last group's, and whoever looks for NaN looks at all that is kept."""
    others_multiply = group.platform != "cpu" and not gemm.has_gemm()
    return others_multiply or jax.debug_nans.value or jax.debug_infs.value


def _dispatch_dot(first: First, beside: jax.Array | None) -> tuple[Any, Dispatched, jax.Array | None]:
    call, (*_, matrices), function = first
    if first.by_kernels:
        out, dispatched, beside = gradients.dispatch_dot(call, *first.operands, beside)
    else:
        out, dispatched = unfused.dispatch_dot(call, *first.operands)
    if call.activation is None and function is not None:
        out = activated(elementwise("dispatch_ragged_dot", "activation", function), *gate_and_up(out))
    elif call.activation is None and len(matrices) == 1:
        (out,) = out
    return out, dispatched, beside


def ragged_dot_combine(
    lhs: Rows,
    rhs: Matrix,
    routing: Routing,
    *,
    group: Group,
    precision: Precision | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """The product of rows with the matrices of their experts, and `jax_ep.combine` of it.

    It stands for `combine(ragged_dot(lhs, rhs, group_sizes), routing)` with the `group_sizes` of the dispatch, to the
    bit; gradients differ by rounding. Called on every rank, inside `jax.shard_map` over the group's axis.
    Differentiable in `lhs`, `rhs` and `routing.weights`: the backward pass keeps `lhs`, and not the product, and
    weighs what the cotangents become (SonicMoE: Guo et al., 2025).

    Args:
      lhs: [C, F] bfloat16, float16 or float32: one row per row of the dispatch; or `Float8Rows`, which have no
        gradient: then `rhs` is in float8, too.
      rhs: [E / R, F, H'] in the dtype of `lhs`, of the rank's own experts, or `Float8Weights` of that shape.
      routing: of the dispatch.
      group: the group of the dispatch.
      precision: None, or "float8", which operands in float8 stand for: a product of operands that are quantized first,
        if they are not yet: F and H' are multiples of 128. Rows come back, and gradients pass straight through the
        rounding, in the dtype of `lhs`. `Float8Weights` have no gradient.
      implementation: as for `jax_ep.dispatch`; "xla" also takes `jax.lax.ragged_dot`.

    Returns:
      [T, H'] in the dtype of `lhs`, or of rows in float8 bfloat16.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the op is traced.
      JaxEpError: as for `jax_ep.combine`.
    """
    options: Any = {"group": group, "precision": precision, "implementation": implementation}
    return combine_beside(lhs, rhs, routing, None, **options)[0]


def combine_beside(
    lhs: Rows,
    rhs: Matrix,
    routing: Routing,
    beside: jax.Array | None,
    *,
    group: Group,
    precision: Precision | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array | None]:
    """`ragged_dot_combine`, and `beside` as it is, whose cotangent asynchronous ops compute beside the backward pass'
    exchange."""
    op = "ragged_dot_combine"
    check_group(op, group)
    checks.check_one_of(op, "implementation", implementation, checks.IMPLEMENTATIONS)
    in_float8 = is_in_float8(op, precision, lhs, rhs)
    if isinstance(lhs, Float8Rows):
        check_operands(op, lhs, rhs, None, ndim=3)
        rows = lhs.bits
        check_combined(op, "lhs.bits", rows, routing, group, dtypes=(BITS,))
    else:
        rows = lhs
        check_combined(op, "lhs", rows, routing, group)
    check_matrix(op, "rhs", rhs, (routing.config.local_experts, rows.shape[1]), "[E / R, F, H']", rows)
    if in_float8:
        check_blocks(op, "rhs", rhs.shape[1:])
    leaves, treedef = jax.tree.flatten((lhs, rhs, routing))
    lhs, rhs, routing = jax.tree.unflatten(treedef, vary.vary_alike(group.axis_name, *leaves))
    lhs, rhs = without_gradient(op, "lhs", lhs), without_gradient(op, "rhs", rhs)
    by_kernels = group._resolve(op, implementation, across_nodes=True) == "ffi"
    call = LastCall(group, in_float8)
    if by_kernels and group.intranode is None:
        return gradients.dot_combine(call, lhs, rhs, routing.weights, routing, beside)
    return unfused.dot_combine(call, lhs, rhs, routing, by_kernels=by_kernels), beside
