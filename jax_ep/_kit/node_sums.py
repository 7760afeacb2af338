"""Sums over the nodes of a group, in float32 and in the order of the nodes, so that their bits are always the same."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def sum_over_nodes(
    parts: jax.Array, axes: tuple[str, ...], taken: Callable[[jax.Array, int], jax.Array] = lambda part, node: part
) -> jax.Array:
    """Sends parts[n] to node n, and adds up the received parts in float32, in the order of the nodes.

    A reduce-scatter carries as many bytes, but XLA chooses its order.

    Args:
      parts: [N, ...], one per node along `axes`.
      taken: taken(part, node) is what is added for that node; default: the part itself.
    """
    return added_up(jax.lax.all_to_all(parts, axes, 0, 0), taken)


def added_up(parts: jax.Array, taken: Callable[[jax.Array, int], jax.Array] = lambda part, node: part) -> jax.Array:
    """Parts [N, ...] of the nodes, added up in float32, in the order of the nodes."""
    total = taken(parts[0], 0).astype(jnp.float32)
    for node in range(1, parts.shape[0]):
        total += taken(parts[node], node).astype(jnp.float32)
    return total.astype(parts.dtype)
