"""Signs of life between the processes of a group across nodes, through the key-value store of jax.distributed.

A process that has such a group writes a count under its own key several times a second, and reads what the others have
written. Who writes nothing new for longer than the group's timeout is lost: it ended, was stopped, or its interpreter
was held up. Only a process that has closed all its groups, and said so, may fall silent.

The store lives in process 0, with the coordinator of jax.distributed: if that does not answer, process 0 is lost.
"""

import atexit
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax

from jax_ep._core import jax_private
from jax_ep.errors import PeerLostError, PeerTimeoutError, PlatformError

_LOGGER = logging.getLogger("jax_ep")
_FOLDER = "jax_ep/alive"  # in the store; a key there for each process
_PERIOD_SECONDS = 0.25  # between two signs of a process
_READS_A_SECOND = 256  # by all processes together, beyond which signs become rarer: each reads the signs of all
_LOOK_SECONDS = 0.1  # between two looks at what was read
_STOPPED_SECONDS = 1.0  # between two looks: then this process was stopped itself
_LEAST_SECONDS = 2.0  # of silence that count as a loss, lest a busy host seems dead
_JOIN_SECONDS = 1.0
_LIFE = secrets.token_hex(4)
_CLOSED = -1
_GOODBYE, _SILENTLY, _NEVER_CAME = "goodbye", "silently", "never came"  # how the last group of a process ends


class Sign(NamedTuple):
    """What a process has written last."""

    life: str  # a process that is started again under its old number has another
    session: int  # how often it has had groups
    beat: int  # one more each time; -1 when it has closed them

    @classmethod
    def parse(cls, text: str) -> Self:
        life, session, beat = text.split()
        return cls(life, int(session), int(beat))

    def __str__(self) -> str:
        return " ".join(map(str, self))


class Signs(NamedTuple):
    """What a process has read."""

    reads: int  # so far
    by_process: Mapping[int, Sign]


class Silence:
    """For how long processes were silent, and which are lost by that. Time that this process was stopped counts not.

    Args:
      others: by process, what an error calls it.
      timeout: seconds.
      signs: the first that were read, of all of them.
      longest_pause: seconds between two reads of a store that answers.
    """

    def __init__(self, others: Mapping[int, str], timeout: float, signs: Signs, longest_pause: float):
        self._others, self._limit, self._signs, self._pause = others, max(timeout, _LEAST_SECONDS), signs, longest_pause
        self._seconds = dict.fromkeys(others, 0.0)
        self._unanswered = 0.0  # seconds since the store was read

    def longest(self) -> str | None:
        """Who has been silent longest, if for longer than a process on a busy host is."""
        process = max(self._seconds, key=lambda each: self._seconds[each])
        return self._silent(process) if self._seconds[process] > self._pause else None

    def look(self, signs: Signs, passed: float) -> str | None:
        """What is lost, if `passed` seconds after the last look these signs have been read."""
        self._unanswered += passed if passed < _STOPPED_SECONDS else _LOOK_SECONDS
        if signs.reads == self._signs.reads:
            if self._unanswered <= self._limit:
                return None
            return f"the coordinator of jax.distributed, in process 0, did not answer for {self._unanswered:.1f} s"
        waited, self._unanswered = min(self._unanswered, self._pause), 0.0  # a store that was gone excuses everybody
        before, self._signs = self._signs, Signs(signs.reads, {**self._signs.by_process, **signs.by_process})
        for process, who in self._others.items():
            old, new = before.by_process[process], signs.by_process.get(process)
            if new is not None and new.life != old.life:
                return f"{who} was started again"
            moves = new is not None and (new != old or new.beat == _CLOSED)
            self._seconds[process] = 0.0 if moves else self._seconds[process] + waited
            if self._seconds[process] > self._limit:
                return self._silent(process)
        return None

    def _silent(self, process: int) -> str:
        return f"{self._others[process]} gave no sign of life for {self._seconds[process]:.1f} s"


class Heartbeats:
    """Watches the other processes of a group from when all of them are there until one is lost or the group is closed.

    Args:
      name: of the group, for the log.
      others: by process, what an error calls it; at least one.
      timeout: seconds of silence after which a process is lost, if they are more than 2.
      open_timeout: seconds that this call waits for the others.

    Raises:
      PlatformError: `jax.distributed.initialize` was not called.
      PeerTimeoutError: a process did not come.
    """

    def __init__(self, name: str, others: Mapping[int, str], timeout: float, open_timeout: float):
        self._name, self._timeout = name, timeout
        self._lost: str | None = None
        self._ended = threading.Event()
        self._pulse = _join_pulse(len(others) + 1)
        try:
            signs, period = self._await(others, open_timeout), self._pulse.period
            self._silence = Silence(others, max(timeout, 4 * period), signs, period + _STOPPED_SECONDS)
            self._thread = threading.Thread(target=self._watch, name="jax_ep heartbeats", daemon=True)
            self._thread.start()
        except BaseException:
            _leave_pulse(_NEVER_CAME)
            raise

    def error(self, *, in_vain: bool = False) -> PeerLostError | None:
        """Which process is lost; or, if a rank of this process has waited in vain, which one is silent meanwhile."""
        what = self._lost or (self._silence.longest() if in_vain else None)
        return None if what is None else PeerLostError(f"{self._name}: {self._failed(what)}")

    def close(self, *, in_order: bool = True) -> None:
        """Says goodbye, unless other groups of this process go on, or it is left by an error: then others miss it."""
        self._ended.set()
        try:
            if self._thread is not threading.current_thread():
                self._thread.join(timeout=_JOIN_SECONDS)
        finally:
            _leave_pulse(_GOODBYE if in_order else _SILENTLY)

    def _await(self, others: Mapping[int, str], seconds: float) -> Signs:
        deadline = time.monotonic() + seconds
        while True:
            signs = self._pulse.signs
            missing = [process for process in others if not _is_here(process, signs.by_process.get(process))]
            if not missing:
                _met.update({process: signs.by_process[process].session for process in others})
                return signs
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                raise PeerTimeoutError(
                    f"Group: process {names} did not create its part of the group within {seconds:g} s"
                )
            time.sleep(_LOOK_SECONDS / 4)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(_LOOK_SECONDS) and not self._pulse.over:
            last, before = time.monotonic(), last
            self._lost = self._silence.look(self._pulse.signs, last - before)
            if self._lost is not None:
                _LOGGER.error("%s: PeerLostError: %s", self._name, self._failed(self._lost))
                return

    def _failed(self, what: str) -> str:
        return f"{what} (timeout {self._timeout:g} s); the group has failed"


class _Pulse:
    """A thread that writes this process' sign of life and reads those of all."""

    def __init__(self, processes: int, session: int):
        self.signs = Signs(0, {})
        self.over = False  # jax.distributed was shut down, or nobody here needs it any more
        self.period = max(_PERIOD_SECONDS, processes / _READS_A_SECOND)
        self._key, self._session = f"{_FOLDER}/{jax.process_index()}", session
        self._ended, self._how = threading.Event(), _GOODBYE
        self._thread = threading.Thread(target=self._beat, name="jax_ep pulse", daemon=True)
        self._thread.start()

    def end(self, how: str) -> None:
        self._how = how
        self._ended.set()
        self._thread.join(timeout=_JOIN_SECONDS)  # it may wait for a coordinator that does not answer

    def _beat(self) -> None:
        count = 0
        try:
            while not self._ended.is_set() and (client := jax_private.coordination_client()) is not None:
                count += 1
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._write(client, Sign(_LIFE, self._session, count))
                    found = client.key_value_dir_get(f"{_FOLDER}/")
                    self.signs = Signs(count, {int(key.rpartition("/")[2]): Sign.parse(text) for key, text in found})
                self._ended.wait(self.period)
        finally:
            self.over = True
        if self._how != _SILENTLY and (client := jax_private.coordination_client()) is not None:
            session = 0 if self._how == _NEVER_CAME else self._session
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._write(client, Sign(_LIFE, session, _CLOSED))

    def _write(self, client: Any, sign: Sign) -> None:
        client.key_value_set(self._key, str(sign), allow_overwrite=True)


_lock = threading.Lock()
_pulse: _Pulse | None = None
_users = 0  # groups that are open
_sessions = 0


def _join_pulse(processes: int) -> _Pulse:
    global _pulse, _users, _sessions
    if jax_private.coordination_client() is None:
        raise PlatformError("Group: a mesh of several processes needs jax.distributed.initialize")
    with _lock:
        if _pulse is None or _pulse.over:
            _sessions += 1
            _pulse = _Pulse(processes, _sessions)
        _users += 1
        return _pulse


def _leave_pulse(how: str) -> None:
    global _pulse, _users
    with _lock:
        _users -= 1
        if _users == 0 and _pulse is not None:
            _pulse.end(how)
            _pulse = None


@atexit.register
def _end() -> None:
    """Before the interpreter ends, as no thread may come back from native code later. Only `close` is a goodbye."""
    pulse = _pulse
    if pulse is not None:
        pulse.end(_SILENTLY)


_met: dict[int, int] = {}  # by process: its session when it was last waited for


def _is_here(process: int, sign: Sign | None) -> bool:
    """Whether it has come; also if it has closed its group since."""
    return sign is not None and (sign.beat != _CLOSED or sign.session > _met.get(process, 0))
