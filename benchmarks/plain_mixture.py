"""The mixture of experts that is the fastest in plain JAX on GPUs: a fixed number of rows for each expert.

Rows move by gathers alone, also in the derivative, because XLA's scatters are slower.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import jax_ep

CAPACITY_FACTOR = 1.25


def plain_mixture(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    experts: jax_ep.Experts,
    *,
    group: jax_ep.Group,
    **_: Any,
) -> tuple[jax.Array, jax_ep.MoeStats]:
    """As `jax_ep.moe_mlp` of a silu layer without biases, but rows beyond the capacity of an expert are dropped."""
    (count, top_k), axis = expert_ids.shape, group.axis_name
    total = group.size * experts.down.shape[0]
    capacity = math.ceil(CAPACITY_FACTOR * count * top_k / total / 8) * 8
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.bincount(flat, length=total).astype(jnp.int32)
    starts = jnp.cumsum(counts) - counts
    place = jnp.argsort(order) - starts[flat]  # of each assignment among those of its expert
    row_of = jnp.where(place < capacity, flat * capacity + place, -1).reshape(count, top_k)
    within = jnp.arange(capacity)
    assignment = jnp.where(within < counts[:, None], order.at[starts[:, None] + within].get(mode="clip"), -1)

    rows = _spread(tokens, row_of, assignment.reshape(-1)).reshape(total, capacity, -1)
    rows = checkpoint_name(jax.lax.all_to_all(rows, axis, 0, 1, tiled=True), "jax_ep_dispatch")
    products = tuple(jnp.einsum("ech,ehf->ecf", rows, matrix) for matrix in (experts.gate, experts.up))
    gate, up = checkpoint_name(products, "jax_ep_products")
    answers = jnp.einsum("ecf,efh->ech", jax.nn.silu(gate) * up, experts.down)
    answers = checkpoint_name(jax.lax.all_to_all(answers, axis, 1, 0, tiled=True), "jax_ep_dispatch")
    answers = answers.reshape(total * capacity, -1)
    out = _summed(answers, weights.astype(jnp.float32), row_of, assignment.reshape(-1))
    dropped = jnp.sum(row_of < 0, dtype=jnp.int32)[None]
    everyone = jax.lax.psum(counts, axis).reshape(group.size, -1)[jax.lax.axis_index(axis)]
    return out, jax_ep.MoeStats(everyone, dropped, jnp.zeros_like(dropped))


def _gathered(x: jax.Array, at: jax.Array) -> jax.Array:
    """Rows of x, zeros where `at` is negative."""
    return jnp.where(at[:, None] >= 0, x[jnp.maximum(at, 0)], 0)


@jax.custom_vjp
def _spread(tokens: jax.Array, row_of: jax.Array, assignment: jax.Array) -> jax.Array:
    """[T, H] -> [E C, H]: the token of each row."""
    top_k = row_of.shape[1]
    return _gathered(tokens, jnp.where(assignment >= 0, assignment // top_k, -1))


def _spread_backward(row_of: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    by_token = _gathered(cotangent, row_of.reshape(-1)).reshape(*row_of.shape, -1)
    return by_token.sum(1, dtype=jnp.float32).astype(cotangent.dtype), None, None


_spread.defvjp(lambda tokens, row_of, assignment: (_spread(tokens, row_of, assignment), row_of), _spread_backward)


@jax.custom_vjp
def _summed(rows: jax.Array, weights: jax.Array, row_of: jax.Array, assignment: jax.Array) -> jax.Array:
    """[E C, H] -> [T, H]: the weighted sum of each token's rows."""
    by_token = _gathered(rows, row_of.reshape(-1)).reshape(*row_of.shape, -1)
    return jnp.einsum("tkh,tk->th", by_token.astype(jnp.float32), weights).astype(rows.dtype)


def _summed_forward(*operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _summed(*operands), operands


def _summed_backward(kept: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    rows, weights, row_of, assignment = kept
    of_rows = _spread(cotangent, row_of, assignment)
    row_weights = jnp.where(assignment >= 0, weights.reshape(-1)[jnp.maximum(assignment, 0)], 0)
    d_rows = (of_rows.astype(jnp.float32) * row_weights[:, None]).astype(rows.dtype)
    products = jnp.sum(of_rows.astype(jnp.float32) * rows.astype(jnp.float32), axis=1)
    d_weights = jnp.where(row_of >= 0, products[jnp.maximum(row_of, 0)], 0)
    return d_rows, d_weights, np.zeros(row_of.shape, jax.dtypes.float0), np.zeros(assignment.shape, jax.dtypes.float0)


_summed.defvjp(_summed_forward, _summed_backward)
