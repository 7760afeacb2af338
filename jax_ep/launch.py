"""`python -m jax_ep.launch -n 4 script.py [arguments]`: one process per GPU of this host, joined by jax.distributed.

Process i of n has device i as its own. With fewer `--gpus`, processes take the GPUs in turn, and kernels of processes
on one GPU take time slices: this is for tests with more ranks than GPUs. With JAX_PLATFORMS=cpu every process
has CPU devices of its own: one, or as many as JAX_NUM_CPU_DEVICES or XLA_FLAGS asks for.

No process outlives the launcher: SIGINT, SIGTERM and SIGHUP end all processes and what these started, and so does the
death of the launcher. The processes are a process group of their own. A shell ends the group when the launcher no
longer holds the shell's input. A process that leaves the group, by setsid or setpgid, is not ended.

The script finds `jax.distributed` initialized. Its own call of `jax.distributed.initialize` does nothing.
"""

import argparse
import contextlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Self

import jax

from jax_ep.runtime import jax_private, watchdog

_ROLE = "JAX_EP_LAUNCH"  # in the environment of a started process
_GRACE_SECONDS = 2.0  # jax takes SIGTERM for a notice, not for an end
_POLL_SECONDS = 0.05
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_PROCESSES = 256  # several for each GPU of a host; more is a typing error
_KEEPER = "trap '' HUP INT TERM; read _; kill -KILL 0"  # for sh: kills its process group when its input ends
# For sh: the terminal stops no process of the command. To write works even after `stty tostop`; to read is an error.
_BACKGROUND = "trap '' TTIN TTOU; exec \"$@\""


class ProcessSpec(NamedTuple):
    """What a started process is told."""

    address: str  # of the coordinator, which is in process 0
    processes: int
    process: int  # the number of this process
    launcher: int  # its process id
    pipe: int  # process 0 holds the read end, which ends when the others, who hold the write end, have exited

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError unless this process' parent wrote it."""
        with contextlib.suppress(ValueError, TypeError):
            address, *numbers = text.split()
            role = cls(address, *map(int, numbers))
            if role.launcher == os.getppid():
                return role
        raise ValueError(f"{_ROLE} must be set by a launcher for its own processes, got {text!r}: unset it")

    def __str__(self) -> str:
        return " ".join(map(str, self))


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the processes and returns the exit code. Unless the main thread calls it, it leaves signals alone."""
    parser = argparse.ArgumentParser(prog="python -m jax_ep.launch", description="One process per GPU of this host.")
    parser.add_argument("-n", "--processes", type=int, required=True, help="how many, one per GPU")
    parser.add_argument("-g", "--gpus", type=int, help="how many GPUs the processes share; default: one each")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="arguments")
    options = parser.parse_args(arguments)
    if not 1 <= options.processes <= _MOST_PROCESSES:
        parser.error(f"argument -n: must be from 1 to {_MOST_PROCESSES}, got {options.processes}")
    if options.gpus is not None and not 1 <= options.gpus <= options.processes:
        parser.error(f"argument -g: must be from 1 to the number of processes, {options.processes}, got {options.gpus}")
    if role := os.environ.pop(_ROLE, None):
        try:
            parsed = ProcessSpec.parse(role)
        except ValueError as error:
            parser.error(str(error))
        _run(parsed, options)
        return 0
    given = list(sys.argv[1:] if arguments is None else arguments)
    return _start_all(options.processes, [sys.executable, "-m", "jax_ep.launch", *given])


def _run(role: ProcessSpec, options: argparse.Namespace) -> None:
    """In a started process: joins the others and becomes the script.

    The process of a script that fails ends at once, because jax.distributed would wait for the others at exit.
    """
    os.set_inheritable(role.pipe, False)
    jax.distributed.initialize(
        role.address,
        role.processes,
        role.process,
        local_device_ids=[role.process % (options.gpus or role.processes)],
        coordinator_bind_address=role.address,  # by default it would listen at all addresses of the host
    )
    if role.process == 0:
        jax_private.replace_coordination_service(lambda service: _LastToLeave(service, role.pipe))
    jax.distributed.initialize = lambda *_, **__: None
    sys.argv = [options.script, *options.rest]
    try:
        if options.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
            runpy.run_path(options.script, run_name="__main__")
    except SystemExit as exit:
        if isinstance(exit.code, int) and exit.code:
            watchdog.end_process(exit.code)
        if not isinstance(exit.code, int | None):
            watchdog.end_process(1, partial(print, exit.code, file=sys.stderr))
    except KeyboardInterrupt:
        watchdog.end_process(128 + signal.SIGINT)
    except BaseException as error:
        watchdog.end_process(1, partial(traceback.print_exception, error))


_kept: list[object] = []  # until the process ends


class _LastToLeave:
    """The coordinator's service, kept until process 0 ends, after all other processes.

    XLA's GPU clients, also in process 0, watch the service until their process ends, and log errors if it stops.
    """

    def __init__(self, service: object, pipe: int):
        self._service, self._pipe = service, pipe

    def shutdown(self) -> None:
        """jax calls this at exit in process 0, when all processes have announced their end, and drops this object."""
        select.select([self._pipe], [], [], _GRACE_SECONDS)
        _kept.append(self._service)


def _start_all(count: int, command: list[str]) -> int:
    """The exit code of the first process that fails, or 0. When one fails, or on a signal, all are ended.

    The launcher prints afterwards, because a full pipe or its terminal may stop it there.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with _reserved_port() as port, _signals() as received, contextlib.ExitStack() as on_end:
        keeper = subprocess.Popen(["sh", "-c", _KEEPER], stdin=subprocess.PIPE, process_group=0)
        on_end.callback(_end, keeper, processes)
        address = f"127.0.0.1:{port.getsockname()[1]}"
        ended, others = os.pipe()
        try:
            for index in range(count):
                pipe = others if index else ended
                role = ProcessSpec(address, count, index, os.getpid(), pipe)
                processes.append(
                    subprocess.Popen(
                        ["sh", "-c", _BACKGROUND, "sh", *command],
                        env=os.environ | {_ROLE: str(role)},
                        pass_fds=[pipe],
                        process_group=keeper.pid,
                    )
                )
        finally:
            os.close(ended)
            os.close(others)
        code, message = _await_end(processes, received)
    if message:
        print(f"jax_ep.launch: {message}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """A list of the ending signals that have arrived. A signal that is ignored, as under nohup, remains ignored.

    Python lets the main thread alone set handlers. None stands for a handler that is not Python's.
    """
    received: list[int] = []
    may_set = threading.current_thread() is threading.main_thread()
    heeded = [each for each in _ENDING if may_set and signal.getsignal(each) not in (signal.SIG_IGN, None)]
    before = [signal.signal(each, lambda number, _: received.append(number)) for each in heeded]
    try:
        yield received
    finally:
        for each, handler in zip(heeded, before, strict=True):
            signal.signal(each, handler)


def _await_end(processes: Sequence["subprocess.Popen[bytes]"], received: Sequence[int]) -> tuple[int, str]:
    """The exit code of the launcher, and what it says."""
    while True:
        codes = [process.poll() for process in processes]
        if received:
            return 128 + received[0], ""
        failed = [(index, code) for index, code in enumerate(codes) if code]
        if failed:
            index, code = failed[0]
            return code if code > 0 else 128 - code, f"process {index} failed with exit code {code}"
        if None not in codes:
            return 0, ""
        time.sleep(_POLL_SECONDS)


def _end(keeper: "subprocess.Popen[bytes]", processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ends the keeper's process group: `processes`, and what they started."""
    os.killpg(keeper.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
    os.killpg(keeper.pid, signal.SIGKILL)
    for process in (keeper, *processes):
        process.communicate()  # closes its pipe, too


def _reserved_port() -> socket.socket:
    """A socket that reserves its port: no other launch gets the port, but jax's coordinator may listen on it."""
    reserved = socket.socket()
    reserved.bind(("127.0.0.1", 0))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # after bind, so that the port is nobody else's
    return reserved


if __name__ == "__main__":
    sys.exit(main())
