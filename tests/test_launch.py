"""`python -m jax_ep.launch`: scripts in several processes, their exit codes and their end."""

import os
import signal
import socket
import subprocess
import sys
import time
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


def test_every_process_runs_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import jax, os, sys\nos.write(1, f'{jax.process_index()} {jax.process_count()} {sys.argv[1:]}\\n'.encode())"
    )
    result = run("-n", "2", str(script), "-n", "x", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["0 2 ['-n', 'x']", "1 2 ['-n', 'x']"]


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(
        "import jax, sys, time\nif jax.process_index() == 1: sys.exit(7)\ntime.sleep(600)"
    )
    start = time.monotonic()
    result = run("-n", "2", "-m", "failing", cwd=tmp_path)
    assert result.returncode == 7
    assert "process 1 failed with exit code 7" in result.stderr
    assert time.monotonic() - start < 60


def test_interrupt(tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text("import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(600)")
    process = subprocess.Popen(
        command("-n", "2", "sleep.py"), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    started = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT
    process.stdout.close()
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_port_is_for_one_launch_alone() -> None:
    with launch._reserved_port() as reserved, socket.socket() as other, socket.socket() as coordinator:
        port = reserved.getsockname()[1]
        for address in ("", "127.0.0.1"):  # at none may anybody else have it: the coordinator listens at all
            with pytest.raises(OSError, match="in use"):
                other.bind((address, port))
        coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does
        coordinator.bind(("", port))
        coordinator.listen()


def test_the_number_of_processes_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch.main(["-n", "0", "script.py"])
    assert "-n: must be at least 1, got 0" in capsys.readouterr().err


def test_the_number_of_gpus_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch.main(["-n", "2", "--gpus", "3", "script.py"])
    assert "-g: must be from 1 to the number of processes, 2, got 3" in capsys.readouterr().err
