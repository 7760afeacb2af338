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
from typing import NamedTuple, Self

from jax_ep.errors import PeerLostError, PeerTimeoutError

_RETRY_SECONDS = 0.02
_HANDSHAKE_SECONDS = 2.0  # that a connection may be pending
_BACKLOG = 4096  # the kernel takes no more than net.core.somaxconn
_MOST_PENDING = 256  # connections; each takes a file descriptor
_LONGEST = 64 * 1024  # bytes of a message
_HANDSHAKE = struct.Struct("=32sI")  # proof of the secret, process; then the payload


def host_identity() -> str:
    """A text that is equal for processes that can reach each other's sockets: they are of one boot of one host, and in
    one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def peer_uid(connection: socket.socket) -> int:
    """The user who runs the process at the other end, as the kernel knows it."""
    credentials = struct.Struct("=3i")  # pid, uid, gid
    return credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[1]


class Accepted(NamedTuple):
    connection: socket.socket  # keeps the boundaries of messages, does not block
    payload: bytes


class Listener:
    """Accepts connections at `process` from the processes `others`, which know the secret. Each listener has its own
    secret.

    `poll` does all the work. As a context manager it closes all connections at the end.
    """

    def __init__(self, secret: str, process: int, others: Collection[int]):
        self.accepted: dict[int, Accepted] = {}  # by process: connections that are open
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
        """Accepts, rejects, and drops closed connections. Returns after `timeout` seconds, or after an event."""
        until = min([time.monotonic() + timeout, *self._pending.values()])
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._socket:
                self._take_connections()
            elif key.data is not None:
                self.drop(key.data)  # a peer sends nothing after its handshake: it has closed
            elif connection in self._pending:  # not rejected a moment ago
                self._finish_handshake(connection)
        now = time.monotonic()
        for connection in [c for c, until in self._pending.items() if until <= now]:
            self._reject(connection)

    def drop(self, process: int) -> None:
        """Closes the connection of a process, which may connect again."""
        connection = self.accepted.pop(process).connection
        self._selector.unregister(connection)
        _close(connection)

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
            if peer_uid(connection) != os.getuid():
                _close(connection)
                continue
            connection.setblocking(False)
            self._pending[connection] = time.monotonic() + _HANDSHAKE_SECONDS
            self._selector.register(connection, selectors.EVENT_READ)

    def _finish_handshake(self, connection: socket.socket) -> None:
        try:
            handshake = connection.recv(_LONGEST)
            payload, [_, sender] = handshake[_HANDSHAKE.size :], _HANDSHAKE.unpack_from(handshake)
            proven = hmac.compare_digest(handshake, _handshake(self._secret, sender, self._process, payload))
            if not proven or sender not in self._others:
                raise OSError("no proof of the secret, or of none of the others")
            connection.send(_handshake(self._secret, self._process, sender))
        except (OSError, struct.error):
            self._reject(connection)
            return
        if sender in self.accepted:  # its older connection has not been seen to close
            self.drop(sender)
        del self._pending[connection]
        self._selector.modify(connection, selectors.EVENT_READ, sender)
        self.accepted[sender] = Accepted(connection, payload)

    def _reject(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)
        _close(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in [*self._pending, *(each.connection for each in self.accepted.values())]:
            _close(connection)
        _close(self._socket)
        self._selector.close()


def connect(secret: str, process: int, peer: int, payload: bytes = b"", *, timeout: float) -> socket.socket:
    """Connects to the listener of `peer`: a blocking connection that keeps messages apart; the caller closes it.

    Args:
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
            if peer_uid(connection) != os.getuid():
                raise PeerLostError(f"process {peer} belongs to another user")
            connection.settimeout(_left(deadline))
            connection.send(_handshake(secret, process, peer, payload))
            answer = connection.recv(_LONGEST)
        except TimeoutError:
            raise PeerTimeoutError(f"process {peer} did not answer within {timeout:g} s") from None
        except OSError as error:
            raise PeerLostError(f"process {peer} went away while process {process} connected: {error}") from error
        if not hmac.compare_digest(answer, _handshake(secret, peer, process)):
            raise PeerLostError(f"process {peer} rejected the connection of process {process}")
        connection.settimeout(None)
        on_failure.pop_all()
        return connection


def send(connection: socket.socket, message: bytes, descriptors: Collection[int] = (), *, timeout: float = 5.0) -> None:
    """Sends a message with file descriptors, once the kernel has room for both.

    Raises:
      OSError: the other end has gone, or takes nothing for `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.send_fds(connection, [message], list(descriptors), socket.MSG_DONTWAIT)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS) or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


def receive(connection: socket.socket, *, timeout: float) -> tuple[bytes, list[socket.socket]]:
    """The next message and its sockets; an empty message if the other end has gone.

    Raises:
      TimeoutError: none came in time.
      OSError: the connection broke.
    """
    connection.settimeout(timeout)
    message, descriptors, _, _ = socket.recv_fds(connection, _LONGEST, 1)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return message, [socket.socket(fileno=descriptor) for descriptor in descriptors]


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection, blocking ones that keep messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


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


def _handshake(secret: str, sender: int, receiver: int, payload: bytes = b"") -> bytes:
    proof = hmac.digest(secret.encode(), f"{sender} to {receiver} ".encode() + payload, "sha256")
    return _HANDSHAKE.pack(proof, sender) + payload


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
