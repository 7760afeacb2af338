"""How the processes of one host find each other: one receives calls on a Unix socket, of one user, who share a secret.

The operating system only: no GPU, no JAX. The sockets' names are abstract (begin with NUL): no file is left behind.
Anybody may connect to them, so strangers are shown out, and hold up nobody.
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
_HELLO_SECONDS = 2.0  # that a caller has to say who it is
_BACKLOG = 4096  # the kernel takes no more than net.core.somaxconn
_MOST_UNDECIDED = 256  # callers who have not said who they are; each takes a file descriptor
_LONGEST = 64 * 1024  # bytes of a message
_HELLO = struct.Struct("=32sI")  # proof of the secret, process; then whatever else it says


def host_identity() -> str:
    """Equal for processes that can reach each other's sockets: of one boot of one host, in one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def peer_uid(connection: socket.socket) -> int:
    """The user who runs the process at the other end, as the kernel knows it."""
    credentials = struct.Struct("=3i")  # pid, uid, gid
    return credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[1]


class Caller(NamedTuple):
    connection: socket.socket  # keeps the boundaries of messages, does not block
    said: bytes


class Reception:
    """Where `process` is called by `others`, who know the secret; a new one for every reception.

    `poll` does all the work. A context manager: at its end all callers are hung up on.
    """

    def __init__(self, secret: str, process: int, others: Collection[int]):
        self.callers: dict[int, Caller] = {}  # by process: who has called, and not gone since
        self._secret, self._process, self._others = secret, process, frozenset(others)
        self._undecided: dict[socket.socket, float] = {}  # until when they may say who they are, in order of arrival
        self._selector = selectors.DefaultSelector()
        self._listener = _new_socket()
        self._listener.setblocking(False)
        try:
            self._listener.bind(_name(secret, process))
            self._listener.listen(_BACKLOG)
        except OSError:
            self.__exit__()
            raise
        self._selector.register(self._listener, selectors.EVENT_READ)

    def poll(self, timeout: float) -> None:
        """Takes in who calls and drops who goes: returns after `timeout` seconds, or when something has happened."""
        until = min([time.monotonic() + timeout, *self._undecided.values()])
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._listener:
                self._accept()
            elif key.data is not None:
                self.drop(key.data)  # callers say no more than hello: this one has gone
            elif connection in self._undecided:  # not shown out a moment ago
                self._hear(connection)
        now = time.monotonic()
        for connection in [c for c, until in self._undecided.items() if until <= now]:
            self._show_out(connection)

    def drop(self, process: int) -> None:
        """Hangs up on a caller, who may call again."""
        connection = self.callers.pop(process).connection
        self._selector.unregister(connection)
        _hang_up(connection)

    def _accept(self) -> None:
        for _ in range(_MOST_UNDECIDED):
            if len(self._undecided) >= _MOST_UNDECIDED:
                self._show_out(next(iter(self._undecided)))
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptors are left, for one
                if self._undecided:
                    self._show_out(next(iter(self._undecided)))
                time.sleep(_RETRY_SECONDS)
                return
            if peer_uid(connection) != os.getuid():
                _hang_up(connection)
                continue
            connection.setblocking(False)
            self._undecided[connection] = time.monotonic() + _HELLO_SECONDS
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        """A caller has said something: with the secret it is let in, and answered."""
        try:
            hello = connection.recv(_LONGEST)
            sender, said = self._read(hello)
            connection.send(_hello(self._secret, self._process, sender))
        except (OSError, ValueError):
            self._show_out(connection)
            return
        if sender in self.callers:  # it has called before, and nobody has heard it go
            self.drop(sender)
        del self._undecided[connection]
        self._selector.modify(connection, selectors.EVENT_READ, sender)
        self.callers[sender] = Caller(connection, said)

    def _read(self, hello: bytes) -> tuple[int, bytes]:
        """The process, and what else it says; ValueError if it does not prove to be one of the others."""
        said = hello[_HELLO.size :]
        sender = _HELLO.unpack_from(hello)[1] if len(hello) >= _HELLO.size else -1
        if sender not in self._others or not _equal(hello, _hello(self._secret, sender, self._process, said)):
            raise ValueError("a stranger")
        return sender, said

    def _show_out(self, connection: socket.socket) -> None:
        del self._undecided[connection]
        self._selector.unregister(connection)
        _hang_up(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in [*self._undecided, *(caller.connection for caller in self.callers.values())]:
            _hang_up(connection)
        _hang_up(self._listener)
        self._selector.close()


def call(secret: str, process: int, peer: int, said: bytes = b"", *, timeout: float) -> socket.socket:
    """Calls the reception of `peer`; the caller closes the connection, a blocking one that keeps messages apart.

    Args:
      secret: that of the reception.
      process: the number of this process.
      peer: the number of the process that receives.
      said: what else the peer should know.
      timeout: seconds to wait for the answer.

    Raises:
      PeerLostError: the peer receives nobody, any more, or not us.
      PeerTimeoutError: it did not answer in time.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as on_failure:
        connection = on_failure.enter_context(_new_socket())
        try:
            _connect(connection, _name(secret, peer), deadline)
            if peer_uid(connection) != os.getuid():
                raise PeerLostError(f"process {peer} belongs to another user")
            connection.settimeout(_left(deadline))
            connection.send(_hello(secret, process, peer, said))
            answer = connection.recv(_LONGEST)
        except TimeoutError:
            raise PeerTimeoutError(f"process {peer} did not answer within {timeout:g} s") from None
        except OSError as error:
            raise PeerLostError(f"process {peer} went away while process {process} connected: {error}") from error
        if not _equal(answer, _hello(secret, peer, process)):
            raise PeerLostError(f"process {peer} refused the connection of process {process}")
        connection.settimeout(None)
        on_failure.pop_all()
        return connection


def send(connection: socket.socket, message: bytes, descriptors: Collection[int] = (), *, timeout: float = 5.0) -> None:
    """Sends a message with file descriptors, once there is room for both: the kernel bounds what is under way.

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
    """The next message, and the sockets that came with it; an empty message when the other end has gone.

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


def _connect(connection: socket.socket, name: str, deadline: float) -> None:
    """Retries where too many others are just calling, which a Unix socket says by EAGAIN."""
    while True:
        connection.settimeout(_left(deadline))
        try:
            connection.connect(name)
            return
        except BlockingIOError:
            time.sleep(_RETRY_SECONDS)


def _hang_up(connection: socket.socket) -> None:
    """Also for a process forked meanwhile, which holds the socket open."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _name(secret: str, process: int) -> str:
    """Every user of the host can read the name of a socket: it must not tell the secret."""
    return "\0jax_ep-" + hashlib.sha256(f"name {secret} {process}".encode()).hexdigest()[:32]


def _hello(secret: str, sender: int, receiver: int, said: bytes = b"") -> bytes:
    proof = hmac.digest(secret.encode(), f"{sender} to {receiver} ".encode() + said, "sha256")
    return _HELLO.pack(proof, sender) + said


def _equal(one: bytes, other: bytes) -> bool:
    return hmac.compare_digest(one, other)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
