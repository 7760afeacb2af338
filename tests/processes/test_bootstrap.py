"""Processes that call each other over Unix sockets, and reject who has not the secret."""

import contextlib
import errno
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import wait_until

from jax_ep import PeerLostError, PeerTimeoutError
from jax_ep.runtime import bootstrap

TIMEOUT = 30.0

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


@contextlib.contextmanager
def receiving(secret: str, others: set[int]) -> Iterator[bootstrap.Listener]:
    """Process 0 receives the others, on a thread, while the block runs."""
    over = threading.Event()

    def body() -> None:
        while not over.is_set():
            listener.poll(0.05)

    with bootstrap.Listener(secret, 0, others) as listener:
        thread = threading.Thread(target=body)
        thread.start()
        try:
            yield listener
        finally:
            over.set()
            thread.join()


def intruder(secret: str) -> socket.socket:
    """Connected to process 0."""
    caller = bootstrap._new_socket()
    caller.settimeout(TIMEOUT)
    caller.connect(bootstrap._socket_name(secret, 0))
    return caller


def answer(secret: str, handshake: bytes = b"") -> bytes:
    """What process 0 says to an intruder who says this, or nothing; b"" where it rejects them."""
    with intruder(secret) as caller, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        if handshake:
            caller.send(handshake)
        return caller.recv(64)
    return b""


def traces() -> set[Path]:
    return {path for folder in ("/tmp", "/dev/shm") for path in Path(folder).iterdir() if "jax_ep" in path.name}


def test_who_knows_the_secret_is_connected_and_nothing_is_left() -> None:
    secret, before = secrets.token_hex(16), traces()
    assert not bootstrap.is_listening(secret, 0)
    with receiving(secret, {3, 5}) as listener, bootstrap.connect(secret, 3, 0, timeout=TIMEOUT) as caller:
        assert bootstrap.is_listening(secret, 0)
        wait_until(lambda: listener.accepted.keys() == {3})
        assert answer(secret, bootstrap._handshake(secret, 3, 0)) == b""
        caller.send(b"hello")
        assert listener.accepted[3].recv(64) == b"hello"
    assert not bootstrap.is_listening(secret, 0)
    assert traces() == before


def test_without_the_secret_one_is_rejected() -> None:
    secret = secrets.token_hex(16)
    handshake = bootstrap._handshake(secret, 1, 0)
    with receiving(secret, {1}) as listener:
        for false in (
            bootstrap._handshake(secrets.token_hex(16), 1, 0),
            bootstrap._handshake(secret, 2, 0),  # nobody waits for process 2
            b"x" + handshake[1:],
            handshake + b"x",
            b"short",
        ):
            assert answer(secret, false) == b""
        assert not listener.accepted
        assert answer(secret, handshake) == bootstrap._handshake(secret, 0, 1)


def test_who_says_nothing_is_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_HANDSHAKE_SECONDS", 0.3)
    secret, start = secrets.token_hex(16), time.monotonic()
    with receiving(secret, {1}):
        assert answer(secret) == b""
        assert time.monotonic() - start < 3


@pytest.mark.parametrize("crowd", [100, bootstrap._MOST_PENDING + 50])
def test_a_crowd_that_says_nothing_holds_up_nobody(crowd: int) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 3 * crowd:
        pytest.skip(f"needs {3 * crowd} file descriptors, may open {soft}")
    secret = secrets.token_hex(16)
    with receiving(secret, {1, 2}) as listener, contextlib.ExitStack() as intruders:
        for _ in range(crowd):
            intruders.enter_context(intruder(secret))
        start = time.monotonic()
        for process in (1, 2):
            intruders.enter_context(bootstrap.connect(secret, process, 0, timeout=TIMEOUT))
        assert time.monotonic() - start < bootstrap._HANDSHAKE_SECONDS / 2
        wait_until(lambda: listener.accepted.keys() == {1, 2})


def test_where_nobody_is_free_callers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """More call than the kernel lets wait while process 0 is busy; a Unix socket refuses further ones by EAGAIN."""
    monkeypatch.setattr(bootstrap, "_BACKLOG", 1)
    secret = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bootstrap.Listener(secret, 0, {1}))
        crowd = [stack.enter_context(bootstrap._new_socket()) for _ in range(8)]
        for each in crowd:
            each.setblocking(False)
        assert errno.EAGAIN in [each.connect_ex(bootstrap._socket_name(secret, 0)) for each in crowd]
        busy = threading.Timer(0.3, lambda: [listener.poll(0.05) for _ in range(20)])
        busy.start()
        with bootstrap.connect(secret, 1, 0, timeout=TIMEOUT):
            busy.join()
            assert listener.accepted.keys() == {1}
        with pytest.raises(PeerTimeoutError, match="process 0 did not answer"):
            bootstrap.connect(secret, 1, 0, timeout=0.2)


def test_another_user_is_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = secrets.token_hex(16)
    monkeypatch.setattr(bootstrap, "peer_uid", lambda connection: os.getuid() + 1)
    with receiving(secret, {1}) as listener:
        start = time.monotonic()
        assert answer(secret) == b""
        assert time.monotonic() - start < bootstrap._HANDSHAKE_SECONDS / 2  # it is not awaited
        with pytest.raises(PeerLostError, match="process 0 belongs to another user"):
            bootstrap.connect(secret, 1, 0, timeout=TIMEOUT)
        assert not listener.accepted


def test_a_listener_that_ends() -> None:
    secret = secrets.token_hex(16)
    with receiving(secret, {1}):
        caller = bootstrap.connect(secret, 1, 0, timeout=TIMEOUT)
    with caller:
        assert caller.recv(64) == b""
    with pytest.raises(PeerLostError, match="process 0"):
        bootstrap.connect(secret, 1, 0, timeout=TIMEOUT)
