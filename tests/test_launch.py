"""`python -m jax_ep.launch`: scripts in several processes, their exit codes and their end."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_ep import launch

ROOT = Path(__file__).parents[1]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "jax_ep.launch", *arguments]


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}


def run(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*arguments), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


def test_every_process_runs_the_script_and_a_clean_end_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import jax, sys, time\n"
        "jax.distributed.initialize()\n"
        "assert jax.numpy.ones(3).sum() == 3\n"
        "open(f'{jax.process_index()} {jax.process_count()} {sys.argv[1:]}', 'w').close()\n"
        "time.sleep(0.3 * jax.process_index())"  # the coordinator's process is the first to be done
    )
    result = run("-n", "3", "script.py", "-n", "x", cwd=tmp_path)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
    assert {f"{i} 3 ['-n', 'x']" for i in range(3)} < {path.name for path in tmp_path.iterdir()}


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(
        "import jax, sys, time\nif jax.process_index() == 1: sys.exit(7)\ntime.sleep(600)"
    )
    start = time.monotonic()
    result = run("-n", "2", "-m", "failing", cwd=tmp_path)
    assert result.returncode == 7
    assert "process 1 failed with exit code 7" in result.stderr
    assert time.monotonic() - start < 60


@contextlib.contextmanager
def sleeping(cwd: Path) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """A launcher, its two processes and what they started, all of which sleep; at the end none is left, whatever the
    launcher did."""
    (cwd / "sleep.py").write_text(
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "os.write(1, b'%d %d\\n' % (os.getpid(), child.pid))\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen(
        command("-n", "2", "sleep.py"), cwd=cwd, env=environment(), stdout=subprocess.PIPE, text=True
    )
    started: list[int] = []
    try:
        assert process.stdout is not None
        for _ in range(2):
            started += map(int, process.stdout.readline().split())
        yield process, started
    finally:
        process.kill()
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def await_end(pids: list[int]) -> None:
    """Fails unless all of them end soon. Orphans that nobody reaps, as in a container without init, have ended too."""
    deadline = time.monotonic() + 10
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                assert time.monotonic() < deadline, f"process {pid} lives on"
                time.sleep(0.05)


def test_a_signal_ends_all(tmp_path: Path) -> None:
    """Of those that the test below sees received."""
    with sleeping(tmp_path) as (process, started):
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
        await_end(started)


def test_a_killed_launcher_takes_all_along(tmp_path: Path) -> None:
    with sleeping(tmp_path) as (process, started):
        process.kill()
        process.wait(timeout=30)
        await_end(started)


@pytest.mark.parametrize("stale", ["1", "127.0.0.1:1 2 0 1 5"])
def test_a_stale_role(stale: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_EP_LAUNCH", stale)
    with pytest.raises(SystemExit):
        launch.main(["-n", "2", "script.py"])
    assert f"JAX_EP_LAUNCH must be set by a launcher for its own processes, got {stale!r}" in capsys.readouterr().err


@pytest.mark.parametrize("ignored", [True, False])
def test_what_is_ignored_stays_so(ignored: bool) -> None:
    hangup = signal.SIG_IGN if ignored else signal.SIG_DFL
    before = signal.signal(signal.SIGHUP, hangup)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    try:
        with launch._signals() as received:
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
        assert received == [*[signal.SIGHUP] * (not ignored), signal.SIGTERM, signal.SIGINT]
        assert signal.getsignal(signal.SIGHUP) is hangup
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, interrupt)


def listening_at(port: int) -> set[str]:
    """The local addresses at which anybody listens on a TCP port, as the kernel writes them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and int(line[1].split(":")[1], 16) == port}


def test_the_coordinator_is_for_this_host_alone(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import jax, os, sys, time\n"
        "from jax._src import distributed\n"
        "os.write(1, f'{distributed.global_state.coordinator_address}\\n'.encode())\n"
        "sys.stdin.read()"
    )
    process = subprocess.Popen(
        command("-n", "1", "script.py"),
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address = process.stdout.readline()
    found = re.fullmatch(r"127\.0\.0\.1:(\d+)\n", address)
    assert found, address
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, and as an address of IPv6
    assert listening_at(int(found[1])) in [{each} for each in loopback]
    with socket.create_connection(("127.0.0.1", int(found[1])), timeout=10) as stranger:
        stranger.send(b"GET / HTTP/1.1\r\n\r\n")
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize(("others_take", "waited"), [(0.5, 0.5), (60, 2.0)])
def test_the_coordinator_leaves_last(others_take: float, waited: float) -> None:
    """And leaves its service running: clients in its own process watch that until the process ends."""
    stopped: list[float] = []

    class Service:
        def shutdown(self) -> None:
            stopped.append(time.monotonic())

    ended, others = os.pipe()
    leaving = threading.Timer(others_take, os.close, [others])
    start = time.monotonic()
    leaving.start()
    launch._LastToLeave(Service(), ended).shutdown()
    assert waited - 0.01 <= time.monotonic() - start < waited + 5
    assert not stopped
    leaving.cancel()
    os.close(ended)
    if others_take == 60:
        os.close(others)


def test_the_port_is_for_one_launch_alone() -> None:
    with launch._reserved_port() as reserved, socket.socket() as other, socket.socket() as coordinator:
        port = reserved.getsockname()[1]
        for address in ("", "127.0.0.1"):
            with pytest.raises(OSError, match="in use"):
                other.bind((address, port))
        coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does
        coordinator.bind(("127.0.0.1", port))
        coordinator.listen()


@pytest.mark.parametrize("number", ["0", "100000"])
def test_the_number_of_processes_is_checked(
    number: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_start_all", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit):
        launch.main(["-n", number, "script.py"])
    assert f"-n: must be from 1 to 256, got {number}" in capsys.readouterr().err


def test_the_number_of_gpus_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch.main(["-n", "2", "--gpus", "3", "script.py"])
    assert "-g: must be from 1 to the number of processes, 2, got 3" in capsys.readouterr().err
