"""Over several nodes: 64 bits, odd routings, one deadline, and arguments that are refused."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_heartbeat import Store
from test_nodes import AXES, EXPERTS, HIDDEN, TOKENS, TOP_K, over, run

from jax_ep import Group, Implementation, NodeOptions, PeerTimeoutError, combine, dispatch
from jax_ep.backends import NodesBackend
from jax_ep.ops.moe.types import NodeRouting
from jax_ep.runtime import heartbeat, opening, topology
from jax_ep.runtime.progress import Progress


@pytest.mark.matrix(1)
@pytest.mark.parametrize("node_capacity", [None, TOKENS - 1])
def test_with_64_bits(node_capacity: int | None, implementation: Implementation, rng: helpers.Rng) -> None:
    """What is counted stays int32, so that combine takes the routing."""
    case = helpers.draw_case(rng, 4, TOKENS, TOP_K, EXPERTS, HIDDEN)
    options: dict[str, Any] = {"on_overflow": "drop", "implementation": implementation}
    with over(2, 2, nodes=NodeOptions(node_capacity)) as group:
        plain = run(group, case, **options)
        with jax.enable_x64(True):
            wide = run(group, case, **options)
        group.check()
    assert plain[0].routing.dropped.any() == (node_capacity is not None)
    for one, other in zip(*map(jax.tree.leaves, (plain, wide)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_each_call_marks_its_begin_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between processes: once, whatever is taken of its results, and in whatever transformation. A dispatch whose
    results `jax.checkpoint` keeps may begin again on a GPU."""
    monkeypatch.setattr(NodesBackend, "marked", property(lambda nodes: nodes._inside.ranks))
    case = helpers.draw_case(np.random.default_rng(helpers.SEED), 4, TOKENS, TOP_K, EXPERTS, HIDDEN)
    operands = [x.reshape(2, 2, *x.shape[1:]) for x in case]
    with over(2, 2) as group:
        assert group.intranode is not None
        progress = Progress(helpers.native(group.intranode).marks)
        both = helpers.round_trip(group, num_experts=EXPERTS, implementation="auto")
        saves_dispatch = jax.checkpoint_policies.save_only_these_names("jax_ep_dispatch")

        def loss(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
            return jnp.sum(both(tokens, ids, weights)[1] ** 2)

        def in_scan(tokens: jax.Array, *others: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(lambda x, _: (both(x, *others)[1], None), tokens, None, length=3)[0])

        def moved(tokens: jax.Array, *others: jax.Array) -> Any:
            return jax.jvp(lambda x: jax.grad(loss)(x, *others), (tokens,), (tokens,))

        remat = jax.grad(jax.checkpoint(loss, policy=saves_dispatch))
        for body, calls in (
            (both, 2),
            (lambda *x: both(*x)[0].group_sizes, 1),
            (jax.grad(loss), 4),
            (jax.grad(loss, 2), 4),
            (remat, 4),
            (jax.grad(in_scan), 12),
            (moved, 6),
            (lambda x, *others: jax.vmap(lambda x: both(x, *others)[1])(jnp.stack([x, x])), 2),
        ):
            before = progress.marks
            helpers.fetch(helpers.per_rank(body, group.mesh)(*operands))
            begun, ended, last = progress.marks
            assert ended == begun
            again = body is remat and jax.default_backend() == "gpu"
            assert begun - before.begun in (calls, calls + again)
        assert last.startswith("combine capacity=")


def test_a_routing_that_names_no_token(implementation: Implementation, rng: helpers.Rng) -> None:
    case = helpers.draw_case(rng, 4, TOKENS, TOP_K, EXPERTS, HIDDEN)
    with over(2, 2, nodes=NodeOptions(3)) as group:
        operands = helpers.on_mesh(group.mesh, case)
        options: dict[str, Any] = {"on_overflow": "drop", "implementation": implementation}

        def body(wrong: int, *operands: jax.Array) -> jax.Array:
            tokens, ids, weights = operands
            out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, **options)
            assert isinstance(out.routing, NodeRouting)
            assert out.routing.sent is not None
            spoiled = dataclasses.replace(out.routing, sent=out.routing.sent.at[1, 0].set(wrong))
            return combine(out.rows, spoiled, group=group, implementation=implementation)

        for wrong in (-1, TOKENS + 1, -(2**31), 2**31 - 1):
            sums = helpers.fetch(helpers.per_rank(functools.partial(body, wrong), group.mesh)(*operands))
            assert np.isnan(sums).all()


def test_a_routing_of_another_kind(rng: helpers.Rng) -> None:
    case = helpers.draw_case(rng, 4, TOKENS, TOP_K, EXPERTS, HIDDEN)
    with over(2, 2) as group, Group(group.mesh, AXES, timeout=30) as one:
        operands = helpers.on_mesh(group.mesh, case)
        for here, there, match in (
            (group, one, "of one node, as group is, got one across nodes"),
            (one, group, "across nodes, as group is, got one of one node"),
        ):

            def body(*operands: jax.Array, here: Group = here, there: Group = there) -> jax.Array:
                out = dispatch(*operands, group=here, num_experts=EXPERTS)
                return combine(out.rows, out.routing, group=there)

            with pytest.raises(ValueError, match=f"^combine: routing must be of a group {match}"):
                jax.eval_shape(helpers.per_rank(body, group.mesh), *operands)


def test_one_deadline_for_all_that_opening_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the hosts of all processes, then for those of its own host, then for those of other hosts."""
    left = []

    def slow(stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            deadline = options.get("open_timeout") or arguments[-1]
            left.append(deadline.left())
            time.sleep(0.4)
            return stage(*arguments, **options)

        return run

    monkeypatch.setattr(topology, "crosses_nodes", slow(topology.crosses_nodes))
    monkeypatch.setattr(opening, "open_native", slow(opening.open_native))
    monkeypatch.setattr(topology, "other_processes", lambda *_: {1: "process 1"})
    store = Store()
    heartbeat_thread = heartbeat.HeartbeatThread(lambda: store, 0)
    monkeypatch.setattr("jax_ep.group.heartbeat_thread", lambda: heartbeat_thread)
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError, match=r"process 1 did not create its part of the group within 1\.2 s"):
        over(2, 2, open_timeout=1.2)
    assert 1.2 <= time.monotonic() - start < 1.6
    assert left == sorted(left, reverse=True)
    assert left[-1] <= 0.8
    heartbeat_thread.stop()


def test_wrong_arguments() -> None:
    mesh = helpers.mesh_of(node=2, ep=2)
    with pytest.raises(ValueError, match=r"^Group: axis_name must be a tuple where across_nodes is True, got 'ep'"):
        Group(mesh, "ep", across_nodes=True)
    with pytest.raises(TypeError, match="across_nodes must be True or False"):
        Group(mesh, AXES, across_nodes=1)  # pyright: ignore[reportArgumentType]
    with Group(mesh, AXES, timeout=30) as group:
        assert (group.nodes, group.intranode, group.node_axes) == (1, None, ())
    capacities = [("capacity", 0, ValueError), ("capacity", "all", ValueError), ("capacity", 2.5, TypeError)]
    chunks = [*(("chunks", x, ValueError) for x in (0, -2)), *(("chunks", x, TypeError) for x in (2.5, "auto", True))]
    for name, wrong, error in capacities + chunks:
        with pytest.raises(error, match=rf"^Group: nodes\.{name} must be"):
            over(2, 2, nodes=NodeOptions(**{name: wrong}))
    with pytest.raises(TypeError, match=r"^Group: nodes must be a jax_ep\.NodeOptions or None, got int"):
        over(2, 2, nodes=3)
