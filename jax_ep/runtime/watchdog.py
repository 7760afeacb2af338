"""A thread per group that notices a failure, logs it and dumps the flight recorder; it also dumps on request."""

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from jax_ep._kit import ffi
from jax_ep.errors import GroupClosedError, JaxEpError
from jax_ep.runtime import flight_recorder
from jax_ep.runtime.native import NativeGroup, as_error

_LOGGER = logging.getLogger("jax_ep")
_PERIOD_SECONDS = 1.0
_STEP_SECONDS = 2.0  # for each log entry, dump and flush
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
                _attempt(partial(flight_recorder.dump, self._native, self._group))
        if error is not None and not isinstance(error, GroupClosedError):
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
    """Logs the failure and dumps the flight recorder of a group's ranks in this process, which then `exits`.

    It raises nothing, and ends whatever a log handler, a stream or the file system does.
    """
    end = f"; the process ends with code {EXIT_CODE}, as on_lost='exit' asks" if exits else ""
    steps = [partial(_LOGGER.error, "%s: %s: %s%s", group, type(error).__name__, error, end)]
    if native is not None:
        steps.append(partial(flight_recorder.dump, native, group, error))
    if exits:
        end_process(EXIT_CODE, *steps)
    _attempt(*steps)


def end_process(code: int, *steps: Callable[[], object]) -> NoReturn:
    """Attempts the steps, flushes the streams, and ends the process: jax.distributed would wait for others at exit."""
    with contextlib.suppress(KeyboardInterrupt):
        _attempt(*steps, lambda: sys.stdout.flush(), lambda: sys.stderr.flush())  # the streams may be None
    os._exit(code & 0xFF)


def _attempt(*steps: Callable[[], object]) -> None:
    """Runs each step in a thread of its own, and waits `_STEP_SECONDS` for it at most.

    A step may raise. It may also wait for ever, for a full pipe, a lock or a file system.
    """
    for step in steps:
        thread = threading.Thread(target=_suppressed, args=(step,), name="jax_ep failure", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            thread.start()
            thread.join(_STEP_SECONDS)


def _suppressed(step: Callable[[], object]) -> None:
    with contextlib.suppress(BaseException):
        step()
