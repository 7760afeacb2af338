"""`python -m jax_ep.launch`: scripts in several processes, their exit codes and their end."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import helpers
import pytest

from jax_ep import launch

LAUNCH = ("-m", "jax_ep.launch")


def started(*arguments: str, cwd: Path, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, *LAUNCH, *arguments]
    environment = helpers.environment(JAX_PLATFORMS="cpu")
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, **options)


def test_every_process_runs_the_script_and_a_clean_end_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import jax, sys, time\n"
        "jax.distributed.initialize()\n"
        "assert jax.numpy.ones(3).sum() == 3\n"
        "open(f'{jax.process_index()} {jax.process_count()} {sys.argv[1:]}', 'w').close()\n"
        "time.sleep(0.3 * jax.process_index())"  # the coordinator's process is the first to be done
    )
    assert helpers.run_python(*LAUNCH, "-n", "3", "script.py", "-n", "x", cwd=tmp_path, JAX_PLATFORMS="cpu") == ""
    assert {f"{i} 3 ['-n', 'x']" for i in range(3)} < {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("failure", "code"), [("sys.exit(7)", 7), ("sys.stdout = open('/dev/full', 'w'); print('lost'); fails", 1)]
)
def test_the_first_failure_ends_all(failure: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(
        f"import jax, sys, time\nif jax.process_index() == 1: {failure}\ntime.sleep(600)"
    )
    start = time.monotonic()
    options: Any = {"cwd": tmp_path, "exit_code": code, "JAX_PLATFORMS": "cpu"}
    output = helpers.run_python(*LAUNCH, "-n", "2", "-m", "failing", **options)
    assert f"process 1 failed with exit code {code}" in output
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
    process = started("-n", "2", "sleep.py", cwd=cwd)
    pids: list[int] = []
    try:
        assert process.stdout is not None
        for _ in range(2):
            pids += map(int, process.stdout.readline().split())
        yield process, pids
    finally:
        process.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def await_end(pids: list[int]) -> None:
    """Fails unless all of them end soon. Orphans that nobody reaps, as in a container without init, have ended too."""
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/{pid}/stat")
            helpers.wait_until(lambda stat=stat: stat.read_text().rpartition(")")[2].split()[0] == "Z", 10)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_all(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """One of those that the test below sees received, and one that the launcher does not."""
    with sleeping(tmp_path) as (process, pids):
        process.send_signal(number)
        assert process.wait(timeout=30) == code
        await_end(pids)


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


def test_a_thread_may_launch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the launcher prints nothing before all have ended: it might wait for a full pipe."""
    end, said = launch._end, list[str]()

    def end_all(*arguments: Any) -> None:
        said.append(capsys.readouterr().err)
        end(*arguments)

    monkeypatch.setattr(launch, "_end", end_all)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(launch._start_all, 2, ["sh", "-c", "exit 3"]).result(60) == 3
    assert said == [""]
    assert re.search("process [01] failed with exit code 3", capsys.readouterr().err)


def test_a_terminal_stops_no_process() -> None:
    """Although it stops those in the background that write, by `stty tostop`, or read."""
    terminal, launched = os.openpty()
    attributes = termios.tcgetattr(launched)
    attributes[3] |= termios.TOSTOP
    termios.tcsetattr(launched, termios.TCSANOW, attributes)
    script = (
        "import fcntl, sys, termios; from jax_ep import launch; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        "sys.exit(launch._start_all(2, ['sh', '-c', 'read line; echo said']))"
    )
    command, streams = [sys.executable, "-c", script], dict.fromkeys(("stdin", "stdout", "stderr"), launched)
    options: Any = {"env": helpers.environment(JAX_PLATFORMS="cpu"), "start_new_session": True, **streams}
    with subprocess.Popen(command, **options) as process:
        os.close(launched)
        try:
            assert process.wait(200) == 0
        finally:
            process.kill()
    assert os.read(terminal, 10_000).count(b"said") == 2
    os.close(terminal)


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
    process = started("-n", "1", "script.py", cwd=tmp_path, stdin=subprocess.PIPE)
    assert process.stdout is not None
    address = process.stdout.readline()
    host, _, port = address.partition(":")
    assert host == "127.0.0.1", address
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, and as an address of IPv6
    assert listening_at(int(port)) in [{each} for each in loopback]
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        stranger.send(b"GET / HTTP/1.1\r\n\r\n")
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize(("others_take", "waited"), [(0.5, 0.5), (60, 2.0)])
def test_the_coordinator_leaves_last(others_take: float, waited: float) -> None:
    """And leaves its service running: clients in its own process watch that until the process ends."""
    service = Mock()
    ended, others = os.pipe()
    leaving = threading.Timer(others_take, os.close, [others])
    start = time.monotonic()
    leaving.start()
    launch._LastToLeave(service, ended).shutdown()
    assert waited - 0.01 <= time.monotonic() - start < waited + 5
    service.shutdown.assert_not_called()
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


@pytest.mark.parametrize(
    ("arguments", "role", "message"),
    [
        ("-n 0", None, "-n: must be from 1 to 256, got 0"),
        ("-n 100000", None, "-n: must be from 1 to 256, got 100000"),
        ("-n 2 --gpus 3", None, "-g: must be from 1 to the number of processes, 2, got 3"),
        ("-n 2", "1", "JAX_EP_LAUNCH must be set by a launcher for its own processes, got '1'"),
        ("-n 2", "127.0.0.1:1 2 0 1 5", "a launcher for its own processes, got '127.0.0.1:1 2 0 1 5'"),
    ],
)
def test_what_is_refused(
    arguments: str, role: str | None, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_start_all", lambda *_: pytest.fail("started"))
    if role:
        monkeypatch.setenv("JAX_EP_LAUNCH", role)
    with pytest.raises(SystemExit):
        launch.main([*arguments.split(), "script.py"])
    assert message in capsys.readouterr().err
