"""The kernels of dispatch and combine, and of their gradients, as FFI calls: `implementation="kernels"`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._kit import ffi
from jax_ep._kit.float8 import Float8Rows
from jax_ep.group import Group
from jax_ep.ops.moe import settings
from jax_ep.ops.moe.routing import add_rows_of_tokens
from jax_ep.ops.moe.settings import DispatchConfig
from jax_ep.ops.moe.types import Dispatched, Routing, Unexpanded


def ffi_dispatch(
    op: str, group: Group, config: DispatchConfig, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> Dispatched | Unexpanded:
    called = ffi.call(
        "dispatch",
        tokens,
        expert_ids,
        weights,
        ranks=group._ranks,
        called_by=op,
        dtype=tokens.dtype,
        num_tokens=tokens.shape[0],
        top_k=expert_ids.shape[1],
        hidden=tokens.shape[1],
        **config.settings(),
    )
    rows = Float8Rows(called["rows"], called["scales"]) if config.wire == "float8_rows" else called["rows"]
    leaves: dict[str, Any] = {leaf.name: called.get(leaf.name) for leaf in dataclasses.fields(Routing)}
    leaves["config"] = config
    routing = Routing(**leaves)
    if config.expand:
        return Dispatched(rows, called["group_sizes"], routing)
    return Unexpanded(rows, called["group_sizes"], routing, called["indices"])


def ffi_scatter(group: Group, tokens: jax.Array, routing: Routing, onto: jax.Array | None = None) -> jax.Array:
    """Sends rows [T, H] along a known routing: [capacity, H].

    Rows without a token are those of `onto`, or as a dispatch leaves them (`DispatchConfig.zero_unused`).
    """
    config = routing.config
    called = ffi.call(
        "scatter",
        tokens,
        routing.targets,
        routing.row_of,
        *([routing.counts] if onto is None else []),
        ranks=group._ranks,
        updated=onto,
        onto=onto is not None,
        dtype=tokens.dtype,
        num_tokens=tokens.shape[0],
        top_k=routing.targets.shape[1],
        hidden=tokens.shape[1],
        local_experts=config.local_experts,
        capacity=config.capacity,
        alignment=config.alignment,
        zero_unused=config.zero_unused,
    )
    return called["rows"]


def ffi_combine(group: Group, expert_outputs: jax.Array, weights: jax.Array, routing: Routing) -> jax.Array:
    if settings.is_alone_on_gpu(group):
        return _combine_locally(expert_outputs, routing, weights)
    return _combine(group, expert_outputs, routing, weights=weights)["combined"]


def ffi_return_rows(group: Group, rows: jax.Array, scalars: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """Unweighted row sums per token, and scalars [R, T, K] sent back to their assignments, [T, K]."""
    if settings.is_alone_on_gpu(group):
        return _combine_locally(rows, routing), jnp.where(routing.row_of[0] >= 0, scalars[0], 0)
    called = _combine(group, rows, routing, scalars=scalars)
    return called["combined"], called["returned"]


def _combine(
    group: Group, rows: jax.Array, routing: Routing, weights: jax.Array | None = None, scalars: jax.Array | None = None
) -> dict[str, jax.Array]:
    return ffi.call(
        "combine",
        rows,
        *(each for each in (weights, scalars) if each is not None),
        routing.targets,
        routing.row_of,
        ranks=group._ranks,
        dtype=rows.dtype,
        num_tokens=routing.targets.shape[0],
        top_k=routing.targets.shape[1],
        hidden=rows.shape[1],
        capacity=rows.shape[0],
        weighted=weights is not None,
        returning=scalars is not None,
    )


def _combine_locally(rows: jax.Array, routing: Routing, weights: jax.Array | None = None) -> jax.Array:
    """`combine` of a rank that exchanges nothing: XLA's gathers run at the speed of memory.

    The tokens of a dispatch that failed become NaN.
    """
    row_of = routing.row_of[0]
    nothing = jnp.zeros((row_of.shape[0], rows.shape[1]), jnp.float32)
    undelivered = (routing.targets[:, :1] < -1).any(axis=1, keepdims=True)  # as ffi/comm/result.h; K may be 0
    total = jnp.where(undelivered, jnp.nan, nothing)
    return add_rows_of_tokens(total, rows, row_of, None if weights is None else weights[0]).astype(rows.dtype)
