"""Finds out, by heartbeats, when all processes of a group are there, and which process of a group across nodes is lost
later (docs/design/processes.md).

Every process publishes which parts of the group it sees: the latest part of each process. If all publish the same
parts, every process has seen every other part since it began its own. So all processes are alive and are opening this
group. Old entries of dead processes, and parts of other groups, never agree.
"""

import atexit
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import jax

from jax_ep.errors import JaxEpError, PeerLostError, PeerTimeoutError, PlatformError
from jax_ep.runtime import jax_private
from jax_ep.runtime.heartbeat import (
    CLOSED,
    JOIN_SECONDS,
    LEFT,
    OPEN,
    OPENING_SECONDS,
    GroupPart,
    Heartbeat,
    HeartbeatThread,
    Readings,
    hash_of,
)
from jax_ep.runtime.progress import HangDetector, Progress
from jax_ep.runtime.timeouts import Deadline

_LOOK_SECONDS = 0.1  # between two looks at the heartbeats
_STOPPED_SECONDS = 1.0  # if this much time lies between two looks, this process was stopped itself
_LEAST_SECONDS = 2.0  # of silence before a process is lost; shorter silence is normal on a busy host


class Meeting(NamedTuple):
    """What processes knew of each other when all of them were there."""

    ids: Mapping[int, str]  # of the others' parts of the group, by process
    readings: Readings  # that showed all processes the same parts

    @property
    def parts(self) -> dict[int, GroupPart]:
        return {process: self.readings.by_process[process].parts[part] for process, part in self.ids.items()}


def meet(thread: HeartbeatThread, over: str, part: str, others: Collection[int], open_timeout: Deadline) -> Meeting:
    """Waits until the processes `others` open the group, too, of which `part` is this process' part.

    Raises:
      PeerTimeoutError: a process did not come in time. All may try again.
      PeerLostError: the store does not answer.
    """
    never_here, group = {*others}, hash_of(over)
    parts: dict[int, str] = {}
    seen, reads, answered, failed = "", 0, time.monotonic(), None  # when the store answered last, and has failed since
    while True:
        unanswered, readings = thread.unanswered, thread.readings
        # Another process may already count this one in with an earlier part of its own, and have begun the next.
        if missing := _missing(readings, others, parts, seen):
            parts = {
                process: key  # the last of each process
                for process in {*others} & readings.by_process.keys()
                for key, each in readings.by_process[process].parts.items()
                if each.group == group
            }
            seen = hash_of(*sorted([part, *parts.values()]))
            thread.update(part, seen=seen)
            missing = _missing(readings, others, parts, seen)
        if not missing:
            return Meeting(parts, readings)
        never_here &= missing
        now, late, lost = time.monotonic(), open_timeout.left() == 0, None
        if readings.reads > reads:
            reads, answered, failed = readings.reads, now, None
        elif unanswered is not None and failed is None:
            failed = now
        if thread.failure is not None:
            lost = f"this process sends no heartbeats any more, because of {thread.failure!r}"
        elif failed is not None and now - failed > _LEAST_SECONDS:
            lost = f"the coordinator of jax.distributed did not answer: {unanswered}"
        elif late and not thread.over and now - answered > _LEAST_SECONDS:
            lost = f"the coordinator of jax.distributed did not answer for {now - answered:.1f} s"
        if late or lost is not None:
            thread.update(part, seen="")  # so that a slow process does not count on this failed attempt
            if lost is not None:
                raise PeerLostError(f"Group: {lost}") from thread.failure or unanswered
            raise not_opened(never_here or missing, open_timeout)  # those that came may have given up because of these
        time.sleep(OPENING_SECONDS)


def hosts_of(
    thread: HeartbeatThread, me: int, others: Collection[int], host: str, open_timeout: Deadline
) -> dict[int, str]:
    """The hosts of process `me` and of others, which call this, too. Raises as `meet` does."""
    over = f"the hosts of {sorted({me, *others})}"
    with thread.opening(over, host) as part:
        met = meet(thread, over, part, others, open_timeout)
        thread.update(part, state=CLOSED)
    return {me: host} | {process: each.host for process, each in met.parts.items()}


def not_opened(processes: Iterable[int], open_timeout: Deadline) -> PeerTimeoutError:
    """The error if processes did not open their parts of a group in time."""
    names = ", ".join(map(str, sorted(processes)))
    return PeerTimeoutError(f"Group: process {names} did not create its part of the group within {open_timeout:g} s")


def _missing(readings: Readings, others: Collection[int], parts: Mapping[int, str], seen: str) -> set[int]:
    """The processes of `others` without a part in `parts` that publishes `seen`."""
    found = {p: readings.by_process[p].parts.get(part) for p, part in parts.items() if p in readings.by_process}
    return {*others} - {p for p, part in found.items() if part and part.seen == seen}


def _later(readings: Readings, before: Readings) -> dict[int, Heartbeat]:
    """The heartbeats in `readings` that were not overtaken: a write may reach the store after the next one."""

    def overtaken(process: int, new: Heartbeat) -> bool:
        old = before.by_process.get(process)
        return old is not None and new.incarnation == old.incarnation and new.beat < old.beat

    return {process: new for process, new in readings.by_process.items() if not overtaken(process, new)}


class FailureDetector:
    """How long processes have been silent, and which are lost. Time in which this process was stopped does not count.

    Args:
      others, limit, parts: as those of HangDetector.
      readings: the first, with heartbeats of all of them.
      pause: the most seconds between two reads of a store that answers.
    """

    def __init__(
        self, others: Mapping[int, str], limit: float, readings: Readings, parts: Mapping[int, str], pause: float
    ):
        self._others, self._limit, self.readings, self._parts, self._pause = others, limit, readings, parts, pause
        self._states = dict.fromkeys(others, OPEN)  # of their parts
        self._seconds = dict.fromkeys(others, 0.0)
        self._unanswered = 0.0  # seconds since the store was read

    def longest(self) -> str | None:
        """What an error says of the process that has been silent longest; None if all have been heard of lately."""
        process = max(self._seconds, key=lambda each: self._seconds[each])
        return self._silent(process) if self._seconds[process] > self._pause else None

    def lives(self, process: int) -> bool:
        """Whether it has sent a heartbeat lately."""
        return max(self._seconds[process], self._unanswered) <= self._pause

    def look(self, readings: Readings, passed: float) -> str | None:
        """What an error says of a lost process, or None. `passed`: seconds since the last look."""
        self._unanswered += passed if passed < _STOPPED_SECONDS else _LOOK_SECONDS
        if readings.reads == self.readings.reads:
            if self._unanswered <= self._limit:
                return None
            return f"the coordinator of jax.distributed, in process 0, did not answer for {self._unanswered:.1f} s"
        waited, self._unanswered = min(self._unanswered, self._pause), 0.0  # not while the store was gone
        before = self.readings
        self.readings = Readings(readings.reads, {**before.by_process, **_later(readings, before)})
        for process, who in self._others.items():
            if self._states[process] == CLOSED:
                continue
            old, new = before.by_process[process], self.readings.by_process[process]
            if new.incarnation != old.incarnation:
                return f"{who} was started again"
            part = new.parts.get(self._parts[process])
            if part is not None:
                self._states[process] = part.state
            elif self._states[process] != LEFT:  # it has ended, and is no longer named
                self._states[process] = CLOSED
            state = self._states[process]
            alive = state == CLOSED or (state != LEFT and new.beat != old.beat)
            self._seconds[process] = 0.0 if alive else self._seconds[process] + waited
            if self._seconds[process] > self._limit:
                return self._silent(process)
        return None

    def _silent(self, process: int) -> str:
        who, seconds = self._others[process], self._seconds[process]
        if self._states[process] == LEFT:
            return f"{who} left the group by an error {seconds:.1f} s ago"
        return f"{who} sent no heartbeat for {seconds:.1f} s"


class Membership:
    """Watches the other processes of a group, from when all are there until one is lost or the group is closed.

    Args:
      name: of the group, for the log.
      over: `opening.identity` of the group.
      others: by process, what an error calls it; at least one.
      timeout: seconds of silence after which a process is lost; no less than 2, nor than four heartbeats take.
      open_timeout: seconds that this call waits for the others. Calls of one process wait one after the other.
      thread, progress: of this process.
      on_lost: called in the watching thread with the error, before a caller sees it; raises nothing.

    Raises:
      PeerTimeoutError: a process did not open the group.
    """

    def __init__(
        self,
        name: str,
        over: str,
        others: Mapping[int, str],
        timeout: float,
        open_timeout: Deadline,
        thread: HeartbeatThread,
        progress: Progress,
        on_lost: Callable[[JaxEpError], None] = lambda error: None,
    ):
        self._name, self._heartbeat, self._on_lost = name, thread, on_lost
        self._progress = progress
        self._lost: JaxEpError | None = None
        self._ended, self._released, self._is_over = threading.Event(), False, False
        with thread.opening(over) as self._part:
            parts, readings = meet(thread, over, self._part, others, open_timeout)
            thread.update(self._part, state=OPEN)
            self._limit = limit = max(timeout, 4 * thread.period, _LEAST_SECONDS)
            self._detector = FailureDetector(others, limit, readings, parts, thread.period + _STOPPED_SECONDS)
            self._hangs = HangDetector(others, limit, parts, self._detector.lives)
            self._thread = threading.Thread(target=self._watch, name="jax_ep membership", daemon=True)
            self._thread.start()

    def error(self, *, in_vain: bool = False) -> JaxEpError | None:
        """Why the group has failed, or None.

        Args:
          in_vain: a kernel has timed out. Then a silent process is the reason, even before it counts as lost.
        """
        silent = self._detector.longest() if in_vain and self._lost is None else None
        found = self._lost if silent is None else self._failed(PeerLostError(silent))
        return None if found is None else type(found)(f"{self._name}: {found}")

    def close(self, *, in_order: bool = True) -> None:
        """Ends this process' part of the group. Unless `in_order`, the group then fails in the other processes."""
        self._ended.set()
        try:
            if self._thread is not threading.current_thread():
                self._thread.join(timeout=JOIN_SECONDS)
        finally:
            self._end(CLOSED if in_order else LEFT)

    def _end(self, state: str) -> None:
        if not self._is_over:
            self._is_over = True
            marks = self._progress.marks._asdict() if state == CLOSED else {}  # nobody compares others
            self._heartbeat.update(self._part, state=state, **marks)

    def release(self) -> None:
        """Lets the watching thread close this process' part. Takes no lock, as a garbage collector may call it."""
        self._released = True

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._released and not self._ended.wait(_LOOK_SECONDS):
            last, before = time.monotonic(), last
            if self._lost is None and (found := self._look(last - before)) is not None:
                lost = self._failed(found)
                try:
                    self._end(LEFT)  # before a caller sees the error: it may end the process
                finally:
                    self._on_lost(lost)
                    self._lost = lost
            if self._heartbeat.over:
                return
        if self._released:
            self._end(CLOSED)

    def _look(self, passed: float) -> JaxEpError | None:
        if self._heartbeat.over:
            failure = self._heartbeat.failure
            what = f"this process sends no heartbeats any more, because of {failure!r}"
            return None if failure is None else PeerLostError(what)
        try:
            marks = self._progress.marks
            self._heartbeat.update(self._part, **marks._asdict())
            if (lost := self._detector.look(self._heartbeat.readings, passed)) is not None:
                return PeerLostError(lost)
            return self._hangs.look(marks, self._detector.readings, min(passed, _STOPPED_SECONDS))
        except Exception as error:
            return PeerLostError(f"this process watches the others no more, because of {error!r}")

    def _failed(self, error: JaxEpError) -> JaxEpError:
        return type(error)(f"{error} (timeout {self._limit:g} s); the group has failed")


_threads: dict[frozenset[int], HeartbeatThread] = {}
_threads_lock = threading.Lock()


def heartbeat_thread(company: frozenset[int]) -> HeartbeatThread:
    """The heartbeat thread of this process in a company.

    Raises:
      PlatformError: `jax.distributed.initialize` was not called.
    """
    if jax_private.coordination_client() is None:
        raise PlatformError("Group: a mesh of several processes needs jax.distributed.initialize")
    with _threads_lock:
        if company not in _threads:
            _threads[company] = HeartbeatThread(jax_private.coordination_client, jax.process_index(), company)
            # A thread that comes back from native code after the interpreter has ended would crash.
            atexit.register(_threads[company].stop)
        return _threads[company]
