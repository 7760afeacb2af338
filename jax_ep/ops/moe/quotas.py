"""The segments of a rank's rows, and max-min fair quotas of rows if a dispatch may drop."""

import jax
import jax.numpy as jnp


def segments(rows: jax.Array, alignment: int, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of experts with `rows` [..., L] int32: padded rows, the ends of segments, and group sizes within the capacity."""
    padded = -(-rows // alignment) * alignment
    ends = jnp.cumsum(padded, axis=-1, dtype=jnp.int32)
    return padded, ends, jnp.minimum(ends, capacity) - jnp.minimum(ends - padded, capacity)


def expert_of_rows(group_sizes: jax.Array, rows: int) -> jax.Array:
    """[C] int32: the local expert of each of `rows` rows, or E / R past the last group."""
    experts = group_sizes.shape[0]
    sizes = jnp.append(group_sizes, rows - jnp.sum(group_sizes, dtype=group_sizes.dtype))
    return jnp.repeat(jnp.arange(experts + 1, dtype=jnp.int32), sizes, total_repeat_length=rows)


def fair_quotas(demand: jax.Array, room: jax.Array | int) -> jax.Array:
    """Divides `room` [...] among members that ask for `demand` [..., n]. Returns [..., n]: what each gets.

    A member gets what it asks for, up to the highest common level that fits. The rest goes, one each, to the first
    members that ask for more.
    """
    ascending, room = jnp.sort(demand), jnp.broadcast_to(jnp.asarray(room, jnp.int32), demand.shape[:-1])[..., None]
    before = jnp.cumsum(ascending, axis=-1, dtype=jnp.int32) - ascending
    # The members that are left, if all before get what they ask for.
    others = demand.shape[-1] - jax.lax.broadcasted_iota(jnp.int32, demand.shape, demand.ndim - 1)
    level = jnp.where(before <= room, (room - before) // others, 0).max(axis=-1, keepdims=True)
    quotas, more = jnp.minimum(demand, level), demand > level
    left = room - quotas.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    return quotas + (more & (jnp.cumsum(more, axis=-1, dtype=jnp.int32) <= left)).astype(jnp.int32)


def rows_of_experts(demand: jax.Array, alignment: int, capacity: int) -> jax.Array:
    """The rows [..., L] that a rank's experts keep of `demand`, by quotas in steps of `alignment` rows."""
    steps = fair_quotas(-(-demand // alignment), capacity // alignment)
    return jnp.minimum(demand, steps * alignment)


def rows_of_sources(demand: jax.Array, kept: jax.Array, first: jax.Array | int) -> jax.Array:
    """The rows [R, E] that the source ranks keep of `demand`, if experts keep `kept` [E].

    Rows left over go one each to the sources, starting at source e modulo R. `first`: the number of the first expert.
    """
    ranks, experts = demand.shape
    begin = (first + jnp.arange(experts, dtype=jnp.int32))[:, None]
    turns = jnp.arange(ranks, dtype=jnp.int32)[None]
    in_turn = jnp.take_along_axis(demand.T, (begin + turns) % ranks, axis=1)
    return jnp.take_along_axis(fair_quotas(in_turn, kept), (turns - begin) % ranks, axis=1).T
