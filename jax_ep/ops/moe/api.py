"""dispatch and combine: tokens go to the ranks of their experts, and weighted sums of the outputs come back.

Each is the other's transpose, apart from the weights.
"""

import dataclasses
import logging
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._kit import checks, vary
from jax_ep._kit.checks import Implementation, OnOverflow
from jax_ep._kit.float8 import Float8Rows
from jax_ep._kit.scopes import op_scope
from jax_ep.group import Group, check_group
from jax_ep.ops.moe.kernels import intranode_combine, intranode_dispatch
from jax_ep.ops.moe.nodes import internode_combine, internode_dispatch
from jax_ep.ops.moe.settings import DispatchCall, Options, Wire, note_same_tokens, runs_kernels, validated
from jax_ep.ops.moe.types import COMBINED, DISPATCHED, Dispatched, NodeRouting, Routing, Unexpanded, check_combined
from jax_ep.ops.moe.xla import dispatch_in_place, xla_combine, xla_dispatch
from jax_ep.runtime.agreement import Agreement
from jax_ep.runtime.undelivered import nan_on_overflow


@overload
def dispatch(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None = ...,
    *,
    wire: Literal["float8"] | None = ...,
    expand: Literal[True] = ...,
    **options: Unpack[Options],
) -> Dispatched[jax.Array]: ...
@overload
def dispatch(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None = ...,
    *,
    wire: Literal["float8_rows"],
    expand: Literal[True] = ...,
    **options: Unpack[Options],
) -> Dispatched[Float8Rows]: ...
@overload
def dispatch(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None = ...,
    *,
    wire: Literal["float8"] | None = ...,
    expand: Literal[False],
    **options: Unpack[Options],
) -> Unexpanded[jax.Array]: ...
@overload
def dispatch(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None = ...,
    *,
    wire: Literal["float8_rows"],
    expand: Literal[False],
    **options: Unpack[Options],
) -> Unexpanded[Float8Rows]: ...
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
    wire: Wire | None = None,
    expand: bool = True,
    on_overflow: OnOverflow = "raise",
    implementation: Implementation = "auto",
) -> Dispatched[Any] | Unexpanded[Any]:
    """Sends every token to the ranks that own its experts. Rank r owns experts [r E/R, (r + 1) E/R).

    Call it on every rank, inside `jax.shard_map` over the group's axis. Each token is sent once per rank, even if the
    rank has several of its experts (as in DeepEP). Differentiable in `tokens` and `weights`.

    Args:
      tokens: [T, H] bfloat16, float16 or float32.
      expert_ids: [T, K] integers in [0, num_experts); -1 is no expert. Other ids are skipped, and counted in
        `routing.invalid`.
      weights: [T, K] floats for `combine`, which takes them as float32, or None for 1.
      group: the open group of the ranks.
      num_experts: E, a multiple of the group's size R.
      capacity: C, the rows that a rank can receive, a multiple of `alignment`. Default: R * T * min(K, E / R) rows
        plus the padding of every expert. No dispatch needs more if no token names an expert twice.
      capacity_factor: replaces `capacity`: C as a multiple of the even load of T * K rows, rounded up to a multiple of
        `alignment` and limited to the default.
      alignment: every expert's segment is padded with zero rows to a multiple of this number. The assignments of all
        ranks and the padding must be fewer than 2^31. The cotangent of a padding row is 0, but a function with an
        infinite slope at 0, such as a square root, makes it 0 * inf = NaN, which gradients of matrices add up. Apply
        such a function to `jnp.where(routing.row_mask()[:, None], x, 1)` instead of x [C, F], if its slope at 1 is
        finite.
      wire: None, or one of two float8 formats, for which H must be a multiple of 128. "float8": rows travel as
        float8_e4m3fn with one float32 scale per 128 values, and arrive in the dtype of `tokens`; gradients pass
        straight through the rounding. "float8_rows": rows arrive as `Float8Rows`, for a product in float8, and have no
        gradient.
      expand: if False, a rank stores a token once, even if several of the rank's experts have it. `indices` [C] says
        which of `rows` each row of the products is, and -1 is a row of zeros: `jax_ep.lax.ragged_dot(rows, ...,
        lhs_indices=indices)`. In one node with R * T < C, token t of rank s is row s * T + t, and rows of tokens
        without an expert here are undefined. On one GPU `rows` is `tokens`, without `wire` and if no rows can overflow.
        With nodes, or R * T >= C, rows are expanded, and `indices` is arange(C).
      on_overflow: if a rank would receive more than C rows: "raise": `CapacityError`, and nothing is delivered. "drop":
        the rank divides its rows among its experts by max-min fairness, in steps of `alignment`, and each expert
        divides its rows among the source ranks in the same way. A source keeps its first tokens. `routing.dropped`
        counts the assignments without a row.
      implementation: "kernels", "xla" (jax.lax alone), or "auto": "kernels", or "xla" if kernels would have to
        exchange between CPU processes. With "xla", an overflow fills `rows` with NaN, and `group.check()` or the next
        op raises it.

    Returns:
      `Dispatched(rows [C, H], group_sizes [E / R] int32, routing)`; with expand=False
      `Unexpanded(rows [M, H], group_sizes, routing, indices [C] int32)`.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the op is traced.
      JaxEpError: an earlier op of this group failed. If this op fails, `jax.block_until_ready` of its results raises
        `jax.errors.JaxRuntimeError` on a CPU; on a GPU the results are NaN. `group.check()` and the next op raise the
        typed error.
    """
    op = "dispatch"
    check_group(op, group)
    checks.check_bool(op, "expand", expand)
    call, operands = validated(
        op,
        tokens,
        expert_ids,
        weights,
        group=group,
        num_experts=num_experts,
        capacity=capacity,
        capacity_factor=capacity_factor,
        alignment=alignment,
        wire=wire,
        on_overflow=on_overflow,
        implementation=implementation,
    )
    note_same_tokens(logging.INFO, op, group, "sends all of them", tokens, expert_ids)
    out = run_dispatch(call if expand else call.unexpanded(tokens.shape[0]), *operands)
    if expand or isinstance(out, Unexpanded):
        return out
    [indices] = vary.vary_alike(group.axis_name, jnp.arange(call.config.capacity, dtype=jnp.int32))
    return Unexpanded(*out, indices)


def combine(
    expert_outputs: jax.Array, routing: Routing, *, group: Group, implementation: Implementation = "auto"
) -> jax.Array:
    """For each token of this rank, the weighted sum of its experts' output rows.

    Each rank sums its rows of a token in float32 and sends one row. The token's rank adds these sums in float32, in
    rank order. Equal inputs give equal bits. Differentiable in `expert_outputs` and in `routing.weights`. Errors and
    profiles name the gradient's op "scatter".

    Args:
      expert_outputs: [C, H'] bfloat16, float16 or float32: one row per row of `Dispatched.rows`. H' is free.
      routing: the routing of the dispatch. Skipped, invalid and dropped assignments count as zero. If a leaf holds a
        row out of bounds, "kernels" raises `InvalidRoutingError` on all ranks, and "xla" returns NaN for the row's
        token.
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
    check_combined(op, "expert_outputs", expert_outputs, routing, group)
    expert_outputs, routing = vary.vary_alike(group.axis_name, expert_outputs, routing)
    by_kernels = runs_kernels(op, group, implementation, routing.targets.shape[0])
    return run_combine(group, expert_outputs, routing, by_kernels=by_kernels)


@op_scope("dispatch")
def run_dispatch(
    call: DispatchCall, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> Dispatched | Unexpanded:
    """Runs a validated call. Returns `Unexpanded` if `call.config.expand` is false."""
    group, config, num_tokens = call.group, call.config, tokens.shape[0]
    path = call.path(expert_ids.size)
    if path == "in place":
        return dispatch_in_place(config, tokens, expert_ids, weights)
    if path == "kernels":
        return intranode_dispatch(call.op, group, config, tokens, expert_ids, weights)
    agreement = Agreement(
        group._participants,
        call.op,
        num_tokens=num_tokens,
        hidden=tokens.shape[1],
        top_k=expert_ids.shape[1],
        dtype=tokens.dtype,
        chunks=min(call.chunks, num_tokens),
        node_capacity=num_tokens if call.node_capacity is None else min(call.node_capacity, num_tokens),
        by_kernels=call.by_kernels,
        **dataclasses.asdict(config),
    )
    tokens, expert_ids, weights = agreement.enter((tokens, expert_ids, weights))
    if path == "nodes":
        out = internode_dispatch(call, tokens, expert_ids, weights)
    else:
        out, needed = xla_dispatch(tokens, expert_ids, weights, axis_name=group.axis_name, config=config)
        if not config.always_fits(group.size * expert_ids.size):
            out = out._replace(rows=nan_on_overflow(call.op, needed, config.capacity, out.rows, group._keep_error))
    return checkpoint_name(agreement.leave(out), DISPATCHED)


@op_scope("combine")
def run_combine(group: Group, expert_outputs: jax.Array, routing: Routing, *, by_kernels: bool) -> jax.Array:
    if by_kernels and not isinstance(routing, NodeRouting):
        return intranode_combine(group, expert_outputs, routing.weights, routing)
    (capacity, hidden), (received, top_k) = expert_outputs.shape, routing.targets.shape
    agreement = Agreement(
        group._participants,
        "combine",
        capacity=capacity,
        hidden=hidden,
        dtype=expert_outputs.dtype,
        received_tokens=received,
        top_k=top_k,
        chunks=min(routing.chunks, received) if isinstance(routing, NodeRouting) else 1,
        by_kernels=by_kernels,
    )
    expert_outputs, routing = agreement.enter((expert_outputs, routing))
    if isinstance(routing, NodeRouting):
        combined = internode_combine(group, expert_outputs, routing, by_kernels=by_kernels)
    else:
        combined = xla_combine(expert_outputs, routing, axis_name=group.axis_name)
    return checkpoint_name(agreement.leave(combined), COMBINED)
