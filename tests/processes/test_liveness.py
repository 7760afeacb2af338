"""When a process counts as lost, by the heartbeats that another one reads; test_nodes_processes.py kills some."""

import dataclasses

import pytest

from jax_ep.runtime.heartbeat import CLOSED, LEFT, OPEN, GroupPart, Heartbeat, Readings
from jax_ep.runtime.liveness import FailureDetector
from jax_ep.runtime.progress import HangDetector, Marks

TIMEOUT = 10.0
PAUSE = 1.25  # the longest between two reads
PARTS = {1: "a part", 2: "another"}
OTHERS = {1: "process 1 (node 1, rank 2, 3)", 2: "process 2 (node 2, rank 4, 5)"}


@dataclasses.dataclass
class Store:
    """What the processes have written, and who goes on writing."""

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

    def end(self, process: int, how: str) -> None:
        part = GroupPart("group", how, "")
        self.readings[process] = self.readings[process]._replace(parts={PARTS[process]: part})

    def look(self, passed: float) -> str | None:
        return self.detector.look(Readings(self.reads, dict(self.readings)), passed)


@pytest.fixture
def store() -> Store:
    readings = {
        process: Heartbeat(f"life{process}", 1, {PARTS[process]: GroupPart("group", OPEN, "")}) for process in OTHERS
    }
    return Store(FailureDetector(OTHERS, TIMEOUT, Readings(1, dict(readings)), PARTS, PAUSE), 1, readings)


EVERYBODY, NOBODY = (1, 2), ()
LOST = f"{OTHERS[2]} sent no heartbeat for 10."
AWAY = "the coordinator of jax.distributed, in process 0, did not answer for 10."
# For so many seconds some are silent, or the store is; and what is lost then.
SCENES: dict[str, list[tuple[float, tuple[int, ...], bool, str | None]]] = {
    "who writes lives": [(5 * TIMEOUT, NOBODY, True, None)],
    "who falls silent is lost after the timeout": [(TIMEOUT - 0.2, (2,), True, None), (0.5, (2,), True, LOST)],
    "a sign in time begins anew": [(TIMEOUT - 0.2, (1,), True, None), (0.1, NOBODY, True, None)] * 4,
    "a store that was away excuses everybody, who could not write": [
        (TIMEOUT - 1, NOBODY, False, None),
        (1.0, EVERYBODY, True, None),  # the first read may be older than what they write now
        (TIMEOUT, NOBODY, True, None),
    ],
    "a store that stays away is the loss of process 0": [(TIMEOUT + 1, NOBODY, False, AWAY)],
}


@pytest.mark.parametrize("scene", SCENES)
def test_who_is_lost(scene: str, store: Store) -> None:
    for seconds, silent, answers, wanted in SCENES[scene]:
        lost = store.wait(seconds, silent=silent, answers=answers)
        assert lost is None if wanted is None else str(lost).startswith(wanted)


def test_the_longest_silence_is_told(store: Store) -> None:
    assert store.detector.longest() is None
    store.wait(TIMEOUT - 0.2, silent=(2,))
    assert str(store.detector.longest()).startswith(f"{OTHERS[2]} sent no heartbeat for 9.")


def test_a_closed_group_may_fall_silent(store: Store) -> None:
    store.end(1, CLOSED)
    assert store.wait(3 * TIMEOUT, silent=(1,)) is None
    store.readings[1] = store.readings[1]._replace(parts={})  # it has closed others since
    assert store.wait(3 * TIMEOUT, silent=(1,)) is None
    store.readings[1] = Heartbeat("another", 1, {})  # it was started again
    assert store.wait(3 * TIMEOUT, silent=(1,)) is None


def test_who_left_by_an_error_is_missed(store: Store) -> None:
    """Not before others are that may have been the reason; also if other groups of the process go on."""
    store.end(2, LEFT)
    assert store.wait(1) is None
    store.readings[2] = store.readings[2]._replace(parts={})  # it has ended others since
    assert store.wait(TIMEOUT - 1.2) is None
    lost = store.wait(0.5)
    assert lost is not None
    assert lost.startswith(f"{OTHERS[2]} left the group by an error 10.")


def test_a_process_that_was_started_again_is_another_one(store: Store) -> None:
    store.readings[1] = Heartbeat("another", 1, {})
    assert store.wait(0.1) == f"{OTHERS[1]} was started again"


def test_a_process_that_was_stopped_blames_nobody(store: Store) -> None:
    """It finds old heartbeats when it is continued; and time without a clock tick of its own counts for nothing."""
    assert store.wait(TIMEOUT - 1, silent=(1, 2)) is None
    assert store.look(1000.0) is None
    assert store.wait(0.5) is None


def hang(marks: Marks, *parts: GroupPart, seconds: float = TIMEOUT + 1, silent: int | None = None) -> str:
    """What a process says that has these marks for so long, of processes with these parts."""
    beats = {p: Heartbeat("life", 1, {PARTS[p]: part}) for p, part in zip(OTHERS, parts, strict=True)}
    detector = HangDetector(OTHERS, TIMEOUT, PARTS, lambda process: process != silent)
    detector.look(marks, Readings(1, beats), 0.1)
    return str(detector.look(marks, Readings(2, beats), seconds) or "")


def at(begun: int, ended: int, state: str = OPEN, last: str = "dispatch") -> GroupPart:
    return GroupPart("group", state, "", begun, ended, last)


def test_who_does_not_come_to_an_op_is_named() -> None:
    """The one furthest behind, or in another op; nobody who is in the same op, and nobody by an idle process."""
    waits, same = Marks(3, 2, "combine"), at(3, 2, last="combine")
    here = f"this process has waited for {TIMEOUT + 1} s in its op 3, combine"
    alike = "all ranks must run the same ops"
    assert hang(waits, at(2, 2), at(1, 0)) == f"{OTHERS[2]} is in its op 1, dispatch; {here}"
    assert hang(waits, at(2, 2), same) == f"{OTHERS[1]} has ended its op 2, dispatch; {here}"
    assert hang(waits, at(2, 2), at(3, 2)) == f"{OTHERS[1]} has ended its op 2, dispatch; {here}"
    assert hang(waits, same, at(3, 2)) == f"{OTHERS[2]} is in its op 3, dispatch; {here}: {alike}"
    assert hang(waits, same, at(0, 0, CLOSED)) == f"{OTHERS[2]} has closed the group; {here}"
    assert hang(waits, same, at(3, 3, CLOSED)) == ""
    assert hang(waits, same, at(4, 3)) == ""  # it was in the same op
    assert hang(waits, at(2, 2), same, silent=1) == ""  # it may be lost
    assert hang(waits, at(2, 2), at(1, 0), seconds=TIMEOUT - 1) == ""
    assert hang(Marks(3, 3, "combine"), at(2, 2), at(1, 0)) == ""
