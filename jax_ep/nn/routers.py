"""Routers choose the experts of a token and their weights.

They are functions of logits [T, E] of this rank's tokens, computed in float32, without a group. On GPUs one Pallas
kernel chooses the experts and computes their weights.

    expert_ids, weights = softmax_top_k(tokens @ router, 8)
    out, stats = jax_ep.moe_mlp(tokens, expert_ids, weights, experts, group=group)

Masked values are replaced before a nonlinearity, never after it: the gradient would be 0 * NaN.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import pallas_kernels
from jax_ep._kit import checks
from jax_ep._kit.batches import by_kernel_on_gpus
from jax_ep._kit.checks import AnyArray, AxisName, PyTree
from jax_ep._kit.linear import linear
from jax_ep._kit.scopes import op_scope
from jax_ep.pallas_kernels import Groups

_Found = tuple[jax.Array | None, jax.Array]  # a mask, and the chosen experts


class Routed(NamedTuple):
    """A router's choice.

    Attributes:
      expert_ids: [T, K] int32, different experts, the best first. Of equal scores the lower id is first. -1 is no
        expert.
      weights: [T, K] float32, differentiable in the logits; 0 without an expert.
    """

    expert_ids: jax.Array
    weights: jax.Array


@op_scope("softmax_top_k")
def softmax_top_k(
    logits: AnyArray,
    top_k: int,
    *,
    groups: int = 1,
    top_groups: int | None = None,
    best_of_group: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    ids: AnyArray | None = None,
    mask: AnyArray | None = None,
) -> Routed:
    """The `top_k` likeliest experts by softmax (Shazeer et al., 2017; Mixtral, Qwen3; with groups, DeepSeek-V2, 2024).

    Args:
      logits: [T, E] bfloat16, float16 or float32.
      groups, top_groups, best_of_group: as for `sigmoid_top_k`; DeepSeek-V2 has a group per device.
      renormalize: the weights are divided by their sum. Otherwise they are the probabilities.
      scale: a factor of the resulting weights.
      ids: [T, K] integers that replace the router's choice (router replay, R3: Ma et al., 2025). Weights and their
        gradients come from the current logits. -1, for a slot that was not captured, is no expert: its weight is 0, and
        the others share the sum. Other ids outside [0, E) stay, with weight 0. For tokens without captured slots use
        `jnp.where(ids[:, :1] < 0, softmax_top_k(logits, K).expert_ids, ids)`.
      mask: [T] bool, the tokens that count. Others, such as padding, get ids of -1 and weights of 0, even if their
        logits are NaN, and do not contribute to gradients.
    """
    return _route("softmax", logits, top_k, groups, top_groups, best_of_group, renormalize, scale, None, ids, mask)


@op_scope("sigmoid_top_k")
def sigmoid_top_k(
    logits: AnyArray,
    top_k: int,
    *,
    bias: AnyArray | None = None,
    groups: int = 1,
    top_groups: int | None = None,
    best_of_group: int = 2,
    renormalize: bool = True,
    scale: float = 1.0,
    ids: AnyArray | None = None,
    mask: AnyArray | None = None,
) -> Routed:
    """The `top_k` experts of the highest sigmoid scores (DeepSeek-V3, 2024; with groups=1 also Llama 4).

    Args:
      logits, renormalize, scale, ids, mask: as for `softmax_top_k`.
      bias: [E] float32, added to the scores when experts are chosen, and not to the weights: see `balanced_bias`.
      groups, top_groups: adjacent experts form `groups` groups of equal size, and experts are chosen only from the
        `top_groups` best groups. If each node of GPUs owns one group, a token goes to at most `top_groups` nodes.
      best_of_group: the score of a group is the sum over its `best_of_group` best experts (2 in DeepSeek-V3, 1 in V2),
        or over all if it has fewer.
    """
    return _route("sigmoid", logits, top_k, groups, top_groups, best_of_group, renormalize, scale, bias, ids, mask)


def within_top_groups(scores: AnyArray, top_k: int, groups: int, top_groups: int, best_of_group: int = 2) -> jax.Array:
    """Scores [T, E] with minus infinity for the experts outside of each token's `top_groups` best groups."""
    op = "within_top_groups"
    checks.check_array(op, "scores", scores, "[T, E]", np.floating)
    checks.check_int(op, "top_k", top_k)
    scores = jnp.asarray(scores)
    chosen = _checked_groups(op, scores.shape[1], top_k, groups, top_groups, best_of_group)
    if chosen.kept == chosen.total:
        return scores
    choose: Callable[[jax.Array], jax.Array] = partial(_best_groups, chosen)
    if scores.dtype in checks.TOKEN_DTYPES and pallas_kernels.can_route(scores.shape[1], chosen.total):
        choose = by_kernel_on_gpus(partial(pallas_kernels.best_groups, groups=chosen), choose)
    return _within(chosen, scores, choose(jax.lax.stop_gradient(scores)))


class _How(NamedTuple):
    score: Literal["softmax", "sigmoid"]
    top_k: int
    groups: Groups
    renormalize: bool


def _checked_groups(
    op: str, experts: int, top_k: int, groups: int, top_groups: int | None, best_of_group: int
) -> Groups:
    for name, number in (("groups", groups), ("best_of_group", best_of_group)):
        checks.check_int(op, name, number)
    top_groups = groups if top_groups is None else top_groups
    checks.check_int(op, "top_groups", top_groups)
    if experts % groups:
        raise ValueError(f"{op}: groups must divide the {experts} experts, got {groups}")
    if top_groups > groups or top_groups * (experts // groups) < top_k:
        raise ValueError(
            f"{op}: top_groups must be at most the {groups} groups, and so many that they hold top_k = {top_k} "
            f"experts; got {top_groups}"
        )
    return Groups(groups, top_groups, best_of_group)


def _route(
    score: Literal["softmax", "sigmoid"],
    logits: AnyArray,
    top_k: int,
    groups: int,
    top_groups: int | None,
    best_of_group: int,
    renormalize: bool,
    scale: float,
    bias: AnyArray | None,
    ids: AnyArray | None,
    mask: AnyArray | None,
) -> Routed:
    op = f"{score}_top_k"
    checks.check_array(op, "logits", logits, "[T, E]", checks.TOKEN_DTYPES)
    checks.check_int(op, "top_k", top_k)
    if top_k > logits.shape[1]:
        raise ValueError(f"{op}: top_k must be in [1, E = {logits.shape[1]}], got {top_k}")
    checks.check_bool(op, "renormalize", renormalize)
    chosen_from = _checked_groups(op, logits.shape[1], top_k, groups, top_groups, best_of_group)
    if bias is not None:
        checks.check_array(op, "bias", bias, "[E]", np.float32, shape=logits.shape[1:])
    checks.check_number(op, "scale", scale)
    check_mask(op, logits, mask)
    if ids is not None:
        checks.check_array(op, "ids", ids, "[T, K]", np.integer, shape=(logits.shape[0], top_k))
        ids = checks.to_int32(ids)
    how = _How(score, top_k, chosen_from, renormalize)
    logits, others = jnp.asarray(logits), {"bias": bias, "ids": ids, "mask": mask}
    given = {name: jnp.asarray(x) for name, x in others.items() if x is not None}
    found = _choose(how, *jax.lax.stop_gradient((logits, given)))
    weights = _following(how, logits, found[1], (given.get("mask"), found[0]))
    return Routed(found[0], weights * jnp.asarray(scale, jnp.float32))


def _choose(how: _How, logits: jax.Array, given: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The result of a router before the scale, without a derivative. `given`: bias, ids and mask unless None."""

    def by_xla(logits: jax.Array, given: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        expert_ids, mask = given.get("ids"), given.get("mask")
        log_scores = _log_scores(how, logits, mask)
        if expert_ids is None:
            scores = jnp.exp(log_scores)
            scores += given["bias"][None] if "bias" in given else 0
            if how.groups.kept < how.groups.total:
                scores = _within(how.groups, scores, _best_groups(how.groups, scores))
            expert_ids = jax.lax.top_k(scores, how.top_k)[1].astype(jnp.int32)
        if mask is not None:
            expert_ids = jnp.where(mask[:, None], expert_ids, -1)
        return expert_ids, _weights(how, log_scores, expert_ids)

    def by_kernel(logits: jax.Array, given: PyTree, interpret: bool) -> tuple[jax.Array, jax.Array]:
        return pallas_kernels.route(logits, **how._asdict(), **given, interpret=interpret)

    fits = pallas_kernels.can_route(logits.shape[1], how.groups.total, how.top_k)
    return (by_kernel_on_gpus(by_kernel, by_xla) if fits else by_xla)(logits, given)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _following(how: _How, logits: jax.Array, weights: jax.Array, found: _Found) -> jax.Array:
    """The weights, with their derivative in the logits."""
    return weights


@_following.defjvp
def _following_jvp(
    how: _How, primals: tuple[jax.Array, jax.Array, _Found], tangents: PyTree
) -> tuple[jax.Array, jax.Array]:
    """The backward pass reads the logits again. No scores are kept."""
    logits, weights, found = primals

    def function(found: _Found) -> Callable[[jax.Array], jax.Array]:
        mask, expert_ids = found
        return lambda logits: _weights(how, _log_scores(how, logits, mask), expert_ids)

    def forward(residuals: tuple[jax.Array, _Found], tangent: jax.Array) -> jax.Array:
        logits, found = residuals
        return jax.jvp(function(found), [logits], [tangent])[1]

    def back(residuals: tuple[jax.Array, _Found], cotangent: jax.Array) -> jax.Array:
        logits, found = residuals
        return jax.vjp(function(found), logits)[1](cotangent)[0]

    return _following(how, logits, weights, found), linear(forward, back, (logits, found), tangents[0])


def _log_scores(how: _How, logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    log = jax.nn.log_softmax if how.score == "softmax" else jax.nn.log_sigmoid
    return log(float32_logits(logits, mask))


def _weights(how: _How, log_scores: jax.Array, expert_ids: jax.Array) -> jax.Array:
    valid = is_expert(expert_ids, log_scores.shape[1])
    of_chosen = jnp.take_along_axis(log_scores, jnp.where(valid, expert_ids, 0), axis=1)
    return shares(of_chosen, valid) if how.renormalize else jnp.where(valid, jnp.exp(of_chosen), 0)


def _by_group(groups: Groups, scores: jax.Array) -> jax.Array:
    return scores.reshape(scores.shape[0], groups.total, scores.shape[1] // groups.total)  # -1 fails without tokens


def _best_groups(groups: Groups, scores: jax.Array) -> jax.Array:
    by_group = _by_group(groups, scores)
    worth = jax.lax.top_k(by_group, min(groups.best, by_group.shape[2]))[0].sum(axis=-1)
    return jax.nn.one_hot(jax.lax.top_k(worth, groups.kept)[1], groups.total, dtype=jnp.bool).any(axis=1)


def _within(groups: Groups, scores: jax.Array, kept: jax.Array) -> jax.Array:
    return jnp.where(kept[:, :, None], _by_group(groups, scores), -jnp.inf).reshape(scores.shape)


def is_expert(expert_ids: jax.Array, num_experts: int) -> jax.Array:
    return (expert_ids >= 0) & (expert_ids < num_experts)


def float32_logits(logits: AnyArray, mask: AnyArray | None) -> jax.Array:
    """The logits [T, E] in float32, zeros for masked tokens."""
    wide = jnp.asarray(logits, jnp.float32)
    return wide if mask is None else jnp.where(mask[:, None], wide, 0)


def shares(log_scores: jax.Array, where: jax.Array | bool = True) -> jax.Array:
    """Scores [T, N], divided by their sum over N; 0 where `where` is not set, and where all scores are 0.

    Computed from logarithms, because a quotient of scores of 1e-20 has no gradient in float32.
    """
    return jax.nn.softmax(log_scores, axis=-1, where=where & (log_scores != -jnp.inf))


def round_tokens(
    routed: Routed,
    top_k: int,
    num_experts: int,
    *,
    multiple: int = 128,
    renormalize: bool = True,
    axis_name: AxisName | None = None,
) -> Routed:
    """Rounds the rows of each expert to whole tiles of its products (token rounding, SonicMoE: Guo et al., 2025).

    A router chooses more than `top_k` experts for each token. The first `top_k` are assignments, the others candidates.
    The count of an expert becomes the nearest multiple (a half rounds up): the expert drops the assignments with the
    least weights, or takes the candidates with the greatest. With too few candidates its count is rounded down. To
    round up by half a multiple, a token needs top_k * multiple / (2 * rows of an expert) candidates.

        routed = round_tokens(softmax_top_k(logits, K + 2), K, E, axis_name="ep")

    `expert_load` and `balance_loss` of the result count assignments after rounding; of `routed.expert_ids[:, :top_k]`,
    before. `capacity_factor` is a multiple of the even load of all K columns.

    Args:
      routed: ids and weights [T, K], K at least `top_k`. Ids outside [0, E) stay and do not count.
      num_experts: E, below 2^30.
      multiple: 128 rows are a tile of float8 products. Gradients of matrices have steps of 64 rows, and 16-bit products
        steps of 16.
      renormalize: as for the router: the weights that a token keeps are scaled to the sum that it had before.
      axis_name: an axis of the mesh, or a tuple of them: counts the tokens of all devices along it. Without it, only
        the tokens of `routed`.

    Returns:
      ids [T, K], or -1 if an expert does not take the token, and their weights, or 0; differentiable in the weights.
    """
    op = "round_tokens"
    if not isinstance(routed, tuple) or len(routed) != 2:
        raise TypeError(f"{op}: routed must be a Routed of ids and weights, got {checks.describe(routed)}")
    expert_ids, weights = routed
    checks.check_array(op, "routed.expert_ids", expert_ids, "[T, K]", np.integer)
    checks.check_array(op, "routed.weights", weights, "[T, K]", np.floating, shape=expert_ids.shape)
    for name, number in (("top_k", top_k), ("num_experts", num_experts), ("multiple", multiple)):
        checks.check_int(op, name, number, below_32_bits=True)
    if num_experts >= 2**30:
        raise ValueError(f"{op}: num_experts must be below 2**30, got {num_experts}")
    if top_k > expert_ids.shape[1]:
        raise ValueError(f"{op}: top_k must be in [1, K = {expert_ids.shape[1]}], got {top_k}")
    checks.check_bool(op, "renormalize", renormalize)
    expert_ids = checks.to_int32(expert_ids)
    valid = is_expert(expert_ids, num_experts)
    weights = jnp.where(valid, weights, 0)
    is_candidate = jax.lax.broadcasted_iota(jnp.int32, expert_ids.shape, 1) >= top_k
    # Each expert has two ranges: its assignments and its candidates, the greatest weights first.
    ranges = jnp.where(valid, 2 * expert_ids + is_candidate.astype(jnp.int32), 2 * num_experts)
    order_by = -jax.lax.stop_gradient(weights)
    if axis_name is not None:
        checks.check_axis_here(op, axis_name)
        ranges, order_by = jax.lax.all_gather((ranges, order_by), axis_name)
    places = jax.lax.iota(jnp.int32, ranges.size)
    ordered, _, order = jax.lax.sort((ranges.ravel(), order_by.ravel(), places), num_keys=2)
    sizes = jnp.bincount(ordered, length=2 * num_experts + 1)
    starts = jnp.cumsum(sizes) - sizes
    count, most = (ends - starts[:-1:2] for ends in (starts[1::2], starts[2::2]))
    over = count % multiple
    rises = (over >= multiple - over) & (multiple - over <= most - count)
    rounded = count - over + jnp.where(rises, multiple, 0)
    last = jnp.append(starts[:-1:2] + rounded, ranges.size)  # all invalid entries stay
    taken = jnp.zeros_like(order, bool).at[order].set(places < last[ordered // 2], unique_indices=True)
    if axis_name is not None:
        taken = taken.reshape(ranges.shape)[jax.lax.axis_index(axis_name)]
    taken = taken.reshape(expert_ids.shape)
    kept = jnp.where(taken, weights, 0)
    if renormalize:
        left = kept.sum(axis=1, keepdims=True)
        kept *= weights.sum(axis=1, keepdims=True) / jnp.where(left > 0, left, 1)
    return Routed(jnp.where(taken, expert_ids, -1), kept)


def check_mask(op: str, logits: AnyArray, mask: AnyArray | None) -> None:
    if mask is not None:
        checks.check_array(op, "mask", mask, "[T]", bool, shape=logits.shape[:1])
