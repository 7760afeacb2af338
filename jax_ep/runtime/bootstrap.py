"""Connects the processes of one host: one listens on a Unix socket, and accepts processes of its user that know the
secret.

It uses the operating system only: no GPU, no JAX. The sockets' names are abstract (begin with NUL), so no file is left
behind. Any process of the host may connect. A connection is pending until its handshake proves the secret. It is
rejected if the handshake is wrong, or after 2 seconds. A pending connection delays no other one.
"""

import contextlib
import errno
import hashlib
import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Collection
from pathlib import Path
from typing import Self

from jax_ep.errors import PeerLostError, PeerTimeoutError

_RETRY_SECONDS = 0.02
_HANDSHAKE_SECONDS = 2.0  # that a connection may be pending
_BACKLOG = 4096  # the kernel takes no more than net.core.somaxconn
_MOST_PENDING = 256  # connections; each takes a file descriptor
_HANDSHAKE = struct.Struct("=32sI")  # proof of the secret, process


def host_identity() -> str:
    """A text that is equal for processes that can reach each other's sockets: they are of one boot of one host, and in
    one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def peer_uid(connection: socket.socket) -> int:
    """The user who runs the process at the other end, as the kernel knows it."""
    credentials = struct.Struct("=3i")  # pid, uid, gid
    return credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[1]


class Listener:
    """Accepts connections at `process` from the processes `others`, which know the secret. Each listener has its own
    secret.

    `poll` does all the work. As a context manager it closes all connections at the end, less those that were taken out
    of `accepted`.
    """

    def __init__(self, secret: str, process: int, others: Collection[int]):
        self.accepted: dict[int, socket.socket] = {}  # by process; blocking ones that keep messages apart
        self._secret, self._process, self._others = secret, process, frozenset(others)
        self._pending: dict[socket.socket, float] = {}  # deadline of the handshake, in order of arrival
        self._selector = selectors.DefaultSelector()
        self._socket = _new_socket()
        self._socket.setblocking(False)
        try:
            self._socket.bind(_socket_name(secret, process))
            self._socket.listen(_BACKLOG)
        except OSError:
            self.__exit__()
            raise
        self._selector.register(self._socket, selectors.EVENT_READ)

    def poll(self, timeout: float) -> None:
        """Accepts and rejects. Returns after `timeout` seconds, or after an event."""
        until = min([time.monotonic() + timeout, *self._pending.values()])
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._socket:
                self._take_connections()
            elif connection in self._pending:  # not rejected a moment ago
                self._finish_handshake(connection)
        now = time.monotonic()
        for connection in [c for c, until in self._pending.items() if until <= now]:
            self._reject(connection)

    def _take_connections(self) -> None:
        for _ in range(_MOST_PENDING):
            if len(self._pending) >= _MOST_PENDING:
                self._reject(next(iter(self._pending)))
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:  # for example, no descriptors are left
                if self._pending:
                    self._reject(next(iter(self._pending)))
                time.sleep(_RETRY_SECONDS)
                return
            if peer_uid(connection) != os.geteuid():
                _close(connection)
                continue
            connection.setblocking(False)
            self._pending[connection] = time.monotonic() + _HANDSHAKE_SECONDS
            self._selector.register(connection, selectors.EVENT_READ)

    def _finish_handshake(self, connection: socket.socket) -> None:
        try:
            handshake = connection.recv(_HANDSHAKE.size + 1)
            _, sender = _HANDSHAKE.unpack(handshake)
            proven = hmac.compare_digest(handshake, _handshake(self._secret, sender, self._process))
            if not proven or sender not in self._others or sender in self.accepted:
                raise OSError("no proof of the secret, or of none of the others")
            connection.send(_handshake(self._secret, self._process, sender))
        except (OSError, struct.error):
            self._reject(connection)
            return
        del self._pending[connection]
        self._selector.unregister(connection)
        connection.setblocking(True)
        self.accepted[sender] = connection

    def _reject(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)
        _close(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in [*self._pending, *self.accepted.values()]:
            _close(connection)
        _close(self._socket)
        self._selector.close()


def connect(secret: str, process: int, peer: int, *, timeout: float) -> socket.socket:
    """Connects to the listener of `peer`: a blocking connection that keeps messages apart; the caller closes it.

    Args:
      secret: of the listener.
      process, peer: the numbers of this process, and of the one that listens.
      timeout: seconds to wait for the answer.

    Raises:
      PeerLostError: the peer does not listen, or rejected this process.
      PeerTimeoutError: it did not answer in time.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as on_failure:
        connection = on_failure.enter_context(_new_socket())
        try:
            while True:
                connection.settimeout(_left(deadline))
                try:
                    connection.connect(_socket_name(secret, peer))
                    break
                except BlockingIOError:  # the backlog is full
                    time.sleep(_RETRY_SECONDS)
            if peer_uid(connection) != os.geteuid():
                raise PeerLostError(f"Group: process {peer} belongs to another user")
            connection.settimeout(_left(deadline))
            connection.send(_handshake(secret, process, peer))
            answer = connection.recv(_HANDSHAKE.size)
        except TimeoutError:
            raise PeerTimeoutError(f"Group: process {peer} did not answer within {timeout:g} s") from None
        except OSError as error:
            raise PeerLostError(
                f"Group: process {peer} went away while process {process} connected: {error}"
            ) from error
        if not hmac.compare_digest(answer, _handshake(secret, peer, process)):
            raise PeerLostError(f"Group: process {peer} rejected the connection of process {process}")
        connection.settimeout(None)
        on_failure.pop_all()
        return connection


def is_listening(secret: str, peer: int) -> bool:
    """Whether the listener of `peer` is open: it closes when its process ends."""
    with _new_socket() as probe:
        probe.setblocking(False)
        return probe.connect_ex(_socket_name(secret, peer)) != errno.ECONNREFUSED


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _close(connection: socket.socket) -> None:
    """Closes a socket, also in forked processes that hold it open."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _socket_name(secret: str, process: int) -> str:
    """The name of the socket, a hash of the secret, as every user of the host can read it."""
    return "\0jax_ep-" + hashlib.sha256(f"name {secret} {process}".encode()).hexdigest()[:32]


def _handshake(secret: str, sender: int, receiver: int) -> bytes:
    return _HANDSHAKE.pack(hmac.digest(secret.encode(), f"{sender} to {receiver}".encode(), "sha256"), sender)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
