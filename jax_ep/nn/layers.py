"""Whole layers made of the ops."""

from typing import Literal

import jax

from jax_ep._kit import checks, quantization, vary
from jax_ep._kit.checks import Implementation, OnOverflow
from jax_ep._kit.scopes import op_scope
from jax_ep.group import Group, check_group
from jax_ep.nn import layer_checks
from jax_ep.ops.matmul import api as matmul
from jax_ep.ops.moe.experts import ExpertsCall, Operands, ProductFunction, experts_of_tokens
from jax_ep.ops.moe.settings import validated
from jax_ep.ops.moe.shared_tokens import sums_of_shared_tokens
from jax_ep.ops.moe.types import MoeStats
from jax_ep.ops.moe.units import Experts, product_biases, unit_of, with_bias


@op_scope("moe_mlp")
def moe_mlp(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None,
    experts: Experts,
    *,
    group: Group,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    wire: Literal["float8"] | None = None,
    precision: Literal["float8"] | None = None,
    on_overflow: OnOverflow = "raise",
    shared_experts: Experts | None = None,
    weigh_inputs: bool = False,
    product: ProductFunction | None = None,
    shared_tokens: bool = False,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, MoeStats]:
    """A mixture of MLPs: each token's weighted sum of (activation(x gate_e) * (x up_e)) down_e over its experts e.

    Call it on every rank, inside `jax.shard_map` over the group's axis, with the matrices of the rank's own experts:
    rank r owns experts [r E/R, (r + 1) E/R). It is differentiable in `tokens`, `weights`, all matrices and biases, and
    in the values that the activation closes over. (Gated MLPs: Shazeer, "GLU Variants Improve Transformer", 2020;
    shared experts: DeepSeekMoE, 2024.) The forward pass saves the rows and the products with gate and up for the
    backward pass.

    Args:
      tokens: [T, H] bfloat16, float16 or float32.
      expert_ids: [T, K] integers in [0, E); -1 is no expert.
      weights: [T, K] floats, or None for 1.
      experts: `Experts`: matrices, biases and the activation.
      group: the open group of the ranks.
      capacity, capacity_factor, wire, on_overflow: as for `jax_ep.dispatch`, but without wire="float8_rows".
      precision: None or "float8"; see the table. "float8" quantizes the operands of the products of routed rows in the
        forward pass (`jax_ep.float8`), and needs H and F to be multiples of 128. Products of the backward pass are in
        the dtype of `tokens`.
      shared_experts: `Experts` that every token visits: one MLP, with matrices [H, S], [H, S], [S, H] and biases [S],
        [S], [H] in the dtype of `tokens`, the same on all ranks. Concatenate several along S.
      weigh_inputs: multiplies the experts' inputs by the weights, instead of their outputs (as in Llama 4).
      product: a function (rows [C, N], matrix, group_sizes [E / R]) -> [C, N'] that replaces `jax_ep.lax.ragged_dot`,
        for int8, LoRA, scales per channel. Each matrix of `experts` may then be any pytree of arrays whose first axis
        is that of the rank's experts. Rows after the last group are zero, and their products are ignored. In a model
        that qwix quantizes, the default is qwix's product.
      shared_tokens: all ranks have the same tokens, ids and weights, for example when they serve one batch. The
        `in_specs` of these are `P()`, and the `out_specs` of the result may also be `P()`. Each rank multiplies the
        rows of its own experts, and `jax.lax.psum` adds the sums of the ranks. An even load is then T * K / R rows.
        Excludes `wire`. With check_vma=False, ranks that differ get wrong sums; JAX_EP_DEBUG_CHECKS=1 makes these NaN
        and raises a `MismatchError`. In the statistics `dropped` counts assignments to this rank's experts, and only
        rank 0 counts `invalid`.
      implementation: as for `jax_ep.dispatch`. "xla" also uses `jax.lax.ragged_dot`, and JAX's own derivative.

    | `precision` | `wire` | rows to the experts | products | matrices | gradients of matrices |
    |---|---|---|---|---|---|
    | None | None | in the dtype of `tokens` | in that dtype | arrays | yes |
    | None | "float8" | in float8 | in the dtype of `tokens` | arrays | yes |
    | "float8" | either | in float8 | in float8 | arrays, quantized in every call | yes |
    | "float8" | either | in float8 | in float8 | `Float8Weights` | no |

    Gradients pass straight through the rounding. Outputs travel, and shared experts are computed, in the dtype of
    `tokens`.

    Returns:
      [T, H] in the dtype of `tokens`, and `MoeStats`.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the op is traced.
      JaxEpError: as for `jax_ep.dispatch`.
    """
    op = "moe_mlp"
    check_group(op, group)
    experts = layer_checks.checked_experts(op, tokens, experts, group, any_matrices=product is not None)
    if shared_experts is not None:
        shared_experts = layer_checks.checked_shared(op, tokens, shared_experts)
    checks.check_bool(op, "weigh_inputs", weigh_inputs)
    in_float8 = layer_checks.is_in_float8(op, precision, wire, experts, product)
    operands = {"tokens": tokens, "expert_ids": expert_ids, "weights": weights}
    layer_checks.check_shared_tokens(op, shared_tokens, group, wire, **operands)
    unit = unit_of(op, experts)
    dispatch_call, operands = validated(
        op,
        tokens,
        expert_ids,
        weights,
        group=group,
        num_experts=group.size * jax.tree.leaves(experts.down)[0].shape[0],
        capacity=capacity,
        capacity_factor=capacity_factor,
        wire="float8" if in_float8 else wire,
        on_overflow=on_overflow,
        implementation=implementation,
        shared_tokens=shared_tokens,
    )
    varying = Operands(*vary.vary_alike(group.axis_name, *operands, experts))
    if product is not None:
        product = layer_checks.checked_product(op, product)
    elif quantization.is_by_qwix(op, "ragged_dot", precision=precision):
        product = matmul.ragged_dot
    call = ExpertsCall(dispatch_call, unit, in_float8, weigh_inputs, product)
    out, stats = (sums_of_shared_tokens if shared_tokens else experts_of_tokens)(call, varying)
    if shared_experts is None:
        return out, stats
    first_biases, down_bias = product_biases(shared_experts)
    first = zip(shared_experts.first_matrices, first_biases, strict=True)
    products = tuple(with_bias(quantization.dot(tokens, matrix), bias) for matrix, bias in first)
    hidden = unit_of(op, shared_experts, "shared_experts")(products)
    return out + with_bias(quantization.dot(hidden, shared_experts.down), down_bias), stats
