"""Processes that meet, here played by threads: all of them or none, whoever is late, and however often."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
from helpers import KeyValueStore

from jax_ep import PeerLostError, PeerTimeoutError, PlatformError
from jax_ep.runtime import bootstrap, rendezvous

TIMEOUT = 30.0
PAIR, TRIPLE = [[0, 1]], [[0, 1, 2]]

pytestmark = pytest.mark.skipif(not Path("/proc/self/ns/net").exists(), reason="needs Linux")


class Processes:
    def __init__(self, pool: ThreadPoolExecutor):
        self.store, self._pool = KeyValueStore(), pool

    def start(
        self, me: int, lines: Sequence[Sequence[int]], timeout: float = TIMEOUT, taken: Sequence[int] = ()
    ) -> "Future[rendezvous.Meeting]":
        return self._pool.submit(rendezvous.meet, self.store, "key", me, lines, taken=taken, timeout=timeout)


@pytest.fixture
def processes() -> Iterator[Processes]:
    with ThreadPoolExecutor(8) as pool:
        yield Processes(pool)


def assert_met(meetings: "dict[int, Future[rendezvous.Meeting]]", lines: Sequence[Sequence[int]]) -> int:
    """Every two that share a line are connected with each other, and nobody else; their number."""
    results = {process: meeting.result(TIMEOUT) for process, meeting in meetings.items()}
    with contextlib.ExitStack() as stack:
        for result in results.values():
            for end in result.sockets.values():
                stack.enter_context(end)
                assert end.getblocking()
        for process, result in results.items():
            assert set(result.sockets) == {p for line in lines if process in line for p in line} - {process}
            for peer, end in result.sockets.items():
                end.send(f"{process} to {peer}".encode())
        for process, result in results.items():
            for peer, end in result.sockets.items():
                end.settimeout(TIMEOUT)
                assert end.recv(64) == f"{peer} to {process}".encode()
    [number] = {result.number for result in results.values()}
    return number


@pytest.mark.parametrize(
    "lines",
    [
        PAIR,
        [[3, 1, 4, 0]],
        [[0, 0, 2, 2], [1, 1, 3, 3]],  # processes 0 and 1 never hear of each other
        [[0, 1], [1, 2], [2, 3], [4, 4]],  # process 0 introduces 2 and 3, and 4 is alone
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


@pytest.mark.parametrize("late", [0, 1, 2])
def test_late_again_and_again(late: int, processes: Processes) -> None:
    """All fail, the late one alone too, and yet they meet when they come together; one stays till the others return."""
    others = {0, 1, 2} - {late}
    for _ in range(2):
        failing = [processes.start(me, TRIPLE, timeout=0.3) for me in others]
        for each in failing:
            with pytest.raises(PeerTimeoutError, match=f"process {late} did not create its part .* within 0.3 s"):
                each.result(TIMEOUT)
        with pytest.raises(PeerTimeoutError, match=r"process [\d, ]+ did not"):
            processes.start(late, TRIPLE, timeout=0.3).result(TIMEOUT)
    meetings = {late: processes.start(late, TRIPLE)}
    for _ in range(2):  # one of the others comes and goes, before both come
        with pytest.raises(PeerTimeoutError):
            processes.start(min(others), TRIPLE, timeout=0.3).result(TIMEOUT)
    meetings |= {me: processes.start(me, TRIPLE) for me in others}
    assert_met(meetings, TRIPLE)
    assert_met({me: processes.start(me, TRIPLE) for me in (0, 1, 2)}, TRIPLE)


def test_all_who_are_missing_are_named(processes: Processes) -> None:
    lines = [[0, 1, 2, 3]]
    here = [processes.start(me, lines, timeout=0.5) for me in (0, 2)]
    for each in here:
        with pytest.raises(PeerTimeoutError, match="process 1, 3 did not"):
            each.result(TIMEOUT)


@pytest.mark.parametrize("restarted", [0, 1])
def test_a_process_that_died_on_the_way(restarted: int, processes: Processes) -> None:
    """What it left behind misleads nobody: it comes again while the other still waits for it."""
    other, store = 1 - restarted, processes.store
    store.key_value_set("key/0/host/0", bootstrap.host_identity())
    store.key_value_set("key/0/secret/0", "of a leader that is dead")
    waiting = processes.start(other, TRIPLE)
    if restarted == 1:
        while store.left["key/0/secret/0"].startswith("of"):
            time.sleep(0.01)
        bootstrap.connect(store.left["key/0/secret/0"], 1, 0, b"[]", timeout=TIMEOUT).close()
    time.sleep(0.1)
    assert_met({other: waiting, restarted: processes.start(restarted, TRIPLE), 2: processes.start(2, TRIPLE)}, TRIPLE)


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
    with pytest.raises(PeerLostError, match=r"coordinator of jax\.distributed did not answer: UNAVAILABLE"):
        processes.start(0, PAIR).result(TIMEOUT)
