"""Groups across nodes, each of which is a process: kernels inside, XLA's collectives between; lost processes."""

import json
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
ON_CPUS = [(2, 1, 4), pytest.param(4, 1, 2, marks=pytest.mark.nightly)]
SHAPES: list[Any] = ON_CPUS if ON_CPU else [(GPUS, 1, 1)] + [(2, GPUS // 2, 1)] * (GPUS >= 4)

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not ON_CPU and GPUS < 2, reason="needs two processes"),
]


def launch(nodes: int, devices: int, *what: str, processes: int = 1, **options: Any) -> str:
    """Runs the worker in `processes` for each of `nodes`, with `devices` each."""
    arguments = (*what, f"--cpu-devices={devices}", f"--nodes={nodes}")
    return launch_script(worker.__file__, *arguments, processes=nodes * processes, **options)


@pytest.mark.parametrize(("nodes", "processes", "devices"), SHAPES)
def test_as_one_group_of_all_ranks(nodes: int, processes: int, devices: int) -> None:
    """On a CPU of two nodes also calls that differ."""
    more = ["mismatch"] * (ON_CPU and nodes == 2) + ["close"] * (nodes == 2)
    output = launch(nodes, devices, "all", *more, processes=processes)
    assert "PeerLostError" not in output  # of groups that were closed or dropped


@pytest.mark.nightly
@pytest.mark.skipif(not ON_CPU, reason="losses are those of one process of the same devices")
def test_the_losses_of_the_demo() -> None:
    """They are those of one process and node."""
    output = launch(2, 4, "demo")
    losses = worker.losses_of_the_demo(None)
    assert losses[-1] < losses[0]
    printed = re.findall(r"^losses (.*)$", output, re.MULTILINE)
    assert len(printed) == 2
    for line in printed:
        np.testing.assert_allclose([float(x) for x in line.split()], losses, rtol=1e-4)


@pytest.mark.parametrize(
    ("how", "lost", "options"),
    [
        ("kill", 1, ()),
        ("kill", 1, ("--without-library",)),
        pytest.param("stop", 1, (), marks=pytest.mark.nightly),
        ("stop the coordinator", 0, ()),
    ],
)
def test_a_lost_process_is_named(how: str, lost: int, options: tuple[str, ...]) -> None:
    output = launch(2, 2 if ON_CPU else 1, how, *options)
    assert "PeerLostError: " in output  # in the log
    assert f"process {lost} was named after" in output


@pytest.mark.parametrize(
    ("how", "on_cpus", "on_gpus"),
    [
        (
            "hang, wait",
            ["PeerLostError", "PeerTimeoutError"],
            "op 5, dispatch .* for process 0 .* ended its op 4, combine ",
        ),
        pytest.param("hang, close", ["PeerLostError"], "for process 0 .* closed the group", marks=pytest.mark.nightly),
        ("hang, exit", ["PeerTimeoutError"], None),
        ("hang, other", None, "op .*, (combine|matmul_all_reduce) .* op .*, (combine|matmul_all_reduce) "),
    ],
)
def test_a_process_that_lives_and_does_not_come(
    how: str, on_cpus: list[str] | None, on_gpus: str | None, tmp_path: Path
) -> None:
    """A GPU process ends, as nothing else frees it; between CPU processes other ops are told before they exchange."""
    if (on_cpus if ON_CPU else on_gpus) is None:
        pytest.skip("of other devices")
    code = 0 if ON_CPU and how != "hang, exit" else watchdog.EXIT_CODE
    output = launch(2, 2 if ON_CPU else 1, how, exit_code=code, JAX_EP_DUMP=str(tmp_path))
    assert re.search("Error: (op|process) ", output)  # in the log
    dumps = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    if ON_CPU:
        assert sorted(dump["error"] for dump in dumps) == on_cpus
    else:
        # The process that waited says for what. The other may have written earlier that this one left.
        named = [dump["time"] for dump in dumps if re.search(str(on_gpus), dump["message"])]
        assert named, [dump["message"] for dump in dumps]
        [start] = re.findall(r"^waits from (.*)$", output, re.MULTILINE)
        assert min(named) - float(start) < worker.LOST_TIMEOUT + worker.ALLOWED + worker.late()
