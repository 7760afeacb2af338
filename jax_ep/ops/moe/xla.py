"""dispatch and combine in plain jax.numpy and jax.lax: `implementation="xla"`.

Written to be read, not to be fast: every rank gathers all assignments and derives the same layout. `dispatch_in_place`
moves nothing: a grouped product reads the tokens through an index list.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import pallas_kernels
from jax_ep._kit.batches import by_kernel_on_gpus
from jax_ep._kit.checks import AxisName
from jax_ep._kit.float8 import packed, rows_from_float8, rows_to_float8, unpacked
from jax_ep._kit.linear import without_gradient
from jax_ep._kit.vary import vary_alike
from jax_ep.ops.matmul.rows import ZERO_ROW
from jax_ep.ops.moe.layout import Layout, count_invalid, layout
from jax_ep.ops.moe.settings import DispatchConfig
from jax_ep.ops.moe.types import DISPATCHED, NO_GRADIENT, Dispatched, Routing, Unexpanded
from jax_ep.pallas_kernels.counting_sort import MOST_IDS


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
    if not num_tokens:  # jax.numpy cannot index an empty array
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


def routing_of(
    placed: Layout, weights: jax.Array, me: jax.Array | int, config: DispatchConfig, expert_ids: jax.Array
) -> Routing:
    """The routing of rank `me`, from its `expert_ids` [T, K] and the `weights` [R, T, K] of all ranks."""
    row, owner, dropped = (x.reshape(weights.shape) for x in (placed.row, placed.owner, placed.dropped))
    row_of = jnp.where(owner == me, row, -1)
    targets = jnp.where(row >= 0, owner * config.capacity + row, -1)
    counts, _ = vary_alike(None, placed.counts, expert_ids)  # also where there are no ids to count
    by_node = counts.reshape(-1, config.size, config.size, config.local_experts)  # of the source
    return Routing(
        targets=targets[me].astype(jnp.int32),
        row_of=row_of,
        weights=jnp.where(row_of >= 0, weights, 0),
        counts=by_node[:, :, me].sum(axis=0, dtype=jnp.int32),
        dropped=dropped[me].sum(dtype=jnp.int32)[None],
        invalid=count_invalid(expert_ids, config.num_experts),
        config=config,
    )


def dispatch_in_place(
    config: DispatchConfig, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> Unexpanded:
    """A dispatch in a group of one rank: rows stay in `tokens`, and `indices` has the token of each row."""
    placed, order = _sorted(config, expert_ids.reshape(-1))
    routing = routing_of(placed, weights[None], 0, config, expert_ids)
    indices = jnp.where(order >= 0, order // max(expert_ids.shape[1], 1), ZERO_ROW)
    return Unexpanded(tokens, *checkpoint_name((placed.group_sizes[0], routing, indices), DISPATCHED))


def _sorted(config: DispatchConfig, ids: jax.Array) -> tuple[Layout, jax.Array]:
    """The layout of the assignments [N] int32 of a group of one rank, and the assignment of each row, [C] int32, or -1.

    On GPUs one kernel sorts up to `MOST_IDS` assignments, as in decoding. XLA would launch eight.
    """
    capacity = config.capacity

    def by_xla(ids: jax.Array) -> tuple[Layout, jax.Array]:
        placed = layout(ids, config, 1)
        row = jnp.where(placed.row >= 0, placed.row, capacity)
        order = jnp.full_like(row, -1, shape=capacity)
        return placed, order.at[row].set(jnp.arange(ids.size, dtype=jnp.int32), mode="drop")

    def by_kernel(ids: jax.Array, interpret: bool) -> tuple[Layout, jax.Array]:
        row, order, sizes = pallas_kernels.counting_sort(ids, config.num_experts, interpret=interpret)
        placed = Layout(
            owner=jnp.zeros_like(row),
            row=row,
            dropped=jnp.zeros_like(row, bool),
            group_sizes=sizes[None],
            counts=sizes[None],
            needed=sizes.sum(dtype=jnp.int32)[None],
        )
        return placed, jnp.pad(order, (0, capacity - ids.size), constant_values=-1)

    few = 0 < ids.size <= min(MOST_IDS, capacity) and config.alignment == 1
    return by_kernel_on_gpus(by_kernel, by_xla)(ids) if few else by_xla(ids)


def add_rows_of_tokens(total: jax.Array, rows: jax.Array, row_of: jax.Array, weights: jax.Array | None) -> jax.Array:
    """`total` [..., T, N] float32 plus each token's rows, times their weights.

    Args:
      rows: [C, N].
      row_of: [..., T, K]; -1 is no row, and a row from C on makes its token NaN.
      weights: as `row_of`, or None for 1.
    """
    for k in range(row_of.shape[-1]):
        row = row_of[..., k]
        values = jnp.take(rows, row, axis=0, mode="clip").astype(jnp.float32)
        weight = jnp.where(row < rows.shape[0], 1.0 if weights is None else weights[..., k], jnp.nan)
        total += jnp.where((row >= 0)[..., None], weight[..., None] * values, 0)
    return total
