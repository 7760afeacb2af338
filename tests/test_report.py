"""`python -m jax_ep report`: the dumps of all processes as one view."""

import json
from pathlib import Path
from typing import Any

import pytest

from jax_ep.__main__ import main

CALLS = ["dispatch float32 T=4 (train.py, step)", "combine float32 T=4 (train.py, step)"]
SIZE = 2  # ranks of a process, which is a line

Ops = list[tuple[int, str, str]]  # number, call, outcome


def ops_until(last: int, outcome: str = "delivered") -> Ops:
    """The ops that a rank keeps; `outcome` is that of the last one."""
    numbers = range(max(1, last - 63), last + 1)
    return [(number, CALLS[(number + 1) % 2], "delivered" if number < last else outcome) for number in numbers]


def write(folder: Path, process: int, ranks: dict[int, Ops], *, line: int | None = None, at: float = 0) -> None:
    line = process if line is None else line
    dump: dict[str, Any] = {"group": "Group(ep)", "id": 7, "error": "", "message": "", "time": at}
    dump |= {"host": "host", "process": process, "stack": [("train.py", 7, "step"), ("a/site-packages/b.py", 1, "f")]}
    dump["ranks"] = [
        {
            "line": line,
            "rank": rank,
            "process": "",
            "waited_ns": [0] * SIZE,
            "ops": [{"epoch": epoch, "call": call, "outcome": outcome} for epoch, call, outcome in ops],
        }
        for rank, ops in ranks.items()
    ]
    (folder / f"jax_ep-host-{process}-{at}.json").write_text(json.dumps(dump))


def reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["report", str(folder)]) == 0
    return capsys.readouterr().out


def test_an_op_that_a_rank_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than 64 ops ago on the others, which no longer know it."""
    write(tmp_path, 0, {0: ops_until(200, "running"), 1: ops_until(200, "running")})
    write(tmp_path, 1, {0: ops_until(200, "running"), 1: ops_until(4)})
    text = reported(tmp_path, capsys)
    assert "process 1 of host, line 1 rank 0, 1, at " in text
    assert "main thread in train.py:7 (step): dumped on request" in text
    assert text.endswith(
        "  first divergence: op 5\n"
        f"    line 1 rank 1: not begun; the last is op 4, {CALLS[1]}, delivered\n"
        "    line 0 rank 0, 1; line 1 rank 0: no longer recorded; the last is op 200\n"
    )


def test_another_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = [*ops_until(6), (7, "combine float32 T=3 (eval.py, step)", "failed"), (8, CALLS[1], "failed")]
    write(tmp_path, 0, {0: ops_until(7, "failed"), 1: ops_until(7, "failed")})
    write(tmp_path, 1, {0: other, 1: ops_until(7, "failed")})
    assert reported(tmp_path, capsys).endswith(
        "  first divergence: op 7\n"
        "    line 1 rank 0: combine float32 T=3 (eval.py, step), failed\n"
        f"    line 0 rank 0, 1; line 1 rank 1: {CALLS[0]}, failed\n"
    )


def test_dumps_of_one_process_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And those of an earlier run are left out; a process without a dump is named."""
    write(tmp_path, 3, {0: ops_until(90, "failed"), 1: ops_until(90, "failed")}, line=0, at=1)
    write(tmp_path, 0, {0: ops_until(5, "running")}, at=2)
    write(tmp_path, 0, {0: ops_until(6)}, at=3)
    (tmp_path / "jax_ep-torn.json").write_text("{")
    text = reported(tmp_path, capsys)
    assert "jax_ep-torn.json is no dump: JSONDecodeError" in text
    assert "  process 3 of host: of an earlier run, left out\n" in text
    assert "  no dump of the process of line 0 rank 1\n  no divergence: " in text


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path)])
    assert f"no dumps (jax_ep-*.json) in {tmp_path}" in capsys.readouterr().err
