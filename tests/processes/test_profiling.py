"""jax_ep.profile: what every rank did in each op, in a trace that can be read, and what every trace must show."""

import gc
import itertools
import json
import re
import time
import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup, Rng

import jax_ep
from jax_ep import Group, JaxEpError
from jax_ep.__main__ import main
from jax_ep._kit import gemm

# Two chunks of tokens, and not so few that the coops of a GPU that have no thread here expand or reduce them all.
SIZE, EXPERTS, TOKENS = 4, 8, 600

pytestmark = pytest.mark.usefixtures("native")

# The phases of an op in their order. On a GPU no thread need have all of them, but those of a rank together do.
ORDER = {  # of dispatch two: ranks exchange counts, or all that few tokens chose
    "dispatch": "(arrive )?(post )?(count (post )?wait layout wait place (post )?)?"
    "wait (send (wait send )?)?(wait (pad )+)?wait wait (expand )?(wait expand )*"
    "|(arrive )?(post )?((count (post )?)?wait count layout (place )?)?"
    "wait (send )?(wait (pad )+)?wait (expand )?(wait expand )*",
    # A coop that takes tokens in groups waits for peers before it claims any. It may then have none to send or reduce.
    "combine": "(arrive )?(post )?(send )?wait (send )?(reduce |wait reduce )*(wait )?",
    "scatter": "(arrive )?(post )?(wait (send )?)?(pad )?(wait expand )*",
    "ragged_all_to_all": "(arrive )?(post )?wait (send )?wait ",
}


class Slice(NamedTuple):
    name: str
    category: str
    rank: int
    thread: int
    op: str
    epoch: int
    begin: float  # microseconds
    end: float


Phases = dict[tuple[int, int], list[Slice]]  # of a rank, by thread and epoch
Run = tuple[int, str]  # epoch, op


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def labels(path: Path) -> dict[int, str]:
    """What the trace says about ranks whose profile is not whole."""
    events = load(path)["traceEvents"]
    return {event["pid"]: event["args"]["labels"] for event in events if event["name"] == "process_labels"}


def slices(path: Path) -> list[Slice]:
    return [
        Slice(e["name"], e["cat"], e["pid"], e["tid"], e["args"]["op"], e["args"]["epoch"], e["ts"], e["ts"] + e["dur"])
        for e in load(path)["traceEvents"]
        if e["ph"] == "X"
    ]


def phases_of_ranks(found: list[Slice]) -> dict[int, Phases]:
    """The phases of each op on each thread, which fill the slice of the op without gap or overlap."""
    ops = {(s.rank, s.thread, s.epoch): s for s in found if s.category == "op"}
    ranks: dict[int, Phases] = defaultdict(lambda: defaultdict(list))
    for s in found:
        if s.category == "phase":
            ranks[s.rank][s.thread, s.epoch].append(s)
    assert {(rank, *track) for rank, phases in ranks.items() for track in phases} == ops.keys()
    for (rank, *track), op in ops.items():
        of_op = ranks[rank][track[0], track[1]]
        edges, begins = [of_op[0].begin, *(s.end for s in of_op)], [*(s.begin for s in of_op), op.end]
        assert max(abs(a - b) for a, b in zip(edges, begins, strict=True)) <= 0.01
        assert edges == sorted(edges)
        assert op.begin == of_op[0].begin
        assert {s.op for s in of_op} == {op.name} == {op.op}
    for one, other in itertools.pairwise(sorted(ops.values(), key=lambda s: (s.rank, s.thread, s.begin))):
        if (one.rank, one.thread) == (other.rank, other.thread):
            assert one.end <= other.begin
            assert one.epoch < other.epoch
    return ranks


def runs_by_thread(phases: Phases) -> dict[int, list[Run]]:
    """What each thread of a rank took part in."""
    runs: dict[int, list[Run]] = defaultdict(list)
    for (thread, epoch), of_op in sorted(phases.items()):
        runs[thread].append((epoch, of_op[0].op))
    return runs


def of_kinds_in(found: list[Run], runs: list[Run]) -> list[Run]:
    """Those of `runs` that a thread must show: its coop takes part in every op of a kind, or in none."""
    kinds = {op for _, op in found}
    return [(epoch, op) for epoch, op in runs if op in kinds]


def assert_in_order(of_op: list[Slice]) -> None:
    names = "".join(f"{s.name} " for s in of_op)
    assert re.fullmatch(ORDER[of_op[0].op], names), names


def assert_complete(path: Path, ranks: int, ops: list[str]) -> None:
    """Every rank ran these ops, in this order, and every phase of each in its order."""
    assert not labels(path)
    absent = set[str]() if jax.default_backend() == "cpu" else {"arrive"}
    phases = phases_of_ranks(slices(path))
    assert phases.keys() == set(range(ranks))
    for mine in phases.values():
        runs = list(enumerate(ops, min(epoch for _, epoch in mine)))
        threads = runs_by_thread(mine)
        assert runs in threads.values()  # the coop that posts takes part in every op
        for found in threads.values():
            assert found == of_kinds_in(found, runs)
        names: dict[int, set[str]] = defaultdict(set)
        for (_, epoch), of_op in mine.items():
            assert_in_order(of_op)
            names[epoch] |= {s.name for s in of_op}
        assert names.keys() == {epoch for epoch, _ in runs}
        for epoch, op in runs:
            assert names[epoch] | absent in [set(re.findall(r"\w+", order)) for order in ORDER[op].split("|")]


def assert_causes_precede(path: Path, slack: float) -> None:
    """No rank is past its first wait before every rank has begun to post."""
    posted: dict[int, dict[int, float]] = defaultdict(dict)
    waited: dict[int, float] = defaultdict(lambda: np.inf)
    tracks = [x for phases in phases_of_ranks(slices(path)).values() for x in phases.items()]
    for (_, epoch), of_op in tracks:
        for s in of_op:
            if s.name == "post":
                posted[epoch][s.rank] = min(s.begin, posted[epoch].get(s.rank, np.inf))
        first = next((s.end for s in of_op if s.name == "wait"), np.inf)
        if "count" in {s.name for s in of_op} or of_op[0].op != "dispatch":  # others wait for rows only
            waited[epoch] = min(waited[epoch], first)
    assert posted
    for epoch, begins in posted.items():
        assert max(begins.values()) <= waited[epoch] + slack


def draw(rng: Rng, tokens: int = TOKENS, size: int = SIZE) -> helpers.Case:
    return helpers.draw_case(rng, size, tokens, 4, EXPERTS, 128)


def round_trip(group: Group, **options: Any) -> Any:
    return helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="kernels", **options)


@pytest.mark.parametrize("wire", [None, "float8"])
def test_every_rank_has_every_phase(wire: Any, group: Group, rng: Rng, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    both = helpers.round_trip(group, num_experts=EXPERTS, wire=wire, implementation="kernels")
    loss = jax.grad(lambda *x: jnp.sum(both(*x)[1] ** 2))
    program, case = helpers.per_rank(loss, group.mesh), draw(rng)
    begin = time.monotonic() * 1e6
    with jax_ep.profile(path):
        helpers.fetch(program(*case))
    end = time.monotonic() * 1e6
    assert_complete(path, SIZE, ["dispatch", "combine", "scatter", "combine"])
    on_cpu = group.platform == "cpu"
    assert_causes_precede(path, slack=0.01 if on_cpu else 20)
    if on_cpu:  # where time.monotonic is the kernels' clock
        assert all(begin <= s.begin <= s.end <= end for s in slices(path))


def test_ragged_all_to_all(group: Group, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def body(operand: jax.Array) -> jax.Array:
        each = jnp.arange(SIZE, dtype=jnp.int32)
        sizes, here = jnp.ones_like(each), jnp.full_like(each, jax.lax.axis_index("ep"))
        return jax_ep.lax.ragged_all_to_all(operand, jnp.zeros_like(operand), each, sizes, here, sizes, axis_name="ep")

    with jax_ep.profile(path):
        helpers.run(group, body, np.ones((SIZE, SIZE, 16), np.float32))
    assert_complete(path, SIZE, ["ragged_all_to_all"])


@pytest.mark.skipif(not gemm.has_gemm(), reason="needs GPUs with the GEMM core")
def test_products(open_group: OpenGroup, rng: Rng, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a product and its gradients, in a program that has run before. Of two groups only the first shows them."""
    path, steps, (m, k, n) = tmp_path / "trace.json", 3, (4096, 256, 512)
    size = helpers.largest_size()
    group, _ = open_group(size), open_group(size)
    sizes = jnp.full(EXPERTS, m // EXPERTS)

    def body(lhs: jax.Array, rhs: jax.Array) -> Any:
        return jax.grad(lambda x, w: jnp.sum(jax_ep.lax.ragged_dot(x, w, sizes) ** 2), argnums=(0, 1))(lhs, rhs)

    case = [rng.standard_normal((size, *shape)).astype(jnp.bfloat16) for shape in ((m, k), (EXPERTS, k, n))]
    program = helpers.per_rank(body, group.mesh)
    helpers.fetch(program(*case))
    with jax_ep.profile(path):
        for _ in range(steps):
            helpers.fetch(program(*case))
    helpers.fetch(program(*case))
    assert not labels(path)
    found = slices(path)
    ranks = {s.rank for s in found}
    assert ranks in (set(range(size)), set(range(size, 2 * size)))
    for rank in ranks:
        here = [s for s in found if s.rank == rank]
        names = {s.epoch: s.op for s in here}
        assert [names[number] for number in range(1, len(names) + 1)].count(f"product {n} x {k}") == steps
        assert list(names.values()).count(f"product {k} x {n}") == 2 * steps  # also the gradient of the matrices
        assert len(names) == 3 * steps
        for s in here:
            assert s.name in ("multiply", names[s.epoch])
            assert s.op == names[s.epoch]
        for number in names:
            ctas = {s.thread: s for s in here if s.epoch == number and s.category == "product"}
            assert len(ctas) > 1
            for thread, whole in ctas.items():
                tiles = [s for s in here if s.epoch == number and s.thread == thread and s.category == "phase"]
                edges = [whole.begin, *(s.end for s in tiles)]
                assert edges == sorted(edges)
                np.testing.assert_allclose(edges, [*(s.begin for s in tiles), whole.end], rtol=0, atol=0.01)
    assert rows_below(f"product {n} x {k}, mean us", reported(path, capsys))[1][:2] == ["0", str(steps)]


def test_only_what_runs_inside_is_profiled_each_time(group: Group, rng: Rng, tmp_path: Path) -> None:
    """Profiles do not nest."""
    program, case = round_trip(group), draw(rng)
    ops = {}
    for run, times in enumerate([2, 1]):
        helpers.fetch(program(*case))
        with jax_ep.profile(tmp_path / f"{run}.json"):
            with pytest.raises(RuntimeError, match=rf"already writing to .*{run}\.json.*do not nest"):
                jax_ep.profile(tmp_path / f"{run}.json").__enter__()
            for _ in range(times):
                helpers.fetch(program(*case))
        helpers.fetch(program(*case))
        assert_complete(tmp_path / f"{run}.json", SIZE, ["dispatch", "combine"] * times)
        ops[run] = {s.epoch for s in slices(tmp_path / f"{run}.json")}
    assert ops == {0: {3, 4, 5, 6}, 1: {11, 12}}
    with jax_ep.profile(tmp_path / "idle.json"):
        pass
    assert slices(tmp_path / "idle.json") == []


def test_groups_that_open_and_close_inside(rng: Rng, tmp_path: Path) -> None:
    path, case = tmp_path / "trace.json", draw(rng, tokens=16, size=2)
    with Group(helpers.mesh_of(ep=2), "ep") as outer, jax_ep.profile(path):
        helpers.fetch(round_trip(outer)(*case))
        with Group(helpers.mesh_of(ep=2), "ep") as inner:
            helpers.fetch(round_trip(inner)(*case))
            helpers.fetch(round_trip(inner)(*case))
        outer.close()
    assert {s.rank for s in slices(path)} == {0, 1, 2, 3}
    epochs = {rank: {s.epoch for s in slices(path) if s.rank == rank} for rank in range(4)}
    assert epochs == {0: {1, 2}, 1: {1, 2}, 2: {1, 2, 3, 4}, 3: {1, 2, 3, 4}}


def test_a_group_that_python_drops_inside(rng: Rng, tmp_path: Path) -> None:
    """It lives on with its program, and in the trace."""
    path, case = tmp_path / "trace.json", draw(rng, size=2)
    group = Group(helpers.mesh_of(ep=2), "ep")
    program, dropped = jax.jit(round_trip(group)).lower(*case).compile(), weakref.ref(group)
    with jax_ep.profile(path):
        helpers.fetch(program(*case))
        del group
        jax.clear_caches()
        gc.collect()
        assert dropped() is None
        helpers.fetch(program(*case))
    assert_complete(path, 2, ["dispatch", "combine"] * 2)


def test_lines_of_a_mesh(open_group: OpenGroup, rng: Rng, tmp_path: Path) -> None:
    group, path = open_group(mesh=helpers.mesh_of(dp=2, ep=2)), tmp_path / "trace.json"
    with jax_ep.profile(path):
        helpers.fetch(round_trip(group)(*helpers.on_mesh(group.mesh, draw(rng))))
    assert_complete(path, 4, ["dispatch", "combine"])
    names = [e["args"]["name"] for e in load(path)["traceEvents"] if e["name"] == "process_name"]
    assert names == [f"rank {rank} of 'ep', line {line}" for line in range(2) for rank in range(2)]


def test_a_long_profile_keeps_its_end_and_says_so(open_group: OpenGroup, rng: Rng, tmp_path: Path) -> None:
    group, path, steps = open_group(2), tmp_path / "trace.json", 4000
    both = helpers.round_trip(group, num_experts=EXPERTS, implementation="kernels")

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (both(x, ids, weights)[1], None), tokens, None, steps)[0]

    program, case = helpers.per_rank(body, group.mesh), draw(rng, tokens=1, size=2)
    with jax_ep.profile(path):
        helpers.fetch(program(*case))
    runs, phases = list(enumerate(["dispatch", "combine"] * steps, 1)), phases_of_ranks(slices(path))
    assert labels(path).keys() == {0, 1}
    for rank, label in labels(path).items():
        lost = re.fullmatch(r"(\d+) earlier phases lost: the profile was too long", label)
        assert lost
        assert int(lost[1]) > 0
        threads = runs_by_thread(phases[rank])
        assert any(of_kinds_in(found, runs) == runs for found in threads.values())
        for found in threads.values():
            assert found == of_kinds_in(found, runs)[-len(found) :]
        for of_op in phases[rank].values():
            assert_in_order(of_op)
    with jax_ep.profile(path):
        helpers.fetch(round_trip(group)(*draw(rng, size=2)))
    assert_complete(path, 2, ["dispatch", "combine"])


def test_a_failing_op_is_profiled(open_group: OpenGroup, rng: Rng, tmp_path: Path) -> None:
    """Who waited, and for how long; the exception passes through."""
    timeout, stalled = 0.5, 3
    group, path = open_group(SIZE, timeout=timeout), tmp_path / "trace.json"
    program, case = round_trip(group), draw(rng, tokens=16)
    helpers.native(group).test_hooks.stall(stalled, "protocol")
    on_cpu = group.platform == "cpu"
    profiled = jax_ep.profile(path)(lambda: helpers.fetch(program(*case)))
    with helpers.awaiting_failure(group, "PeerTimeoutError|PeerLostError"):
        profiled()
    with pytest.raises(JaxEpError):
        group.check()
    waits = {s.rank: s.end - s.begin for s in slices(path) if s.name == "wait" and s.op == "dispatch"}
    assert set(range(SIZE)) - {stalled} <= waits.keys()
    assert max(waits.values()) >= 0.9 * timeout * 1e6
    if on_cpu:
        assert any(s.name == "give up" for s in slices(path))


def reported(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["report", str(path)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("op", "slow"), [("dispatch", 2), ("combine", 1)])
def test_the_report_names_the_slow_rank(
    op: str, slow: int, group: Group, rng: Rng, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A callback of the host delays one rank before an op. All others wait that long, for this rank."""
    path, seconds, case = tmp_path / "trace.json", 0.5, draw(rng, tokens=16)

    def sleep(rank: np.ndarray, after: np.ndarray) -> np.ndarray:
        del after  # what must be there before the delay
        time.sleep(seconds if int(rank) == slow else 0)
        return np.zeros((), np.float32)

    def delayed(rows: jax.Array) -> jax.Array:
        rank = jax.lax.axis_index("ep")
        return rows + jax.pure_callback(sleep, jax.typeof(rank.astype(np.float32)), rank, rows[0, 0])

    experts = {"experts": delayed} if op == "combine" else {}
    both = helpers.round_trip(group, num_experts=EXPERTS, implementation="kernels", **experts)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        return both(delayed(tokens) if op == "dispatch" else tokens, ids, weights)[1]

    program = helpers.per_rank(body, group.mesh)
    helpers.fetch(program(*case))
    with jax_ep.profile(path):
        helpers.fetch(program(*case))
    text = reported(path, capsys)
    longest = re.search(r"longest waits\n +(.*)", text)
    assert longest
    found = re.fullmatch(rf"{op} \d+: ([\d.]+) us for rank {slow}; it came ([\d.]+) us after rank \d", longest[1])
    assert found, text
    assert all(0.8 * seconds * 1e6 <= float(each) <= 20 * seconds * 1e6 for each in found.groups()), text
    waited = {row[0]: row[1:] for row in rows_below("who waited for whom, us in all", text)}
    assert waited.pop("rank") == [f"for {rank}" for rank in range(SIZE)]
    assert waited.pop(str(slow))[slow] == "-"
    assert all(float(row[slow]) >= 0.8 * seconds * 1e6 for row in waited.values()), text


def rows_below(head: str, text: str) -> list[list[str]]:
    """The columns of a table, which are two spaces or more apart."""
    table = re.search(rf"  {head}\n((    .*\n)+)", text)
    assert table, text
    return [re.split("  +", line.strip()) for line in table[1].splitlines()]


@pytest.mark.parametrize("path", [None, "", "missing/trace.json"])
def test_a_path_that_cannot_be_written(path: Any, tmp_path: Path) -> None:
    where: Any = path if path is None else tmp_path / path
    says = "str or a path, got NoneType" if path is None else "file that can be written, got"
    with pytest.raises((TypeError, OSError), match=f"profile: path must be a {says}"):
        jax_ep.profile(where).__enter__()
    with jax_ep.profile(tmp_path / "trace.json"):  # the failure has left nothing behind
        pass
    assert load(tmp_path / "trace.json")["traceEvents"] == []


def test_each_process_writes_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with jax_ep.profile(tmp_path / "trace.json"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["trace.1.json"]
