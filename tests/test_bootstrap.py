"""Processes that find each other over Unix sockets, and hand over descriptors."""

import contextlib
import multiprocessing as mp
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from jax_ep import PeerLostError, PeerTimeoutError, _bootstrap

PROCESSES, TIMEOUT = 4, 30.0
SPAWN = mp.get_context("spawn")  # a fork would copy JAX's threads

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


def exchange_memory(secret: str, process: int, answer: Connection) -> None:
    """In a process of its own: hands everybody a piece of memory, and writes its number into theirs."""
    peers = set(range(PROCESSES)) - {process}
    sockets = _bootstrap.connect(secret, process, peers, timeout=TIMEOUT)
    memory = os.memfd_create("test")
    os.ftruncate(memory, PROCESSES)
    for peer in peers:
        socket.send_fds(sockets[peer], [b"memory"], [memory])
    for peer in peers:
        _, (theirs,), *_ = socket.recv_fds(sockets[peer], 16, 1)
        os.pwrite(theirs, bytes([process + 1]), process)
        os.close(theirs)
        sockets[peer].send(b"written")
    for peer in peers:
        assert sockets[peer].recv(16) == b"written"
        sockets[peer].close()
    answer.send(os.pread(memory, PROCESSES, 0))


def vanish(secret: str, process: int, peer: int) -> None:
    """Listens as `process`, takes the call of `peer` and dies without an answer."""
    with _bootstrap._new_socket() as listener:
        listener.bind(_bootstrap._name(secret, process))
        listener.listen()
        listener.accept()[0].recv(64)


def traces() -> set[Path]:
    return {path for folder in ("/tmp", "/dev/shm") for path in Path(folder).iterdir() if "jax_ep" in path.name}


@contextlib.contextmanager
def connecting(secret: str, process: int, peers: set[int], timeout: float = TIMEOUT) -> Iterator[dict[str, Any]]:
    """Connects on a thread; at the end of the block "sockets" or "error" is there."""
    outcome: dict[str, Any] = {}

    def body() -> None:
        try:
            outcome["sockets"] = _bootstrap.connect(secret, process, peers, timeout=timeout)
        except Exception as error:
            outcome["error"] = error

    thread = threading.Thread(target=body)
    thread.start()
    yield outcome
    thread.join()
    for each in outcome.get("sockets", {}).values():
        each.close()


def call(secret: str, process: int, hello: bytes) -> bytes:
    """What a listening process answers to a hello: nothing, where it sends the caller away."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        with _bootstrap._new_socket() as caller, contextlib.suppress(ConnectionRefusedError):
            caller.settimeout(TIMEOUT)
            caller.connect(_bootstrap._name(secret, process))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                caller.send(hello)
                return caller.recv(64)
            return b""
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_memory_goes_round_and_nothing_is_left() -> None:
    secret, before = secrets.token_hex(16), traces()
    pipes = [SPAWN.Pipe(duplex=False) for _ in range(PROCESSES)]
    processes = [
        SPAWN.Process(target=exchange_memory, args=(secret, index, sender)) for index, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for index, (receiver, _) in enumerate(pipes):
        assert receiver.poll(TIMEOUT)
        assert receiver.recv() == bytes(0 if i == index else i + 1 for i in range(PROCESSES))
    for process in processes:
        process.join(TIMEOUT)
        assert process.exitcode == 0
    assert traces() == before


def test_a_wrong_secret_is_sent_away() -> None:
    secret = secrets.token_hex(16)
    with connecting(secret, 0, {1}) as first:
        assert call(secret, 0, _bootstrap._hello(secrets.token_hex(16), 1, 0)) == b""
        assert call(secret, 0, b"short") == b""
        assert call(secret, 0, _bootstrap._hello(secret, 2, 0)) == b""  # nobody waits for process 2
        with connecting(secret, 1, {0}) as second:
            pass
    assert set(first["sockets"]) == {1}
    assert set(second["sockets"]) == {0}


def test_another_user_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = secrets.token_hex(16)
    monkeypatch.setattr(_bootstrap, "peer_uid", lambda connection: os.getuid() + 1)
    with connecting(secret, 0, {1}, timeout=1) as outcome:
        assert call(secret, 0, _bootstrap._hello(secret, 1, 0)) == b""
        with pytest.raises(PeerLostError, match="process 0 belongs to another user"):
            _bootstrap.connect(secret, 1, {0}, timeout=TIMEOUT)
    assert isinstance(outcome["error"], PeerTimeoutError)


@pytest.mark.parametrize(("process", "peer"), [(0, 1), (1, 0)])
def test_a_peer_that_never_comes(process: int, peer: int) -> None:
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError, match=f"process {peer} did not connect"):
        _bootstrap.connect(secrets.token_hex(16), process, {peer}, timeout=0.3)
    assert time.monotonic() - start < 3


def test_a_peer_that_dies() -> None:
    secret = secrets.token_hex(16)
    dying = SPAWN.Process(target=vanish, args=(secret, 0, 1))
    dying.start()
    with pytest.raises(PeerLostError, match="process 0"):
        _bootstrap.connect(secret, 1, {0}, timeout=TIMEOUT)
    dying.join(TIMEOUT)
    assert dying.exitcode == 0


def test_the_users_of_a_socket_are_known() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert _bootstrap.peer_uid(ours) == os.getuid()
