"""Heartbeats of processes, here played by threads: who is lost, who is there, and for which group."""

import dataclasses
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import pytest
from helpers import KeyValueStore, wait_until

from jax_ep import JaxEpError, PeerTimeoutError
from jax_ep.runtime import heartbeat, membership
from jax_ep.runtime.heartbeat import CLOSED, LEFT, OPEN, GroupPart, Heartbeat, HeartbeatThread, Readings
from jax_ep.runtime.membership import FailureDetector, Membership, hosts_of
from jax_ep.runtime.progress import HangDetector, Marks, Progress
from jax_ep.runtime.timeouts import Deadline

LIMIT = 10.0
PAUSE = 1.25  # the longest between two reads
PARTS = {1: "a part", 2: "another"}
OTHERS = {1: "process 1 (node 1, rank 2, 3)", 2: "process 2 (node 2, rank 4, 5)"}


@dataclasses.dataclass
class Others:
    """What the other processes have written, and who goes on writing."""

    detector: FailureDetector
    reads: int
    readings: dict[int, Heartbeat]

    def wait(self, seconds: float, *, silent: tuple[int, ...] = (), answers: bool = True) -> str | None:
        """Looks ten times a second, until something is lost; the store is read every time if it answers."""
        for _ in range(round(seconds * 10)):
            if answers:
                self.reads += 1
                for process in self.readings.keys() - set(silent):
                    self.readings[process] = self.readings[process]._replace(beat=self.reads)
            if (lost := self.look(0.1)) is not None:
                return lost
        return None

    def look(self, passed: float) -> str | None:
        return self.detector.look(Readings(self.reads, dict(self.readings)), passed)


@pytest.fixture
def others() -> Others:
    readings = {
        process: Heartbeat(f"life{process}", 1, {PARTS[process]: GroupPart("group", OPEN)}) for process in OTHERS
    }
    return Others(FailureDetector(OTHERS, LIMIT, Readings(1, dict(readings)), PARTS, PAUSE), 1, readings)


class Step(NamedTuple):
    """What some write from now on, who is silent for how long, or whether the store is; and what is lost then."""

    seconds: float
    silent: tuple[int, ...] = ()
    lost: str | None = None
    writes: Mapping[int, Any] = {}  # by process, fields of its heartbeat
    answers: bool = True


CLOSES = {1: {"parts": {PARTS[1]: GroupPart("group", CLOSED)}}}
LEAVES = {2: {"parts": {PARTS[2]: GroupPart("group", LEFT)}}}
STARTS_AGAIN = {1: {"incarnation": "another", "beat": 1, "parts": {}}}
SILENT = f"{OTHERS[2]} sent no heartbeat for 10."
AWAY = "the coordinator of jax.distributed, in process 0, did not answer for 10."
SCENES: dict[str, list[Step]] = {
    "who writes lives": [Step(5 * LIMIT)],
    "who falls silent is lost after the timeout": [Step(LIMIT - 0.2, (2,)), Step(0.5, (2,), SILENT)],
    "a sign in time begins anew": [Step(LIMIT - 0.2, (1,)), Step(0.1)] * 4,
    "a store that was away excuses everybody, who could not write": [
        Step(LIMIT - 1, answers=False),
        Step(1.0, (1, 2)),  # the first read may be older than what they write now
        Step(LIMIT),
    ],
    "a store that stays away is the loss of process 0": [Step(LIMIT + 1, lost=AWAY, answers=False)],
    "a closed group may fall silent": [
        Step(3 * LIMIT, (1,), writes=CLOSES),
        Step(3 * LIMIT, (1,), writes={1: {"parts": {}}}),  # it has closed others since
        Step(3 * LIMIT, (1,), writes=STARTS_AGAIN),
    ],
    # Not before others are that may have been the reason; also if other groups of the process go on.
    "who left by an error is missed": [
        Step(1, writes=LEAVES),
        Step(LIMIT - 1.2, writes={2: {"parts": {}}}),  # it has ended others since
        Step(0.5, lost=f"{OTHERS[2]} left the group by an error 10."),
    ],
    "who was started again is another one": [Step(0.1, lost=f"{OTHERS[1]} was started again", writes=STARTS_AGAIN)],
    "a heartbeat that was overtaken does not count": [
        Step(1),
        Step(LIMIT + 1, (1,), f"{OTHERS[1]} sent no heartbeat for 10.", {1: {"beat": 0, "parts": {}}}),
    ],
}


@pytest.mark.parametrize("scene", SCENES)
def test_who_is_lost(scene: str, others: Others) -> None:
    for step in SCENES[scene]:
        for process, fields in step.writes.items():
            others.readings[process] = others.readings[process]._replace(**fields)
        lost = others.wait(step.seconds, silent=step.silent, answers=step.answers)
        assert lost is None if step.lost is None else str(lost).startswith(step.lost)


def test_the_longest_silence_is_told(others: Others) -> None:
    assert others.detector.longest() is None
    others.wait(LIMIT - 0.2, silent=(2,))
    assert str(others.detector.longest()).startswith(f"{OTHERS[2]} sent no heartbeat for 9.")


def test_a_process_that_was_stopped_blames_nobody(others: Others) -> None:
    """It finds old heartbeats when it is continued; and time without a clock tick of its own counts for nothing."""
    assert others.wait(LIMIT - 1, silent=(1, 2)) is None
    assert others.look(1000.0) is None
    assert others.wait(0.5) is None


def test_the_last_heartbeat_is_written_again_if_the_store_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    store, failures = KeyValueStore(), [jax.errors.JaxRuntimeError("UNAVAILABLE")] * 2

    def fail_at_first(*arguments: Any, **options: Any) -> None:
        if failures:
            raise failures.pop()
        KeyValueStore.key_value_set(store, *arguments, **options)

    thread = HeartbeatThread(lambda: store, 0, {0, 1})
    with thread.opening("a group") as part:
        wait_until(lambda: bool(store.left))
        monkeypatch.setattr(store, "key_value_set", fail_at_first)
        thread.update(part, state=CLOSED)
    wait_until(lambda: f'"{CLOSED}"' in "".join(store.left.values()))


def hang(marks: Marks, *parts: GroupPart, seconds: float = LIMIT + 1, silent: int | None = None) -> str:
    """What a process says that has these marks for so long, of processes with these parts."""
    beats = {p: Heartbeat("life", 1, {PARTS[p]: part}) for p, part in zip(OTHERS, parts, strict=True)}
    detector = HangDetector(OTHERS, LIMIT, PARTS, lambda process: process != silent)
    detector.look(marks, Readings(1, beats), 0.1)
    return str(detector.look(marks, Readings(2, beats), seconds) or "")


def at(begun: int, ended: int, state: str = OPEN, last: str = "dispatch") -> GroupPart:
    return GroupPart("group", state, begun=begun, ended=ended, last=last)


def test_who_does_not_come_to_an_op_is_named() -> None:
    """The one furthest behind, or in another op; nobody who is in the same op, and nobody by an idle process."""
    waits, same = Marks(3, 2, "combine"), at(3, 2, last="combine")
    here = f"op 3, combine: this process waited {LIMIT + 1} s"
    alike = "all ranks must run the same ops"
    assert hang(waits, at(2, 2), at(1, 0)) == f"{here} for {OTHERS[2]} in vain: it is in its op 1, dispatch"
    assert hang(waits, at(2, 2), same) == f"{here} for {OTHERS[1]} in vain: it has ended its op 2, dispatch"
    assert hang(waits, at(2, 2), at(3, 2)) == f"{here} for {OTHERS[1]} in vain: it has ended its op 2, dispatch"
    assert hang(waits, same, at(3, 2)) == f"{here}, but {OTHERS[2]} is in its op 3, dispatch: {alike}"
    assert hang(waits, same, at(0, 0, CLOSED)) == f"{here} for {OTHERS[2]} in vain: it has closed the group"
    assert hang(waits, same, at(3, 3, CLOSED)) == ""
    assert hang(waits, same, at(4, 3)) == ""  # it was in the same op
    assert hang(waits, at(2, 2), same, silent=1) == ""  # it may be lost
    assert hang(waits, at(2, 2), at(1, 0), seconds=LIMIT - 1) == ""
    assert hang(Marks(3, 3, "combine"), at(2, 2), at(1, 0)) == ""


TIMEOUT = 20.0  # of what must come about
SHORT = 0.75  # of what must not
Opening = Future[Membership]
FOLDER = f"{heartbeat._FOLDER}/{heartbeat.hash_of('0', '1', '2')}"


class Store(KeyValueStore):
    def heartbeat(self, process: int) -> Heartbeat:
        return Heartbeat.parse(self.left[f"{FOLDER}/{process}"])


class Processes:
    """`count` processes, each of which has a heartbeat thread and can open groups with all others."""

    def __init__(self, pool: ThreadPoolExecutor, count: int):
        self.store, self._pool, self._everyone = Store(), pool, range(count)
        self.threads = {me: self.start(me) for me in self._everyone}

    def start(self, me: int) -> HeartbeatThread:
        """A process that is started again under its old number has another one."""
        return HeartbeatThread(lambda: self.store, me, self._everyone)

    def open(self, me: int, group: str, timeout: float = TIMEOUT, seconds: float = TIMEOUT) -> Opening:
        others = {process: f"process {process}" for process in self._everyone if process != me}
        heartbeat_thread = self.threads[me]
        return self._pool.submit(
            Membership, group, group, others, seconds, Deadline(timeout), heartbeat_thread, Progress()
        )

    def open_all(self, group: str, seconds: float = TIMEOUT) -> list[Membership]:
        openings = [self.open(me, group, seconds=seconds) for me in self._everyone]
        return [opening.result(TIMEOUT) for opening in openings]


@pytest.fixture
def processes() -> Iterator[Processes]:
    with ThreadPoolExecutor(8) as pool:
        three = Processes(pool, 3)
        yield three
        for heartbeat_thread in three.threads.values():
            heartbeat_thread.stop()


def close_all(groups: Iterable[Membership]) -> None:
    for group in groups:
        assert group.error() is None
        group.close()


def assert_missing(missing: str, *openings: Opening) -> None:
    for opening in openings:
        with pytest.raises(
            PeerTimeoutError, match=f"^Group: process {missing} did not create its part .* within {SHORT} s"
        ):
            opening.result(TIMEOUT)


def test_a_short_timeout_is_no_reason_for_haste(processes: Processes) -> None:
    first, *_ = processes.open_all("group", seconds=0.1)
    processes.threads[1].stop()
    start = time.monotonic()
    wait_until(lambda: first.error() is not None, TIMEOUT)
    assert time.monotonic() - start > 1.5  # 2 s after its last heartbeat
    assert "process 1 sent no heartbeat for 2." in str(first.error())


@pytest.mark.parametrize("what", ["_hangs.look", "_progress._read"])
def test_a_watch_that_fails_is_told(what: str, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = processes.open_all("group")
    lost: list[JaxEpError] = []
    monkeypatch.setattr(first, "_on_lost", lost.append)
    where, name = what.split(".")
    monkeypatch.setattr(getattr(first, where), name, lambda *_: [][0])
    wait_until(lambda: first.error() is not None, TIMEOUT)
    assert "this process watches the others no more, because of IndexError" in str(first.error())
    assert [f"group: {each}" for each in lost] == [str(first.error())]
    wait_until(lambda: others[0].error(in_vain=True) is not None)
    assert "process 0 left the group by an error" in str(others[0].error(in_vain=True))
    for each in (first, *others):
        each.close(in_order=each is not first)


@pytest.mark.parametrize("name", ["a group", "another group"])
def test_another_open_group_of_a_process_does_not_count(name: str, processes: Processes) -> None:
    groups = processes.open_all("a group")
    assert_missing("2", *[processes.open(me, name, SHORT) for me in (0, 1)])
    late = [processes.open(me, name) for me in (0, 1)]
    time.sleep(SHORT)
    assert not any(opening.done() for opening in late)
    groups += [opening.result(TIMEOUT) for opening in (processes.open(2, name), *late)]
    close_all(groups)


@pytest.mark.parametrize("how", ["while it was open", "while it was opened"])
def test_what_a_dead_process_left_does_not_count(how: str, processes: Processes) -> None:
    if how == "while it was open":
        groups = processes.open_all("a group")
        processes.threads[2].stop()
        for group in groups[:2]:
            group.close()
    else:
        dies = processes.open(2, "a group", 5 * SHORT)
        wait_until(lambda: f"{FOLDER}/2" in processes.store.left)
        processes.threads[2].stop()
        with pytest.raises(PeerTimeoutError):
            dies.result(TIMEOUT)
    left = processes.store.heartbeat(2)
    assert_missing("2", *[processes.open(me, "a group", SHORT) for me in (0, 1)])
    assert processes.store.heartbeat(2) == left
    openings = [processes.open(me, "a group") for me in (0, 1)]
    processes.threads[2] = processes.start(2)
    openings.append(processes.open(2, "a group"))
    close_all(opening.result(TIMEOUT) for opening in openings)


def test_late_again_and_again(processes: Processes) -> None:
    """Attempts that failed do not count, in whatever order processes come late."""
    for late in (0, 2):
        for _ in range(2):
            assert_missing(str(late), *[processes.open(me, "a group", SHORT) for me in {0, 1, 2} - {late}])
        others = sorted({0, 1, 2} - {late})
        assert_missing(f"{others[0]}, {others[1]}", processes.open(late, "a group", SHORT))
    close_all(processes.open_all("a group"))


def without_seen(text: bytes) -> bytes:
    heartbeat = Heartbeat.parse(text)
    parts = {key: part._replace(seen="") for key, part in heartbeat.parts.items()}
    return str(heartbeat._replace(parts=parts)).encode()


class HeldUp(Store):
    """The store of the others, for a process that is held up, in all its threads, once it would read that all agree."""

    def __init__(self, store: Store) -> None:
        self.left = store.left
        self.all_agree, self.may_look = threading.Event(), threading.Event()

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        published = any(part.seen for part in self.heartbeat(0).parts.values())
        found = super().key_value_dir_get_bytes(key)
        seen = {part.seen for _, text in found for part in Heartbeat.parse(text).parts.values()}
        if len(found) == 3 and len(seen) == 1 and seen != {""}:
            self.all_agree.set()
        elif not published:
            # If it read what the others see before it has published the same, it would open the group at once.
            return [(name, without_seen(text)) for name, text in found]
        if not self.all_agree.is_set():
            return found
        assert self.may_look.wait(TIMEOUT)
        return super().key_value_dir_get_bytes(key)


@pytest.fixture
def held_up(processes: Processes) -> Iterator[HeldUp]:
    """What process 0 reads."""
    store = HeldUp(processes.store)
    processes.threads[0] = HeartbeatThread(lambda: store, 0, range(3))
    yield store
    store.may_look.set()


@pytest.mark.parametrize("again", [False, True])
def test_who_closes_at_once_was_there(again: bool, processes: Processes, held_up: HeldUp) -> None:
    """A process that looks only afterwards meets them for the group that they have closed, and not for the next one."""
    opening, *others = [processes.open(me, "a group") for me in range(3)]
    assert held_up.all_agree.wait(TIMEOUT)
    close_all(each.result(TIMEOUT) for each in others)
    next_ones = [processes.open(me, "a group") for me in (1, 2) if again]
    wait_until(lambda: not again or all(len(processes.store.heartbeat(me).parts) == 2 for me in (1, 2)))
    assert not opening.done()
    held_up.may_look.set()
    close_all([opening.result(TIMEOUT)])
    assert not any(each.done() for each in next_ones)
    if again:
        close_all(each.result(TIMEOUT) for each in [processes.open(0, "a group"), *next_ones])


def test_processes_tell_their_hosts(processes: Processes) -> None:
    """Those of now: one may have been on another host before."""

    def tell(me: int, host: str) -> Future[dict[int, str]]:
        others = {0, 1, 2} - {me}
        return processes._pool.submit(hosts_of, processes.threads[me], me, others, host, Deadline(TIMEOUT))

    for hosts in ("aab", "abb"):
        telling = [tell(me, host) for me, host in enumerate(hosts)]
        assert all(each.result(TIMEOUT) == dict(enumerate(hosts)) for each in telling)


def test_a_sign_names_what_is_open_and_little_else(processes: Processes) -> None:
    groups = processes.open_all("a group")
    for _ in range(12):
        close_all(processes.open_all("another group"))

    def states() -> list[str]:
        return [part.state for part in processes.store.heartbeat(0).parts.values()]

    wait_until(lambda: states().count(heartbeat.OPEN) == 1)
    assert 1 < len(states()) < 12
    close_all(groups)


def test_a_group_left_by_an_error_is_told_from_others_of_the_process(processes: Processes) -> None:
    kept, left = processes.open_all("kept"), processes.open_all("left")
    left[2].close(in_order=False)
    wait_until(lambda: left[0].error(in_vain=True) is not None)
    assert "process 2 left the group by an error" in str(left[0].error(in_vain=True))
    assert all(group.error(in_vain=True) is None for group in kept)
    for group in kept + left[:2]:
        group.close()


def newer(written: Heartbeat) -> str:
    return json.dumps([*written[:2], {key: [*part, "more"] for key, part in written.parts.items()}, "more", 3])


ODD = ["", "[]", "{", "1", "null", '"abc"', '["a", 1, {"b": 2}]', '["a", 1, {"b": []}]', "\udcff"]
ODD += ["[" * 100_000, "9" * 5000, '["a", Infinity, {}]', '["a", 1, {"b": ["", "", "", "", [], Infinity, 0, ""]}]']


def test_what_others_wrote_into_the_store_is_ignored(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd keys and values end nothing, nor do fields of a newer version; a silent process is still named."""
    monkeypatch.setattr(membership, "_LEAST_SECONDS", 0.5)
    for number, text in enumerate(ODD):
        processes.store.left[f"{FOLDER}/{100 + number}"] = text
    monkeypatch.setattr(Heartbeat, "__str__", newer)
    groups = processes.open_all("a group", seconds=1.0)
    for key in ("", "one", "01", "+1", "1/2", "\u0661"):  # read after those of the processes
        processes.store.left[f"{FOLDER}/{key}"] = str(Heartbeat("another", 1, {}))
    time.sleep(2 * SHORT)
    assert all(group.error() is None for group in groups)
    processes.threads[2].stop()
    wait_until(lambda: groups[0].error() is not None)
    assert "process 2 sent no heartbeat" in str(groups[0].error())
    for group in groups:
        group.close()


@pytest.mark.parametrize("log_waits", [False, True])
def test_a_heartbeat_thread_that_fails_is_reported(
    log_waits: bool, processes: Processes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its log entry waits, for a full pipe or a lock."""
    groups, goes_on = processes.open_all("a group"), threading.Event()
    if log_waits:
        monkeypatch.setattr(heartbeat._LOGGER, "exception", lambda *_: goes_on.wait(2 * TIMEOUT))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no such store")

    monkeypatch.setattr(Store, "key_value_set", fail)
    wait_until(lambda: all(group.error() is not None for group in groups))
    assert "this process sends no heartbeats any more, because of OSError('no such store')" in str(groups[0].error())
    assert log_waits or "the heartbeat thread has ended" in caplog.text
    goes_on.set()
    for group in groups:
        group.close()
