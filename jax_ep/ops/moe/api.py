"""dispatch and combine: tokens to the ranks that own their experts, and the weighted sum of the answers back.

Both are linear in their float operands and each is the other's backward, up to the routing weights:
dispatch's backward sums cotangent rows per token, combine's backward sends the cotangent along the same routing.
"""

from typing import Literal

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_ep._kit import checks, vary
from jax_ep._kit.checks import Implementation, OnOverflow
from jax_ep.group import Group, check_group
from jax_ep.ops.moe import gradients, nodes, xla
from jax_ep.ops.moe.arguments import check_combined, dispatch_config, node_chunks, node_tokens, operands
from jax_ep.ops.moe.types import COMBINED, DISPATCHED, DispatchCall, Dispatched, NodeRouting, Routing
from jax_ep.runtime.undelivered import nan_on_overflow


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
    node_capacity: int | Literal["auto"] | None = None,
    chunks: int = 1,
    wire_dtype: DTypeLike | None = None,
    dequantize: bool = True,
    on_overflow: OnOverflow = "raise",
    zero_unused: bool = True,
    implementation: Implementation = "auto",
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
      node_capacity: where the group is of several nodes: the tokens of a rank that have room on the way to each; beyond
        it `on_overflow` decides. None: all tokens go to all nodes, which is best while there are few. "auto": None, or
        room for 5/4 of the tokens that an even router has for a node (`Group.node_plan`).
      chunks: where the group is of several nodes: into how many chunks tokens are cut on their way, so that one is
        passed on inside the nodes while the next goes between them; here, in the `combine` of this routing, and in the
        gradients of both. The results have the same bits. "xla" does not look at it.
      wire_dtype: None, or float8_e4m3fn: rows travel as fp8 with one float32 scale per 128 values and arrive in the
        dtype of `tokens`. H must be a multiple of 128. Gradients pass straight through the rounding.
      dequantize: False leaves the rows as `Float8Rows(bits, scales)`, for a float8 product. Needs `wire_dtype`, has
        no gradient.
      on_overflow: when a rank would receive more than C rows: "raise" (`CapacityError`, nothing is delivered), or
        "drop": its experts get max-min fair shares of the rows, in blocks of `alignment`, and so do the source ranks of
        each expert, which keep those of their first tokens. The others are counted in `routing.dropped`.
      zero_unused: whether the rows behind those of the last expert are zeroed. False: they hold anything, NaN too, and
        so do these rows of their tangent, and of the cotangent of `expert_outputs` in the gradient of `combine`.
        `jax_ep.lax.ragged_dot`, its gradients and `combine` do not use them; whatever else adds up rows, as a bias's
        gradient does, must leave them out. To zero a row takes about as long as to copy one.
      implementation: "ffi" (kernels), "xla" (jax.lax alone), or "auto": "ffi", but "xla" where ranks that would
        exchange by kernels are CPU devices of several processes. With "xla", an overflow fills `tokens` with NaN and is
        raised by `group.check()` or the next op.

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
        group=group,
        num_experts=num_experts,
        capacity=capacity,
        capacity_factor=capacity_factor,
        alignment=alignment,
        wire_dtype=wire_dtype,
        dequantize=dequantize,
        on_overflow=on_overflow,
        zero_unused=zero_unused,
    )
    to_nodes = node_tokens(op, node_capacity, group, num_experts, expert_ids)
    checks.check_one_of(op, "implementation", implementation, checks.IMPLEMENTATIONS)
    sent = operands(group, tokens, expert_ids, weights)
    by_kernels = group._resolve(op, implementation, across_nodes=True) == "ffi"
    cut = node_chunks(op, chunks, group, by_kernels=by_kernels)
    return checked_dispatch(DispatchCall(group, config, to_nodes, cut, by_kernels), *sent)


def combine(
    expert_outputs: jax.Array, routing: Routing, *, group: Group, implementation: Implementation = "auto"
) -> jax.Array:
    """For each token of this rank, the weighted sum of its experts' output rows.

    Each peer sums its rows of a token in float32 and sends one row; the token's rank adds those and its own rows in
    float32, in rank order. Equal inputs give equal bits. Differentiable in `expert_outputs` and in
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
    expert_outputs, *leaves = vary.vary_alike(group.axis_name, expert_outputs, *leaves)
    routing = jax.tree.unflatten(treedef, leaves)
    by_kernels = group._resolve(op, implementation, across_nodes=True) == "ffi"
    return checked_combine(group, expert_outputs, routing, by_kernels=by_kernels)


def checked_dispatch(call: DispatchCall, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array) -> Dispatched:
    """`dispatch` of `operands`: over nodes, by kernels, or in plain jax.lax."""
    group, config = call.group, call.config
    if group.intranode is not None:
        return nodes.dispatch(call, tokens, expert_ids, weights)
    if call.by_kernels:
        return gradients.dispatch(group, config, tokens, expert_ids, weights)
    out, needed = xla.dispatch(tokens, expert_ids, weights, axis_name=group.axis_name, config=config)
    if not config.drop:
        out = out._replace(tokens=nan_on_overflow("dispatch", needed, config.capacity, out.tokens, group._keep_error))
    return checkpoint_name(out, DISPATCHED)


def checked_combine(group: Group, expert_outputs: jax.Array, routing: Routing, *, by_kernels: bool) -> jax.Array:
    """`combine` of what `check_combined` let pass."""
    if isinstance(routing, NodeRouting):
        return nodes.combine(group, expert_outputs, routing, by_kernels=by_kernels)
    if by_kernels:
        return gradients.combine(group, expert_outputs, routing.weights, routing)
    return checkpoint_name(xla.combine(expert_outputs, routing, axis_name=group.axis_name), COMBINED)
