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
import stat
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args, get_origin, get_type_hints

from jax_ep.errors import JaxEpError
from jax_ep.runtime.native import NativeGroup, RankHistory, history

_LOGGER = logging.getLogger("jax_ep")
_FOLDER = "JAX_EP_DUMP"  # of the dumps
_REQUEST = "request"  # a file in it
NAMES = "jax_ep-*.json"  # their files
_MOST_BYTES = 1 << 28  # of a dump that is read; 64 ranks write some MiB
_END_OF_TIME = 2.0**37  # seconds; what `time.localtime` takes everywhere


class Call(NamedTuple):
    """A call on the stack of the main thread."""

    file: str
    line: int
    function: str


class Dump(NamedTuple):
    """What a process knew of a group. A file has it as JSON, with an object for each record."""

    group: str
    id: int  # the same in all processes of the group
    error: str  # its type; empty if the dump was requested
    message: str
    time: float  # seconds since 1970
    host: str
    process: int
    stack: list[Call]  # the innermost last
    ranks: list[RankHistory]

    @classmethod
    def read(cls, path: Path) -> Self:
        """The dump in a file. Further fields are ignored.

        Raises:
          OSError, ValueError, RecursionError: the path is no file with a dump.
        """
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a FIFO would wait
            raise ValueError("not a file")
        if status.st_size > _MOST_BYTES:
            raise ValueError(f"{status.st_size} bytes")
        dump = _parsed(cls, json.loads(path.read_bytes()), "dump")
        if not 0 <= dump.time < _END_OF_TIME:
            raise ValueError(f"time {dump.time}")
        return dump


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
    try:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        calls = traceback.walk_stack(frame) if frame else ()  # extract_stack would open source files
        stack = [Call(each.f_code.co_filename, line or 0, each.f_code.co_name) for each, line in calls]
        what = (type(error).__name__, str(error)) if error else ("", "")
        where = (time.time(), socket.gethostname(), os.getpid(), stack[::-1])
        content = Dump(group, native.id, *what, *where, history(native))
        path = _write_whole(Path(folder), json.dumps(_plain(content), indent=1))
    except Exception as failed:
        _LOGGER.error("%s: the flight recorder could not be dumped to %s=%r: %r", group, _FOLDER, folder, failed)
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


def _plain(value: Any) -> object:
    """The value for JSON: records as objects."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    return value


def _parsed(kind: Any, value: object, name: str) -> Any:
    """The reverse of `_plain`: a value of `kind`, which is a NamedTuple, a list, str, int or float.

    Raises:
      ValueError: it names the field that is missing or of another kind.
    """
    if isinstance(value, list) and get_origin(kind) is list:
        [of] = get_args(kind)
        return [_parsed(of, each, name) for each in value]
    if isinstance(value, dict) and hasattr(kind, "_fields"):
        fields = get_type_hints(kind).items()
        return kind(*(_parsed(each, value.get(field), f"{name}.{field}") for field, each in fields))
    if kind is str and isinstance(value, str):
        return value
    if kind in (int, float) and isinstance(value, int | kind) and type(value) is not bool and abs(value) < 2**64:
        return kind(value)
    raise ValueError(f"{name} is no {getattr(kind, '__name__', kind)}")
