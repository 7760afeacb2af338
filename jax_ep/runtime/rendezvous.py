"""How the processes of a group meet: all of them at once, or none.

The lowest process leads. It receives the others on a Unix socket, whose secret it leaves in the key-value store of
jax.distributed, and when all are there it hands every two that share a line the ends of a connection. So who is there
is known from open connections alone: whoever gives up or dies hangs up, and whoever comes late or again finds the
secret that is last. Nothing is counted, and nothing old can be mistaken for new.
"""

import contextlib
import hashlib
import json
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax

from jax_ep.errors import PeerLostError, PeerTimeoutError, PlatformError
from jax_ep.runtime import bootstrap, jax_private
from jax_ep.runtime.timeouts import Deadline

# Groups of several processes over the same devices are told apart by numbers that all their processes agree on.
_numbers: defaultdict[str, set[int]] = defaultdict(set)  # of those that are open here, by what they are over
_meeting: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # one thread at a time, likewise

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between looks into the store
_ANSWER_SECONDS = 5.0  # within which a leader answers a call; then it has gone, or stopped


class Store(Protocol):
    """What we ask of the client of jax.distributed."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


class Meeting(NamedTuple):
    number: int  # the same in all processes; differs from the numbers that any of them had taken
    sockets: dict[int, socket.socket]  # blocking, by process with which this one shares a line; the caller closes them


class Introduced(NamedTuple):
    number: int  # of the group, taken here until `free` is called
    neighbours: dict[str, Any]  # what the compiled library asks about the group's processes
    free: Callable[[], None]


def introduce(what: str, me: int, processes: Sequence[Sequence[int]], timeout: float) -> Introduced:
    """Meets the other processes of a group over `what`, and takes the same free number there as they do.

    Args:
      processes: of the ranks along each line.

    Raises:
      PlatformError: `jax.distributed.initialize` was not called.
      JaxEpError: as for `meet`.
    """
    client = jax_private.coordination_client()
    if client is None:
        raise PlatformError("Group: a mesh of several processes needs jax.distributed.initialize")
    key = f"jax_ep/{hashlib.sha256(what.encode()).hexdigest()}"
    with _meeting[what]:
        number, sockets = meet(client, key, me, processes, taken=_numbers[what], timeout=timeout)
        _numbers[what].add(number)
    neighbours: dict[str, Any] = {}
    if sockets:
        descriptors = [sockets[i].detach() if i in sockets else -1 for i in range(max(me, *sockets) + 1)]
        neighbours = {"processes": processes, "sockets": descriptors}
    return Introduced(number, neighbours, partial(_numbers[what].discard, number))


def meet(
    store: Store, key: str, me: int, lines: Sequence[Sequence[int]], *, taken: Collection[int], timeout: float
) -> Meeting:
    """Returns once all processes that lines join with `me`, directly or through others, are here with this key.

    Args:
      store: where processes on any host find what the others left.
      key: what they meet for. In a process one at a time meets for it; later meetings may have the same.
      me: the number of this process.
      lines: the processes of the ranks along each line.
      taken: numbers that the meeting must not get.
      timeout: seconds.

    Raises:
      PeerTimeoutError: a process did not come in time. Another attempt may follow, here and there.
      PeerLostError: a process, or the store, went away at the very end.
      PlatformError: they are not of one host.
    """
    try:
        guests = _Guests(store, key, me, neighbours(lines, me), timeout)
        meeting = guests.lead(taken) if me == guests.leader else guests.join(taken)
    except jax.errors.JaxRuntimeError as error:
        raise PeerLostError(f"Group: the coordinator of jax.distributed did not answer: {error}") from error
    for each in meeting.sockets.values():
        each.setblocking(True)  # whatever socket.setdefaulttimeout says
    return meeting


def neighbours(lines: Sequence[Sequence[int]], me: int) -> dict[int, set[int]]:
    """For every process that is to be met, those with whom it shares a line."""
    shared: dict[int, set[int]] = defaultdict(set)
    for line in lines:
        for process in line:
            shared[process].update({*line} - {process})
    met, found = set[int](), {me}
    while met != found:
        met, found = found, found.union(*(shared[process] for process in found))
    return {process: shared[process] for process in sorted(met)}


class _Guests:
    def __init__(self, store: Store, key: str, me: int, neighbours: dict[int, set[int]], timeout: float):
        self.leader = min(neighbours)
        self._store, self._folder, self._me = store, f"{key}/{self.leader}", me
        self._neighbours, self._others = neighbours, set(neighbours) - {me}
        self._timeout = Deadline(timeout)
        self._host = bootstrap.host_identity()
        self._missing = sorted(self._others) if me == self.leader else [self.leader]  # to blame when time is over
        self._leave("host", me, self._host)

    def lead(self, taken: Collection[int]) -> Meeting:
        secret = secrets.token_hex(16)
        with bootstrap.Reception(secret, self._me, self._others) as reception:
            self._leave("secret", self.leader, secret)
            while True:
                self._await_all(reception)
                numbers = {*taken}.union(*(json.loads(caller.said) for caller in reception.callers.values()))
                number = next(number for number in range(len(numbers) + 1) if number not in numbers)
                with contextlib.ExitStack() as on_failure:
                    if (sockets := self._introduce(reception, on_failure)) is not None:
                        self._tell_all(reception, {"number": number})  # who goes only now is lost to all
                        on_failure.pop_all()
                        return Meeting(number, sockets)

    def _await_all(self, reception: bootstrap.Reception) -> None:
        """Tells those who are there whom they are waiting for."""
        reception.poll(0)
        told: list[bootstrap.Caller] = []
        never_here = set(self._others)
        while missing := self._others - reception.callers.keys():
            never_here &= missing
            self._missing = sorted(never_here or missing)  # others may have gone because of these
            if told != (present := list(reception.callers.values())):
                self._tell_all(reception, {"missing": self._missing})
                told = present
            self._look()
            reception.poll(min(_LONGEST_PAUSE, self._left()))

    def _introduce(
        self, reception: bootstrap.Reception, on_failure: contextlib.ExitStack
    ) -> dict[int, socket.socket] | None:
        """This process' own sockets; None if somebody went meanwhile, and is to be awaited again."""
        mine: dict[int, socket.socket] = {}
        for process, neighbour in ((p, n) for p, all in self._neighbours.items() for n in all if n > p):
            with contextlib.ExitStack() as handed_over:
                for one, other, end in zip((process, neighbour), (neighbour, process), bootstrap.pair(), strict=True):
                    (on_failure if one == self._me else handed_over).enter_context(end)
                    if one == self._me:
                        mine[other] = end
                    elif not self._tell(reception, one, {"peer": other}, [end.fileno()]):
                        return None
        reception.poll(0)
        return mine if self._others == reception.callers.keys() else None

    def _tell_all(self, reception: bootstrap.Reception, message: dict[str, Any]) -> None:
        for process in list(reception.callers):
            self._tell(reception, process, message)

    def _tell(
        self, reception: bootstrap.Reception, process: int, message: dict[str, Any], descriptors: Collection[int] = ()
    ) -> bool:
        """Whether the process was there to hear it; otherwise it is dropped."""
        try:
            bootstrap.send(reception.callers[process].connection, json.dumps(message).encode(), descriptors)
        except OSError:
            reception.drop(process)
            return False
        return True

    def join(self, taken: Collection[int]) -> Meeting:
        pause = _FIRST_PAUSE
        while True:
            if (secret := self._look()) is not None and (leader := self._call(secret, taken)) is not None:
                with leader:
                    if (meeting := self._follow(leader)) is not None:
                        return meeting
                pause = _FIRST_PAUSE
            time.sleep(min(pause, self._left()))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _call(self, secret: str, taken: Collection[int]) -> socket.socket | None:
        """None if the leader has gone who left the secret."""
        said, timeout = json.dumps(sorted(taken)).encode(), min(_ANSWER_SECONDS, self._left())
        try:
            return bootstrap.call(secret, self._me, self.leader, said, timeout=timeout)
        except (PeerLostError, PeerTimeoutError):
            return None

    def _follow(self, leader: socket.socket) -> Meeting | None:
        """Does as the leader says; None if it goes."""
        with contextlib.ExitStack() as on_failure:
            sockets: dict[int, socket.socket] = {}
            while True:
                try:
                    text, ends = bootstrap.receive(leader, timeout=self._left())
                except TimeoutError:
                    continue
                except OSError:
                    return None
                if not text:
                    return None
                message = json.loads(text)
                if "missing" in message:
                    self._missing = message["missing"]
                elif "peer" in message:  # the second time, if somebody went during the introduction
                    peer, [end] = message["peer"], ends
                    if peer in sockets:
                        sockets[peer].close()
                    sockets[peer] = on_failure.enter_context(end)
                else:
                    on_failure.pop_all()
                    return Meeting(message["number"], sockets)

    def _leave(self, what: str, process: int, value: str) -> None:
        self._store.key_value_set(f"{self._folder}/{what}/{process}", value, allow_overwrite=True)

    def _look(self) -> str | None:
        """The secret that the leader left, if it did."""
        found = self._store.key_value_dir_get(f"{self._folder}/")
        left = {key.removeprefix(f"{self._folder}/"): value for key, value in found}
        for process in self._neighbours:
            if left.get(f"host/{process}", self._host) != self._host:
                raise PlatformError(
                    f"Group: the devices of a line must be of one host, those of processes {self._me} and {process} "
                    "are not (or are in containers with networks of their own)"
                )
        return left.get(f"secret/{self.leader}")

    def _left(self) -> float:
        """Seconds until the deadline."""
        left = self._timeout.left()
        if left == 0:
            names = ", ".join(map(str, self._missing))
            raise PeerTimeoutError(
                f"Group: process {names} did not create its part of the group within {self._timeout:g} s"
            )
        return left
