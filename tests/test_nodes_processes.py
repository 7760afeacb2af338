"""Groups across nodes, each of which is a process: kernels inside, XLA's collectives between; lost processes."""

from pathlib import Path

import helpers
import jax
import nodes_worker as worker
import pytest
from test_processes import launch_script

ON_CPU = jax.default_backend() == "cpu"
SHAPES = [(2, 4), (4, 2)] if ON_CPU else [(helpers.largest_size(), 1)]  # processes, and the devices of each

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(SHAPES[0][0] < 2, reason="needs two processes"),
]


def launch(what: str, processes: int, devices: int) -> str:
    return launch_script(Path(worker.__file__), what, f"--cpu-devices={devices}", processes=processes)


@pytest.mark.parametrize(("processes", "devices"), SHAPES)
def test_as_one_group_of_all_ranks(processes: int, devices: int) -> None:
    launch("all", processes, devices)


@pytest.mark.parametrize(("how", "lost"), [("kill", 1), ("stop", 1), ("stop the coordinator", 0)])
def test_a_lost_process_is_named(how: str, lost: int) -> None:
    output = launch(how, 2, 2 if ON_CPU else 1)
    assert "PeerLostError: " in output  # in the log
    assert f"process {lost} was named after" in output


def test_a_process_that_closes_its_group_is_not_lost() -> None:
    assert "PeerLostError" not in launch("close", 2, 2 if ON_CPU else 1)
