"""The meeting of a group's processes: all at once, or none (docs/design/processes.md).

A process is there while its connection to the leader, the lowest process, is open. Nothing is counted, so nothing old
is mistaken for new.
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
from typing import NamedTuple

import jax

from jax_ep.errors import PeerLostError, PeerTimeoutError, PlatformError
from jax_ep.runtime import bootstrap
from jax_ep.runtime.store import Store, not_opened, store
from jax_ep.runtime.timeouts import Deadline

# Groups of several processes over the same devices have different numbers, on which their processes agree.
_numbers: defaultdict[str, set[int]] = defaultdict(set)  # of the groups open here, by what the groups are over
_meeting: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # one thread meets at a time, likewise

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between looks into the store
_ANSWER_SECONDS = 5.0  # for a leader to answer; a leader that takes longer has gone, or is stopped


class Meeting(NamedTuple):
    number: int  # the same in all processes; none of them had taken it
    sockets: dict[int, socket.socket]  # blocking, by process with which this one shares a line; the caller closes them


def introduce(
    what: str, me: int, processes: Sequence[Sequence[int]], timeout: float
) -> tuple[int, list[int], Callable[[], None]]:
    """Meets the other processes of a group over `what`. All take the same free number for the group.

    Args:
      processes: of the ranks along each line.

    Returns:
      The number; a connected socket's descriptor for each process, -1 where no line is shared, or [] without any; and
      the function that frees the number.

    Raises:
      PlatformError: `jax.distributed.initialize` was not called.
      JaxEpError: as for `meet`.
    """
    key = f"jax_ep/{hashlib.sha256(what.encode()).hexdigest()}"
    with _meeting[what]:
        number, sockets = meet(store(), key, me, processes, taken=_numbers[what], timeout=timeout)
        _numbers[what].add(number)
    descriptors = [sockets[i].detach() if i in sockets else -1 for i in range(max(me, *sockets) + 1)] if sockets else []
    return number, descriptors, partial(_numbers[what].discard, number)


def meet(
    store: Store, key: str, me: int, lines: Sequence[Sequence[int]], *, taken: Collection[int], timeout: float
) -> Meeting:
    """Returns once all processes that lines connect with `me`, directly or through others, meet with this key.

    Args:
      key: names the meeting. A process is in one meeting of a key at a time; later meetings may have the same key.
      lines: the processes of the ranks along each line.
      taken: numbers that the meeting must not get.

    Raises:
      PeerTimeoutError: a process did not come in time. All processes may try again.
      PeerLostError: a process, or the store, went away at the very end.
      PlatformError: the processes are not of one host.
    """
    try:
        participants = _Rendezvous(store, key, me, neighbours(lines, me), timeout)
        meeting = participants.lead(taken) if me == participants.leader else participants.join(taken)
    except jax.errors.JaxRuntimeError as error:
        raise PeerLostError(f"Group: the coordinator of jax.distributed did not answer: {error}") from error
    for each in meeting.sockets.values():
        each.setblocking(True)  # whatever socket.setdefaulttimeout says
    return meeting


def neighbours(lines: Sequence[Sequence[int]], me: int) -> dict[int, set[int]]:
    """For every process of the meeting, the processes with which it shares a line."""
    shared: dict[int, set[int]] = defaultdict(set)
    for line in lines:
        for process in line:
            shared[process].update({*line} - {process})
    met, found = set[int](), {me}
    while met != found:
        met, found = found, found.union(*(shared[process] for process in found))
    return {process: shared[process] for process in sorted(met)}


class _Rendezvous:
    def __init__(self, store: Store, key: str, me: int, neighbours: dict[int, set[int]], timeout: float):
        self.leader = min(neighbours)
        self._store, self._folder, self._me = store, f"{key}/{self.leader}", me
        self._neighbours, self._others = neighbours, set(neighbours) - {me}
        self._timeout = Deadline(timeout)
        self._host = bootstrap.host_identity()
        self._missing = sorted(self._others) if me == self.leader else [self.leader]  # for the error of a timeout
        self._publish("host", me, self._host)

    def lead(self, taken: Collection[int]) -> Meeting:
        secret = secrets.token_hex(16)
        with bootstrap.Listener(secret, self._me, self._others) as listener:
            self._publish("secret", self.leader, secret)
            while True:
                self._await_all(listener)
                numbers = {*taken}.union(*(json.loads(each.payload) for each in listener.accepted.values()))
                number = next(number for number in range(len(numbers) + 1) if number not in numbers)
                if (sockets := self._introduce(listener)) is not None:
                    self._send_to_all(listener, {"number": number})  # a process that goes after this is lost
                    return Meeting(number, sockets)

    def _await_all(self, listener: bootstrap.Listener) -> None:
        """Waits until all processes are connected. Tells connected processes which ones are missing."""
        listener.poll(0)
        informed: list[bootstrap.Accepted] = []
        never_here = set(self._others)
        while missing := self._others - listener.accepted.keys():
            never_here &= missing
            self._missing = sorted(never_here or missing)  # others may have gone because of these
            if informed != (present := list(listener.accepted.values())):
                self._send_to_all(listener, {"missing": self._missing})
                informed = present
            self._look_up_secret()
            listener.poll(min(_LONGEST_PAUSE, self._left()))

    def _introduce(self, listener: bootstrap.Listener) -> dict[int, socket.socket] | None:
        """This process' own sockets; None if a process has gone and the leader must wait for it again."""
        mine: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as on_failure:
            for process, neighbour in ((p, n) for p, all in self._neighbours.items() for n in all if n > p):
                with contextlib.ExitStack() as handed_over:
                    ways = (process, neighbour), (neighbour, process)
                    for (one, other), end in zip(ways, bootstrap.pair(), strict=True):
                        (on_failure if one == self._me else handed_over).enter_context(end)
                        if one == self._me:
                            mine[other] = end
                        elif not self._send(listener, one, {"peer": other}, [end.fileno()]):
                            return None
            listener.poll(0)
            if self._others != listener.accepted.keys():
                return None
            on_failure.pop_all()
            return mine

    def _send_to_all(self, listener: bootstrap.Listener, message: dict[str, object]) -> None:
        for process in list(listener.accepted):
            self._send(listener, process, message)

    def _send(
        self, listener: bootstrap.Listener, process: int, message: dict[str, object], descriptors: Collection[int] = ()
    ) -> bool:
        """Whether the process was connected; otherwise it is dropped."""
        try:
            bootstrap.send(listener.accepted[process].connection, json.dumps(message).encode(), descriptors)
        except OSError:
            listener.drop(process)
            return False
        return True

    def join(self, taken: Collection[int]) -> Meeting:
        payload, pause = json.dumps(sorted(taken)).encode(), _FIRST_PAUSE
        while True:
            if (secret := self._look_up_secret()) is not None:
                timeout = min(_ANSWER_SECONDS, self._left())
                with contextlib.suppress(PeerLostError, PeerTimeoutError):  # the leader of this secret has gone
                    with bootstrap.connect(secret, self._me, self.leader, payload, timeout=timeout) as leader:
                        if (meeting := self._follow(leader)) is not None:
                            return meeting
                    pause = _FIRST_PAUSE
            time.sleep(min(pause, self._left()))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _follow(self, leader: socket.socket) -> Meeting | None:
        """Follows the leader's messages; None if the leader goes."""
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
                elif "peer" in message:  # again, if a process went during the introduction
                    peer, [end] = message["peer"], ends
                    if peer in sockets:
                        sockets[peer].close()
                    sockets[peer] = on_failure.enter_context(end)
                else:
                    on_failure.pop_all()
                    return Meeting(message["number"], sockets)

    def _publish(self, what: str, process: int, value: str) -> None:
        self._store.key_value_set(f"{self._folder}/{what}/{process}", value, allow_overwrite=True)

    def _look_up_secret(self) -> str | None:
        """The leader's secret in the store, if there is one."""
        found = self._store.key_value_dir_get(f"{self._folder}/")
        left = {key.removeprefix(f"{self._folder}/"): value for key, value in found}
        for process in self._neighbours:
            if left.get(f"host/{process}", self._host) != self._host:
                raise PlatformError(
                    f"Group: a line must be on one host, but the devices of processes {self._me} and {process} "
                    "are not (or are in containers with networks of their own)"
                )
        return left.get(f"secret/{self.leader}")

    def _left(self) -> float:
        left = self._timeout.left()
        if left == 0:
            raise not_opened(self._missing, self._timeout)
        return left
