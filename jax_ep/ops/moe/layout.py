"""The layout of a dispatch in plain jax.numpy, from the expert ids of all ranks: segments, max-min fair quotas, and the
row of each assignment.

For `implementation="xla"`, a group of one GPU, the exchange between nodes, and layers of shared tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ep.ops.moe.settings import DispatchConfig

_BLOCK = 32  # assignments


class Layout(NamedTuple):
    """The row of every assignment of every rank, at the rank that owns its expert. N = R * T * K."""

    owner: jax.Array  # [N] rank, meaningless where row is -1
    row: jax.Array  # [N] row at the owner, -1 if there is none
    dropped: jax.Array  # [N] bool
    group_sizes: jax.Array  # [R, E / R] padded and clipped to capacity
    counts: jax.Array  # [S, E] of each source rank, before drops
    needed: jax.Array  # [R] rows that each rank would need without drops


def layout(ids: jax.Array, config: DispatchConfig, sources: int, first_expert: jax.Array | int = 0) -> Layout:
    """The layout of the assignments `ids` [N] of all source ranks, in the order of the ranks.

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

    A counting sort in blocks: all pairs within a block are compared.
    """
    sources, width = expert.shape
    if width == 0:  # sorted, because jaxlib 0.10 does not compile the gradient of a constant program
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


def segments(rows: jax.Array, alignment: int, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For experts with `rows` [..., L] int32: padded rows, ends of segments, and group sizes within the capacity."""
    padded = -(-rows // alignment) * alignment
    ends = jnp.cumsum(padded, axis=-1, dtype=jnp.int32)
    return padded, ends, jnp.minimum(ends, capacity) - jnp.minimum(ends - padded, capacity)


def expert_of_rows(group_sizes: jax.Array, rows: int) -> jax.Array:
    """[C] int32: the local expert of each of `rows` rows, or E / R past the last group."""
    experts = group_sizes.shape[0]
    sizes = jnp.append(group_sizes, rows - jnp.sum(group_sizes, dtype=group_sizes.dtype))
    return jnp.repeat(jnp.arange(experts + 1, dtype=jnp.int32), sizes, total_repeat_length=rows)


def fair_quotas(demand: jax.Array, room: jax.Array | int) -> jax.Array:
    """Divides `room` [...] among members that need `demand` [..., n]. Returns their shares [..., n].

    A member gets its demand, up to the highest common level that fits. The rest goes, one each, to the first members
    that need more.
    """
    ascending, room = jnp.sort(demand), jnp.broadcast_to(jnp.asarray(room, jnp.int32), demand.shape[:-1])[..., None]
    before = jnp.cumsum(ascending, axis=-1, dtype=jnp.int32) - ascending
    # The members that are left, if all before get their demand.
    others = demand.shape[-1] - jax.lax.broadcasted_iota(jnp.int32, demand.shape, demand.ndim - 1)
    level = jnp.where(before <= room, (room - before) // others, 0).max(axis=-1, keepdims=True)
    quotas, more = jnp.minimum(demand, level), demand > level
    left = room - quotas.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    return quotas + (more & (jnp.cumsum(more, axis=-1, dtype=jnp.int32) <= left)).astype(jnp.int32)


def rows_of_experts(demand: jax.Array, alignment: int, capacity: int) -> jax.Array:
    """The rows [..., L] of `demand` that a rank's experts keep, by quotas in steps of `alignment` rows."""
    steps = fair_quotas(-(-demand // alignment), capacity // alignment)
    return jnp.minimum(demand, steps * alignment)


def rows_of_sources(demand: jax.Array, kept: jax.Array, first: jax.Array | int) -> jax.Array:
    """The rows [R, E] of `demand` that the source ranks keep, if experts keep `kept` [E].

    Rows left over go one each to the sources, starting at source e modulo R. `first`: the number of the first expert.
    """
    ranks, experts = demand.shape
    begin = (first + jnp.arange(experts, dtype=jnp.int32))[:, None]
    turns = jnp.arange(ranks, dtype=jnp.int32)[None]
    in_turn = jnp.take_along_axis(demand.T, (begin + turns) % ranks, axis=1)
    return jnp.take_along_axis(fair_quotas(in_turn, kept), (turns - begin) % ranks, axis=1).T
