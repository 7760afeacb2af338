"""How the processes of one host find each other: connected Unix sockets, of one user, who share a secret.

The operating system only: no GPU, no JAX. The sockets' names are abstract (begin with NUL): no file is left behind.
"""

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Collection
from pathlib import Path

from jax_ep.errors import PeerLostError, PeerTimeoutError

_RETRY_SECONDS = 0.02
_HELLO = struct.Struct("=32sI")  # proof of the secret, process


def host_identity() -> str:
    """Equal for processes that can reach each other's sockets: of one boot of one host, in one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def connect(secret: str, process: int, peers: Collection[int], *, timeout: float) -> dict[int, socket.socket]:
    """Connects this process with each of `peers`, which call this with the same secret.

    Args:
      secret: known to these processes alone; a new one for every call.
      process: the number of this process.
      peers: the numbers of the others.
      timeout: seconds.

    Returns:
      A connected, blocking socket by peer, which keeps the boundaries of messages. The caller closes them.

    Raises:
      PeerTimeoutError: a peer did not come in time.
      PeerLostError: a peer went away while connecting.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as on_failure, _new_socket() as listener:
        listener.bind(_name(secret, process))
        listener.listen(len(peers) + 8)
        sockets: dict[int, socket.socket] = {}
        for peer in sorted(p for p in peers if p < process):
            sockets[peer] = on_failure.enter_context(_call(secret, process, peer, deadline))
        waiting = {p for p in peers if p > process}
        while waiting:
            arrived = _accept(listener, secret, process, waiting, deadline)
            if arrived is not None:
                peer, sockets[peer] = arrived
                on_failure.enter_context(sockets[peer])
                waiting.remove(peer)
        for each in sockets.values():
            each.setblocking(True)
        on_failure.pop_all()
        return sockets


def peer_uid(connection: socket.socket) -> int:
    """The user who runs the process at the other end, as the kernel knows it."""
    credentials = struct.Struct("=3i")  # pid, uid, gid
    return credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[1]


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _name(secret: str, process: int) -> str:
    """Every user of the host can read the name of a socket: it must not tell the secret."""
    return "\0jax_ep-" + hashlib.sha256(f"name {secret} {process}".encode()).hexdigest()[:32]


def _hello(secret: str, sender: int, receiver: int) -> bytes:
    proof = hmac.digest(secret.encode(), f"{sender} to {receiver}".encode(), "sha256")
    return _HELLO.pack(proof, sender)


def _call(secret: str, process: int, peer: int, deadline: float) -> socket.socket:
    """Connects to a peer, who may not be listening yet."""
    while True:
        with contextlib.ExitStack() as on_failure:
            connection = on_failure.enter_context(_new_socket())
            connection.settimeout(_left(deadline, {peer}))
            try:
                connection.connect(_name(secret, peer))
                if peer_uid(connection) != os.getuid():
                    raise PeerLostError(f"process {peer} belongs to another user")
                connection.send(_hello(secret, process, peer))
                answer = connection.recv(_HELLO.size)
            except ConnectionRefusedError:
                time.sleep(_RETRY_SECONDS)
                continue
            except TimeoutError:
                raise _too_late({peer}) from None
            except OSError as error:
                raise PeerLostError(f"process {peer} went away while process {process} connected: {error}") from error
            if not hmac.compare_digest(answer, _hello(secret, peer, process)):
                raise PeerLostError(f"process {peer} refused the connection of process {process}")
            on_failure.pop_all()
            return connection


def _accept(
    listener: socket.socket, secret: str, process: int, waiting: set[int], deadline: float
) -> tuple[int, socket.socket] | None:
    """The next peer that calls; None for a stranger, who is sent away and does not hold up the others for long."""
    try:
        listener.settimeout(_left(deadline, waiting))
        connection, _ = listener.accept()
    except TimeoutError:
        raise _too_late(waiting) from None
    try:
        connection.settimeout(min(1.0, _left(deadline, waiting)))
        hello = connection.recv(_HELLO.size) if peer_uid(connection) == os.getuid() else b""
        peer = _HELLO.unpack(hello)[1] if len(hello) == _HELLO.size else -1
        if peer in waiting and hmac.compare_digest(hello, _hello(secret, peer, process)):
            connection.send(_hello(secret, process, peer))
            return peer, connection
    except OSError:
        pass
    connection.close()
    return None


def _left(deadline: float, waiting: set[int]) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _too_late(waiting)
    return left


def _too_late(waiting: set[int]) -> PeerTimeoutError:
    processes = ", ".join(map(str, sorted(waiting)))
    return PeerTimeoutError(f"process {processes} did not connect in time to create the group")
