"""Routers: which experts a token visits, and with what weight.

Plain functions of logits [T, E] of this rank's tokens, float32 inside; they need no group.

    expert_ids, weights = softmax_top_k(tokens @ router, 8)
    out, stats = jax_ep.moe_mlp(tokens, expert_ids, weights, experts, group=group)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit import checks

Array = jax.Array | np.ndarray


class Routed(NamedTuple):
    """What a router chooses.

    Attributes:
      expert_ids: [T, K] int32, different experts, the best first; of equal scores that of the lower id.
      weights: [T, K] float32, differentiable in the logits.
    """

    expert_ids: jax.Array
    weights: jax.Array


def softmax_top_k(
    logits: Array,
    top_k: int,
    *,
    groups: int = 1,
    top_groups: int | None = None,
    best_of_group: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> Routed:
    """The `top_k` likeliest experts by softmax (Shazeer et al., 2017; Mixtral, Qwen3; with groups, DeepSeek-V2, 2024).

    Args:
      logits: [T, E] bfloat16, float16 or float32.
      groups, top_groups, best_of_group: as for `sigmoid_top_k`; DeepSeek-V2 has a group per device.
      renormalize: the weights are divided by their sum, which is then 1. Otherwise they are the probabilities.
      scale: what the weights are multiplied by in the end.
    """
    op = "softmax_top_k"
    _check_logits(op, logits, top_k)
    scores = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    chosen_by = _within_top_groups(op, scores, top_k, groups, top_groups, best_of_group)
    return _take(op, scores, chosen_by, top_k, renormalize, scale)


def sigmoid_top_k(
    logits: Array,
    top_k: int,
    *,
    bias: Array | None = None,
    groups: int = 1,
    top_groups: int | None = None,
    best_of_group: int = 2,
    renormalize: bool = True,
    scale: float = 1.0,
) -> Routed:
    """The `top_k` experts of the highest sigmoid scores (DeepSeek-V3, 2024; with groups=1 also Llama 4).

    Args:
      logits: [T, E] bfloat16, float16 or float32.
      bias: [E] float32, added to the scores when experts are chosen, and not to the weights: see `balanced_bias`.
      groups, top_groups: the E experts are so many groups of neighbours; only those of the `top_groups` best groups are
        chosen. Where a group is what a node of GPUs owns, a token goes to at most `top_groups` nodes.
      best_of_group: a group is as good as the sum of so many of its best experts (2 in DeepSeek-V3, 1 in V2), or of all
        where it has fewer.
      scale: what the weights are multiplied by in the end.
    """
    op = "sigmoid_top_k"
    _check_logits(op, logits, top_k)
    scores = jax.nn.sigmoid(logits.astype(jnp.float32))
    _check_bias(op, bias, logits.shape[1])
    biased = scores if bias is None else scores + bias
    chosen_by = _within_top_groups(op, biased, top_k, groups, top_groups, best_of_group)
    return _take(op, scores, chosen_by, top_k, renormalize, scale)


def within_top_groups(scores: Array, top_k: int, groups: int, top_groups: int, best_of_group: int = 2) -> jax.Array:
    """Scores [T, E] with minus infinity for the experts outside of each token's `top_groups` best groups."""
    op = "within_top_groups"
    checks.check_rank(op, "scores", scores, 2, "[T, E]")
    checks.check_kind(op, "scores", scores, np.floating, "a float")
    checks.check_int(op, "top_k", top_k)
    return _within_top_groups(op, jnp.asarray(scores), top_k, groups, top_groups, best_of_group)


def _within_top_groups(
    op: str, scores: jax.Array, top_k: int, groups: int, top_groups: int | None, best_of_group: int
) -> jax.Array:
    for name, number in (("groups", groups), ("best_of_group", best_of_group)):
        checks.check_int(op, name, number)
    top_groups = groups if top_groups is None else top_groups
    checks.check_int(op, "top_groups", top_groups)
    tokens, experts = scores.shape
    if experts % groups:
        raise ValueError(f"{op}: groups must divide the {experts} experts, got {groups}")
    if top_groups > groups or top_groups * (experts // groups) < top_k:
        raise ValueError(
            f"{op}: top_groups must be at most the {groups} groups, and so many that they hold top_k = {top_k} "
            f"experts; got {top_groups}"
        )
    if top_groups == groups:
        return scores
    by_group = scores.reshape(tokens, groups, experts // groups)
    best = jax.lax.top_k(by_group, min(best_of_group, experts // groups))[0].sum(axis=-1)
    kept = jax.nn.one_hot(jax.lax.top_k(best, top_groups)[1], groups, dtype=jnp.bool).any(axis=1)
    return jnp.where(kept[:, :, None], by_group, -jnp.inf).reshape(tokens, experts)


def _take(op: str, scores: jax.Array, chosen_by: jax.Array, top_k: int, renormalize: bool, scale: float) -> Routed:
    checks.check_bool(op, "renormalize", renormalize)
    checks.check_number(op, "scale", scale)
    expert_ids = jax.lax.top_k(jax.lax.stop_gradient(chosen_by), top_k)[1]
    weights = jnp.take_along_axis(scores, expert_ids, axis=1)
    if renormalize:
        weights = weights / jnp.maximum(weights.sum(axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return Routed(expert_ids.astype(jnp.int32), weights * scale)


def _check_logits(op: str, logits: Any, top_k: int) -> None:
    checks.check_rank(op, "logits", logits, 2, "[T, E]")
    checks.check_dtype(op, "logits", logits, checks.TOKEN_DTYPES)
    checks.check_int(op, "top_k", top_k)
    if top_k > logits.shape[1]:
        raise ValueError(f"{op}: top_k must be in [1, E = {logits.shape[1]}], got {top_k}")


def _check_bias(op: str, bias: Any, num_experts: int) -> None:
    if bias is not None:
        checks.check_shape(op, "bias", bias, (num_experts,), "[E]")
        checks.check_dtype(op, "bias", bias, (np.dtype(np.float32),))
