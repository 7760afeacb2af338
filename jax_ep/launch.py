"""`python -m jax_ep.launch -n 4 script.py [arguments]`: one process per GPU of this host, joined by jax.distributed.

Process i of n sees device i alone as its own. With `--gpus` fewer, they share those in turn: kernels of processes on
one GPU take time slices, so this is for tests of more ranks than there are GPUs. With JAX_PLATFORMS=cpu every process
has CPU devices of its own.
"""

import argparse
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence

import jax

_ROLE = "JAX_EP_LAUNCH"  # address, number of processes and index, in the environment of a started process
_GRACE_SECONDS = 2.0  # jax takes SIGTERM for a notice, not for an end
_POLL_SECONDS = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep.launch", description="One process per GPU of this host.")
    parser.add_argument("-n", "--processes", type=int, required=True, help="how many, one per GPU")
    parser.add_argument("-g", "--gpus", type=int, help="how many GPUs the processes share; default: one each")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="arguments")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"argument -n: must be at least 1, got {options.processes}")
    if options.gpus is not None and not 1 <= options.gpus <= options.processes:
        parser.error(f"argument -g: must be from 1 to the number of processes, {options.processes}, got {options.gpus}")
    if role := os.environ.pop(_ROLE, None):
        _run(role, options)
        return 0
    given = list(sys.argv[1:] if arguments is None else arguments)
    return _start_all(options.processes, [sys.executable, "-m", "jax_ep.launch", *given])


def _run(role: str, options: argparse.Namespace) -> None:
    """In a started process: joins the others and becomes the script.

    A script that fails ends at once: on the way out jax.distributed would wait for the others.
    """
    address, count, index = role.split()
    device = int(index) % (options.gpus or int(count))
    jax.distributed.initialize(address, int(count), int(index), local_device_ids=[device])
    sys.argv = [options.script, *options.rest]
    try:
        if options.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
            runpy.run_path(options.script, run_name="__main__")
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        if exit.code:
            _leave(exit.code if isinstance(exit.code, int) else 1)
    except KeyboardInterrupt:
        _leave(128 + signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        _leave(1)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start_all(count: int, command: list[str]) -> int:
    """The exit code of the first process that fails, or 0. When one fails the others are ended."""
    with _reserved_port() as port:
        role = f"127.0.0.1:{port.getsockname()[1]} {count}"
        processes = [subprocess.Popen(command, env=os.environ | {_ROLE: f"{role} {index}"}) for index in range(count)]
        try:
            return _first_failure(processes)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            _end(processes)


def _first_failure(processes: Sequence["subprocess.Popen[bytes]"]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = [(index, code) for index, code in enumerate(codes) if code]
        if failed:
            index, code = failed[0]
            print(f"jax_ep.launch: process {index} failed with exit code {code}", file=sys.stderr)
            return code if code > 0 else 128 - code
        if None not in codes:
            return 0
        time.sleep(_POLL_SECONDS)


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _reserved_port() -> socket.socket:
    """A socket whose port no other launch is given while it is open, but on which jax's coordinator may listen.

    It listens at all addresses of this host, so the port must be free at all: a connection may use it at one.
    """
    dual = socket.has_dualstack_ipv6()
    reserved = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    if dual:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.bind(("", 0))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return reserved


if __name__ == "__main__":
    sys.exit(main())
