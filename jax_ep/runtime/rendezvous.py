"""Introduces the processes of a native group, all of one host: they meet, agree on a number, and connect
(docs/design/processes.md)."""

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from jax_ep.errors import PeerLostError, PeerTimeoutError, PlatformError
from jax_ep.runtime import bootstrap, topology
from jax_ep.runtime.heartbeat import CLOSED, HeartbeatThread
from jax_ep.runtime.membership import heartbeat_thread, meet, not_opened
from jax_ep.runtime.timeouts import Deadline

# Groups of several processes over the same devices have different numbers, on which their processes agree.
_numbers: defaultdict[str, set[int]] = defaultdict(set)  # of the groups open here, by what the groups are over

_PROBE_SECONDS = 0.5  # between two looks whether a process that does not connect still lives


def introduce(
    over: str, me: int, processes: Sequence[Sequence[int]], open_timeout: Deadline
) -> tuple[int, list[int], Callable[[], None]]:
    """Meets the other processes of the group `over`. All take the same free number for the group.

    Args:
      processes: of the ranks along each line.

    Returns:
      The number; a connected socket's descriptor for each process, -1 where no line is shared, or [] without any; and
      the function that frees the number.

    Raises:
      PlatformError: `jax.distributed.initialize` was not called.
      JaxEpError: as for `join`.
    """
    taken = _numbers[over]
    thread = heartbeat_thread(frozenset(topology.company(processes, me)))
    number, sockets = join(thread, over, me, processes, taken, open_timeout)
    descriptors = [sockets[i].detach() if i in sockets else -1 for i in range(max(me, *sockets) + 1)] if sockets else []
    return number, descriptors, partial(taken.discard, number)


def join(
    thread: HeartbeatThread,
    over: str,
    me: int,
    processes: Sequence[Sequence[int]],
    taken: set[int],
    open_timeout: Deadline,
) -> tuple[int, dict[int, socket.socket]]:
    """Returns once all processes that lines connect with `me`, directly or through others, join the group `over`.

    Args:
      taken: numbers that the group must not get. Gets the group's number.

    Returns:
      The number, the same in all processes; and sockets, blocking ones that keep messages apart, by process with which
      this one shares a line. The caller closes them.

    Raises:
      PeerTimeoutError: a process did not come in time. All processes may try again.
      PeerLostError: a process went away at the very end, or the store does not answer.
      PlatformError: the processes are not of one host.
    """
    others = topology.company(processes, me) - {me}
    neighbours = {process for line in processes if me in line for process in line} - {me}
    host = bootstrap.host_identity()
    with thread.opening(over, host, taken) as part, bootstrap.Listener(part, me, neighbours) as listener:
        met = meet(thread, over, part, others, open_timeout)
        if elsewhere := sorted(process for process, each in met.parts.items() if each.host != host):
            raise PlatformError(
                f"Group: a line must be on one host, but the devices of processes {me} and {elsewhere[0]} are not (or "
                "are in containers with networks of their own)"
            )
        numbers = taken.union(*(each.taken for each in met.parts.values()))
        number = min({*range(len(numbers) + 1)} - numbers)
        sockets = _connect(listener, me, neighbours, met.ids, open_timeout)
        taken.add(number)
        thread.update(part, state=CLOSED)  # from here on their sockets tell them of each other
    return number, sockets


def _connect(
    listener: bootstrap.Listener, me: int, neighbours: Collection[int], parts: Mapping[int, str], deadline: Deadline
) -> dict[int, socket.socket]:
    """Connects to lower processes, and waits for higher ones."""
    higher, probe_at = {process for process in neighbours if process > me}, time.monotonic() + _PROBE_SECONDS
    with ExitStack() as on_failure:
        sockets: dict[int, socket.socket] = {}
        for peer in sorted({*neighbours} - higher):
            try:
                connection = bootstrap.connect(parts[peer], me, peer, timeout=deadline.left())
            except PeerTimeoutError:
                raise not_opened([peer], deadline) from None
            sockets[peer] = on_failure.enter_context(connection)
        while missing := higher - listener.accepted.keys():
            if deadline.left() == 0:
                raise not_opened(missing, deadline)
            if time.monotonic() >= probe_at:
                probe_at += _PROBE_SECONDS
                if not bootstrap.is_listening(parts[min(missing)], min(missing)):
                    raise PeerLostError(f"Group: process {min(missing)} went away while the group was opened")
            listener.poll(min(_PROBE_SECONDS, deadline.left()))
        on_failure.pop_all()
    sockets |= listener.accepted
    listener.accepted = {}
    return sockets
