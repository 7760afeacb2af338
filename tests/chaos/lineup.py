"""Processes started by jax_ep.launch, as their parent sees them: told what to do, killed, stopped and continued."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from jax_ep import launch

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0


class NoAnswerError(RuntimeError):
    """A process hangs, or has died of itself."""


class Process:
    """One process: commands go in as lines of JSON, and for each comes one answer."""

    def __init__(self, command: list[str], environment: dict[str, str], role: launch.ProcessSpec):
        self.index = role.process
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by kill()
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        environment = environment | {launch._ROLE: str(role)}
        self.popen = subprocess.Popen(command, env=environment, pass_fds=[role.pipe], cwd=ROOT, **pipes)
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.stdin, self.stdout = self.popen.stdin, self.popen.stdout
        os.set_blocking(self.stdout.fileno(), False)
        self.pending = b""

    def send(self, do: str, **arguments: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells
            self.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """
        Raises:
          NoAnswerError: none came in time, or the process has ended.
        """
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as ready:
            ready.register(self.stdout, selectors.EVENT_READ)
            while True:
                while b"\n" in self.pending:
                    line, self.pending = self.pending.split(b"\n", 1)
                    if line.startswith(b"@"):
                        return json.loads(line[1:])
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    self.signal(signal.SIGUSR1)  # it writes down where it hangs
                    time.sleep(0.5)
                    raise NoAnswerError(f"process {self.index} hangs for {seconds:.1f} s\n{self.last_words()}")
                data = self.stdout.read()
                if not data:
                    code = self.popen.wait(10)
                    raise NoAnswerError(f"process {self.index} has ended with {code}\n{self.last_words()}")
                self.pending += data

    def last_words(self) -> str:
        self.log.seek(0)
        return self.log.read()[-6000:]

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.popen.wait()
        self.log.close()
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Lineup:
    """`members` processes of some devices each, and process 0 that holds the coordinator and takes no part."""

    def __init__(self, members: int, devices: int, gpus: int | None):
        self.coordinator: Process
        count = members + 1
        shared = [f"--gpus={min(gpus, count)}"] if gpus else []
        command = [sys.executable, "-m", "jax_ep.launch", f"-n={count}", *shared]
        command += ["-m", "tests.chaos.worker", f"--devices={devices}"]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        environment |= {} if gpus else {"JAX_PLATFORMS": "cpu"}
        self._port = launch._reserved_port()
        address = f"127.0.0.1:{self._port.getsockname()[1]}"
        ended, others = os.pipe()
        roles = [launch.ProcessSpec(address, count, i, os.getpid(), others if i else ended) for i in range(count)]
        self.coordinator, *started = (Process(command, environment, role) for role in roles)
        os.close(ended)
        os.close(others)
        self.members = dict(enumerate(started, start=1))

    def everyone(self) -> list[Process]:
        return [self.coordinator, *self.members.values()]

    def await_start(self) -> None:
        for process in self.everyone():
            process.answer(START_SECONDS)

    def ask(self, seconds: float, do: str, **arguments: Any) -> dict[int, dict[str, Any]]:
        """Tells all members, and awaits what each says."""
        for process in self.members.values():
            process.send(do, **arguments)
        return {index: process.answer(seconds) for index, process in self.members.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.everyone():
            process.kill()
        self._port.close()
