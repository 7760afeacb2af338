"""`python -m jax_ep report`: the dumps of all processes as one view, and the times in traces."""

import itertools
import json
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest

from jax_ep import profiling
from jax_ep.__main__ import main
from jax_ep._kit.ffi import Ranks
from jax_ep.runtime import native

CALLS = ["dispatch float32 T=4 (train.py, step)", "combine float32 T=4 (train.py, step)"]
SIZE = 2  # ranks of a process, which is a line

Report = Callable[..., str]
Ops = list[tuple[int, str, str]]  # number, call, outcome


def ops_until(last: int, outcome: str = "delivered") -> Ops:
    """The ops that a rank keeps; `outcome` is that of the last one."""
    numbers = range(max(1, last - 63), last + 1)
    return [(number, CALLS[(number + 1) % 2], "delivered" if number < last else outcome) for number in numbers]


def dump_of(process: int, ranks: dict[int, Ops], *, line: int | None = None, at: float = 0) -> dict[str, Any]:
    line, times = process if line is None else line, {"begin_ns": 0, "end_ns": 0}
    stack = [{"file": file, "line": 7, "function": "step"} for file in ("train.py", "a/site-packages/b.py")]
    nothing = {"finished": 0, "process": "", "waited_ns": [0] * SIZE, "received_bytes": [0] * SIZE}
    history = [
        {"line": line, "rank": rank, **nothing}
        | {"ops": [{"epoch": epoch, "op": "", "call": call, "outcome": how} | times for epoch, call, how in ops]}
        for rank, ops in ranks.items()
    ]
    who = {"group": "Group(ep)", "id": 7, "host": "host", "process": process, "time": at}
    return who | {"error": "", "message": "", "stack": stack, "ranks": history}


def write(folder: Path, process: int, ranks: dict[int, Ops], *, line: int | None = None, at: float = 0) -> None:
    text = json.dumps(dump_of(process, ranks, line=line, at=at))
    (folder / f"jax_ep-host-{process}-{at}.json").write_text(text)


@pytest.fixture
def reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    """What the command prints of a folder or of traces, by default of the test's folder; or its error."""

    def run(*paths: Path, fails: bool = False) -> str:
        arguments = ["report", *map(str, paths or [tmp_path])]
        if fails:
            with pytest.raises(SystemExit):
                main(arguments)
            return capsys.readouterr().err
        assert main(arguments) == 0
        return capsys.readouterr().out

    return run


def test_an_op_that_a_rank_has_not_begun(tmp_path: Path, reported: Report) -> None:
    write(tmp_path, 0, {0: ops_until(200, "running"), 1: ops_until(200, "running")})
    write(tmp_path, 1, {0: ops_until(200, "running"), 1: ops_until(4)})
    text = reported()
    assert "process 1 of host, line 1 rank 0, 1, at " in text
    assert "main thread in train.py:7 (step): dumped on request" in text
    assert text.endswith(
        "  first divergence: op 5\n"
        f"    line 1 rank 1: not begun; the last is op 4, {CALLS[1]}, delivered\n"
        "    line 0 rank 0, 1; line 1 rank 0: no longer recorded; the last is op 200\n"
    )


def test_another_op(tmp_path: Path, reported: Report) -> None:
    other = [*ops_until(6), (7, "combine float32 T=3 (eval.py, step)", "failed"), (8, CALLS[1], "failed")]
    write(tmp_path, 0, {0: ops_until(7, "failed"), 1: ops_until(7, "failed")})
    write(tmp_path, 1, {0: other, 1: ops_until(7, "failed")})
    assert reported().endswith(
        "  first divergence: op 7\n"
        "    line 1 rank 0: combine float32 T=3 (eval.py, step), failed\n"
        f"    line 0 rank 0, 1; line 1 rank 1: {CALLS[0]}, failed\n"
    )


def test_dumps_of_one_process_are_merged(tmp_path: Path, reported: Report) -> None:
    """And those of an earlier run are left out; a process without a dump is named."""
    write(tmp_path, 3, {0: ops_until(90, "failed"), 1: ops_until(90, "failed")}, line=0, at=1)
    write(tmp_path, 0, {0: ops_until(5, "running")}, at=2)
    write(tmp_path, 0, {0: ops_until(6)}, at=3)
    text = reported()
    assert "  process 3 of host: of an earlier run, left out\n" in text
    assert "  no dump of the process of line 0 rank 1\n  no divergence: " in text


def test_an_empty_folder(tmp_path: Path, reported: Report) -> None:
    assert f"no dumps (jax_ep-*.json) in {tmp_path}" in reported(fails=True)


def without(*path: str | int) -> str:
    """A dump in which a field is missing."""
    dump: Any = dump_of(0, {0: ops_until(2)})
    *parents, field = path
    where = dump
    for each in parents:
        where = where[each]
    del where[field]
    return json.dumps(dump)


def with_field(field: str, value: Any) -> str:
    return json.dumps(dump_of(0, {0: ops_until(2)}) | {field: value})


Content = str | bytes | Callable[[Path], object]
NO_DUMPS: dict[str, Content] = {
    "torn": "{",
    "empty": "",
    "other JSON": "[7]",
    "nested": "[" * 100_000,
    "nested objects": '{"id":' * 100_000,
    "not UTF-8": b"\xff\xfe\x80",
    "no id": without("id"),
    "no stack": without("stack"),
    "no call": without("ranks", 0, "ops", 0, "call"),
    "no waits": without("ranks", 0, "waited_ns"),
    "another stack": with_field("stack", [["train.py", 7, "step"]]),
    "ranks of another kind": with_field("ranks", {"0": []}),
    "a text for a number": with_field("process", "1"),
    "a truth value for a number": with_field("process", True),
    "a large number": with_field("process", 10**4200),
    "a number with too many digits": '{"id": ' + "9" * 5000 + "}",
    "a list for a text": with_field("message", ["\x1b[2J"]),
    "no time": with_field("time", float("nan")),
    "a late time": with_field("time", 1e18),
    "FIFO": os.mkfifo,
    "folder": Path.mkdir,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "huge": lambda path: path.touch() or os.truncate(path, 1 << 33),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("content", NO_DUMPS.values(), ids=NO_DUMPS.keys())
def test_other_files_are_named(content: Content, tmp_path: Path, reported: Report) -> None:
    path = tmp_path / "jax_ep-\x1b[2J\udcff.json"
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    named = rf"{tmp_path}/jax_ep-\x1b[2J\udcff.json is no dump: "
    assert named in reported(fails=True)
    write(tmp_path, 1, {0: ops_until(2), 1: ops_until(2)})
    text = reported()
    assert text.startswith(named)
    assert text.endswith("\n  no divergence: every recorded op was delivered, and was the same on all ranks\n")


@pytest.mark.parametrize("field", ["group", "error", "host"])
def test_nothing_but_text_reaches_the_terminal(field: str, tmp_path: Path, reported: Report) -> None:
    odd = "".join(map(chr, [*range(0x100), 0x202E, *range(0xD800, 0xE000)]))
    (tmp_path / "jax_ep-odd.json").write_text(with_field(field, f"[{odd}]"))
    text = reported()
    assert r"[\x00\x01" in text
    assert all(line.isprintable() for line in text.split("\n")), text
    assert len(text.split("\n")) == 5


def test_a_closed_group_has_no_ranks(tmp_path: Path, reported: Report) -> None:
    write(tmp_path, 0, {})
    assert "process 0 of host, " in reported()


def test_letters_that_the_terminal_lacks(tmp_path: Path) -> None:
    (tmp_path / "jax_ep-host.json").write_text(with_field("group", "Grüppe"))
    output = helpers.run_python("-m", "jax_ep", "report", str(tmp_path), PYTHONIOENCODING="ascii")
    assert r"Gr\xfcppe" in output


PhaseTimes = list[tuple[str, int]]  # us
Spans = list[tuple[Any, ...]]  # of the library


def spans_of(op: str, number: int, begin: int, phases: PhaseTimes, cta: int = 0, role: int = 0) -> Spans:
    """One phase after the other, from `begin` on."""
    ends = list(itertools.accumulate((us for _, us in phases), initial=begin))
    return [
        (cta, role, number, op, phase, 1000 * end - 1000 * us, 1000 * end)
        for (phase, us), end in zip(phases, ends[1:], strict=True)
    ]


def write_trace(path: Path, ranks: dict[int, Spans], lost: int = 0) -> None:
    """What jax_ep.profile writes of ranks of GPUs."""
    library: Any = types.SimpleNamespace(stop_profile=lambda: [(0, r, lost, 0, spans) for r, spans in ranks.items()])
    profile = profiling._Profile(path)
    profile.ranks = [(Ranks(helpers.mesh_of(ep=4), "ep", "cuda", 7), native.stop_profile(library))]
    with path.open("w") as file:
        profiling._write(file, profile)


TABLES = """\
'ep', group 7
  dispatch, mean us
    rank  times     op  post   wait
       0      1  600.0  10.0  590.0
       1      1  300.0  10.0  290.0
       2      1  100.0  10.0   90.0
       3      1  600.0  10.0  590.0
  combine, mean us
    rank  times     op   send   wait  reduce  give up
       0      2  702.5   25.0  625.0     5.0      2.5
       1      2  662.5  100.0  475.0     5.0      2.5
       2      2  702.5   25.0  625.0     5.0      2.5
       3      1  500.0   50.0  350.0    10.0      0.0
  product 64 x 32, mean us
    rank  times    op  multiply
       0      2  91.0      90.0
       1      0     -         -
       2      0     -         -
       3      0     -         -
  who waited for whom, us in all
    rank  for 0  for 1  for 2  for 3
       0      -  300.0  500.0  900.0
       1    0.0      -  200.0  900.0
       2    0.0  300.0      -  900.0
       3    0.0  300.0  500.0      -
  longest waits
    combine 3: 900.0 us for rank 3; it has no such op in this profile
    dispatch 1: 500.0 us for rank 2; it came 500.0 us after rank 0
    combine 2: 300.0 us for rank 1; its send took 200.0 us, that of the others 50.0
"""


def test_a_trace(tmp_path: Path, reported: Report) -> None:
    """Two processes. In op 1 ranks 1 and 2 come late, in op 2 rank 1 is slow, and rank 3 never begins op 3."""

    def of_rank(rank: int) -> Spans:
        late, send = {1: 300, 2: 500}.get(rank, 0), 400 if rank == 1 else 100
        return [
            *spans_of("dispatch", 1, late, [("post", 10), ("wait", 590 - late)]),
            *spans_of("combine", 2, 1000, [("send", send), ("wait", 400 - send), ("reduce", 20)]),
            *(spans_of("combine", 3, 2000, [("wait", 900), ("give up", 5)]) if rank != 3 else []),
            *spans_of("combine", 2, 1100, [("wait", 500 - send)], role=1),
        ]

    matrix = 64 << 24 | 32  # two products of it one after the other, each of two CTAs
    products = [
        each
        for cta in range(2)
        for begin in (5000, 5100)
        for each in spans_of("", matrix, begin + cta, [("multiply", 40), ("multiply", 50)], cta, role=2)
    ]
    write_trace(tmp_path / "trace.json", {0: [*of_rank(0), *products], 1: of_rank(1)})
    write_trace(tmp_path / "trace.1.json", {2: of_rank(2), 3: of_rank(3)})
    assert reported(tmp_path / "trace.json", tmp_path / "trace.1.json") == TABLES


def test_a_trace_that_has_lost_ops(tmp_path: Path, reported: Report) -> None:
    """Nobody knows whether the others waited for a rank in an op that it no longer knows."""
    path = tmp_path / "trace.json"
    first, second = (spans_of("scatter", number, 50 * number, [("wait", 10), ("send", 10)]) for number in (1, 2))
    write_trace(path, {0: [*first, *second], 1: second}, lost=2)
    text = reported(path)
    assert text.startswith("process 0 of the trace: 2 earlier phases lost: the profile was too long\n")
    assert "scatter 2: 0.0 us" in text
    assert "scatter 1: " not in text


def test_a_trace_without_ops(tmp_path: Path, reported: Report) -> None:
    write_trace(tmp_path / "trace.json", {0: [], 1: []})
    assert reported(tmp_path / "trace.json") == "no op has ended in this profile\n"


INFINITE = '{"traceEvents": [{"ph": "X", "pid": 0, "args": {"epoch": 1e999, "op": "a"}}]}'


@pytest.mark.parametrize("content", ["", "[]", '{"traceEvents": [{}]}', "[" * 100_000, INFINITE, None])
def test_other_files_are_no_traces(content: str | None, tmp_path: Path, reported: Report) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_text(content)
    why = f"{path} is no trace of jax_ep.profile: " if content is not None else "No such file or directory"
    assert why in reported(path, fails=True)
