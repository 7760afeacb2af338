"""A thread per group that notices a failure, logs it and dumps the flight recorder; it also dumps on request."""

import atexit
import logging
import os
import sys
import threading

from jax_ep._kit import ffi
from jax_ep.errors import GroupClosedError, JaxEpError
from jax_ep.runtime import flight_recorder
from jax_ep.runtime.native import NativeGroup, as_error

_LOGGER = logging.getLogger("jax_ep")
_PERIOD_SECONDS = 1.0
EXIT_CODE = 75  # of a process whose group has failed, with on_lost="exit": EX_TEMPFAIL, for "try again"


class Watchdog(threading.Thread):
    """Watches a group until it fails or is closed.

    Args:
      native: the group, as its library holds it.
      group: its name, for the log.
      exits: whether a failure ends the process.
    """

    def __init__(self, native: NativeGroup, group: str, *, exits: bool):
        super().__init__(name="jax_ep watchdog", daemon=True)
        self._native, self._group, self._exits = native, group, exits
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        error, asked = None, flight_recorder.last_request()
        while error is None and not self._ended.is_set():
            error = as_error(self._native.await_failure(_PERIOD_SECONDS))
            before, asked = asked, flight_recorder.last_request()
            if error is None and asked not in (None, before):
                flight_recorder.dump(self._native, self._group)
        if error is not None and not isinstance(error, GroupClosedError):
            _LOGGER.error("%s: %s: %s", self._group, type(error).__name__, error)
            handle_failure(self._native, self._group, self._exits, error)

    def end(self) -> None:
        """Ends the thread, when the group is closed. The thread may be writing a report."""
        self._ended.set()
        if self is not threading.current_thread():
            self.join(timeout=10 * _PERIOD_SECONDS)


@atexit.register
def _end_all() -> None:
    """Ends all threads before the interpreter ends: a thread that returns from native code later kills the process.
    Also closes groups that only compiled programs hold."""
    for library in ffi.loaded_libraries():
        library.close_all()
    for thread in threading.enumerate():
        if isinstance(thread, Watchdog):
            thread.join(timeout=10 * _PERIOD_SECONDS)


def handle_failure(native: NativeGroup | None, group: str, exits: bool, error: JaxEpError) -> None:
    """Dumps the flight recorder of a group's ranks in this process, which then `exits`."""
    if native is not None:
        flight_recorder.dump(native, group, error)
    if exits:
        _LOGGER.error("%s: the process ends with code %d, as on_lost='exit' asks", group, EXIT_CODE)
        end_process(EXIT_CODE)


def end_process(code: int) -> None:
    """At once: jax.distributed would wait for other processes at exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
