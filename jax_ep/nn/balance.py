"""Losses, a learned bias and statistics that keep experts evenly loaded and logits small.

With `axis_name`, a mesh axis or a tuple of them, a function is called inside `jax.shard_map`. Its result covers the
tokens of all devices along the axis, and is the same on each. Without it, the result covers the given tokens.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit import checks
from jax_ep._kit.checks import AnyArray, AxisName
from jax_ep.nn.routers import check_mask, float32_logits, is_expert, shares
from jax_ep.ops.moe.types import MoeStats

Score = Literal["softmax", "sigmoid"]


def expert_load(expert_ids: AnyArray, num_experts: int, *, axis_name: AxisName | None = None) -> jax.Array:
    """[E] int32: the assignments [T, K] of each expert. Ids outside [0, E) do not count."""
    op = "expert_load"
    checks.check_array(op, "expert_ids", expert_ids, dtype=np.integer)
    checks.check_int(op, "num_experts", num_experts, below_32_bits=True)
    expert_ids = checks.to_int32(expert_ids)
    place = jnp.where(is_expert(expert_ids, num_experts), expert_ids, num_experts)
    load = jnp.zeros(num_experts, jnp.int32).at[place].add(1, mode="drop")
    return _sum(op, load, axis_name)


def balance_loss(
    logits: AnyArray, expert_ids: AnyArray, *, score: Score = "softmax", axis_name: AxisName | None = None
) -> jax.Array:
    """E times the sum over experts of (fraction of the assignments) * (mean probability): 1 when both are even.

    The auxiliary loss of GShard (2020) and Switch Transformers (2021), for any K. Differentiable only in the logits. It
    is not a mean over tokens: the loss of a whole batch needs `axis_name`. A mean over the losses of ranks makes each
    rank even, and a mean over sequences (`jax.vmap`) each sequence.

    Args:
      logits: [T, E].
      expert_ids: [T, K]. Ids outside [0, E) are skipped. A token without other ids, such as padding, does not count,
        and its logits may be NaN.
      score: "softmax"; or "sigmoid", with scores divided by their sum over the experts (DeepSeek-V3, 2024).
    """
    op = "balance_loss"
    checks.check_one_of(op, "score", score, Score)
    checks.check_array(op, "logits", logits, "[T, E]", np.floating)
    checks.check_array(op, "expert_ids", expert_ids, "[T, K]", np.integer)
    if len(expert_ids) != len(logits):
        raise ValueError(f"{op}: expert_ids must be of the {len(logits)} tokens of logits, got {expert_ids.shape}")
    expert_ids = checks.to_int32(expert_ids)
    experts = logits.shape[1]
    going = jnp.any(is_expert(expert_ids, experts), axis=1)
    wide = float32_logits(logits, going)
    mean = _mean(op, shares(jax.nn.log_sigmoid(wide) if score == "sigmoid" else wide), going, axis_name)
    load = expert_load(expert_ids, experts, axis_name=axis_name).astype(jnp.float32)
    return experts * jnp.sum(load / jnp.maximum(load.sum(), 1) * mean)


def z_loss(logits: AnyArray, mask: AnyArray | None = None, *, axis_name: AxisName | None = None) -> jax.Array:
    """The mean square of log(sum(exp(logits))), which keeps logits small (ST-MoE, 2022).

    Args:
      logits: [T, E].
      mask: [T] bool, the tokens that count, or None for all. Logits of other tokens may be NaN.
    """
    op = "z_loss"
    checks.check_array(op, "logits", logits, "[T, E]", np.floating)
    check_mask(op, logits, mask)
    squares = jax.nn.logsumexp(float32_logits(logits, mask), axis=-1) ** 2
    return _mean(op, squares, jnp.ones(squares.shape, bool) if mask is None else jnp.asarray(mask), axis_name)


def balanced_bias(bias: jax.Array, load: AnyArray, *, rate: float | jax.Array = 1e-3) -> jax.Array:
    """The bias [E] of the next step: `rate` up for experts below the mean load, `rate` down for experts above.

    Balance without an auxiliary loss (Wang et al., 2024; DeepSeek-V3).

    Args:
      bias: [E] of a float dtype.
      load: [E] assignments of all ranks, as by `expert_load` with `axis_name`, or `MoeStats.counts` of a whole layer.
    """
    op = "balanced_bias"
    checks.check_array(op, "bias", bias, dtype=np.floating)
    _check_load(op, load)
    checks.check_array(op, "load", load, "that of bias", shape=bias.shape)
    checks.check_number(op, "rate", rate)
    load = load.astype(jnp.float32)
    return bias + (jnp.asarray(rate, jnp.float32) * jnp.sign(load.mean() - load)).astype(bias.dtype)


class LoadStats(NamedTuple):
    """How even the load of experts is. All scalars are float32.

    Attributes:
      max_over_mean: of the assignments per expert; 1 is even. By rank (`ranks`) it limits the speed of a layer.
      idle: the fraction of experts without assignments.
      entropy: of the fractions per expert, divided by log(number): 1 is even, 0 means that one has all.
    """

    max_over_mean: jax.Array
    idle: jax.Array
    entropy: jax.Array


def load_stats(load: AnyArray, *, ranks: int | None = None) -> LoadStats:
    """How even a load [E] is over the experts or, with `ranks`, over ranks of E / ranks adjacent experts each."""
    op = "load_stats"
    _check_load(op, load)
    load = load.astype(jnp.float32)
    if ranks is not None:
        checks.check_int(op, "ranks", ranks)
        if load.size % ranks:
            raise ValueError(f"{op}: ranks must divide the {load.size} experts, got {ranks}")
        load = load.reshape(ranks, -1).sum(axis=1)
    fraction = load / jnp.maximum(load.sum(), 1)
    entropy = -jnp.sum(jnp.where(fraction > 0, fraction * jnp.log(jnp.where(fraction > 0, fraction, 1)), 0))
    return LoadStats(
        max_over_mean=load.max() / jnp.maximum(load.mean(), 1 / load.size),
        idle=jnp.mean(load == 0, dtype=jnp.float32),
        entropy=entropy / math.log(load.size) if load.size > 1 else jnp.ones(()),
    )


def scalars(stats: MoeStats, *, ranks: int | None = None) -> dict[str, jax.Array]:
    """The counts of a layer as scalars by name, for TensorBoard and other logs.

    Args:
      stats: of a whole layer, as `jax.shard_map` returns it by `P(axis_name)`.
      ranks: of the group, for the load by rank, or None.

    Returns:
      "assignments", "dropped" and "invalid" (int32); `LoadStats` as "expert_load/max_over_mean", ".../idle" and
      ".../entropy"; with `ranks` also as "rank_load/...".
    """
    if not isinstance(stats, MoeStats):
        raise TypeError(f"scalars: stats must be a jax_ep.MoeStats, got {checks.describe(stats)}")
    for name, x in stats._asdict().items():
        checks.check_array("scalars", f"stats.{name}", x, dtype=checks.NUMBERS)
    found = {"assignments": stats.counts.sum(), "dropped": stats.dropped.sum(), "invalid": stats.invalid.sum()}
    loads = {"expert_load": load_stats(stats.counts)}
    if ranks is not None:
        loads["rank_load"] = load_stats(stats.counts, ranks=ranks)
    return found | {f"{name}/{field}": x for name, load in loads.items() for field, x in load._asdict().items()}


def _check_load(op: str, load: AnyArray) -> None:
    checks.check_array(op, "load", load, "[E]", checks.NUMBERS)
    if not load.size:
        raise ValueError(f"{op}: load must be of one expert at least, got {load.shape}")


def _sum(op: str, x: jax.Array, axis_name: AxisName | None) -> jax.Array:
    if axis_name is None:
        return x
    checks.check_axis_here(op, axis_name)
    return jax.lax.psum(x, axis_name)


def _mean(op: str, x: jax.Array, mask: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """The mean of the rows of x [T, ...] with `mask` [T] set, or zero if there are none."""
    total = jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, 0).sum(axis=0)
    return _sum(op, total, axis_name) / jnp.maximum(_sum(op, mask.sum(dtype=jnp.float32), axis_name), 1)
