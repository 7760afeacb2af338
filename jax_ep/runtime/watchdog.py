"""A thread per group that notices a failure, logs it and writes the flight record."""

import atexit
import json
import logging
import os
import threading
import time
from pathlib import Path

from jax_ep.errors import GroupClosedError
from jax_ep.runtime.native import NativeGroup, await_failure, close_all, history

_LOGGER = logging.getLogger("jax_ep")
_PERIOD_SECONDS = 1.0
_DUMP = "JAX_EP_DUMP"  # the folder for flight records
_watching: set[threading.Thread] = set()


class Watchdog:
    """Watches a group until it fails or is closed.

    Args:
      native: the group, as its library holds it.
      name: of the group, for the log.
    """

    def __init__(self, native: NativeGroup, name: str):
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=_watch, args=(native, name, self._ended), name="jax_ep watchdog", daemon=True
        )
        _watching.add(self._thread)
        self._thread.start()

    def end(self) -> None:
        """Ends the thread, when the group is closed. The thread may be writing a report."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10 * _PERIOD_SECONDS)


@atexit.register
def _end_all() -> None:
    """Ends all threads before the interpreter ends: a thread that returns from native code later kills the process."""
    close_all()
    for thread in list(_watching):
        thread.join(timeout=10 * _PERIOD_SECONDS)


def _watch(native: NativeGroup, name: str, ended: threading.Event) -> None:
    try:
        found = None
        while found is None and not ended.is_set():
            found = await_failure(native, _PERIOD_SECONDS)
        if found is not None and not isinstance(found, GroupClosedError):
            kind, message = type(found).__name__, str(found)
            _LOGGER.error("%s: %s: %s%s", name, kind, message, _dump(native, name, kind, message))
    finally:
        _watching.discard(threading.current_thread())


def _dump(native: NativeGroup, name: str, kind: str, message: str) -> str:
    """Writes the flight record into the folder JAX_EP_DUMP; returns a text for the log."""
    folder = os.environ.get(_DUMP)
    if not folder:
        return f"; set {_DUMP} to a folder for the last ops of every rank"
    record = {
        "group": name,
        "error": kind,
        "message": message,
        "time": time.time(),
        "process": os.getpid(),
        "ranks": [rank._asdict() | {"ops": [op._asdict() for op in rank.ops]} for rank in history(native)],
    }
    try:
        path = Path(folder) / f"jax_ep-{os.getpid()}-{time.time_ns()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1))
    except OSError as error:
        return f"; its flight record could not be written to {_DUMP}={folder!r}: {error}"
    return f"; flight record: {path}"
