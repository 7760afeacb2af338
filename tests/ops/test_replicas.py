"""Replicas of busy experts: plans and the ids that follow them against numpy, layers against those without."""

from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Rng
from jax.sharding import PartitionSpec as P

from jax_ep import Group, Implementation, nn

SIZE, EXPERTS = 4, 16


@pytest.mark.parametrize(
    ("ranks", "slots", "nodes", "groups"),
    [(4, 16, 1, None), (4, 24, 1, None), (8, 32, 1, None), (2, 18, 1, None), (8, 32, 4, None), (8, 32, 4, 8)],
)
def test_replicas(ranks: int, slots: int, nodes: int, groups: int | None, rng: Rng) -> None:
    """An expert's replicas, and the experts of a group, are on one node; nodes are as even as their packing can be."""
    load = rng.uniform(1, 9, EXPERTS) if nodes > 1 else rng.zipf(1.5, EXPERTS).clip(max=1000).astype(np.float64)
    options: Any = {"num_ranks": ranks, "num_slots": slots, "num_nodes": nodes, "groups": groups}
    plan = nn.plan_replicas(load, **options)
    np.testing.assert_array_equal(plan.counts, np.bincount(plan.experts, minlength=EXPERTS))
    assert plan.counts.min() == 1
    for expert in range(EXPERTS):
        assert set(plan.slots[expert]) == set(np.flatnonzero(plan.experts == expert))
    for group in np.split(np.arange(EXPERTS), groups or EXPERTS):
        assert len({*(plan.slots[group] // (slots // nodes)).ravel()}) == 1
    per_slot = load / plan.counts
    if nodes == 1:  # nobody would gain by another's last replica
        assert all(load[e] / (plan.counts[e] - 1) >= per_slot.max() for e in np.flatnonzero(plan.counts > 1))
    busy = per_slot[plan.experts].reshape(nodes, ranks // nodes, -1).sum(axis=2)
    assert np.ptp(busy.sum(axis=1)) <= load.reshape(groups or EXPERTS, -1).sum(axis=1).max()
    assert (busy.max(axis=1) <= busy.mean(axis=1) + per_slot.max()).all()
    assert_alike(plan, nn.plan_replicas(load, **options))


def test_layers_have_plans_of_their_own(rng: Rng) -> None:
    load = rng.uniform(1, 9, (3, EXPERTS))
    options: Any = {"num_ranks": 4, "num_slots": 24}
    whole = nn.plan_replicas(load, **options)
    again = nn.plan_replicas(load * rng.uniform(0.8, 1.2, load.shape), **options, previous=whole)
    for i in range(3):
        assert_alike(nn.ReplicaPlan(*(x[i] for x in whole)), nn.plan_replicas(load[i], **options))
        assert np.mean(again.experts[i] == whole.experts[i]) > 0.5


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_plan_keeps_what_it_can(nodes: int, rng: Rng) -> None:
    """Of the same loads all; of similar ones most, where a plan of its own would move most, and nearly as evenly."""
    load = rng.uniform(1, 9, 64)
    options: Any = {"num_ranks": 8, "num_slots": 96, "num_nodes": nodes}
    before = nn.plan_replicas(load, **options)
    assert_alike(before, nn.plan_replicas(load, **options, previous=before))
    moved_load = load * np.exp(rng.normal(0, 0.05, 64))
    fresh, kept = (nn.plan_replicas(moved_load, **options, previous=plan) for plan in (None, before))
    moved = [int((plan.experts != before.experts).sum()) for plan in (fresh, kept)]
    assert moved[1] < 0.3 * moved[0]
    busy = (moved_load / kept.counts)[kept.experts].reshape(8, -1).sum(axis=1)
    assert busy.max() < 1.12 * busy.mean()


def assert_alike(plan: nn.ReplicaPlan, wanted: nn.ReplicaPlan) -> None:
    for a, b in zip(plan, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_plan_is_made_on_the_host() -> None:
    with pytest.raises(TypeError, match=r"^plan_replicas: load must be known on the host, got a traced float32\[4\]"):
        jax.eval_shape(partial(nn.plan_replicas, num_ranks=2, num_slots=4), jnp.ones(4))


PLAN = nn.plan_replicas(np.ones(200), num_ranks=2, num_slots=400)
IDS = np.zeros((1, 1), int)
OTHER = nn.plan_replicas(np.ones(6), num_ranks=2, num_slots=8)
EIGHT, DIVIDE = (np.ones(8), 4, 12), "num_nodes must divide 4 ranks and"
REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("plan_replicas", EIGHT, {"num_nodes": 3}, f"{DIVIDE} 8 groups, and groups 8 experts, got 3"),
    ("plan_replicas", EIGHT, {"groups": 3}, f"{DIVIDE} 3 groups, and groups 8 experts, got 1"),
    ("plan_replicas", EIGHT, {"groups": 2, "num_nodes": 4}, f"{DIVIDE} 2 groups"),
    ("plan_replicas", EIGHT, {"previous": PLAN}, "previous.experts must have shape"),
    ("plan_replicas", EIGHT, {"previous": np.ones(12)}, "previous must be the ReplicaPlan of plan_replicas, got"),
    ("plan_replicas", EIGHT, {"previous": PLAN._replace(experts=np.ones(12))}, "previous.experts must be of an int"),
    ("plan_replicas", ("load", 1, 2), {}, "load must be an array, got str"),
    *(("plan_replicas", (np.array(load), 1, 2), {}, "load must be") for load in ([1.0, -1.0], [], [1.0, np.nan])),
    ("plan_replicas", (np.ones(3), 2, 2), {}, "num_slots must be a multiple of 2 ranks and at least 3, got 2"),
    ("plan_replicas", (np.ones(3), 2, 5), {}, "num_slots must be a multiple of 2 ranks and at least 3, got 5"),
    ("plan_replicas", (np.ones(2), 0, 2), {}, "num_ranks must be at least 1, got 0"),
    ("plan_replicas", (np.ones(2), 2, 2.0), {}, "num_slots must be a Python int, .* got float"),
    ("physical_ids", ([[0]], PLAN), {}, "expert_ids must be an array, got list"),
    ("physical_ids", (np.zeros((1, 1)), PLAN), {}, "expert_ids must be of an integer dtype, got float64"),
    ("physical_ids", (IDS, tuple(PLAN)), {}, "plan must be the ReplicaPlan of plan_replicas, got tuple"),
    ("physical_ids", (IDS, jax.tree.map(lambda x: x[:1], PLAN)), {}, r"plan.slots must have shape \[E, S - E \+ 1\]"),
    ("physical_ids", (IDS, jax.tree.map(lambda x: x + 0.5, PLAN)), {}, "plan.experts must be of an integer dtype"),
    ("physical_ids", (IDS, PLAN), {"offset": 1.5}, "offset must be of an integer dtype, got float64"),
    ("physical_ids", (IDS, PLAN), {"offset": 2**31}, r"offset must be below 2\*\*31, got 2147483648"),
    ("physical_ids", (IDS, PLAN), {"offset": np.zeros(3, int)}, r"offset must have shape \[\] = \(\), got \(3,\)"),
    ("replicate", (np.ones((8, 3)), tuple(PLAN)), {}, "plan must be the ReplicaPlan of plan_replicas, got tuple"),
    ("replicate", (np.ones((3, 3)), PLAN), {}, r"each leaf of experts .* \[E / R, ...\] = \(50, 3\), got \(3, 3\)"),
    ("replicate", (np.ones(()), PLAN), {}, r"each leaf of experts must have shape \[E / R, ...\] = \(50,\), got \(\)"),
    ("replicate", (3.0, PLAN), {}, "each leaf of experts must be an array, got float"),
    ("replicate", (np.ones(1), OTHER), {}, "plan must be of experts and slots that 4"),
]


@pytest.mark.parametrize(("op", "given", "options", "match"), REFUSED)
def test_what_is_refused(op: str, given: Any, options: dict[str, Any], match: str, group: Group) -> None:
    if op == "plan_replicas":
        given, options = given[:1], options | dict(zip(("num_ranks", "num_slots"), given[1:], strict=True))
    elif op == "replicate":
        options = {"group": group}
    with pytest.raises((ValueError, TypeError), match=f"^{op}: {match}"):
        helpers.trace(group, lambda: getattr(nn, op)(*given, **options))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_ids_that_do_not_hold_the_number_of_slots(dtype: Any) -> None:
    ids = np.array([[0, 127], [5, 0]])
    wanted = nn.physical_ids(ids, PLAN)
    np.testing.assert_array_equal(nn.physical_ids(ids.astype(dtype), PLAN), wanted)
    np.testing.assert_array_equal(PLAN.experts[np.asarray(wanted)], ids)


@pytest.mark.parametrize("offset", [5, helpers.BIG])
def test_turns_do_not_follow_the_order_of_tokens(offset: int, rng: Rng) -> None:
    plan = nn.plan_replicas(np.array([9.0, 1, 4, 1]), num_ranks=1, num_slots=7)
    ids: Any = rng.integers(-1, 5, (40, 3)).astype(np.int32)  # 4 is no expert
    ids[::2, 0], ids[1::2, 0] = 0, 2
    actual = np.asarray(jax.jit(lambda *given: nn.physical_ids(*given[:2], offset=given[2]))(ids, plan, offset))
    queues = [offset] * 4
    assert plan.counts.max() == 3
    for place in np.ndindex(*ids.shape):
        expert = ids[place]
        if 0 <= expert < 4:
            assert actual[place] == plan.slots[expert][queues[expert] % int(plan.counts[expert])]
            queues[expert] += 1
        else:
            assert actual[place] == (-1 if expert == -1 else 7)


def test_replicas_of_no_loads_are_spread() -> None:
    np.testing.assert_array_equal(nn.plan_replicas(np.zeros(6), num_ranks=4, num_slots=8).counts, [2, 2, 1, 1, 1, 1])


@pytest.mark.usefixtures("strict")
def test_matrices_go_out_and_gradients_come_home(implementation: Implementation, group: Group, rng: Rng) -> None:
    """To the last bit: whole numbers have the sums of one copy, rounded once. Another plan compiles nothing."""
    size, experts, slots = SIZE, 8, 24
    plan = nn.plan_replicas(rng.zipf(1.3, experts).clip(max=50), num_ranks=size, num_slots=slots)
    assert plan.counts.max() > 3
    given: Any = {
        "wide": rng.integers(-9, 9, (experts, 3, 5)).astype(np.float32),
        "narrow": jnp.asarray(rng.integers(-9, 9, (experts, 2)), jnp.bfloat16),
    }
    codes = rng.integers(-128, 127, (experts, 6)).astype(np.int8)
    cotangent = {name: rng.integers(100, 250, (slots, *x.shape[1:])) for name, x in given.items()}
    body = partial(nn.replicate, group=group, implementation=implementation)
    replicate, traced = helpers.sharded(group.mesh, body, (P("ep"), P()), P("ep")), []

    @jax.jit
    def both(given: Any, plan: nn.ReplicaPlan, cotangent: Any) -> Any:
        traced.append(plan)

        def whole(given: Any) -> Any:
            out = replicate(given | {"codes": codes}, plan)
            return out, out.pop("codes")

        out, pull, sent = jax.vjp(whole, given, has_aux=True)
        return out, sent, pull(jax.tree.map(lambda c, x: c.astype(x.dtype), cotangent, out))[0]

    out, sent, gradient = helpers.fetch(both(given, plan, cotangent))
    jax.block_until_ready(both(given, nn.plan_replicas(np.ones(8), num_ranks=size, num_slots=slots), cotangent))
    assert len(traced) == 1
    np.testing.assert_array_equal(sent, codes[plan.experts])
    for name, x in given.items():
        np.testing.assert_array_equal(out[name], x[plan.experts])
        wanted = np.zeros(x.shape)
        np.add.at(wanted, plan.experts, np.asarray(cotangent[name]))
        np.testing.assert_array_equal(gradient[name], jnp.asarray(wanted, x.dtype))
