"""The kernels of dispatch and combine, and of their gradients, as FFI calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._core import checks, ffi
from jax_ep.group import Group
from jax_ep.ops.moe.types import FP8_BLOCK, DispatchConfig, Dispatched, Float8Rows, Routing


def dispatch(
    group: Group, config: DispatchConfig, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> Dispatched:
    (num_tokens, hidden), top_k = tokens.shape, expert_ids.shape[1]
    table = (config.size, num_tokens, top_k)
    compiled = ffi.library(group.platform)
    float8 = not config.dequantize
    wire_float8 = config.wire_dtype is not None
    early = compiled.early_tokens(num_tokens, top_k, wire_float8, float8)
    slot_bytes = compiled.landing_slot_bytes(hidden, tokens.dtype.itemsize, wire_float8, float8)
    scales_row = hidden // FP8_BLOCK if float8 else 0
    result = functools.partial(checks.result_type, like=tokens)
    out, scales, sizes, targets, rows, arrived, counts, dropped, invalid, *_ = ffi.call(
        "dispatch",
        (
            result((config.capacity, hidden), config.wire_dtype if float8 else tokens.dtype),
            result((config.capacity, scales_row), jnp.float32),
            result((config.local_experts,), jnp.int32),
            result((num_tokens, top_k), jnp.int32),
            result(table, jnp.int32),
            result(table, jnp.float32),
            result((config.size, config.local_experts), jnp.int32),
            result((1,), jnp.int32),
            result((1,), jnp.int32),
            result((compiled.route_scratch(config.num_experts),), jnp.int32),
            result((config.size * early, slot_bytes), jnp.uint8),  # where they land
        ),
        tokens,
        expert_ids,
        weights,
        group=group,
        alignment=np.int32(config.alignment),
        drop=config.drop,
        wire_float8=wire_float8,
    )
    rows_or_float8 = Float8Rows(out, scales) if float8 else out
    return Dispatched(rows_or_float8, sizes, Routing(targets, rows, arrived, counts, dropped, invalid, config))


def scatter(group: Group, tokens: jax.Array, routing: Routing) -> jax.Array:
    """Rows [T, H] along a routing that is already known: [capacity, H]."""
    config = routing.config
    return ffi.call(
        "scatter",
        checks.result_type((config.capacity, tokens.shape[1]), tokens.dtype, tokens),
        tokens,
        routing.targets,
        routing.rows,
        routing.counts,
        op="the gradient of combine",
        group=group,
        alignment=np.int32(config.alignment),
    )


def combine(group: Group, expert_outputs: jax.Array, weights: jax.Array, routing: Routing) -> jax.Array:
    none = jnp.zeros((0,), jnp.float32)
    return _combine("combine", group, expert_outputs, weights, none, (0,), routing)[0]


def return_rows(group: Group, rows: jax.Array, weights: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """Unweighted row sums per token, and [R, T, K] scalars returned to the [T, K] they belong to."""
    none = jnp.zeros((0,), jnp.float32)
    return _combine("the gradient of dispatch", group, rows, none, weights, routing.targets.shape, routing)


def _combine(
    op: str,
    group: Group,
    rows: jax.Array,
    weights: jax.Array,
    scalars: jax.Array,
    returned: tuple[int, ...],
    routing: Routing,
) -> tuple[jax.Array, jax.Array]:
    num_tokens, hidden = routing.targets.shape[0], rows.shape[1]
    result = functools.partial(checks.result_type, like=rows)
    out, back, _ = ffi.call(
        "combine",
        (
            result((num_tokens, hidden), rows.dtype),
            result(returned, jnp.float32),
            result((routing.config.size, num_tokens, hidden), rows.dtype),  # where partial sums land
        ),
        rows,
        weights,
        scalars,
        routing.targets,
        routing.rows,
        op=op,
        group=group,
    )
    return out, back
