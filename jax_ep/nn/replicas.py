"""Replicas of busy experts: a plan made of loads, on the host, and the ids that follow it, in front of a dispatch.

    plan = plan_replicas(load, num_ranks=8, num_slots=288)
    up_of_slots = up[plan.experts]  # and so all matrices
    slots = physical_ids(expert_ids, plan)  # for dispatch(..., num_experts=288)

A plan is numpy: make one from time to time, and gather the matrices of its slots, sharded as those of experts are; the
gradient of that gather adds up over replicas. Hand the plan to a jitted function as an argument: all plans of as many
experts and slots have one shape, so a new one compiles nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_ep._kit import checks

Array = jax.Array | np.ndarray


class ReplicaPlan(NamedTuple):
    """Where replicas of experts are. Rank r of R owns the slots [r S/R, (r + 1) S/R).

    Attributes:
      experts: [S] int32, the expert of each slot.
      slots: [E, S - E + 1] int32, the slots of each expert in ascending order, repeated from the first.
      counts: [E] int32, how many there are.
    """

    experts: np.ndarray
    slots: np.ndarray
    counts: np.ndarray


def plan_replicas(load: np.ndarray, *, num_ranks: int, num_slots: int) -> ReplicaPlan:
    """A greedy plan (after EPLB of DeepSeek, 2025): of the same loads every process makes the same one.

    First every expert has one replica; each further slot goes to the expert whose replicas are busiest, of equal ones
    to that of the fewest. Then replicas are packed, the busiest first, each into the least busy rank with a free slot,
    rather one without that expert.

    Args:
      load: [E] assignments of each expert, of all ranks: a past mean.
      num_slots: S, at least E and a multiple of `num_ranks`.

    Raises:
      ValueError, TypeError: the numbers do not fit, a load is negative or not finite, or it is traced.
    """
    op = "plan_replicas"
    checks.check_int(op, "num_ranks", num_ranks)
    checks.check_int(op, "num_slots", num_slots)
    if isinstance(load, Tracer):
        raise TypeError(f"{op}: load must be known on the host, got a traced {checks.describe(load)}")
    load = np.asarray(load, np.float64)
    if load.ndim != 1 or not load.size or not np.all(np.isfinite(load)) or (load < 0).any():
        raise ValueError(f"{op}: load must be [E] finite numbers, none negative, got {load}")
    if num_slots % num_ranks or num_slots < load.size:
        raise ValueError(
            f"{op}: num_slots must be a multiple of {num_ranks} ranks and at least {load.size}, got {num_slots}"
        )
    counts = np.ones(load.size, np.int32)
    for _ in range(num_slots - load.size):
        counts[np.lexsort((counts, -load / counts))[0]] += 1
    replicas = np.repeat(np.arange(load.size), counts)
    share = (load / counts)[replicas]
    busy, held = np.zeros(num_ranks), [[] for _ in range(num_ranks)]
    for i in np.argsort(-share, kind="stable"):
        free = [r for r in range(num_ranks) if len(held[r]) < num_slots // num_ranks]
        rank = min(free, key=lambda r: (replicas[i] in held[r], busy[r], r))
        held[rank].append(int(replicas[i]))
        busy[rank] += share[i]
    experts = np.array([expert for rank in held for expert in sorted(rank)], np.int32)
    slots = [np.flatnonzero(experts == expert) for expert in range(load.size)]
    most = num_slots - load.size + 1
    return ReplicaPlan(experts, np.array([np.resize(s, most) for s in slots], np.int32), counts)


def physical_ids(expert_ids: Array, plan: ReplicaPlan, *, offset: int | jax.Array = 0) -> jax.Array:
    """The slots [T, K] int32 that stand for experts [T, K], which are integers.

    The assignments to an expert are dealt to its replicas in turn, in the order of (token, k): what they get differs by
    at most one, whatever the order of the tokens.

    Ids outside [0, E) stay outside of the slots: -1 is -1, others become the number of slots, which is invalid.

    Args:
      offset: the replica that begins. With the rank, what cannot be divided goes to another one on every rank.
    """
    op = "physical_ids"
    checks.check_kind(op, "expert_ids", expert_ids, np.integer, "an integer")
    _check_plan(op, plan)
    first = offset if isinstance(offset, jax.Array) else np.asarray(offset)
    checks.check_kind(op, "offset", first, np.integer, "an integer")
    checks.check_shape(op, "offset", first, (), "[]")
    num_experts, num_slots = len(plan.counts), len(plan.experts)
    flat = checks.to_int32(expert_ids).reshape(-1)
    inside = (flat >= 0) & (flat < num_experts)
    expert = jnp.where(inside, flat, 0)
    turn = _turns(jnp.where(inside, flat, num_experts)) + checks.to_int32(first)
    slot = jnp.asarray(plan.slots)[expert, turn % jnp.asarray(plan.counts)[expert]]
    slot = jnp.where(inside, slot, jnp.where(flat == -1, -1, num_slots))
    return slot.astype(jnp.int32).reshape(expert_ids.shape)


def _check_plan(op: str, plan: ReplicaPlan) -> None:
    if not isinstance(plan, ReplicaPlan):
        raise TypeError(f"{op}: plan must be the ReplicaPlan of plan_replicas, got {checks.describe(plan)}")
    for name, leaf in plan._asdict().items():
        checks.check_kind(op, f"plan.{name}", leaf, np.integer, "an integer")
    checks.check_rank(op, "plan.experts", plan.experts, 1, "[S]")
    checks.check_rank(op, "plan.counts", plan.counts, 1, "[E]")
    slots, experts = plan.experts.size, plan.counts.size
    checks.check_shape(op, "plan.slots", plan.slots, (experts, slots - experts + 1), "[E, S - E + 1]")


def _turns(ids: jax.Array) -> jax.Array:
    """[N] int32: how many equal ids stand before each."""
    order = jnp.argsort(ids, stable=True)
    ordered = ids[order]
    before = jnp.arange(ids.size) - jnp.searchsorted(ordered, ordered, side="left")
    return jnp.zeros_like(order).at[order].set(before, unique_indices=True)
