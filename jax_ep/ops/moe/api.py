"""dispatch and combine: tokens to the ranks that own their experts, and the weighted sum of the answers back.

Both are linear in their float operands and each is the other's backward, up to the routing weights:
dispatch's backward sums cotangent rows per token, combine's backward sends the cotangent along the same routing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep._core import checks, ffi
from jax_ep.group import Group
from jax_ep.ops.moe import kernels, xla
from jax_ep.ops.moe.types import FP8_BLOCK, DispatchConfig, Dispatched, Routing, worst_case_capacity


def dispatch(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None = None,
    *,
    group: Group,
    num_experts: int,
    capacity: int | None = None,
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
      expert_ids: [T, K] int32 in [0, num_experts); -1 skips. Others are counted in `routing.invalid` and skipped.
      weights: [T, K] float32 for `combine`, or None for 1.
      group: the open group of the ranks.
      num_experts: E, a multiple of the group's size.
      capacity: C, the rows a rank can receive; a multiple of `alignment`. Default: size * T * min(K, E / size) rows
        plus the padding of every expert, the most there can be when no token names an expert twice.
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
    group.check()
    checks.check_inside_shard_map(op, group.mesh, group.axis_name)
    config = _dispatch_config(
        tokens, expert_ids, weights, group, num_experts, capacity, alignment, wire_dtype, dequantize, on_overflow
    )
    checks.check_one_of(op, "implementation", implementation, checks.IMPLEMENTATIONS)
    if weights is None:
        weights = jnp.ones(expert_ids.shape, jnp.float32)
    tokens, expert_ids, weights = checks.vary_alike(group.axis_name, tokens, expert_ids, weights)
    tokens, expert_ids, weights = (checks.not_batched(op, x) for x in (tokens, expert_ids, weights))
    if group.resolve(op, implementation) == "xla":
        return _dispatch_xla(group, config, tokens, expert_ids, weights)
    return _dispatch(group, config, tokens, expert_ids, weights)


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
    group.check()
    checks.check_inside_shard_map(op, group.mesh, group.axis_name)
    checks.check_one_of(op, "implementation", implementation, checks.IMPLEMENTATIONS)
    if not isinstance(routing, Routing):
        raise TypeError(f"combine: routing must be the Routing of a dispatch, got {checks.describe(routing)}")
    routing.check(op)
    config = routing.config
    if config.size != group.size:
        raise ValueError(f"combine: routing is of a group of {config.size} ranks, group has {group.size}")
    routing.check_own(op, group.axis_name)
    checks.check_rank(op, "expert_outputs", expert_outputs, 2, "[capacity, H']")
    checks.check_dtype(op, "expert_outputs", expert_outputs, checks.TOKEN_DTYPES)
    if expert_outputs.shape[0] != config.capacity:
        raise ValueError(
            f"combine: expert_outputs must have the {config.capacity} rows of the dispatch, got {expert_outputs.shape}"
        )
    leaves, treedef = jax.tree.flatten(routing)
    expert_outputs, *leaves = checks.vary_alike(group.axis_name, expert_outputs, *leaves)
    expert_outputs, *leaves = (checks.not_batched(op, x) for x in (expert_outputs, *leaves))
    routing = jax.tree.unflatten(treedef, leaves)
    if group.resolve(op, implementation) == "xla":
        return xla.combine(expert_outputs, routing, axis_name=group.axis_name)
    return _combine(group, expert_outputs, routing.weights, routing)


def _dispatch_config(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None,
    group: Group,
    num_experts: int,
    capacity: int | None,
    alignment: int,
    wire_dtype: DTypeLike | None,
    dequantize: bool,
    on_overflow: str,
) -> DispatchConfig:
    op = "dispatch"
    checks.check_rank(op, "tokens", tokens, 2, "[T, H]")
    checks.check_dtype(op, "tokens", tokens, checks.TOKEN_DTYPES)
    checks.check_rank(op, "expert_ids", expert_ids, 2, "[T, K]")
    checks.check_dtype(op, "expert_ids", expert_ids, (np.dtype(np.int32),))
    (num_tokens, hidden), top_k = tokens.shape, expert_ids.shape[1]
    checks.check_shape(op, "expert_ids", expert_ids, (num_tokens, top_k), "[T, K]")
    if weights is not None:
        checks.check_dtype(op, "weights", weights, (np.dtype(np.float32),))
        checks.check_shape(op, "weights", weights, (num_tokens, top_k), "[T, K]")
    checks.check_positive(op, "num_experts", num_experts)
    checks.check_positive(op, "alignment", alignment)
    checks.check_one_of(op, "on_overflow", on_overflow, ("raise", "drop"))
    if num_experts % group.size:
        raise ValueError(
            f"dispatch: num_experts must be a multiple of the group's size {group.size}, got {num_experts}"
        )
    if num_experts > ffi.MAX_EXPERTS:
        raise ValueError(f"dispatch: num_experts must be at most {ffi.MAX_EXPERTS}, got {num_experts}")
    rows, local_experts = group.size * num_tokens * top_k, num_experts // group.size
    if rows + local_experts * alignment >= 2**31:  # kernels reckon with int32
        raise ValueError(
            f"dispatch: alignment must keep {rows} rows, padded for {local_experts} experts, below 2**31, "
            f"got {alignment}"
        )
    if capacity is None:
        capacity = worst_case_capacity(group.size, num_tokens, top_k, local_experts, alignment)
    else:
        checks.check_positive(op, "capacity", capacity)
        if capacity % alignment:
            raise ValueError(f"dispatch: capacity must be a multiple of alignment {alignment}, got {capacity}")
    if group.size * capacity >= 2**31:
        raise ValueError(f"dispatch: capacity must be below 2**31 / {group.size} rows, got {capacity}")
    wire = checks.canonical_dtype(op, "wire_dtype", wire_dtype)
    checks.check_bool(op, "dequantize", dequantize)
    if wire is not None and wire != np.dtype(jnp.float8_e4m3fn):
        raise ValueError(f"dispatch: wire_dtype must be None or float8_e4m3fn, got {wire}")
    if wire is None and not dequantize:
        raise ValueError("dispatch: dequantize must be True where wire_dtype is None, as rows are not quantized")
    if wire is not None and hidden % FP8_BLOCK:
        raise ValueError(f"dispatch: wire_dtype float8_e4m3fn needs H to be a multiple of 128, got H = {hidden}")
    return DispatchConfig(group.size, num_experts, capacity, alignment, wire, on_overflow == "drop", dequantize)


def _dispatch_xla(
    group: Group, config: DispatchConfig, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> Dispatched:
    out, needed = xla.dispatch(tokens, expert_ids, weights, axis_name=group.axis_name, config=config)
    if config.drop:
        return out
    return out._replace(tokens=group.nan_on_overflow("dispatch", needed, config.capacity, out.tokens))


# Each op with its backward pass. The forward rules call the op, not the kernel, so that they can be differentiated too.
_dispatch = jax.custom_vjp(kernels.dispatch, nondiff_argnums=(0, 1))
_combine = jax.custom_vjp(kernels.combine, nondiff_argnums=(0,))
_scatter = jax.custom_vjp(kernels.scatter, nondiff_argnums=(0,))
_return = jax.custom_vjp(kernels.return_rows, nondiff_argnums=(0,))


def _dispatch_fwd(
    group: Group, config: DispatchConfig, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> tuple[Dispatched, Routing]:
    if not config.dequantize:
        raise TypeError("dispatch: dequantize=False has no gradient; differentiate with dequantize=True")
    out = _dispatch(group, config, tokens, expert_ids, weights)
    return out, out.routing


def _dispatch_bwd(group: Group, config: DispatchConfig, routing: Routing, cotangent: Dispatched) -> Any:
    d_tokens, d_weights = _return(group, cotangent.tokens, cotangent.routing.weights, routing)
    return d_tokens, None, d_weights


def _combine_fwd(group: Group, expert_outputs: jax.Array, weights: jax.Array, routing: Routing) -> Any:
    return _combine(group, expert_outputs, weights, routing), (expert_outputs, weights, routing)


def _combine_bwd(group: Group, residuals: Any, cotangent: jax.Array) -> Any:
    expert_outputs, weights, routing = residuals
    present = routing.rows >= 0
    place = jnp.where(present, routing.rows, routing.config.capacity)
    arrived = _scatter(group, cotangent, routing).astype(jnp.float32)
    row_weights = jnp.zeros(routing.config.capacity, jnp.float32).at[place].set(weights, mode="drop")
    d_outputs = (arrived * row_weights[:, None]).astype(expert_outputs.dtype)
    products = jnp.sum(arrived * expert_outputs.astype(jnp.float32), axis=1)
    d_weights = jnp.where(present, products.at[place].get(mode="clip"), 0)
    return d_outputs, d_weights, None


def _scatter_fwd(group: Group, tokens: jax.Array, routing: Routing) -> tuple[jax.Array, Routing]:
    return _scatter(group, tokens, routing), routing


def _scatter_bwd(group: Group, routing: Routing, cotangent: jax.Array) -> Any:
    return _return(group, cotangent, jnp.zeros_like(routing.weights), routing)[0], None


def _return_fwd(group: Group, rows: jax.Array, weights: jax.Array, routing: Routing) -> Any:
    return _return(group, rows, weights, routing), routing


def _return_bwd(group: Group, routing: Routing, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    d_tokens, d_weights = cotangents
    sent = jax.lax.all_gather(d_weights, group.axis_name)
    return _scatter(group, d_tokens, routing), jnp.where(routing.rows >= 0, sent, 0), None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)
_combine.defvjp(_combine_fwd, _combine_bwd)
_scatter.defvjp(_scatter_fwd, _scatter_bwd)
_return.defvjp(_return_fwd, _return_bwd)
