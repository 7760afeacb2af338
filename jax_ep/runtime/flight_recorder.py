"""Dumps of the flight recorder: the last ops of a group's ranks, and where this process is, as JSON in JAX_EP_DUMP.

A failure writes a dump. If somebody touches the file `request` in that folder, every process that sees the file dumps
each open group within a second, even while its main thread waits in native code. (A signal would come too late, as
Python runs signal handlers in the main thread.) `jax_ep.runtime.report` merges dumps.
"""

import contextlib
import json
import logging
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from jax_ep.errors import JaxEpError
from jax_ep.runtime.native import NativeGroup, history

_LOGGER = logging.getLogger("jax_ep")
_FOLDER = "JAX_EP_DUMP"  # of the dumps
_REQUEST = "request"  # a file in it
NAMES = "jax_ep-*.json"  # their files


def last_request() -> int | None:
    """When the file `request` was touched last; None if there is none."""
    with contextlib.suppress(OSError):
        if folder := os.environ.get(_FOLDER):
            return os.stat(Path(folder) / _REQUEST).st_mtime_ns
    return None


def dump(native: NativeGroup, group: str, error: JaxEpError | None = None) -> None:
    """Writes a dump, of a failed group with its error, and logs where; or why not."""
    level = logging.ERROR if error else logging.WARNING
    folder = os.environ.get(_FOLDER)
    if not folder:
        _LOGGER.log(level, "%s: set %s to a folder for the last ops of every rank", group, _FOLDER)
        return
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = traceback.extract_stack(frame) if frame else []
    content = {
        "group": group,
        "id": native.id,  # the same in all processes of the group
        "error": type(error).__name__ if error else "",  # none on request
        "message": str(error or ""),
        "time": time.time(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "stack": [(call.filename, call.lineno or 0, call.name) for call in calls],  # of the main thread, innermost last
    }
    try:
        content["ranks"] = [rank._asdict() | {"ops": [op._asdict() for op in rank.ops]} for rank in history(native)]
        path = _write_whole(Path(folder), json.dumps(content, indent=1))
    except (OSError, RuntimeError) as failed:
        _LOGGER.error("%s: the flight recorder could not be dumped to %s=%r: %s", group, _FOLDER, folder, failed)
    else:
        _LOGGER.log(level, "%s: flight recorder dumped to %s", group, path)


def _write_whole(folder: Path, text: str) -> Path:
    """Writes a file that other users cannot read, and that nobody sees before it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAMES.replace("*", f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}")
    descriptor, temporary = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
