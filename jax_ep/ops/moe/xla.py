"""dispatch and combine in plain jax.numpy and jax.lax: `implementation="xla"`.

Written to be read, not to be fast: every rank gathers all assignments and derives the same layout from them.
"""

import jax
import jax.numpy as jnp

from jax_ep._kit.checks import AxisName
from jax_ep._kit.float8 import packed, rows_from_float8, rows_to_float8, unpacked
from jax_ep._kit.linear import without_gradient
from jax_ep.ops.moe.routing import add_rows_of_tokens, layout, routing_of
from jax_ep.ops.moe.settings import DispatchConfig
from jax_ep.ops.moe.types import NO_GRADIENT, Dispatched, Routing, Unexpanded


def xla_dispatch(
    tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array, *, axis_name: AxisName, config: DispatchConfig
) -> tuple[Dispatched | Unexpanded, jax.Array]:
    """`jax_ep.dispatch`, and the rows that every rank needs, [R] int32."""
    (num_tokens, top_k), size = expert_ids.shape, config.size
    me = jax.lax.axis_index(axis_name)
    sent = tokens
    if config.wire == "float8_rows":
        sent = packed(rows_to_float8(without_gradient(NO_GRADIENT, tokens)))
    elif config.wire == "float8":  # the gradient passes straight through the rounding
        rounded = rows_from_float8(rows_to_float8(tokens), tokens.dtype)
        sent = jax.lax.stop_gradient(rounded) + (tokens - jax.lax.stop_gradient(tokens))

    placed = layout(jax.lax.all_gather(expert_ids, axis_name).reshape(-1), config, size)
    routing = routing_of(placed, jax.lax.all_gather(weights, axis_name), me, config, expert_ids)
    source = jnp.arange(routing.row_of.size) // max(top_k, 1)
    all_tokens = jax.lax.all_gather(sent, axis_name).reshape(size * num_tokens, sent.shape[1])
    indices, received = None, all_tokens
    if config.expand:
        rows = jnp.where(routing.row_of >= 0, routing.row_of, config.capacity).reshape(-1)
        received = jnp.zeros((config.capacity, sent.shape[1]), sent.dtype)
        received = received.at[rows].set(all_tokens[source], mode="drop")
    else:
        indices = routing.by_row(source.astype(jnp.int32).reshape(routing.row_of.shape), -1)
        if not config.drop:  # an index out of bounds is a row of NaN
            indices = jnp.where((placed.needed > config.capacity).any(), jnp.iinfo(jnp.int32).min, indices)
    if config.wire == "float8_rows":
        received = unpacked(received, tokens.shape[1])
    out = Dispatched(received, placed.group_sizes[me], routing)
    return out if indices is None else Unexpanded(*out, indices), placed.needed


def xla_scatter(tokens: jax.Array, routing: Routing, *, axis_name: AxisName) -> jax.Array:
    """Sends rows [T, H] along a known routing: [capacity, H]."""
    size, num_tokens, top_k = routing.row_of.shape
    if not num_tokens:  # jax.numpy takes nothing from an empty array
        return jnp.zeros_like(tokens, shape=(routing.config.capacity, tokens.shape[1]))
    all_tokens = jax.lax.all_gather(tokens, axis_name).reshape(size * num_tokens, tokens.shape[1])
    source = jnp.arange(routing.row_of.size, dtype=jnp.int32) // max(top_k, 1)
    source_of_row = routing.by_row(source.reshape(routing.row_of.shape), all_tokens.shape[0])
    return all_tokens.at[source_of_row].get(mode="fill", fill_value=0)  # unlike a scatter, it has a transpose


def xla_combine(expert_outputs: jax.Array, routing: Routing, *, axis_name: AxisName) -> jax.Array:
    """`jax_ep.combine`: partial sums on the expert's rank, then the sum of the ranks' partial sums in rank order."""
    zeros = jnp.zeros((*routing.row_of.shape[:2], expert_outputs.shape[1]), jnp.float32)
    partial = add_rows_of_tokens(zeros, expert_outputs, routing.row_of, routing.weights)
    partials = jax.lax.all_to_all(partial.astype(expert_outputs.dtype), axis_name, 0, 0)
    total = jnp.zeros(partials.shape[1:], jnp.float32)
    for rank in range(partials.shape[0]):
        total += partials[rank].astype(jnp.float32)
    return total.astype(expert_outputs.dtype)
