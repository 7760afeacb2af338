"""A mesh over the CPU devices of two processes: "auto" means "xla", and the results are right."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

PROCESSES = 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a CPU mesh; this host's default devices are no CPUs")
def test_two_processes() -> None:
    worker = Path(__file__).with_name("multiprocess_worker.py")
    address = f"127.0.0.1:{free_port()}"
    paths = os.pathsep.join([str(worker.parents[1]), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), address, str(PROCESSES), str(index)],
            env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(PROCESSES)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert "checked 2 shards" in output
