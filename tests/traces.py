"""Reading the traces that `jax_ep.profile` writes, and what every one must show."""

import itertools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# The phases of an op in their order. On a GPU no thread need have all of them, but those of a rank together do.
ORDER = {  # of dispatch two: ranks exchange counts, or all that few tokens chose
    "dispatch": "(post )?(count (post )?wait layout wait place (post )?)?"
    "wait (send (wait send )?)?(wait (pad )+)?wait wait (expand )?(wait expand )*"
    "|(post )?((count (post )?)?wait count layout (place )?)?"
    "wait (send )?(wait (pad )+)?wait (expand )?(wait expand )*",
    "combine": "(post )?(send )?wait send (wait reduce )*",
    "scatter": "(post )?(wait (send )?)?(pad )?(wait expand )*",
    "ragged_all_to_all": "(post )?wait (send )?wait ",
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


Track = tuple[int, int, int]  # rank, thread, epoch
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


def phases_of_tracks(found: list[Slice]) -> dict[Track, list[Slice]]:
    """The phases of each op on each thread, which fill the slice of the op without gap or overlap."""
    ops = {(s.rank, s.thread, s.epoch): s for s in found if s.category == "op"}
    phases: dict[Track, list[Slice]] = defaultdict(list)
    for s in found:
        if s.category == "phase":
            phases[s.rank, s.thread, s.epoch].append(s)
    assert phases.keys() == ops.keys()
    for track, of_op in phases.items():
        edges = [of_op[0].begin, *(s.end for s in of_op)]
        begins = [s.begin for s in of_op] + [ops[track].end]
        assert max(abs(a - b) for a, b in zip(edges, begins, strict=True)) <= 0.01
        assert edges == sorted(edges)
        assert ops[track].begin == of_op[0].begin
        assert {s.op for s in of_op} == {ops[track].name} == {ops[track].op}
    for one, other in itertools.pairwise(sorted(ops.values(), key=lambda s: (s.rank, s.thread, s.begin))):
        if (one.rank, one.thread) == (other.rank, other.thread):
            assert one.end <= other.begin
            assert one.epoch < other.epoch
    return phases


def of_rank(rank: int, phases: dict[Track, list[Slice]]) -> dict[Track, list[Slice]]:
    return {track: of_op for track, of_op in phases.items() if track[0] == rank}


def runs_by_thread(phases: dict[Track, list[Slice]]) -> dict[int, list[Run]]:
    """What each thread of a rank took part in."""
    runs: dict[int, list[Run]] = defaultdict(list)
    for (_, thread, epoch), of_op in sorted(phases.items()):
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
    phases = phases_of_tracks(slices(path))
    assert {rank for rank, _, _ in phases} == set(range(ranks))
    for rank in range(ranks):
        mine = of_rank(rank, phases)
        runs = list(enumerate(ops, min(epoch for _, _, epoch in mine)))
        threads = runs_by_thread(mine)
        assert runs in threads.values()  # the coop that posts takes part in every op
        for found in threads.values():
            assert found == of_kinds_in(found, runs)
        names: dict[int, set[str]] = defaultdict(set)
        for (_, _, epoch), of_op in mine.items():
            assert_in_order(of_op)
            names[epoch] |= {s.name for s in of_op}
        assert names.keys() == {epoch for epoch, _ in runs}
        for epoch, op in runs:
            assert names[epoch] in [set(re.findall(r"\w+", order)) for order in ORDER[op].split("|")]


def assert_causes_precede(path: Path, slack: float) -> None:
    """No rank is past its first wait before every rank has begun to post."""
    posted: dict[int, dict[int, float]] = defaultdict(dict)
    waited: dict[int, float] = defaultdict(lambda: np.inf)
    for (rank, _, epoch), of_op in phases_of_tracks(slices(path)).items():
        for s in of_op:
            if s.name == "post":
                posted[epoch][rank] = min(s.begin, posted[epoch].get(rank, np.inf))
        first = next((s.end for s in of_op if s.name == "wait"), np.inf)
        if "count" in {s.name for s in of_op} or of_op[0].op != "dispatch":  # others wait for rows only
            waited[epoch] = min(waited[epoch], first)
    assert posted
    for epoch, begins in posted.items():
        assert max(begins.values()) <= waited[epoch] + slack
