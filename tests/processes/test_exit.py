"""`Group(on_lost="exit")` ends the process whatever its streams, its log and its disk do."""

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import helpers
import pytest

from jax_ep.runtime import flight_recorder, watchdog

SECONDS = 30  # for a scene; four steps that wait for ever take 8 s
WAITED = "; the process ends with code 75, as on_lost='exit' asks"


class Failing:
    """A native group that fails soon, and its flight recorder."""

    id = 1

    def __init__(self, request: Path | None):
        self.request = request  # touched before the failure

    def await_failure(self, seconds: float) -> Any:
        time.sleep(0.1)
        if self.request is not None:
            self.request.touch()
            self.request = None
            return None
        return SimpleNamespace(name="PeerTimeoutError"), "rank 1 in vain"

    def history(self) -> list[Any]:
        return []


def fail(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("of the test")


def wait_for_ever(*_: Any) -> NoReturn:
    while True:
        time.sleep(1)


def log_to(action: Callable[..., Any]) -> None:
    handler = logging.Handler()
    handler.emit = action
    logging.getLogger().addHandler(handler)


def full_pipe() -> int:
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 12))
    os.set_blocking(writer, True)
    return writer


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def redirect(descriptor: int) -> None:
    for each in (1, 2):
        os.dup2(descriptor, each)


def print_in_a_thread() -> None:
    """It holds the lock of stdout for ever."""
    os.dup2(full_pipe(), 1)
    threading.Thread(target=print, args=("x" * (1 << 20),), daemon=True).start()
    time.sleep(0.2)


def set_streams(stream: Any) -> None:
    sys.stdout = sys.stderr = stream


class Scene(NamedTuple):
    prepare: Callable[[], object]
    dumps: bool = True  # whether a dump can be written
    logs: bool = False  # whether the log and what was printed can be read


SCENES = {
    "nothing": Scene(lambda: None, logs=True),
    "closed pipe": Scene(lambda: redirect(closed_pipe())),
    "full pipe": Scene(lambda: redirect(full_pipe())),
    "another thread prints": Scene(print_in_a_thread),
    "stdout is None": Scene(lambda: set_streams(None)),
    "stdout is closed": Scene(lambda: sys.stdout.close()),
    "flush raises": Scene(lambda: set_streams(SimpleNamespace(flush=fail, write=fail))),
    "a log handler raises": Scene(lambda: log_to(fail)),
    "a log handler exits": Scene(lambda: log_to(lambda _: sys.exit(3))),
    "a log handler waits": Scene(lambda: log_to(wait_for_ever)),
    "the folder does not answer": Scene(lambda: setattr(flight_recorder, "_write_whole", wait_for_ever), False, True),
    "no history": Scene(lambda: setattr(flight_recorder, "history", fail), False, True),
    "no more threads": Scene(lambda: None, False),
}


def play(name: str, request: bool, folder: Path) -> NoReturn:
    """In a process of its own."""
    os.environ["JAX_EP_DUMP"] = str(folder)
    with open(folder / "output", "w") as output:
        redirect(output.fileno())
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    print("printed")
    SCENES[name].prepare()
    native: Any = Failing(folder / "request" if request else None)
    watchdog.Watchdog(native, "a group", exits=True)
    if name == "no more threads":
        threading.Thread.start = fail
    wait_for_ever()  # as one of XLA's collectives


def play_all(folder: Path) -> None:
    """All scenes at once, in forks of this process."""
    children: dict[int, str] = {}
    for name in SCENES:
        for request in (False, True):
            inside = folder / f"{name}, {request}"
            inside.mkdir()
            if (child := os.fork()) == 0:
                play(name, request, inside)
            children[child] = inside.name
    deadline, codes = time.monotonic() + SECONDS, dict[str, int]()
    for child, name in children.items():
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.05)
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
        codes[name] = os.waitstatus_to_exitcode(ended[1])
    (folder / "codes.json").write_text(json.dumps(codes))
    os._exit(0)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    helpers.run_python("-c", helpers.knowing(__name__, f"here.play_all(here.Path({str(folder)!r}))"))
    return folder


@pytest.mark.parametrize("request_first", [False, True])
@pytest.mark.parametrize("name", SCENES)
def test_a_lost_peer_ends_the_process(name: str, request_first: bool, played: Path) -> None:
    scene, key = SCENES[name], f"{name}, {request_first}"
    assert json.loads((played / "codes.json").read_text())[key] == watchdog.EXIT_CODE
    dumps = [json.loads(path.read_text())["error"] for path in (played / key).glob("*.json")]
    assert sorted(dumps) == ([""] * request_first + ["PeerTimeoutError"]) * scene.dumps
    if scene.logs:
        output = (played / key / "output").read_text()
        assert "printed\n" in output
        assert f"a group: PeerTimeoutError: rank 1 in vain{WAITED}\n" in output
