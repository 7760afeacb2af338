"""The kernels of dispatch and combine, and of their gradients, as FFI calls."""

import jax

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
