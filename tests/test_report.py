"""`python -m jax_ep report`: the flight records of all processes as one view; records of a job that hangs."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from test_launch import command, environment

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
    record: dict[str, Any] = {"group": "Group(ep)", "id": 7, "error": "", "message": "", "time": at}
    record |= {"host": "host", "process": process, "stack": [("train.py", 7, "step"), ("a/site-packages/b.py", 1, "f")]}
    record["ranks"] = [
        {
            "line": line,
            "rank": rank,
            "process": "",
            "waited_ns": [0] * SIZE,
            "ops": [{"epoch": epoch, "call": call, "outcome": outcome} for epoch, call, outcome in ops],
        }
        for rank, ops in ranks.items()
    ]
    (folder / f"jax_ep-host-{process}-{at}.json").write_text(json.dumps(record))


def reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["report", str(folder)]) == 0
    return capsys.readouterr().out


def test_an_op_that_a_rank_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than 64 ops ago on the others, which no longer know it."""
    write(tmp_path, 0, {0: ops_until(200, "running"), 1: ops_until(200, "running")})
    write(tmp_path, 1, {0: ops_until(200, "running"), 1: ops_until(4)})
    text = reported(tmp_path, capsys)
    assert "process 1 of host, line 1 rank 0, 1, at " in text
    assert "main thread in train.py:7 (step): was asked for its record" in text
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


def test_records_of_one_process_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And those of an earlier run are left out; a process without a record is named."""
    write(tmp_path, 3, {0: ops_until(90, "failed"), 1: ops_until(90, "failed")}, line=0, at=1)
    write(tmp_path, 0, {0: ops_until(5, "running")}, at=2)
    write(tmp_path, 0, {0: ops_until(6)}, at=3)
    (tmp_path / "jax_ep-torn.json").write_text("{")
    text = reported(tmp_path, capsys)
    assert "jax_ep-torn.json is no flight record: JSONDecodeError" in text
    assert "  process 3 of host: of an earlier run, left out\n" in text
    assert "  no record of the process of line 0 rank 1\n  no divergence: " in text


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path)])
    assert f"no flight records (jax_ep-*.json) in {tmp_path}" in capsys.readouterr().err


HANGS = """
import time
import jax, numpy as np
import jax_ep
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

axes = ("node", "ep")
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), axes)
group = jax_ep.Group(mesh, axes)

def step(tokens, ids):
    rows, _, routing = jax_ep.dispatch(tokens, ids, group=group, num_experts=4)
    return jax_ep.combine(rows, routing, group=group)

def load_data():
    time.sleep(600)

run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))
operands = [
    jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(axes)), lambda index, x=x: x[index])
    for x in (np.ones((8, 16), np.float32), np.zeros((8, 2), np.int32))
]
jax.block_until_ready(run(*operands))
open(f"here-{jax.process_index()}", "w").close()
if jax.process_index():
    load_data()
jax.block_until_ready(run(*operands))
"""


def await_files(job: "subprocess.Popen[bytes]", folder: Path, pattern: str) -> None:
    """Of both processes."""
    deadline = time.monotonic() + 120
    while len(list(folder.glob(pattern))) < 2:
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.usefixtures("native")
@pytest.mark.timeout(300)
def test_a_job_of_several_nodes_that_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One process waits in XLA's collectives for one that loads data."""
    script, folder = tmp_path / "train.py", tmp_path / "records"
    script.write_text(HANGS)
    folder.mkdir()
    flags = {"JAX_EP_DUMP": str(folder), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    job = subprocess.Popen(
        command("-n", "2", str(script)), cwd=tmp_path, env=environment() | flags, stdout=subprocess.DEVNULL
    )
    try:
        await_files(job, tmp_path, "here-*")
        time.sleep(1)
        (folder / "request").touch()
        await_files(job, folder, "*.json")
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait(timeout=30)
    text = reported(folder, capsys)
    assert re.search(r"line 0 rank 0, 1, at .*, main thread in train\.py:\d+ \(<module>\): was asked", text), text
    assert re.search(r"line 1 rank 0, 1, at .*, main thread in train\.py:\d+ \(load_data\): was asked", text), text
