"""What dispatch and combine ask of their arguments; errors name the op that was called, as do those of fused ops."""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep._kit import checks, ffi, float8, vary
from jax_ep._kit.checks import OnOverflow
from jax_ep.group import Group
from jax_ep.ops.moe.types import Chunks, DispatchConfig, NodeRouting, Routing, worst_case_capacity


def dispatch_config(
    op: str,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None,
    *,
    group: Group,
    num_experts: int,
    capacity: int | None,
    capacity_factor: float | None,
    wire_dtype: DTypeLike | None,
    on_overflow: OnOverflow,
    alignment: int = 1,
    dequantize: bool = True,
    zero_unused: bool = True,
) -> DispatchConfig:
    """How a dispatch is called. Raises ValueError or TypeError, naming `op` and the argument, if it cannot be."""
    checks.check_rank(op, "tokens", tokens, 2, "[T, H]")
    checks.check_dtype(op, "tokens", tokens, checks.TOKEN_DTYPES)
    checks.check_rank(op, "expert_ids", expert_ids, 2, "[T, K]")
    checks.check_kind(op, "expert_ids", expert_ids, np.integer, "an integer")
    (num_tokens, hidden), top_k = tokens.shape, expert_ids.shape[1]
    checks.check_shape(op, "expert_ids", expert_ids, (num_tokens, top_k), "[T, K]")
    if weights is not None:
        checks.check_kind(op, "weights", weights, np.floating, "a float")
        checks.check_shape(op, "weights", weights, (num_tokens, top_k), "[T, K]")
    checks.check_int(op, "num_experts", num_experts)
    checks.check_int(op, "alignment", alignment)
    checks.check_one_of(op, "on_overflow", on_overflow, checks.ON_OVERFLOW)
    if num_experts % group.size:
        raise ValueError(f"{op}: num_experts must be a multiple of the group's size {group.size}, got {num_experts}")
    if num_experts > ffi.MAX_EXPERTS:
        raise ValueError(f"{op}: num_experts must be at most {ffi.MAX_EXPERTS}, got {num_experts}")
    rows, local_experts = group.size * num_tokens * top_k, num_experts // group.size
    if rows + local_experts * alignment >= 2**31:  # kernels reckon with int32
        raise ValueError(
            f"{op}: alignment must keep {rows} rows, padded for {local_experts} experts, below 2**31, got {alignment}"
        )
    most = worst_case_capacity(group.size, num_tokens, top_k, local_experts, alignment)
    if capacity is None:
        capacity = most
        if capacity_factor is not None:
            capacity = min(most, balanced_capacity(op, capacity_factor, num_tokens * top_k, alignment))
    elif capacity_factor is not None:
        raise ValueError(f"{op}: capacity_factor must be None where capacity is given, got {capacity_factor}")
    else:
        checks.check_int(op, "capacity", capacity)
        if capacity % alignment:
            raise ValueError(f"{op}: capacity must be a multiple of alignment {alignment}, got {capacity}")
    if group.size * capacity >= 2**31:
        raise ValueError(f"{op}: capacity must be below 2**31 / {group.size} rows, got {capacity}")
    wire = checks.canonical_dtype(op, "wire_dtype", wire_dtype)
    checks.check_bool(op, "dequantize", dequantize)
    checks.check_bool(op, "zero_unused", zero_unused)
    if wire is not None and wire != np.dtype(jnp.float8_e4m3fn):
        raise ValueError(f"{op}: wire_dtype must be None or float8_e4m3fn, got {wire}")
    if wire is None and not dequantize:
        raise ValueError(f"{op}: dequantize must be True where wire_dtype is None, as rows are not quantized")
    if wire is not None and hidden % float8.BLOCK:
        raise ValueError(f"{op}: wire_dtype float8_e4m3fn needs H to be a multiple of 128, got H = {hidden}")
    drop = on_overflow == "drop"
    return DispatchConfig(group.size, num_experts, capacity, alignment, wire, drop, dequantize, zero_unused)


def node_tokens(
    op: str, node_capacity: int | Literal["auto"] | None, group: Group, num_experts: int, expert_ids: jax.Array
) -> int | None:
    """The tokens that a rank can send to each node; None: every node is sent all. Raises as `dispatch_config` does."""
    if node_capacity == "auto":
        return group.node_plan(expert_ids.shape[0], expert_ids.shape[1], num_experts).node_capacity
    if node_capacity is not None:
        if isinstance(node_capacity, str):
            raise ValueError(f"{op}: node_capacity must be an int, 'auto' or None, got {node_capacity!r}")
        checks.check_int(op, "node_capacity", node_capacity)
    return node_capacity


def node_chunks(op: str, chunks: int, group: Group, *, by_kernels: bool) -> Chunks:
    """How tokens are cut on their way. Raises as `dispatch_config` does."""
    checks.check_int(op, "chunks", chunks)
    return Chunks(group.nodes, int(chunks) if by_kernels else 1)


def balanced_capacity(op: str, factor: float, assignments: int, alignment: int) -> int:
    """`factor` times the rows of a rank when all receive as many, which are those that each sends, aligned."""
    if isinstance(factor, bool) or not isinstance(factor, int | float | np.integer | np.floating):
        raise TypeError(f"{op}: capacity_factor must be a number or None, got {checks.describe(factor)}")
    if not 0 < factor < math.inf:
        raise ValueError(f"{op}: capacity_factor must be positive and finite, got {factor}")
    return max(1, math.ceil(min(factor, 2.0**31) * assignments / alignment)) * alignment  # no rank takes 2^31 rows


def operands(
    group: Group, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array | None, *others: jax.Array
) -> tuple[jax.Array, ...]:
    """As kernels take them: ids int32, weights float32, all varying over one set of axes."""
    weights = jnp.ones(expert_ids.shape, jnp.float32) if weights is None else jnp.asarray(weights).astype(jnp.float32)
    return vary.vary_alike(group.axis_name, tokens, checks.to_int32(expert_ids), weights, *others)


def check_combined(
    op: str,
    name: str,
    rows: jax.Array,
    routing: Routing,
    group: Group,
    dtypes: Sequence[np.dtype] = checks.TOKEN_DTYPES,
) -> None:
    """Raises unless `rows` [capacity, H'] has a row for each that the dispatch of `routing` delivered here."""
    if not isinstance(routing, Routing):
        raise TypeError(f"{op}: routing must be the Routing of a dispatch, got {checks.describe(routing)}")
    routing.check(op)
    config = routing.config
    if isinstance(routing, NodeRouting) != (group.intranode is not None):
        kinds = ("of one node", "across nodes")
        of, here = kinds[isinstance(routing, NodeRouting)], kinds[group.intranode is not None]
        raise ValueError(f"{op}: routing is of a group {of}, group is {here}")
    if routing.counts.shape[0] != group.size or config.size * group.nodes != group.size:
        raise ValueError(f"{op}: routing is of a group of {routing.counts.shape[0]} ranks, group has {group.size}")
    routing.check_own(op, group.axis_name)
    checks.check_rank(op, name, rows, 2, "[capacity, H']")
    checks.check_dtype(op, name, rows, dtypes)
    if rows.shape[0] != config.capacity:
        raise ValueError(f"{op}: {name} must have the {config.capacity} rows of the dispatch, got {rows.shape}")
