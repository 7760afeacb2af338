"""Heartbeats in the key-value store of jax.distributed: each says that a process lives, and which groups it has.

A *company* is the set of processes that lines of a group connect. While a process opens a group of a company, or has
one across nodes, it writes its heartbeat into the company's folder several times a second: a count, and its part of
each group. It reads the heartbeats of the others there.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import jax

_LOGGER = logging.getLogger("jax_ep")
_FOLDER = "jax_ep/heartbeat/3"  # in the store, with the version of what is written; a folder there for each company
_PERIOD_SECONDS = 0.25  # between two heartbeats of a process
OPENING_SECONDS = 0.01  # the same, while the process opens a group
_READS_A_SECOND = 256  # of a company together; with many processes heartbeats become rarer
JOIN_SECONDS = 1.0  # for a thread that ends
_LAST_SECONDS = 5.0  # in which a thread that ends tries to write its last heartbeat
_MOST_ENDED = 4  # parts that a heartbeat still names

OPENING, OPEN, CLOSED, LEFT = "opening", "open", "closed", "left"  # left: by an error


def hash_of(*texts: str) -> str:
    """A short name of texts, in their order, that is the same in all processes."""
    return hashlib.sha256(" ".join(texts).encode()).hexdigest()[:16]


class GroupPart(NamedTuple):
    """A process' part of a group, as its heartbeat tells it."""

    group: str  # what the group is over
    state: str
    seen: str = ""  # a hash of the parts of the group, of all processes, that this process has seen
    host: str = ""  # of the process, if all must be on one
    taken: tuple[int, ...] = ()  # numbers that the group must not get
    begun: int = 0  # ops of the group
    ended: int = 0
    last: str = ""  # the op that was begun last

    @classmethod
    def parse(cls, fields: Iterable[Any]) -> Self:
        group, state, seen, host, taken, begun, ended, last, *_ = fields
        numbers = tuple(map(int, taken))
        return cls(str(group), str(state), str(seen), str(host), numbers, int(begun), int(ended), str(last))


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
            return cls(str(incarnation), int(beat), {key: GroupPart.parse(part) for key, part in parts.items()})
        except (TypeError, AttributeError, LookupError, OverflowError, RecursionError) as error:
            raise ValueError(f"no heartbeat: {text!r}") from error

    def __str__(self) -> str:
        return json.dumps(self)


class Store(Protocol):
    """What we use of the client of jax.distributed. The store itself is in process 0."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]: ...  # of any bytes


class Readings(NamedTuple):
    reads: int  # so far
    by_process: Mapping[int, Heartbeat]


class HeartbeatThread:
    """Writes the heartbeat of process `me` and reads those of its company, in a thread that runs while it has parts.

    Args:
      store: returns the store, or None while jax.distributed is not initialized.
      company: the numbers of its processes.
    """

    def __init__(self, store: Callable[[], Store | None], me: int, company: Iterable[int]):
        self.readings = Readings(0, {})
        self.failure: Exception | None = None  # that ended the thread
        self.unanswered: Exception | None = None  # of the store, when it was last asked
        self._store, self._me, self._incarnation = store, me, secrets.token_hex(4)
        self._folder = f"{_FOLDER}/{hash_of(*map(str, sorted(company)))}"
        self._meeting: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by group
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

    @contextlib.contextmanager
    def opening(self, over: str, host: str = "", taken: Collection[int] = ()) -> Iterator[str]:
        """Begins a part of the group `over`, and yields its id, a random secret that only readers of the store know.

        Only one thread at a time may open a given group; the others wait. If the block raises, the part is left.
        """
        with self._meeting[over]:
            part = secrets.token_hex(16)
            self._begin(part, GroupPart(hash_of(over), OPENING, host=host, taken=tuple(taken)))
            try:
                yield part
            except BaseException:
                self.update(part, state=LEFT)
                raise

    def _begin(self, part: str, begun: GroupPart) -> None:
        with self._lock:
            self._parts[part] = begun
            if self._stopped.is_set() or self.over:
                self._stopped, self.failure, self.unanswered = threading.Event(), None, None
                run = partial(self._run, self._stopped)
                self._thread = threading.Thread(target=run, name="jax_ep heartbeat", daemon=True)
                self._thread.start()

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
            self._thread.join(timeout=JOIN_SECONDS)

    def _run(self, stopped: threading.Event) -> None:
        try:
            while not stopped.is_set() and self._exchange():
                stopped.wait(self._pause())
            until = time.monotonic() + _LAST_SECONDS
            while not self._silent and self._thread is threading.current_thread() and self._exchange():
                if self.unanswered is None or time.monotonic() > until:
                    break
                time.sleep(_PERIOD_SECONDS)
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
        try:
            store.key_value_set(f"{self._folder}/{self._me}", str(heartbeat), allow_overwrite=True)
            found = store.key_value_dir_get_bytes(f"{self._folder}/")
        except jax.errors.JaxRuntimeError as error:
            self.unanswered = error
            return True
        readings: dict[int, Heartbeat] = {}
        for key, text in found:
            process = key.removeprefix(f"{self._folder}/")
            with contextlib.suppress(ValueError):  # somebody else wrote it
                if str(int(process)) == process:
                    readings[int(process)] = Heartbeat.parse(text)
        self.readings, self.unanswered = Readings(self.readings.reads + 1, readings), None
        return True

    def _pause(self) -> float:
        with self._lock:
            opens = any(part.state == OPENING for part in self._parts.values())
        return max(OPENING_SECONDS, len(self.readings.by_process) / _READS_A_SECOND) if opens else self.period
