"""Where the assignments of a dispatch lie, and sums of rows by token, in plain jax.numpy.

For `implementation="xla"`, a group of one GPU, the exchange between nodes, and layers of shared tokens. Here is also
the dispatch that moves nothing: a grouped product reads the tokens through an index list.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._kit.vary import vary_alike
from jax_ep.ops.matmul.rows import ZERO_ROW
from jax_ep.ops.moe.quotas import rows_of_experts, rows_of_sources, segments
from jax_ep.ops.moe.settings import DispatchConfig
from jax_ep.ops.moe.types import DISPATCHED, Routing, Unexpanded

_BLOCK = 32  # assignments


class Layout(NamedTuple):
    """The row of every assignment of every rank, at the rank that owns its expert. N = R * T * K."""

    owner: jax.Array  # [N] rank, meaningless where row is -1
    row: jax.Array  # [N] row at the owner, -1 if there is none
    dropped: jax.Array  # [N] bool
    group_sizes: jax.Array  # [R, E / R] padded and clipped to capacity
    counts: jax.Array  # [S, E] of each source rank, before drops
    needed: jax.Array  # [R] rows each rank would need, if none may be dropped


def layout(ids: jax.Array, config: DispatchConfig, sources: int, first_expert: jax.Array | int = 0) -> Layout:
    """Where a dispatch puts the assignments `ids` [N] of all source ranks, in the order of the ranks.

    `first_expert`: the number of expert 0 among the experts of all nodes.
    """
    experts, local = config.num_experts, config.local_experts
    valid = (ids >= 0) & (ids < experts)
    expert = jnp.where(valid, ids, experts)
    source = jnp.arange(ids.size, dtype=jnp.int32) // max(ids.size // sources, 1)
    position, counts = positions(expert.reshape(sources, -1), experts)
    demand, kept = counts.sum(axis=0, dtype=jnp.int32), counts
    if config.drop:
        rows = rows_of_experts(demand.reshape(config.size, local), config.alignment, config.capacity).reshape(-1)
        kept = rows_of_sources(counts, rows, first_expert)
    rows = kept.sum(axis=0, dtype=jnp.int32)
    padded, ends, sizes = segments(rows.reshape(config.size, local), config.alignment, config.capacity)
    row_ends = (ends - padded).reshape(1, -1) + jnp.cumsum(kept, axis=0)  # of each source, [S, E]

    at = source, jnp.minimum(expert, experts - 1)
    row = position + (row_ends - kept - jnp.cumsum(counts, axis=0) + counts)[at]
    fits = valid & (row < row_ends[at]) & (row < config.capacity)
    return Layout(
        owner=expert // local,
        row=jnp.where(fits, row, -1).astype(jnp.int32),
        dropped=valid & ~fits,
        group_sizes=sizes,
        counts=counts,
        needed=ends[:, -1],
    )


def positions(expert: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """[S * N] int32: for each of `expert` [S, N], how many of the same expert come before it in row-major order. And
    [S, experts] int32: how many of each expert a source has. Experts out of bounds have position 0 and no count.

    A counting sort in blocks: all pairs within a block are compared, and the experts of each block are counted.
    """
    sources, width = expert.shape
    if width == 0:  # sorted, as jaxlib 0.10 does not compile the gradient of a program that is constant
        return jnp.sort(expert.reshape(-1)), jnp.zeros((sources, experts), jnp.int32)
    blocks = -(-width // _BLOCK)
    padded = jnp.pad(expert, ((0, 0), (0, blocks * _BLOCK - width)), constant_values=experts).reshape(-1, _BLOCK)
    same = padded[:, :, None] == padded[:, None, :]
    earlier = (same & jnp.tri(_BLOCK, k=-1, dtype=bool)[None]).sum(axis=2, dtype=jnp.int32)
    each = jnp.arange(experts, dtype=expert.dtype)[None, :, None]
    of_block = (padded[:, None, :] == each).sum(axis=2, dtype=jnp.int32)
    ends = jnp.cumsum(of_block, axis=0)
    before = jnp.take_along_axis(ends - of_block, jnp.minimum(padded, experts - 1), axis=1)
    position = jnp.where(padded < experts, before + earlier, 0)
    counts = jnp.diff(ends[blocks - 1 :: blocks], axis=0, prepend=0)
    return position.reshape(sources, -1)[:, :width].reshape(-1), counts


def count_invalid(expert_ids: jax.Array, num_experts: int) -> jax.Array:
    """[1] int32, `Routing.invalid`."""
    return ((expert_ids < -1) | (expert_ids >= num_experts)).sum(dtype=jnp.int32)[None]


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
    """`jax_ep.dispatch` with expand=False, whose rows are `tokens`. Differentiable by JAX."""
    shape = expert_ids.shape
    placed = layout(expert_ids.reshape(-1), config, 1)
    routing = routing_of(placed, weights[None], 0, config, expert_ids)
    token = jnp.broadcast_to(jnp.arange(shape[0], dtype=jnp.int32)[:, None], (1, *shape))
    indices = routing.by_row(token, ZERO_ROW)
    return Unexpanded(tokens, *checkpoint_name((placed.group_sizes[0], routing, indices), DISPATCHED))


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
