"""A rank that stalls is named in time, in an exception, the log and a file; a process that is stopped blames nobody."""

import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from conftest import OpenGroup, Rng

from jax_ep import Group, JaxEpError, PeerTimeoutError
from jax_ep.runtime import flight_recorder
from jax_ep.runtime.report import report

SIZE, EXPERTS, STALLED = 4, 8, 3
OPTIONS = {"num_experts": EXPERTS, "implementation": "kernels"}
ON_CPU = jax.default_backend() == "cpu"

pytestmark = pytest.mark.usefixtures("native")


def case_of(rng: Rng) -> helpers.Case:
    return helpers.draw_case(rng, SIZE, 4, 2, EXPERTS, 16)


def fail(group: Group, case: helpers.Case, where: str = "protocol", program: Any = None) -> None:
    """A rank stalls, on the CPU before or after it arrives; on a GPU its kernels are no longer launched, for either.

    Nobody calls `check()`. Where nothing raises, all get NaN but the stalled rank, whose results nobody writes.
    """
    helpers.native(group).test_hooks.stall(STALLED, where)
    with helpers.awaiting_failure(group, f"rank {STALLED}"):
        results = helpers.fetch((program or helpers.dispatch_combine(group, **OPTIONS))(*case))
        dispatched, combined = jax.tree.map(lambda x: np.delete(x, STALLED, axis=0), results)
        helpers.assert_nothing_delivered(dispatched)
        assert np.isnan(combined).all()


@pytest.mark.parametrize("where", ["arrival", "protocol"])
def test_a_stalled_rank_is_named_and_a_new_group_works(where: str, open_group: OpenGroup, rng: Rng) -> None:
    timeout = 1.0
    group, healthy, case = open_group(SIZE, timeout=timeout), open_group(SIZE), case_of(rng)
    program = helpers.dispatch_combine(group, **OPTIONS)
    helpers.assert_round_trip(helpers.fetch(program(*case)), case, num_experts=EXPERTS)

    start = time.monotonic()
    fail(group, case, where, program)
    assert time.monotonic() - start < timeout + 1
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"PeerTimeoutError.*rank {STALLED}"):
        helpers.fetch(program(*case))  # a compiled training loop that calls nothing else of this library

    for _ in range(2):  # a failed group stays failed
        with pytest.raises(PeerTimeoutError, match=f"rank {STALLED}"):
            group.check()
    with pytest.raises(PeerTimeoutError, match=f"rank {STALLED}"):
        helpers.dispatch_combine(group, **OPTIONS)(*case)

    start = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError):
        helpers.fetch(program(*case))  # fails without waiting again
    group.close()
    assert time.monotonic() - start < timeout

    for other in (healthy, open_group(SIZE)):  # another group does not notice
        new = helpers.dispatch_combine(other, **OPTIONS)
        for _ in range(3):
            helpers.assert_round_trip(helpers.fetch(new(*case)), case, num_experts=EXPERTS)
        other.check()


def await_log(caplog: pytest.LogCaptureFixture, text: str) -> str:
    def logged() -> list[logging.LogRecord]:
        return [record for record in caplog.records if text in record.getMessage()]

    helpers.wait_until(logged, 10)
    assert logged()[0].levelno == logging.ERROR
    return logged()[0].getMessage()


def test_a_failure_is_logged_and_dumped(
    open_group: OpenGroup, rng: Rng, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_EP_DUMP", str(tmp_path))
    group = open_group(SIZE, timeout=0.5)
    case = case_of(rng)
    helpers.fetch(helpers.dispatch_combine(group, **OPTIONS)(*case))
    fail(group, case)
    await_log(caplog, "flight recorder dumped to ")
    message = await_log(caplog, "PeerTimeoutError: ")
    assert f"rank {STALLED} in vain: it has not begun this op; its last was combine float32 T=4 K=2 H=16" in message
    [path] = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    dump = json.loads(path.read_text())
    assert dump["error"] == "PeerTimeoutError"
    assert [rank["rank"] for rank in dump["ranks"]] == list(range(SIZE))
    for rank in dump["ranks"]:
        calls = [(op["op"], op["outcome"]) for op in rank["ops"]]
        assert calls[:2] == [("dispatch", "delivered"), ("combine", "delivered")]
        if rank["rank"] != STALLED:
            assert calls[2][0] == "dispatch"
    assert max(rank["waited_ns"][STALLED] for rank in dump["ranks"]) > 0.4e9
    with pytest.raises(PeerTimeoutError):
        group.check()


def test_a_full_disk(
    open_group: OpenGroup, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_EP_DUMP", str(tmp_path))
    group = open_group(SIZE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        flight_recorder.dump(helpers.native(group), repr(group), JaxEpError())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    await_log(caplog, "the flight recorder could not be dumped to JAX_EP_DUMP=")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not ON_CPU, reason="a GPU's host does not wait when a program is called")
def test_a_dump_on_request(open_group: OpenGroup, rng: Rng, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the main thread waits in native code for a rank that stalls."""
    monkeypatch.setenv("JAX_EP_DUMP", str(tmp_path))
    group = open_group(SIZE, timeout=60)
    case = case_of(rng)
    program = helpers.dispatch_combine(group, **OPTIONS)
    helpers.fetch(program(*case))
    stall = helpers.native(group).test_hooks.stall
    stall(STALLED, "protocol")
    found: list[Path] = []

    def ask() -> None:
        time.sleep(0.5)
        (tmp_path / "request").touch()
        helpers.wait_until(lambda: any(tmp_path.glob("*.json")))
        found.extend(tmp_path.glob("*.json"))
        stall(-1, "protocol")

    asking = threading.Thread(target=ask)
    asking.start()
    helpers.assert_round_trip(helpers.fetch(program(*case)), case, num_experts=EXPERTS)
    asking.join()
    assert len(found) == 1
    text = report(tmp_path)
    site = "(helpers.py, both)"
    assert f", line 0 rank 0, 1, 2, 3, at {time.strftime('%H:')}" in text
    assert "main thread in helpers.py:" in text
    assert f"first divergence: op 3\n    line 0 rank {STALLED}: not begun; the last is op 2, combine float32" in text
    assert re.search(rf"\n    line 0 rank 0, 1, 2: dispatch float32 T=4 .*{re.escape(site)}, running$", text), text


def test_report(group: Group, rng: Rng) -> None:
    program = helpers.dispatch_combine(group, **OPTIONS)
    rounds = 40  # more ops than are kept
    for _ in range(rounds):
        helpers.fetch(program(*case_of(rng)))
    report = group.report()
    assert [rank.rank for rank in report] == list(range(SIZE))
    for rank in report:
        assert rank.finished == 2 * rounds
        assert [op.epoch for op in rank.ops] == list(range(2 * rounds - 63, 2 * rounds + 1))
        assert {op.outcome for op in rank.ops} == {"delivered"}
        assert all(op.begin_ns < op.end_ns for op in rank.ops)
        assert [op.op for op in rank.ops[-2:]] == ["dispatch", "combine"]
        assert rank.ops[-2].call.startswith("dispatch float32 T=4 K=2 H=16 E=8 ")
        assert rank.ops[-2].call.endswith("(helpers.py, both)")
        assert len(rank.waited_ns) == SIZE


STOPPED = """
import numpy as np, time
group = Group(helpers.mesh_of(ep=here.SIZE), "ep", timeout=2.0)
case = here.case_of(np.random.default_rng(helpers.SEED))
program = helpers.dispatch_combine(group, **here.OPTIONS)
helpers.fetch(program(*case))
helpers.native(group).test_hooks.stall(here.STALLED, sys.argv[1])
found = program(*case)
time.sleep(0.5)
print("stop me", flush=True)
assert sys.stdin.readline() == "go on\\n"
time.sleep(1.0)
helpers.native(group).test_hooks.stall(-1, sys.argv[1])
helpers.assert_round_trip(helpers.fetch(found), case, num_experts=here.EXPERTS)
group.check()
print("right", flush=True)
"""


@pytest.mark.skipif(not ON_CPU, reason="a GPU's kernels go on when their process is stopped")
def test_a_stopped_process_does_not_count_the_time(tmp_path: Path) -> None:
    """Ctrl-Z, or a container that is paused, for longer than the timeout."""
    command = [sys.executable, "-c", helpers.knowing(__name__, STOPPED), "protocol"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "stop me\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4)
        os.kill(process.pid, signal.SIGCONT)
        output, _ = process.communicate("go on\n", timeout=60)
    assert output == "right\n"
