"""dispatch and combine: tokens to the ranks that own their experts, and the weighted sum of the answers back.

Both are linear in their float operands and each is the other's backward, up to the routing weights:
dispatch's backward sums cotangent rows per token, combine's backward sends the cotangent along the same routing.
"""

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_ep._core import checks
from jax_ep._core.undelivered import nan_on_overflow
from jax_ep.group import Group, check_group
from jax_ep.ops.moe import gradients, xla
from jax_ep.ops.moe.arguments import check_combined, dispatch_config, operands
from jax_ep.ops.moe.types import COMBINED, DISPATCHED, DispatchConfig, Dispatched, Routing


def dispatch(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None = None,
    *,
    group: Group,
    num_experts: int,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    alignment: int = 1,
    wire_dtype: DTypeLike | None = None,
    dequantize: bool = True,
    on_overflow: str = "raise",
    implementation: str = "auto",
) -> Dispatched:
    """Sends every token to the ranks that own its experts; rank r owns experts [r E/R, (r + 1) E/R).

    Called on every rank, inside `jax.shard_map` over the group's axis. Each token crosses the wire once per rank,
    however many of its experts live there (as in DeepEP). Differentiable in `tokens` and `weights`.

    Args:
      tokens: [T, H] bfloat16, float16 or float32.
      expert_ids: [T, K] integers in [0, num_experts); -1 skips. Others are counted in `routing.invalid` and skipped.
      weights: [T, K] floats for `combine`, which takes them as float32, or None for 1.
      group: the open group of the ranks.
      num_experts: E, a multiple of the group's size.
      capacity: C, the rows a rank can receive; a multiple of `alignment`. Default: size * T * min(K, E / size) rows
        plus the padding of every expert, the most there can be when no token names an expert twice.
      capacity_factor: instead of `capacity`: C is as many times T * K, the rows of each rank when all receive as many,
        rounded up to a multiple of `alignment`, and at most the default.
      alignment: rows; every expert's segment is padded with zero rows to a multiple of it. All ranks' assignments,
        so padded, are fewer than 2^31.
      wire_dtype: None, or float8_e4m3fn: rows travel as fp8 with one float32 scale per 128 values and arrive in the
        dtype of `tokens`. H must be a multiple of 128. Gradients pass straight through the rounding.
      dequantize: False leaves the rows as `Float8Rows(values, scales)`, for a float8 product. Needs `wire_dtype`, has
        no gradient.
      on_overflow: when a rank would receive more than C rows: "raise" (`CapacityError`, nothing is delivered), or
        "drop": the last rows find no room, and are counted in `routing.dropped`.
      implementation: "ffi" (kernels), "xla" (jax.lax alone), or "auto": "ffi" but for CPU meshes of many processes.
        With "xla", an overflow fills `tokens` with NaN and is raised by `group.check()` or the next op.

    Returns:
      `Dispatched(tokens [C, H], group_sizes [E / size] int32, routing)`.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the op is traced.
      JaxEpError: an earlier op of this group failed. Where this one fails, awaiting its results raises
        `jax.errors.JaxRuntimeError` on a CPU, and on a GPU they are NaN; `group.check()` and the next op raise the
        typed error.
    """
    op = "dispatch"
    check_group(op, group)
    config = dispatch_config(
        op,
        tokens,
        expert_ids,
        weights,
        group,
        num_experts,
        capacity,
        capacity_factor,
        alignment,
        wire_dtype,
        dequantize,
        on_overflow,
    )
    checks.check_one_of(op, "implementation", implementation, checks.IMPLEMENTATIONS)
    tokens, expert_ids, weights = operands(group, tokens, expert_ids, weights)
    if group.resolve(op, implementation) == "xla":
        return dispatch_by_xla(group, config, tokens, expert_ids, weights)
    return gradients.dispatch(group, config, tokens, expert_ids, weights)


def combine(expert_outputs: jax.Array, routing: Routing, *, group: Group, implementation: str = "auto") -> jax.Array:
    """For each token of this rank, the weighted sum of its experts' output rows.

    Each peer sums its rows of a token in float32 and sends one row; the token's rank adds those and its own rows in
    float32, in rank order. The same inputs give the same bits. Differentiable in `expert_outputs` and in
    `routing.weights`.

    Args:
      expert_outputs: [C, H'] bfloat16, float16 or float32: one row per row of `Dispatched.tokens`. H' is free.
      routing: of the dispatch. Skipped, invalid and dropped assignments count as zero. Where a leaf holds rows that no
        rank has, no rank delivers ("ffi": `InvalidRoutingError`), or the sums of their tokens are NaN ("xla").
      group: the group of the dispatch.
      implementation: as for `dispatch`.

    Returns:
      [T, H'] in the dtype of `expert_outputs`.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the op is traced.
      JaxEpError: as for `dispatch`.
    """
    op = "combine"
    check_group(op, group)
    checks.check_one_of(op, "implementation", implementation, checks.IMPLEMENTATIONS)
    check_combined(op, "expert_outputs", expert_outputs, routing, group)
    leaves, treedef = jax.tree.flatten(routing)
    expert_outputs, *leaves = checks.vary_alike(group.axis_name, expert_outputs, *leaves)
    routing = jax.tree.unflatten(treedef, leaves)
    if group.resolve(op, implementation) == "xla":
        return combine_by_xla(group, expert_outputs, routing)
    return gradients.combine(group, expert_outputs, routing.weights, routing)


def dispatch_by_xla(
    group: Group, config: DispatchConfig, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> Dispatched:
    out, needed = xla.dispatch(tokens, expert_ids, weights, axis_name=group.axis_name, config=config)
    if not config.drop:
        out = out._replace(tokens=nan_on_overflow("dispatch", needed, config.capacity, out.tokens, group.keep_error))
    return checkpoint_name(out, DISPATCHED)


def combine_by_xla(group: Group, expert_outputs: jax.Array, routing: Routing) -> jax.Array:
    return checkpoint_name(xla.combine(expert_outputs, routing, axis_name=group.axis_name), COMBINED)
