"""Processes of one host that meet and connect, here played by threads: all of them or none."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
from helpers import KeyValueStore

from jax_ep import PeerLostError, PeerTimeoutError, PlatformError
from jax_ep.runtime import bootstrap, rendezvous, topology
from jax_ep.runtime.heartbeat import HeartbeatThread
from jax_ep.runtime.timeouts import Deadline

TIMEOUT = 30.0
PAIR, TRIPLE = [[0, 1]], [[0, 1, 2]]

pytestmark = pytest.mark.skipif(not Path("/proc/self/ns/net").exists(), reason="needs Linux")


Joined = tuple[int, dict[int, socket.socket]]


class Processes:
    """Processes that join groups over "what". Each has a heartbeat thread for every company."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.store, self._pool = KeyValueStore(), pool
        self.threads: dict[tuple[int, frozenset[int]], HeartbeatThread] = {}

    def thread(self, me: int, lines: Sequence[Sequence[int]]) -> HeartbeatThread:
        company = frozenset(topology.company(lines, me))
        new = HeartbeatThread(lambda: self.store, me, company)
        return self.threads.setdefault((me, company), new)

    def start(
        self, me: int, lines: Sequence[Sequence[int]], timeout: float = TIMEOUT, taken: Sequence[int] = ()
    ) -> Future[Joined]:
        thread = self.thread(me, lines)
        return self._pool.submit(rendezvous.join, thread, "what", me, lines, {*taken}, Deadline(timeout))


@pytest.fixture
def processes() -> Iterator[Processes]:
    with ThreadPoolExecutor(8) as pool:
        found = Processes(pool)
        yield found
        for thread in found.threads.values():
            thread.stop()


def assert_met(meetings: dict[int, Future[Joined]], lines: Sequence[Sequence[int]]) -> int:
    """Every two that share a line are connected with each other, and nobody else; their number."""
    results = {process: meeting.result(TIMEOUT) for process, meeting in meetings.items()}
    with contextlib.ExitStack() as stack:
        for _, sockets in results.values():
            for end in sockets.values():
                stack.enter_context(end)
                assert end.getblocking()
        for process, (_, sockets) in results.items():
            assert set(sockets) == {p for line in lines if process in line for p in line} - {process}
            for peer, end in sockets.items():
                end.send(f"{process} to {peer}".encode())
        for process, (_, sockets) in results.items():
            for peer, end in sockets.items():
                end.settimeout(TIMEOUT)
                assert end.recv(64) == f"{peer} to {process}".encode()
    [number] = {number for number, _ in results.values()}
    return number


@pytest.mark.parametrize(
    "lines",
    [
        PAIR,
        [[3, 1, 4, 0]],
        [[0, 0, 2, 2], [1, 1, 3, 3]],  # processes 0 and 1 never hear of each other
        [[0, 1], [1, 2], [2, 3], [4, 4]],  # process 0 meets 2 and 3, too, and 4 is alone
    ],
    ids=str,
)
def test_all_meet(lines: list[list[int]], processes: Processes) -> None:
    everyone = {process for line in lines for process in line}
    for _ in range(3):
        assert assert_met({me: processes.start(me, lines) for me in everyone}, lines) == 0


def test_the_number_is_free_everywhere(processes: Processes) -> None:
    taken = {0: [0, 3], 1: [1], 2: []}
    assert assert_met({me: processes.start(me, TRIPLE, taken=numbers) for me, numbers in taken.items()}, TRIPLE) == 2


def gone(*_: object) -> None:
    raise OSError("it has gone")


@pytest.mark.parametrize(("goes", "stays"), [(0, 1), (1, 0)])
def test_a_process_that_goes_at_the_very_end(
    goes: int, stays: int, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have met, and it does not connect."""
    connect = rendezvous._connect
    monkeypatch.setattr(rendezvous, "_connect", lambda *args: (gone if args[1] == goes else connect)(*args))
    meetings = {me: processes.start(me, PAIR) for me in (0, 1)}
    with pytest.raises(OSError, match="it has gone"):
        meetings[goes].result(TIMEOUT)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=f"process {goes} went away while"):
        meetings[stays].result(TIMEOUT)
    assert time.monotonic() - start < 5
    monkeypatch.undo()
    assert_met({me: processes.start(me, PAIR) for me in (0, 1)}, PAIR)


@pytest.mark.parametrize("late", [0, 1])
def test_a_process_that_lives_and_does_not_connect(
    late: int, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = rendezvous._connect
    monkeypatch.setattr(
        rendezvous, "_connect", lambda *args: (time.sleep(2) if args[1] == late else None, connect(*args))[1]
    )
    meetings = {me: processes.start(me, PAIR, timeout=1.0) for me in (0, 1)}
    with pytest.raises(PeerTimeoutError, match=f"process {late} did not create its part .* within 1 s"):
        meetings[1 - late].result(TIMEOUT)
    with pytest.raises((PeerTimeoutError, PeerLostError), match=f"process {1 - late}"):
        meetings[late].result(TIMEOUT)


def test_another_host(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(["here", "there"])
    monkeypatch.setattr(bootstrap, "host_identity", lambda: next(hosts))
    for each in [processes.start(me, PAIR) for me in (0, 1)]:
        with pytest.raises(PlatformError, match="must be on one host, but the devices of processes"):
            each.result(TIMEOUT)


def test_the_store_is_gone(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE")

    monkeypatch.setattr(KeyValueStore, "key_value_set", fail)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=r"coordinator of jax\.distributed did not answer: UNAVAILABLE"):
        processes.start(0, PAIR).result(TIMEOUT)
    assert time.monotonic() - start < 5


def test_a_store_that_hangs_is_no_fault_of_others(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(KeyValueStore, "key_value_set", lambda *_, **__: answers.wait(TIMEOUT))
    with pytest.raises(PeerLostError, match=r"coordinator of jax\.distributed did not answer for 3\.\d s"):
        processes.start(0, PAIR, timeout=3.0).result(TIMEOUT)
    answers.set()
