"""Heartbeats in the key-value store of jax.distributed: each says that a process lives, and which groups it has.

A process that has a group across nodes writes its heartbeat under its own key several times a second: a count, and its
part of each group. It reads the heartbeats of all others.
"""

import contextlib
import itertools
import json
import logging
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Self

import jax

from jax_ep.runtime.store import Store

_LOGGER = logging.getLogger("jax_ep")
_FOLDER = "jax_ep/heartbeat/2"  # in the store, with the version of what is written; a key there for each process
_PERIOD_SECONDS = 0.25  # between two heartbeats of a process
_OPENING_SECONDS = 0.025  # the same, while the process opens a group
_READS_A_SECOND = 256  # of all processes together; with many processes heartbeats become rarer
_JOIN_SECONDS = 1.0
_MOST_ENDED = 4  # parts that a heartbeat still names

OPENING, OPEN, CLOSED, LEFT = "opening", "open", "closed", "left"  # left: by an error


class GroupPart(NamedTuple):
    """A process' part of a group, as its heartbeat tells it."""

    group: str  # what the group is over
    state: str
    seen: str  # a hash of the parts of the group, of all processes, that this process has seen
    begun: int = 0  # ops of the group
    ended: int = 0
    last: str = ""  # the op that was begun last

    @classmethod
    def parse(cls, group: str, state: str, seen: str, begun: int, ended: int, last: str, *_: object) -> Self:
        return cls(str(group), str(state), str(seen), int(begun), int(ended), str(last))


class Heartbeat(NamedTuple):
    """The latest heartbeat of a process."""

    incarnation: str  # a restarted process has another
    beat: int  # one more each time
    parts: Mapping[str, GroupPart]  # by id, in the order in which they were begun; also a few that have ended

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Reads a heartbeat. Further fields, of a newer version, are ignored.

        Raises:
          ValueError: the text is no heartbeat.
        """
        try:
            incarnation, beat, parts, *_ = json.loads(text)
            return cls(incarnation, beat, {key: GroupPart.parse(*part) for key, part in parts.items()})
        except (TypeError, AttributeError, LookupError, RecursionError) as error:
            raise ValueError(f"no heartbeat: {text!r}") from error

    def __str__(self) -> str:
        return json.dumps(self)


class Readings(NamedTuple):
    """The heartbeats that a process has read."""

    reads: int  # so far
    by_process: Mapping[int, Heartbeat]


class HeartbeatThread:
    """Writes the heartbeat of process `me` and reads the heartbeats of all, in a thread that runs while it has parts.

    Args:
      store: returns the store, or None while jax.distributed is not initialized.
    """

    def __init__(self, store: Callable[[], Store | None], me: int):
        self.readings = Readings(0, {})
        self.failure: Exception | None = None  # that ended the thread
        self.meeting: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by group: one thread at a time
        self._store, self._key, self._incarnation = store, f"{_FOLDER}/{me}", secrets.token_hex(4)
        self._parts: dict[str, GroupPart] = {}
        self._beats = itertools.count(1)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._silent = False
        self._thread: threading.Thread | None = None

    @property
    def period(self) -> float:
        return max(_PERIOD_SECONDS, len(self.readings.by_process) / _READS_A_SECOND)

    @property
    def over(self) -> bool:
        """Whether it has stopped: no part is left, jax.distributed was shut down, or it has failed."""
        return self.failure is not None or self._thread is None or not self._thread.is_alive()

    def begin(self, group: str) -> str:
        """A new part, by its id."""
        with self._lock:
            part = secrets.token_hex(4)
            self._parts[part] = GroupPart(group, OPENING, "")
            if self._stopped.is_set() or self.over:
                self._stopped, self.failure = threading.Event(), None
                run = partial(self._run, self._stopped)
                self._thread = threading.Thread(target=run, name="jax_ep heartbeat", daemon=True)
                self._thread.start()
        return part

    def update(self, part: str, **changed: str | int) -> None:
        """Changes fields of a part. It ends once, by its `state`."""
        with self._lock:
            self._parts[part] = self._parts[part]._replace(**changed)
            ended = [key for key, each in self._parts.items() if each.state in (CLOSED, LEFT)]
            for key in ended[:-_MOST_ENDED]:
                del self._parts[key]
            if len(self._parts) > len(ended[-_MOST_ENDED:]):
                return
            self._stopped.set()
        self._join()

    def stop(self) -> None:
        """Ends the heartbeats, without a last one."""
        with self._lock:
            self._silent = True
            self._stopped.set()
        self._join()

    def _join(self) -> None:
        """Waits for the last heartbeat, but not for a coordinator that does not answer."""
        if self._thread is not None:
            self._thread.join(timeout=_JOIN_SECONDS)

    def _run(self, stopped: threading.Event) -> None:
        try:
            while not stopped.is_set() and self._exchange():
                stopped.wait(self._pause())
            if not self._silent:
                self._exchange()
        except Exception as error:
            self.failure = error
            _LOGGER.exception("the heartbeat thread has ended: other processes will take this one for lost")

    def _exchange(self) -> bool:
        """Writes and reads; False if there is no store."""
        store = self._store()
        if store is None:
            return False
        with self._lock:
            heartbeat = Heartbeat(self._incarnation, next(self._beats), dict(self._parts))
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            store.key_value_set(self._key, str(heartbeat), allow_overwrite=True)
            readings: dict[int, Heartbeat] = {}
            for key, text in store.key_value_dir_get_bytes(f"{_FOLDER}/"):
                process = key.removeprefix(f"{_FOLDER}/")
                with contextlib.suppress(ValueError):  # somebody else wrote it
                    if str(int(process)) == process:
                        readings[int(process)] = Heartbeat.parse(text)
            self.readings = Readings(self.readings.reads + 1, readings)
        return True

    def _pause(self) -> float:
        with self._lock:
            opens = any(part.state == OPENING for part in self._parts.values())
        return max(_OPENING_SECONDS, len(self.readings.by_process) / _READS_A_SECOND) if opens else self.period
