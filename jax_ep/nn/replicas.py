"""Replicas of busy experts: a plan, made on the host from loads, and the ids and matrices of the plan.

    plan = plan_replicas(load, num_ranks=8, num_slots=288)
    slots = physical_ids(expert_ids, plan)  # in jax.shard_map, as all that follows
    out, stats = moe_mlp(tokens, slots, weights, replicate(experts, plan, group=group), group=group)

A plan is numpy: make one from time to time, and pass it to a jitted function as an argument. Plans with the same
numbers of experts and slots have one shape, so a new plan does not compile again. Only the layer sees slots:
parameters, optimizers and checkpoints hold experts.
"""

import itertools
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_ep._kit import checks, vary
from jax_ep._kit.checks import AnyArray, Implementation
from jax_ep._kit.linear import linear
from jax_ep._kit.scopes import op_scope
from jax_ep.group import Group, check_group
from jax_ep.ops.ragged.api import ragged_all_to_all

Tree = TypeVar("Tree")
SLACK = 1.05  # times the mean load: the most load of a rank that keeps a matrix


class ReplicaPlan(NamedTuple):
    """The slots of experts' replicas. Rank r of R owns the slots [r S/R, (r + 1) S/R).

    In a plan of several layers these are a leading axis, for `jax.lax.scan`, or `jax.tree.map(lambda x: x[i], plan)`.

    Attributes:
      experts: [S] int32, the expert of each slot.
      slots: [E, S - E + 1] int32, the slots of each expert in ascending order, repeated from the first.
      counts: [E] int32, the number of slots of each expert.
    """

    experts: np.ndarray
    slots: np.ndarray
    counts: np.ndarray


def plan_replicas(
    load: np.ndarray,
    *,
    num_ranks: int,
    num_slots: int,
    num_nodes: int = 1,
    groups: int | None = None,
    previous: ReplicaPlan | None = None,
) -> ReplicaPlan:
    """A greedy plan (after EPLB of DeepSeek, 2025). Every process makes the same plan from the same arguments.

    First every expert has one replica. Each further slot goes to the expert with the busiest replicas, or among equal
    ones to the expert with the fewest. Then replicas are packed, the busiest first, each into the least busy rank with
    a free slot, preferably a rank without that expert.

    Args:
      load: [E] or [layers, E] assignments of each expert, of all ranks: a past mean.
      num_slots: S, at least E and a multiple of `num_ranks`.
      num_nodes: nodes of adjacent ranks, each with all replicas of its experts: groups are packed into nodes first.
      groups: of adjacent experts, as for `sigmoid_top_k`: a group is on one node. Default: E.
      previous: an earlier plan, from which the new one differs little. A replica goes to a rank that had its expert if
        the rank then has at most 1.05 times the mean load. Experts that stay on a rank stay in their slots.

    Raises:
      ValueError, TypeError: the numbers do not fit, a load is negative or not finite, or it is traced.
    """
    op = "plan_replicas"
    for name, count in (("num_ranks", num_ranks), ("num_slots", num_slots), ("num_nodes", num_nodes)):
        checks.check_int(op, name, count)
    _check_on_host(op, "load", load)
    checks.check_array(op, "load", load, dtype=checks.NUMBERS)
    load = np.asarray(load, np.float64)
    if load.ndim not in (1, 2) or not load.size or not np.all(np.isfinite(load)) or (load < 0).any():
        raise ValueError(f"{op}: load must be [E] or [layers, E] finite numbers, none negative, got {load}")
    experts = load.shape[-1]
    if num_slots % num_ranks or num_slots < experts:
        raise ValueError(
            f"{op}: num_slots must be a multiple of {num_ranks} ranks and at least {experts}, got {num_slots}"
        )
    number: int = experts if groups is None else groups
    checks.check_int(op, "groups", number)
    if num_ranks % num_nodes or number % num_nodes or experts % number:
        raise ValueError(
            f"{op}: num_nodes must divide {num_ranks} ranks and {number} groups, and groups {experts} experts, got "
            f"{num_nodes}"
        )
    before = itertools.repeat(None)
    if previous is not None:
        _check_is_plan(op, "previous", previous)
        _check_on_host(op, "previous.experts", previous.experts)
        shape = (*load.shape[:-1], num_slots)
        checks.check_array(op, "previous.experts", previous.experts, "[..., S]", np.integer, shape=shape)
        before = np.atleast_2d(previous.experts)
    each = partial(_plan, ranks=num_ranks // num_nodes, num_slots=num_slots, nodes=num_nodes, groups=number)
    plans = list(map(each, np.atleast_2d(load), before))
    return plans[0] if load.ndim == 1 else ReplicaPlan(*map(np.stack, zip(*plans, strict=True)))


def _plan(
    load: np.ndarray, before: np.ndarray | None, *, ranks: int, num_slots: int, nodes: int, groups: int
) -> ReplicaPlan:
    """Args: `ranks` of a node; `before`, the experts of the slots [S]."""
    each, room = load.size // groups, num_slots // nodes // ranks
    had = None if before is None else before.reshape(nodes, ranks, room)
    of_groups = load.reshape(groups, each).sum(axis=1)
    had_groups = None if had is None else had.reshape(nodes, -1) // each
    counts, experts = np.ones(load.size, np.int32), np.empty((nodes, ranks, room), np.int32)
    for n, held in enumerate(_packed(of_groups, np.arange(groups), nodes, groups // nodes, had_groups)):
        mine = np.add.outer(np.sort(held) * each, np.arange(each)).ravel()
        for _ in range(ranks * room - mine.size):
            counts[mine[np.lexsort((counts[mine], -load[mine] / counts[mine]))[0]]] += 1
        replicas = np.repeat(mine, counts[mine])
        packed = _packed((load / counts)[replicas], replicas, ranks, room, None if had is None else had[n])
        for r, new in enumerate(packed):
            experts[n, r] = sorted(new) if had is None else _in_place(new, had[n, r])
    flat = experts.reshape(-1)
    slots = [np.flatnonzero(flat == expert) for expert in range(load.size)]
    most = num_slots - load.size + 1
    return ReplicaPlan(flat, np.array([np.resize(s, most) for s in slots], np.int32), counts)


def _packed(loads: np.ndarray, kinds: np.ndarray, bins: int, room: int, before: np.ndarray | None) -> list[list[int]]:
    """The kinds of the items in each bin. Args: `before`, the kinds that each bin had, or None."""
    busy, held = np.zeros(bins), [[] for _ in range(bins)]
    limit = SLACK * loads.sum() / bins
    for i in np.argsort(-loads, kind="stable"):
        kind, load = int(kinds[i]), loads[i]
        moves = [before is None or kind not in before[b] or busy[b] + load > limit for b in range(bins)]
        best = min((len(held[b]) >= room, kind in held[b], moves[b], busy[b], b) for b in range(bins))[-1]
        held[best].append(kind)
        busy[best] += load
    return held


def _in_place(new: list[int], had: np.ndarray) -> list[int]:
    """`new`, ordered so that as many experts as possible stay in their slots."""
    left = sorted(new)
    kept = [left.pop(left.index(expert)) if expert in left else None for expert in had]
    return [left.pop(0) if expert is None else expert for expert in kept]


@op_scope("replicate")
def replicate(experts: Tree, plan: ReplicaPlan, *, group: Group, implementation: Implementation = "auto") -> Tree:
    """The matrices [S / R, ...] of this rank's slots. Call it on every rank, in `jax.shard_map`, with its own experts.

    A matrix is sent once to each slot. The owner adds up the gradients of its replicas in float32, in the order of the
    slots, and rounds once. (`lb_prefetch_weights` and `lb_reduce_grads` of DeepEP V2.5.)

    Args:
      experts: any pytree of arrays [E / R, ...], such as `jax_ep.Experts`; rank r owns experts [r E/R, (r + 1) E/R).
      plan: of one layer, the same on all ranks.
      group, implementation: as for `jax_ep.lax.ragged_all_to_all`, whose errors it raises.
    """
    op = "replicate"
    check_group(op, group)
    _check_plan(op, plan)
    slots, ranks, local = plan.experts.shape[0], group.size, plan.counts.shape[0] // group.size
    if slots % ranks or plan.counts.shape[0] % ranks:
        raise ValueError(f"{op}: plan must be of experts and slots that {ranks} ranks divide, got {plan}")
    me, room, of_slots = jax.lax.axis_index(group.axis_name), slots // ranks, jnp.asarray(plan.experts, jnp.int32)
    owner, row = jnp.divmod(of_slots, local)
    is_slot = jnp.asarray(plan.slots, jnp.int32)[of_slots] == jnp.arange(slots, dtype=jnp.int32)[:, None]
    number = jnp.argmax(is_slot, axis=1).astype(jnp.int32)  # among its expert's slots
    my_owner, my_row, my_number = (x.reshape(ranks, room)[me] for x in (owner, row, number))
    from_here, to_here = owner == me, (my_owner[None] == jnp.arange(ranks, dtype=jnp.int32)[:, None]).reshape(-1)
    places = jnp.arange(room, dtype=jnp.int32)
    here = (jnp.tile(x, ranks) for x in (places, my_row, my_number))  # of each rank, a slice of each slot
    index = (row, number, from_here, to_here, *here, jnp.max(jnp.asarray(plan.counts, jnp.int32)))
    exchange = partial(ragged_all_to_all, axis_name=group.axis_name, group=group, implementation=implementation)

    def out(index: list[jax.Array], own: jax.Array) -> jax.Array:
        row, _, from_here, to_here, at, *_ = index
        empty = jnp.zeros_like(own, shape=(room, *own.shape[1:]))
        return exchange(own, empty, row, from_here.astype(jnp.int32), at, to_here.astype(jnp.int32))

    def home(index: list[jax.Array], cotangent: jax.Array) -> jax.Array:
        _, number, from_here, to_here, at, my_row, my_number, most = index
        nothing = jnp.zeros_like(cotangent, shape=(local, *cotangent.shape[1:]))

        def add(turn: jax.Array, total: jax.Array) -> jax.Array:  # one replica of each expert
            sent, received = to_here & (my_number == turn), from_here & (number == turn)
            part = exchange(cotangent, nothing, at, sent.astype(jnp.int32), my_row, received.astype(jnp.int32))
            return total + part.astype(jnp.float32)

        return jax.lax.fori_loop(0, most, add, nothing.astype(jnp.float32)).astype(cotangent.dtype)

    def replicated(own: jax.Array) -> jax.Array:
        checks.check_array(op, "each leaf of experts", own)
        checks.check_array(op, "each leaf of experts", own, "[E / R, ...]", shape=(local, *own.shape[1:]))
        own, *residuals = vary.vary_alike(group.axis_name, own, *index)
        return linear(out, home, residuals, own) if jnp.issubdtype(own.dtype, np.inexact) else out(residuals, own)

    return jax.tree.map(replicated, experts)


def physical_ids(expert_ids: AnyArray, plan: ReplicaPlan, *, offset: int | jax.Array = 0) -> jax.Array:
    """The slots [T, K] int32 of integer experts [T, K].

    The assignments to an expert go to its replicas in turn, in the order of (token, k), so the loads of two replicas
    differ by at most one. -1 stays -1, and other ids outside [0, E) become the number of slots, which is invalid.

    Args:
      offset: the first replica. If it is the rank, odd assignments go to different replicas on different ranks.
    """
    op = "physical_ids"
    checks.check_array(op, "expert_ids", expert_ids, dtype=np.integer)
    _check_plan(op, plan)
    first = offset if isinstance(offset, jax.Array) else np.asarray(offset)
    checks.check_array(op, "offset", first, "[]", np.integer, shape=())
    if isinstance(first, np.ndarray):
        checks.check_int(op, "offset", int(first), least=-(2**31), below_32_bits=True)
    num_experts, num_slots = len(plan.counts), len(plan.experts)
    flat = checks.to_int32(expert_ids).reshape(-1)
    inside = (flat >= 0) & (flat < num_experts)
    expert = jnp.where(inside, flat, 0)
    replicas = jnp.asarray(plan.counts, jnp.int32)[expert]
    turn = _turns(jnp.where(inside, flat, num_experts)) % replicas + checks.to_int32(first) % replicas
    slot = jnp.asarray(plan.slots)[expert, turn % replicas]
    slot = jnp.where(inside, slot, jnp.where(flat == -1, -1, num_slots))
    return slot.astype(jnp.int32).reshape(expert_ids.shape)


def _check_on_host(op: str, name: str, x: object) -> None:
    if isinstance(x, Tracer):
        raise TypeError(f"{op}: {name} must be known on the host, got a traced {checks.describe(x)}")


def _check_is_plan(op: str, name: str, plan: object) -> None:
    if not isinstance(plan, ReplicaPlan):
        raise TypeError(f"{op}: {name} must be the ReplicaPlan of plan_replicas, got {checks.describe(plan)}")


def _check_plan(op: str, plan: ReplicaPlan) -> None:
    _check_is_plan(op, "plan", plan)
    for name, leaf in plan._asdict().items():
        checks.check_array(op, f"plan.{name}", leaf, dtype=np.integer)
    checks.check_array(op, "plan.experts", plan.experts, "[S]")
    checks.check_array(op, "plan.counts", plan.counts, "[E]")
    slots, experts = plan.experts.size, plan.counts.size
    checks.check_array(op, "plan.slots", plan.slots, "[E, S - E + 1]", shape=(experts, slots - experts + 1))


def _turns(ids: jax.Array) -> jax.Array:
    """[N] int32: how many equal ids come before each."""
    order = jnp.argsort(ids, stable=True)
    ordered = ids[order]
    places = jnp.arange(ids.size, dtype=jnp.int32)
    before = places - jax.lax.cummax(jnp.where(ordered != jnp.roll(ordered, 1), places, 0))
    return jnp.zeros_like(places).at[order].set(before, unique_indices=True)
