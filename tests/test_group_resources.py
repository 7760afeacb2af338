"""What a group leaves behind: nothing, however many are opened and closed, in one process and in several."""

import os
import subprocess
import sys
from pathlib import Path

import helpers
import jax
import pytest
import resources_worker as worker

ON_CPU = jax.default_backend() == "cpu"
pytestmark = pytest.mark.usefixtures("native")


def test_one_process() -> None:
    worker.open_and_close(helpers.largest_size() if not ON_CPU else worker.SIZE)


@pytest.mark.skipif(not ON_CPU and jax.device_count() < 2, reason="needs two devices")
def test_two_processes() -> None:
    tests = Path(worker.__file__).parent
    paths = os.pathsep.join([str(tests.parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-m", "jax_ep.launch", "-n=2", "--gpus=2", worker.__file__],
        env=os.environ | {"PYTHONPATH": paths} | ({"JAX_PLATFORMS": "cpu"} if ON_CPU else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert "process 1 is done" in result.stdout, result.stdout
