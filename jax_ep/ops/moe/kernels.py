"""The kernels of dispatch and combine, and of their gradients, as FFI calls."""

import jax
import jax.numpy as jnp

from jax_ep._kit import ffi
from jax_ep._kit.float8 import Float8Rows
from jax_ep.group import Group
from jax_ep.ops.moe.types import DispatchConfig, Dispatched, Routing


def dispatch(
    group: Group, config: DispatchConfig, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> Dispatched:
    called = ffi.call(
        "dispatch",
        tokens,
        expert_ids,
        weights,
        group=group,
        dtype=tokens.dtype,
        num_tokens=tokens.shape[0],
        top_k=expert_ids.shape[1],
        hidden=tokens.shape[1],
        num_experts=config.num_experts,
        capacity=config.capacity,
        alignment=config.alignment,
        wire=config.wire or "plain",
        drop=config.drop,
        expand=config.expand,
        zero_unused=config.zero_unused,
    )
    rows = Float8Rows(called["rows"], called["scales"]) if config.wire == "float8_rows" else called["rows"]
    routing = Routing(
        targets=called["targets"],
        row_of=called["row_of"],
        weights=called["weights"],
        counts=called["counts"],
        dropped=called["dropped"],
        invalid=called["invalid"],
        config=config,
        indices=called.get("indices"),
    )
    return Dispatched(rows, called["group_sizes"], routing)


def scatter(group: Group, tokens: jax.Array, routing: Routing, onto: jax.Array | None = None) -> jax.Array:
    """Sends rows [T, H] along a known routing: [capacity, H]. Rows without a token are as in the dispatch, or those of
    `onto`."""
    config = routing.config
    called = ffi.call(
        "scatter",
        tokens,
        routing.targets,
        routing.row_of,
        *([routing.counts] if onto is None else []),
        group=group,
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


def combine(group: Group, expert_outputs: jax.Array, weights: jax.Array, routing: Routing) -> jax.Array:
    return _combine("combine", group, expert_outputs, routing, weights=weights)["combined"]


def return_rows(group: Group, rows: jax.Array, weights: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """Unweighted row sums per token, and scalars [R, T, K] sent back to their assignments, [T, K]."""
    called = _combine("dispatch's backward pass", group, rows, routing, scalars=weights)
    return called["combined"], called["returned"]


def _combine(
    op: str,
    group: Group,
    rows: jax.Array,
    routing: Routing,
    *,
    weights: jax.Array | None = None,
    scalars: jax.Array | None = None,
) -> dict[str, jax.Array]:
    if group.size == 1 and group.platform != "cpu":
        return combine_here(rows, routing, weights, scalars)
    return ffi.call(
        "combine",
        rows,
        *(x for x in (weights, scalars) if x is not None),
        routing.targets,
        routing.row_of,
        op=op,
        group=group,
        dtype=rows.dtype,
        num_tokens=routing.targets.shape[0],
        top_k=routing.targets.shape[1],
        hidden=rows.shape[1],
        capacity=rows.shape[0],
        weighted=weights is not None,
        returning=scalars is not None,
    )


def combine_here(
    rows: jax.Array, routing: Routing, weights: jax.Array | None, scalars: jax.Array | None = None
) -> dict[str, jax.Array]:
    """The op of a rank that exchanges nothing: XLA's gathers run at the speed of memory.

    A row out of bounds makes its token NaN, and so does a dispatch that failed.
    """
    row_of, failed = routing.row_of[0], routing.targets[:, :1] < -1
    total = jnp.where(failed, jnp.nan, jnp.zeros((row_of.shape[0], rows.shape[1]), jnp.float32))
    for k in range(row_of.shape[1]):
        row = row_of[:, k]
        weight = 1.0 if weights is None else weights[0, :, k]
        weight = jnp.where(row < rows.shape[0], weight, jnp.nan)[:, None]
        values = rows.at[row].get(mode="clip", wrap_negative_indices=False).astype(jnp.float32)
        total += jnp.where((row >= 0)[:, None], weight * values, 0)
    results = {"combined": total.astype(rows.dtype)}
    if scalars is not None:
        results["returned"] = jnp.where(row_of >= 0, scalars[0], 0)
    return results
