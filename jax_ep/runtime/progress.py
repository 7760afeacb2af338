"""Where the processes of a group across nodes are: how many ops each has begun, which have ended, the last one's name.

XLA's collectives wait for ever for a process that lives and does not join them. Therefore each rank marks the
beginning and the end of each op (`agreement`), and heartbeats carry the marks. If an op does not end within the group's
timeout, its process compares the marks. It blames a process that has begun fewer ops, has closed the group, or has
begun another op in place of this one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jax_ep.errors import JaxEpError, MismatchError, PeerLostError, PeerTimeoutError
from jax_ep.runtime.heartbeat import CLOSED, OPEN, GroupPart, Readings


class Marks(NamedTuple):
    begun: int = 0  # ops
    ended: int = 0  # the last of them that has ended
    last: str = ""  # what was begun last


class Progress:
    """The marks of this process: how many ops its furthest rank has begun, and the last op that all its ranks ended.

    Args:
      read: `NativeGroup.marks`.
    """

    def __init__(self, read: Callable[[], Sequence[tuple[int, int, str]]] = tuple):
        self._read, self._last, self._refused = read, Marks(), 0

    def refuse(self) -> None:
        """The op that was begun last will not be run."""
        self._refused = max((begun for begun, _, _ in self._read()), default=0)

    @property
    def marks(self) -> Marks:
        """Those of a closed group are its last ones."""
        if ranks := self._read():
            begun, _, last = max(ranks)
            self._last = Marks(begun, max(min(ended for _, ended, _ in ranks), self._refused), last)
        return self._last


class HangDetector:
    """How long this process has been in one op, and which process is not in it.

    Args:
      others: by process, what an error calls it.
      limit: seconds.
      parts: by process, the id of its part.
      lives: whether a process has sent a heartbeat lately. One that has not may be lost: FailureDetector finds it.
    """

    def __init__(self, others: Mapping[int, str], limit: float, parts: Mapping[int, str], lives: Callable[[int], bool]):
        self._others, self._limit, self._parts, self._lives = others, limit, parts, lives
        self._marks, self._seconds = Marks(), 0.0

    def look(self, marks: Marks, readings: Readings, passed: float) -> JaxEpError | None:
        """The error if this process waits in vain, after `passed` seconds."""
        waits = marks == self._marks and marks.ended < marks.begun
        self._marks, self._seconds = marks, self._seconds + passed if waits else 0.0
        if self._seconds <= self._limit:
            return None
        here, waited = f"op {marks.begun}, {marks.last}", f"this process waited {self._seconds:.1f} s"
        behind: list[tuple[int, str]] = []
        differs: list[str] = []
        for process, who in self._others.items():
            part = readings.by_process[process].parts.get(self._parts[process])
            if part is None or (part.state == CLOSED and part.begun < marks.begun):
                return PeerLostError(f"{here}: {waited} for {who} in vain: it has closed the group")
            if part.state == OPEN and self._lives(process):
                if part.begun < marks.begun:
                    behind.append((part.begun, f"{here}: {waited} for {who} in vain: it {_position(part)}"))
                elif part.begun == marks.begun and part.last != marks.last:
                    differs.append(f"{here}: {waited}, but {who} {_position(part)}: all ranks must run the same ops")
        if behind:
            return PeerTimeoutError(min(behind)[1])
        return MismatchError(differs[0]) if differs else None


def _position(part: GroupPart) -> str:
    if part.begun == 0:
        return "has begun no op"
    return f"{'is in' if part.ended < part.begun else 'has ended'} its op {part.begun}, {part.last}"
