"""Who gets the rows of a rank that has too few, where a dispatch may drop: max-min fair shares."""

import jax
import jax.numpy as jnp


def fair_shares(asked: jax.Array, room: jax.Array | int) -> jax.Array:
    """What each of [..., n] gets of `room` [...]: what it asks for, up to a level, the highest that there is room for.

    What is left then goes to the first of those that ask for more, one each.
    """
    ascending, room = jnp.sort(asked), jnp.asarray(room, jnp.int32)[..., None]
    before = jnp.cumsum(ascending, axis=-1, dtype=jnp.int32) - ascending
    others = jnp.arange(asked.shape[-1], 0, -1, dtype=jnp.int32)  # if those before get all that they ask for
    level = jnp.where(before <= room, (room - before) // others, 0).max(axis=-1, keepdims=True)
    shares, more = jnp.minimum(asked, level), asked > level
    left = room - shares.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    return shares + (more & (jnp.cumsum(more, axis=-1) <= left))


def rows_of_experts(asked: jax.Array, alignment: int, capacity: int) -> jax.Array:
    """The rows [..., L] that a rank's experts keep of those that they are asked for: shares are of `alignment` rows."""
    blocks = fair_shares(-(-asked // alignment), capacity // alignment)
    return jnp.minimum(asked, blocks * alignment)


def rows_of_sources(asked: jax.Array, kept: jax.Array, first: jax.Array | int) -> jax.Array:
    """The rows [R, E] that the source ranks keep of those that they ask for, where experts keep `kept` [E].

    Odd rows go to the sources from number e modulo R on, for expert e; the first expert here is number `first`.
    """
    ranks, experts = asked.shape
    begin = (first + jnp.arange(experts, dtype=jnp.int32))[:, None]
    turns = jnp.arange(ranks, dtype=jnp.int32)
    in_turn = jnp.take_along_axis(asked.T, (begin + turns) % ranks, axis=1)
    return jnp.take_along_axis(fair_shares(in_turn, kept), (turns - begin) % ranks, axis=1).T
