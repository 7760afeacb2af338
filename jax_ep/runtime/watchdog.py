"""A thread per group that notices a failure, logs it and dumps the flight recorder; it also dumps on request."""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable

from jax_ep.errors import GroupClosedError, JaxEpError
from jax_ep.runtime import flight_recorder
from jax_ep.runtime.native import NativeGroup, as_error, close_all

_LOGGER = logging.getLogger("jax_ep")
_PERIOD_SECONDS = 1.0
EXIT_CODE = 75  # of a process whose group has failed, with on_lost="exit": EX_TEMPFAIL, for "try again"
_watching: set[threading.Thread] = set()


class Watchdog:
    """Watches a group until it fails or is closed.

    Args:
      native: the group, as its library holds it.
      name: of the group, for the log.
      exits: whether a failure ends the process.
    """

    def __init__(self, native: NativeGroup, name: str, *, exits: bool):
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=_watch, args=(native, name, exits, self._ended), name="jax_ep watchdog", daemon=True
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


def handle_loss(dump: Callable[[str, JaxEpError], None], name: str, exits: bool, error: JaxEpError) -> None:
    """A group across nodes has failed: dumps the flight recorder of its ranks in this process, which then `exits`."""
    dump(name, error)
    if exits:
        _exit(name)


def _exit(name: str) -> None:
    _LOGGER.error("%s: the process ends with code %d, as on_lost='exit' asks", name, EXIT_CODE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE)


def _watch(native: NativeGroup, name: str, exits: bool, ended: threading.Event) -> None:
    try:
        found, request = None, flight_recorder.Request()
        while found is None and not ended.is_set():
            found = as_error(native.await_failure(_PERIOD_SECONDS))
            if found is None and request.is_new():
                flight_recorder.dump(native, name)
        if found is not None and not isinstance(found, GroupClosedError):
            kind, message = type(found).__name__, str(found)
            _LOGGER.error("%s: %s: %s", name, kind, message)
            flight_recorder.dump(native, name, kind, message)
            if exits:
                _exit(name)
    finally:
        _watching.discard(threading.current_thread())
