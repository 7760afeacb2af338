"""A layer for serving, in which all ranks have the same tokens: only the sums of the ranks' experts travel."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit import vary
from jax_ep.errors import MismatchError
from jax_ep.group import Group
from jax_ep.ops.matmul.rows import GatheredRows, dense_rows
from jax_ep.ops.moe.experts import (
    ExpertsCall,
    Operands,
    Residuals,
    answers_of,
    experts_of_tokens,
    plain_answers,
    rows_to_multiply,
    stats_of,
)
from jax_ep.ops.moe.layout import count_invalid
from jax_ep.ops.moe.types import MoeStats
from jax_ep.ops.moe.xla import add_rows_of_tokens, dispatch_in_place
from jax_ep.runtime.agreement import Agreement
from jax_ep.runtime.undelivered import nan_on_overflow, undelivered_if


def sums_of_shared_tokens(call: ExpertsCall, operands: Operands) -> tuple[jax.Array, MoeStats]:
    """Each token's weighted sum [T, H'] of its experts' outputs, the same on all ranks, and each rank's counts.

    A rank computes its own experts. Sums stay float32 until the sums of all ranks are added up.
    """
    group, config = call.dispatch.group, call.dispatch.config
    if group.size == 1:  # the psum makes the result invariant over the axis
        total, stats = experts_of_tokens(call, operands)
        return jax.lax.psum(total, group.axis_name), stats
    tokens, expert_ids, weights, experts, _ = operands
    (num_tokens, hidden), top_k = tokens.shape, expert_ids.shape[1]
    shapes = {"num_tokens": num_tokens, "hidden": hidden, "top_k": top_k, "dtype": tokens.dtype}
    agreement = Agreement(group._participants, "moe_mlp", shared_tokens=True, **shapes, **dataclasses.asdict(config))
    tokens, expert_ids, weights = agreement.enter((tokens, expert_ids, weights))
    local, rank = config.local_experts, jax.lax.axis_index(group.axis_name)
    mine = expert_ids - rank * local
    mine = jnp.where((mine >= 0) & (mine < local), mine, -1)  # without a division XLA fuses it into its users
    alone = dataclasses.replace(config, size=1, num_experts=local, wire=None)
    _, sizes, routing, indices = dispatch_in_place(alone, tokens, mine, weights)
    rows = rows_to_multiply(GatheredRows(tokens, indices), sizes)
    gathers = call.dispatch.by_kernels and not (call.in_float8 or call.weigh_inputs or call.product)
    if gathers:
        rows, sizes, experts = vary.vary_alike(None, rows, sizes, experts)
        residuals = Residuals(rows, sizes, routing, (), experts, ())
        answers, weighed_routing = answers_of(call, residuals, tokens.dtype, keep_products=False)[0], routing
    else:
        answers, weighed_routing = plain_answers(call, dense_rows(rows), sizes, routing, experts)
    nothing = jnp.zeros((num_tokens, answers.shape[1]), jnp.float32)
    own = add_rows_of_tokens(nothing, answers, weighed_routing.row_of[0], weighed_routing.weights[0])
    total = agreement.leave(jax.lax.psum(own, group.axis_name)).astype(tokens.dtype)
    if not alone.always_fits(num_tokens * top_k):
        rows_here = jnp.where(jnp.arange(group.size, dtype=jnp.int32) == rank, routing.counts.sum(dtype=jnp.int32), 0)
        needed = jax.lax.psum(rows_here, group.axis_name)
        total = nan_on_overflow("moe_mlp", needed, config.capacity, total, group._keep_error)
    if os.environ.get("JAX_EP_DEBUG_CHECKS") == "1":
        total = _nan_unless_shared(group, total, tokens, expert_ids, weights)
    invalid = jnp.where(rank == 0, count_invalid(expert_ids, config.num_experts), 0)
    return total, stats_of(routing)._replace(invalid=invalid)


def _nan_unless_shared(group: Group, total: jax.Array, *operands: jax.Array) -> jax.Array:
    """`total`; or NaN, and an error for `group.check()`, if the bits of tokens, ids or weights differ by rank."""
    found = jnp.stack([_hashed(x) for x in operands])
    differ = jax.lax.pmin(found, group.axis_name) != jax.lax.pmax(found, group.axis_name)

    def error(differ: np.ndarray) -> MismatchError:
        names = [name for name, each in zip(("tokens", "expert_ids", "weights"), differ, strict=True) if each]
        return MismatchError(
            f"moe_mlp: {', '.join(names)} must be the same on all ranks where shared_tokens is true, got others on "
            f"some rank: take {group.axis_name!r} out of their in_specs"
        )

    return undelivered_if(differ.any(), total, group._keep_error, error, differ)


def _hashed(x: jax.Array) -> jax.Array:
    """A uint32 hash of the bits of an array of 16- or 32-bit values, and of their places."""
    words = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(x), jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)
    words = words.astype(jnp.uint32).ravel()
    mixed = (words ^ (jnp.arange(words.size, dtype=jnp.uint32) * np.uint32(0x9E3779B9))) * np.uint32(0x85EBCA6B)
    return jnp.sum((mixed ^ (mixed >> 15)) * np.uint32(0xC2B2AE35), dtype=jnp.uint32)
