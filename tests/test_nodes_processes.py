"""Groups across nodes, each of which is a process: kernels inside, XLA's collectives between; lost processes."""

import re
from pathlib import Path
from typing import Any

import helpers
import jax
import nodes_worker as worker
import numpy as np
import pytest
from test_processes import launch_script

from jax_ep.runtime import watchdog

ON_CPU = jax.default_backend() == "cpu"
GPUS = helpers.largest_size()
# Nodes, the processes of each, and the devices of each of these. NCCL wants a GPU for every process.
SHAPES = [(2, 1, 4), (4, 1, 2)] if ON_CPU else [(GPUS, 1, 1)] + [(2, GPUS // 2, 1)] * (GPUS >= 4)

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(SHAPES[0][0] < 2, reason="needs two processes"),
]


def launch(what: str, nodes: int, devices: int, *, processes: int = 1, **options: Any) -> str:
    """Runs the worker in `processes` for each of `nodes`, with `devices` each."""
    arguments = (what, f"--cpu-devices={devices}", f"--nodes={nodes}")
    return launch_script(Path(worker.__file__), *arguments, processes=nodes * processes, **options)


@pytest.mark.parametrize(("nodes", "processes", "devices"), SHAPES)
def test_as_one_group_of_all_ranks(nodes: int, processes: int, devices: int, pytestconfig: pytest.Config) -> None:
    everything = nodes == 2 or not ON_CPU or pytestconfig.getoption("nightly")
    launch("all" if everything else "most", nodes, devices, processes=processes)


@pytest.mark.skipif(not ON_CPU, reason="GPUs exchange no descriptions of calls")
def test_processes_that_differ() -> None:
    launch("mismatch", 2, 2)


@pytest.mark.skipif(not ON_CPU, reason="one process has too few GPUs to compare with")
def test_the_language_model_on_two_nodes() -> None:
    """The demo's losses are those of one process and one node."""
    losses = worker.losses_of_the_demo(None)
    assert losses[-1] < losses[0]
    printed = re.findall(r"^losses (.*)$", launch("demo", 2, 4), re.MULTILINE)
    assert len(printed) == 2
    for line in printed:
        np.testing.assert_allclose([float(x) for x in line.split()], losses, rtol=1e-4)


@pytest.mark.parametrize(("how", "lost"), [("kill", 1), ("stop", 1), ("stop the coordinator", 0)])
def test_a_lost_process_is_named(how: str, lost: int) -> None:
    output = launch(how, 2, 2 if ON_CPU else 1)
    assert "PeerLostError: " in output  # in the log
    assert f"process {lost} was named after" in output


@pytest.mark.skipif(not ON_CPU, reason="heartbeats of GPUs do not say where they are")
@pytest.mark.parametrize("how", worker.HANGS)
def test_a_process_that_lives_and_does_not_come(how: str, tmp_path: Path) -> None:
    exits = how == "hang, exit"
    environment = {"JAX_EP_DUMP": str(tmp_path)}
    output = launch(how, 2, 2, exit_code=watchdog.EXIT_CODE if exits else 0, environment=environment)
    assert "Error: Group(" in output  # in the log
    assert len([*tmp_path.glob("*.json")]) == exits


def test_a_process_that_closes_or_drops_its_group_is_not_lost() -> None:
    assert "PeerLostError" not in launch("close", 2, 2 if ON_CPU else 1)
