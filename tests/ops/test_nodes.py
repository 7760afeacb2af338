"""dispatch and combine over several nodes, which are the first axis of a mesh of one process, against the oracles:
there and back, in chunks the results of whole tokens by as many calls as chunks, odd routings, and what is refused."""

import dataclasses
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import nodes_cases
import numpy as np
import pytest
from helpers import Rng
from nodes_cases import AXES, EXPERTS, HIDDEN, TOKENS, TOP_K, over, run, uneven

import jax_ep
from jax_ep import CapacityError, Group, Implementation, NodeOptions, PlatformError, combine, dispatch
from jax_ep.backends import NodesBackend
from jax_ep.lax import ragged_all_to_all
from jax_ep.ops.moe.types import NodeRouting
from jax_ep.runtime import heartbeat, opening, topology
from jax_ep.runtime.progress import Progress

CAPACITY = 24  # of a rank
BFLOAT16, FLOAT16, FLOAT32 = helpers.DTYPES
# Nodes, ranks, node capacity, wire, dtype, and chunks: those that divide the tokens of a node or not, and more than
# there are.
WAYS = [
    *((2, 4, None, None, BFLOAT16, chunks) for chunks in (1, 2)),
    *((4, 2, None, None, FLOAT16, chunks) for chunks in (1, 4)),
    *((2, 2, capacity, None, FLOAT32, chunks) for capacity, chunks in ((None, 100), (5, 2), (100, 1))),
    *((nodes, ranks, None, None, FLOAT32, 1) for nodes, ranks in ((1, 2), (2, 1))),
    *((2, 4, capacity, None, FLOAT32, chunks) for capacity, chunks in ((2, 1), (3, 3))),
    (4, 2, 5, None, FLOAT32, 1),
    *((2, 2, capacity, "float8", FLOAT32, 4) for capacity in (None, 4)),
]

pytestmark = pytest.mark.usefixtures("native")


WAY, ROOM = r"tokens for a node but nodes\.capacity is 3", r"needs \d+ rows but capacity is "


@pytest.mark.parametrize(("capacity", "node_capacity", "match"), [(16, None, ROOM), (None, 3, WAY), (2, 3, WAY)])
def test_overflow_delivers_nothing(
    capacity: Any, node_capacity: Any, match: str, implementation: Implementation, rng: Rng
) -> None:
    """Each time, and of the way first, where tokens for a node find no room there and the others are too many rows."""
    case = uneven(rng, 8)
    with over(2, 4, nodes=NodeOptions(node_capacity)) as group:
        for _ in range(2):
            out, _ = run(group, case, implementation=implementation, capacity=capacity)
            assert np.isnan(out.rows).all()
            with pytest.raises(CapacityError, match=match):
                group.check()
            group.check()
        out, _ = run(group, case, implementation=implementation, on_overflow="drop")
        group.check()
        assert np.isfinite(out.rows).all()


def test_what_does_not_leave_a_node(rng: Rng) -> None:
    with over(2, 2) as group:
        assert group._resolve("ragged_all_to_all", "auto") == "xla"
        with pytest.raises(PlatformError, match="ragged_all_to_all: groups across nodes need implementation='xla'"):
            group._resolve("ragged_all_to_all", "kernels")
        rows, indices = rng.standard_normal((2, 2, 4, 3)).astype(np.float32), np.zeros((2, 2, 4), np.int32)
        program = helpers.per_rank(partial(ragged_all_to_all, axis_name=AXES), group.mesh, check_vma=False)
        np.testing.assert_array_equal(helpers.fetch(program(rows, rows, *[indices] * 4)), rows)


def test_the_plan() -> None:
    """All to all while most tokens need a node; room for a quarter more than expected where few do."""
    with over(2, 2) as group:
        assert group.node_plan(4096, 8, 256).capacity is None
        with pytest.raises(ValueError, match=r"^Group\.node_plan: num_tokens must be at least 0, got -1"):
            group.node_plan(-1, 8, 256)
        few = group.node_plan(4096, 1, 256)
        assert few.expected == 2048
        assert few.capacity == 2560


@pytest.mark.matrix(1)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_there_and_back(way: Any, implementation: Implementation, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody writes is NaN before."""
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    nodes, ranks, node_capacity, wire, dtype, chunks = way
    case = uneven(rng, nodes * ranks, 128 if wire else HIDDEN, dtype)
    with over(nodes, ranks, nodes=NodeOptions(node_capacity, chunks)) as group:
        assert (group.size, group.nodes, group.node_axes) == (nodes * ranks, nodes, ("node",))
        sent: dict[str, Any] = {"on_overflow": "drop", "wire": wire, "capacity": CAPACITY, "alignment": 4}
        found = run(group, case, implementation=implementation, **sent)
        group.check()
    nodes_cases.assert_there_and_back(found, group, case, fp8=wire is not None, alignment=4)


@pytest.mark.optimized
@pytest.mark.parametrize(("node_capacity", "chunks", "check_vma"), [(None, 2, True), (4, 4, False)])
def test_the_bits_are_those_of_whole_tokens(node_capacity: int | None, chunks: int, check_vma: bool, rng: Rng) -> None:
    """Forward, along tangents and backward, in 16 bits; of routings whose rows do not fit, too."""
    case, found = uneven(rng, 4, dtype=BFLOAT16), []
    for number in (1, chunks):
        with over(2, 2, nodes=NodeOptions(node_capacity, number)) as group:
            options: dict[str, Any] = {"num_experts": EXPERTS, "capacity": CAPACITY, "on_overflow": "drop"}
            both = helpers.round_trip(group, experts=jnp.tanh, **options)

            def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array, both: Any = both) -> Any:
                out, back = jax.vjp(lambda *x: both(x[0], ids, x[1])[1], tokens, weights)
                moved = jax.jvp(lambda *x: both(x[0], ids, x[1])[1], (tokens, weights), (tokens[::-1], weights))
                return out, moved, back(tokens[::-1])

            program = helpers.per_rank(body, group.mesh, check_vma=check_vma)
            found.append(helpers.bits(helpers.fetch(program(*helpers.on_mesh(group.mesh, case)))))
            group.check()
    assert found[0] == found[1]


SCATTER, COMBINE = (rf'custom-call\(.*custom_call_target="jax_ep_{kernel}"' for kernel in ("scatter", "combine"))
EXCHANGE = rf"\(?f32\[[^=]*\b{HIDDEN}\][^=]* (?:all-gather|all-to-all)\("  # of rows
COPY = rf"f32\[{CAPACITY},{HIDDEN}\]\S* copy\(%(?!broadcast)"  # of a buffer of rows, unless it is of zeros


def counted(program: Any, *operands: Any) -> dict[str, int]:
    """Calls of kernels, exchanges between nodes of rows, copies, and what would keep chunks from overlapping."""
    hlo = program.lower(*operands).compile().as_text()
    found = dict(re.findall(r"^\s*(?:ROOT )?(%\S+) = (.*)$", hlo, re.MULTILINE))  # each instruction, by its name
    waits: dict[str, set[str]] = {}  # for what each waits; operands come before what uses them
    for name, text in found.items():
        used = {operand for operand in re.findall(r"%[\w.-]+", text) if operand in waits}
        waits[name] = used.union(*(waits[operand] for operand in used))
    kinds = {"scatter": SCATTER, "combine": COMBINE, "exchange": EXCHANGE, "copy": COPY}
    of_kind = {kind: {name for name, text in found.items() if re.search(each, text)} for kind, each in kinds.items()}
    ends = (("exchange", "scatter"), ("combine", "exchange"))
    waiting = sum(bool(waits[name] & of_kind[before]) for kind, before in ends for name in of_kind[kind])
    return {kind: len(names) for kind, names in of_kind.items()} | {"waiting": waiting}


@pytest.mark.matrix(1)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA compiles for a CPU")
@pytest.mark.parametrize("node_capacity", [None, 4])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_kernel_and_an_exchange_for_each_chunk(node_capacity: int | None, chunks: int) -> None:
    """All write into one buffer of rows, which is nowhere copied. No exchange waits for kernels that pass on what
    another one brought, nor do kernels that sum rows up wait for an exchange.
    """
    with over(2, 2, nodes=NodeOptions(node_capacity, chunks)) as group:

        def sent(tokens: jax.Array, ids: jax.Array) -> Any:
            return dispatch(tokens, ids, group=group, num_experts=EXPERTS, capacity=CAPACITY, on_overflow="drop")

        def summed(rows: jax.Array, routing: Any) -> jax.Array:
            return combine(rows, routing, group=group)

        def of_sums(rows: jax.Array, routing: Any, cotangent: jax.Array) -> Any:
            return jax.vjp(lambda rows: combine(rows, routing, group=group), rows)[1](cotangent)

        def of_rows(tokens: jax.Array, ids: jax.Array, cotangent: jax.Array) -> Any:
            return jax.vjp(lambda tokens: sent(tokens, ids).rows, tokens)[1](cotangent)

        tokens, ids = np.zeros((2, 2, TOKENS, HIDDEN), np.float32), np.zeros((2, 2, TOKENS, TOP_K), np.int32)
        out = jax.eval_shape(helpers.per_rank(sent, group.mesh), tokens, ids)
        rows = out.rows, out.routing
        moved = {"scatter": chunks, "combine": 0, "exchange": chunks, "copy": 0, "waiting": 0}
        added = {"scatter": 0, "combine": chunks, "exchange": chunks, "copy": 0, "waiting": 0}
        for body, operands, expected in (
            (sent, (tokens, ids), moved),
            (summed, rows, added),
            (of_sums, (*rows, tokens), moved),
            (of_rows, (tokens, ids, out.rows), added),
        ):
            assert counted(helpers.per_rank(body, group.mesh), *operands) == expected, body.__name__


def test_each_call_marks_its_begin_and_its_end(monkeypatch: pytest.MonkeyPatch, rng: Rng) -> None:
    """As between processes: once, whatever is taken of its results, and in whatever transformation. A dispatch whose
    results `jax.checkpoint` keeps may begin again on a GPU, and since jax 0.11."""
    monkeypatch.setattr(NodesBackend, "marked", property(lambda nodes: nodes._inside.ranks))
    operands = [x.reshape(2, 2, *x.shape[1:]) for x in helpers.draw_case(rng, 4, TOKENS, TOP_K, EXPERTS, HIDDEN)]
    with over(2, 2) as group:
        assert group.intranode is not None
        progress = Progress(helpers.native(group.intranode).marks)
        both = helpers.round_trip(group, num_experts=EXPERTS, implementation="auto")

        def loss(*x: jax.Array) -> jax.Array:
            return jnp.sum(both(*x)[1] ** 2)

        def in_scan(tokens: jax.Array, *others: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(lambda x, _: (both(x, *others)[1], None), tokens, None, length=3)[0])

        def moved(tokens: jax.Array, *others: jax.Array) -> Any:
            return jax.jvp(lambda x: jax.grad(loss)(x, *others), (tokens,), (tokens,))

        saves_dispatch = jax.checkpoint_policies.save_only_these_names("jax_ep_dispatch")
        remat = jax.grad(jax.checkpoint(loss, policy=saves_dispatch))
        again = jax.default_backend() == "gpu" or jax.__version_info__ >= (0, 11)
        for body, calls in (
            (both, {2}),
            (lambda *x: both(*x)[0].group_sizes, {1}),
            (jax.grad(loss), {4}),
            (jax.grad(loss, 2), {4}),
            (remat, {4, 4 + again}),
            (jax.grad(in_scan), {12}),
            (moved, {6}),
            (lambda x, *others: jax.vmap(lambda x: both(x, *others)[1])(jnp.stack([x, x])), {2}),
        ):
            before = progress.marks
            helpers.run(group, body, *operands)
            begun, ended, last = progress.marks
            assert ended == begun
            assert begun - before.begun in calls
        assert last.startswith("combine capacity=")


def test_a_routing_that_names_no_token(implementation: Implementation, rng: Rng) -> None:
    case = helpers.draw_case(rng, 4, TOKENS, TOP_K, EXPERTS, HIDDEN)
    with over(2, 2, nodes=NodeOptions(3)) as group:
        operands = helpers.on_mesh(group.mesh, case)
        options: dict[str, Any] = {"num_experts": EXPERTS, "on_overflow": "drop", "implementation": implementation}

        def body(wrong: int, *operands: jax.Array) -> jax.Array:
            out = dispatch(*operands, group=group, **options)
            assert isinstance(out.routing, NodeRouting)
            assert out.routing.sent is not None
            spoiled = dataclasses.replace(out.routing, sent=out.routing.sent.at[1, 0].set(wrong))
            return combine(out.rows, spoiled, group=group, implementation=implementation)

        for wrong in (-1, TOKENS + 1, -(2**31), 2**31 - 1):
            assert np.isnan(helpers.run(group, partial(body, wrong), *operands)).all()


def test_a_routing_of_another_kind(rng: Rng) -> None:
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
    store = helpers.KeyValueStore()
    heartbeat_thread = heartbeat.HeartbeatThread(lambda: store, 0, {0, 1})
    monkeypatch.setattr("jax_ep.group.heartbeat_thread", lambda _: heartbeat_thread)
    start = time.monotonic()
    with pytest.raises(jax_ep.PeerTimeoutError, match=r"process 1 did not create its part of the group within 1\.2 s"):
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
