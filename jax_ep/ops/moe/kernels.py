"""The kernels of dispatch and combine, as FFI calls, with their derivatives, forward and backward.

All are linear in their rows. Each kernel serves the transpose of another:

| forward op     | its transpose                                      | kernel of the transpose                    |
|----------------|----------------------------------------------------|--------------------------------------------|
| dispatch       | `return_rows`: sums rows per token, no weights     | combine, which also returns the weights'   |
| combine        | `scatter` of the cotangent, then rows are weighed  | scatter: a dispatch of a known routing     |
| `scatter`      | `return_rows`                                      | combine; the returned weights are not used |
| `return_rows`  | `scatter`; weights go by an all-gather             | scatter                                    |

With expand=False the same kernels take `Routing.of_slots`. The tangent of dispatch is a `scatter`, the tangent of
combine is a combine. Each chunk of tokens is a call with its part of the routing.

The results of dispatch and combine have names for policies of `jax.checkpoint`.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._kit import ffi
from jax_ep._kit.checks import PyTree
from jax_ep._kit.float8 import Float8Rows
from jax_ep._kit.linear import linear
from jax_ep._kit.scopes import op_scope
from jax_ep.group import Group
from jax_ep.ops.moe import settings
from jax_ep.ops.moe.settings import DispatchConfig
from jax_ep.ops.moe.types import COMBINED, DISPATCHED, NO_GRADIENT, WHOLE, Chunks, Dispatched, Routing, Unexpanded
from jax_ep.ops.moe.xla import add_rows_of_tokens

_Combined = tuple[jax.Array, jax.Array, Routing]  # experts' outputs, their weights, and the routing


@op_scope("scatter")
def scatter(group: Group, tokens: jax.Array, routing: Routing, onto: jax.Array | None = None) -> jax.Array:
    """Sends rows [T, H] along a known routing: [C, H].

    Rows without a token are those of `onto`, or follow `DispatchConfig.zero_unused`. Several calls may write into one
    array. They write different rows, so the cotangent of `onto` is that of the result.
    """

    config = routing.config

    def forward(routing: Routing, operands: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        tokens, onto = operands
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

    def backward(routing: Routing, cotangent: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        tokens, _ = return_rows(group, routing, (cotangent, jnp.zeros_like(routing.weights)))
        return tokens, None if onto is None else cotangent

    return linear(forward, backward, jax.lax.stop_gradient(routing), (tokens, onto))


def return_rows(group: Group, routing: Routing, operands: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Sums of rows [C, H] per token, and weights [R, T, K] sent back to their assignments: [T, H] and [T, K].

    The transpose of `_to_rows`.
    """

    def forward(routing: Routing, operands: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows, weights = operands
        if settings.is_alone_on_gpu(group):
            return _combine_locally(rows, routing), jnp.where(routing.row_of[0] >= 0, weights[0], 0)
        called = _call_combine(group, rows, routing, returned=weights)
        return called["combined"], called["returned"]

    return linear(forward, partial(_to_rows, group), jax.lax.stop_gradient(routing), operands)


def scatter_all(group: Group, tokens: Sequence[jax.Array], routings: Sequence[Routing]) -> jax.Array:
    """`scatter` of tokens in chunks into the same rows, each along its part of a routing.

    With several chunks the rows are zeroed first, because each call writes only its own rows.
    """
    if len(routings) == 1:
        return scatter(group, tokens[0], routings[0])
    received = jnp.zeros_like(tokens[0], shape=(routings[0].config.capacity, tokens[0].shape[1]))
    for chunk, routing in zip(tokens, routings, strict=True):
        received = scatter(group, chunk, routing, received)
    return received


@op_scope("combine")
def intranode_combine(group: Group, expert_outputs: jax.Array, weights: jax.Array, routing: Routing) -> jax.Array:
    return combine_chunks(group, WHOLE, expert_outputs, weights, routing)[0]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def combine_chunks(
    group: Group, chunks: Chunks, expert_outputs: jax.Array, weights: jax.Array, routing: Routing
) -> list[jax.Array]:
    routings = chunks.cut(dataclasses.replace(routing, weights=weights))
    if settings.is_alone_on_gpu(group):
        return [_combine_locally(expert_outputs, part, part.weights) for part in routings]
    return [_call_combine(group, expert_outputs, part)["combined"] for part in routings]


def of_assignments(by_row: jax.Array, routing: Routing) -> jax.Array:
    """Values [C] of rows, by assignment: [R, T, K], 0 for assignments without a row."""
    return jnp.where(routing.row_of >= 0, by_row.at[routing.row_of].get(mode="clip"), 0)


def weighed(rows: jax.Array, row_weights: jax.Array) -> jax.Array:
    """Rows [C, N] times weights [C], rounded once, in the dtype of `rows`."""
    return (rows.astype(jnp.float32) * row_weights[:, None]).astype(rows.dtype)


def inner_products(rows: jax.Array, others: jax.Array) -> jax.Array:
    """[C]: the inner product of each row [C, N] with the same row of `others`, in float32."""
    return jnp.sum(rows.astype(jnp.float32) * others.astype(jnp.float32), axis=1)


def sent_weights(group: Group, weights: jax.Array, routing: Routing) -> jax.Array:
    """Weights [T, K] of each rank, exchanged as by a dispatch: [R, T, K]."""
    return jnp.where(routing.row_of >= 0, jax.lax.all_gather(weights, group.axis_name), 0)


def intranode_dispatch(
    op: str, group: Group, config: DispatchConfig, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> Dispatched | Unexpanded:
    """Runs the kernel for `op`. `_with_derivative` attaches the derivative."""
    constant_tokens, constant_weights = jax.lax.stop_gradient((tokens, weights))
    called = ffi.call(
        "dispatch",
        constant_tokens,
        expert_ids,
        constant_weights,
        ranks=group._ranks,
        called_by=op,
        dtype=tokens.dtype,
        num_tokens=tokens.shape[0],
        top_k=expert_ids.shape[1],
        hidden=tokens.shape[1],
        **config.settings(),
    )
    rows = Float8Rows(called["rows"], called["scales"]) if config.wire == "float8_rows" else called["rows"]
    names = {leaf.name for leaf in dataclasses.fields(Routing)} - {"config"}
    routing = Routing(**{name: called[name] for name in names}, config=config)
    out = Dispatched(rows, called["group_sizes"], routing)
    out = checkpoint_name(out if config.expand else Unexpanded(*out, called["indices"]), DISPATCHED)
    rows, routed_weights = _with_derivative(group, config, tokens, weights, out)
    return out._replace(rows=rows, routing=dataclasses.replace(out.routing, weights=routed_weights))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _with_derivative(
    group: Group, config: DispatchConfig, tokens: jax.Array, weights: jax.Array, out: Dispatched | Unexpanded
) -> tuple[PyTree, jax.Array]:
    """The floats of a dispatch, without the integers: JAX has no types for tangents of integers."""
    return out.rows, out.routing.weights


@_with_derivative.defjvp
def _with_derivative_jvp(group: Group, config: DispatchConfig, primals: PyTree, tangents: PyTree) -> PyTree:
    if config.wire == "float8_rows":
        raise TypeError(NO_GRADIENT)
    there, back = (_to_rows, return_rows) if config.expand else (_to_slots, _from_slots)
    # Derivatives of this derivative need `_with_derivative` again.
    tangent = linear(partial(there, group), partial(back, group), primals[2].routing, tuple(tangents[:2]))
    return _with_derivative(group, config, *primals), tangent


def _to_rows(group: Group, routing: Routing, operands: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Sends tokens [T, H] and weights [T, K] as a dispatch does: [C, H] and [R, T, K]."""
    tokens, weights = operands
    return scatter(group, tokens, routing), sent_weights(group, weights, routing)


def _to_slots(group: Group, routing: Routing, operands: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Sends tokens to their slots [R T, H] at ranks where they have a row, and weights. Other slots are undefined."""
    tokens, weights = operands
    if group.size > 1:
        tokens = scatter(group, tokens, routing.of_slots(jax.lax.axis_index(group.axis_name)))
    return tokens, sent_weights(group, weights, routing)


def _from_slots(group: Group, routing: Routing, operands: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The transpose of `_to_slots`."""
    slots, weights = operands
    arrived = jnp.where(routing.row_of >= 0, weights, 0)
    if group.size == 1:
        return slots, arrived[0]
    along = routing.of_slots(jax.lax.axis_index(group.axis_name))
    tokens, _ = return_rows(group, along, (slots, jnp.zeros_like(weights)))
    return tokens, jax.lax.psum_scatter(arrived, group.axis_name)


@combine_chunks.defjvp
def _combine_jvp(group: Group, chunks: Chunks, primals: _Combined, tangents: _Combined) -> PyTree:
    expert_outputs, weights, routing = primals
    out = checkpoint_name(combine_chunks(group, chunks, expert_outputs, weights, routing), COMBINED)

    def forward(residuals: _Combined, tangents: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
        (outputs, weights, routing), (d_outputs, d_weights) = residuals, tangents
        by_outputs = combine_chunks(group, chunks, d_outputs, weights, routing)
        by_weights = combine_chunks(group, chunks, outputs, d_weights, routing)
        return [a + b for a, b in zip(by_outputs, by_weights, strict=True)]

    def backward(residuals: _Combined, cotangents: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        outputs, weights, routing = residuals
        d_rows = scatter_all(group, cotangents, chunks.cut(routing))
        d_outputs = weighed(d_rows, routing.by_row(weights, 0))
        return d_outputs, of_assignments(inner_products(d_rows, outputs), routing)

    return out, linear(forward, backward, (expert_outputs, weights, routing), tangents[:2])


def _call_combine(
    group: Group, rows: jax.Array, routing: Routing, returned: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Sums of rows times `routing.weights`; or sums of rows, and the scalars that are to be `returned`."""
    return ffi.call(
        "combine",
        rows,
        routing.weights if returned is None else returned,
        routing.targets,
        routing.row_of,
        ranks=group._ranks,
        dtype=rows.dtype,
        num_tokens=routing.targets.shape[0],
        top_k=routing.targets.shape[1],
        hidden=rows.shape[1],
        capacity=rows.shape[0],
        weighted=returned is None,
        returning=returned is not None,
    )


def _combine_locally(rows: jax.Array, routing: Routing, weights: jax.Array | None = None) -> jax.Array:
    """`combine` of a group of one rank: XLA's gathers run at the speed of memory. Tokens of a failed dispatch become
    NaN.
    """
    row_of = routing.row_of[0]
    nothing = jnp.zeros((row_of.shape[0], rows.shape[1]), jnp.float32)
    undelivered = (routing.targets[:, :1] < -1).any(axis=1, keepdims=True)  # as ffi/comm/result.h; K may be 0
    total = jnp.where(undelivered, jnp.nan, nothing)
    return add_rows_of_tokens(total, rows, row_of, None if weights is None else weights[0]).astype(rows.dtype)
