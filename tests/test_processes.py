"""A group whose ranks live in several processes: the oracle's results, and bit for bit those of one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import helpers
import jax
import numpy as np
import processes_worker as worker
import pytest
from chaos.compare import assert_near
from chaos.faulty_ops import Op
from conftest import OpenGroup
from jax.sharding import Mesh

ON_CPU = jax.default_backend() == "cpu"
# On the CPU two processes of two ranks each, so that a rank has peers in its own process and in another.
GPUS = 1 if ON_CPU else helpers.largest_size()
PROCESSES, CPU_DEVICES = (2, 2) if ON_CPU else (max(GPUS, 2), 1)
SIZE = PROCESSES * CPU_DEVICES
MORE_RANKS = 4  # where there are fewer GPUs, they are shared

# On GPUs: XLA's pool as one region, not as regions that grow as conftest asks for; memory that nobody else can map.
PREALLOCATED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}
UNMAPPABLE = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}

pytestmark = [pytest.mark.usefixtures("native"), pytest.mark.timeout(300)]
on_gpus = pytest.mark.skipif(GPUS < 2, reason="needs several GPUs")


def launch(
    folder: Path, *arguments: str, processes: int = PROCESSES, environment: dict[str, str] | None = None
) -> None:
    """Runs the worker in all processes."""
    options = (str(folder), f"--cpu-devices={CPU_DEVICES}", *arguments)
    launch_script(Path(worker.__file__), *options, processes=processes, environment=environment)


def launch_script(
    script: Path,
    *arguments: str,
    processes: int = PROCESSES,
    environment: dict[str, str] | None = None,
    exit_code: int = 0,
) -> str:
    """Runs a script of this folder in all processes; returns its output, which is shown where it fails.

    Args:
      exit_code: of the launcher; that of the first process that fails.
    """
    tests = script.parent
    paths = os.pathsep.join([str(tests.parent), os.environ.get("PYTHONPATH", "")])
    given = os.environ | {"PYTHONPATH": paths} | ({"JAX_PLATFORMS": "cpu"} if ON_CPU else {}) | (environment or {})
    command = [sys.executable, "-m", "jax_ep.launch", f"-n={processes}", f"--gpus={min(processes, GPUS)}"]
    result = subprocess.run(
        [*command, str(script), *arguments],
        env=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == exit_code, result.stdout
    assert exit_code or f"process 0 of {processes} is done" in result.stdout, result.stdout
    return result.stdout


def assemble(folder: Path, like: dict[str, Any], size: int = SIZE) -> dict[str, Any]:
    """The arrays of all ranks from what the processes saved."""
    shards: dict[str, np.ndarray] = {}
    for path in folder.glob("*.npz"):
        with np.load(path) as saved:
            shards |= dict(saved)
    leaves, structure = jax.tree.flatten(like)
    found = [
        np.concatenate([shards[f"{index} {rank}"] for rank in range(size)]).view(leaf.dtype).reshape(leaf.shape)
        for index, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, found)


def assert_right(found: dict[str, Any], ops: dict[str, Op]) -> None:
    for name, op in ops.items():
        for array, value in zip(jax.tree.leaves(found[name]), op.wanted, strict=False):
            assert_near(array, value.exact, value.magnitude, value.roundings, name)


def in_one_process(
    open_group: OpenGroup, *, staged: bool = False, mesh: Mesh | None = None
) -> tuple[dict[str, Any], dict[str, Op]]:
    """The results, and the ops that gave them."""
    with open_group(SIZE, mesh=mesh) as group:
        assert group._native is not None
        if staged:
            group._native.stage_all()
        return helpers.fetch(worker.results(group)), worker.ops_of(group)


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        pytest.param((), {}, id="growing"),
        pytest.param(("--stage",), {}, id="staging"),
        pytest.param((), PREALLOCATED, id="preallocated", marks=on_gpus),
        pytest.param((), UNMAPPABLE, id="unmappable", marks=on_gpus),
        pytest.param((), {"JAX_EP_DEBUG_POISON": "1"}, id="poisoned", marks=on_gpus),
    ],
)
def test_as_one_process(
    arguments: tuple[str, ...], environment: dict[str, str], open_group: OpenGroup, tmp_path: Path
) -> None:
    print(f"JAX_EP_TEST_SEED={helpers.SEED}")
    expected, ops = in_one_process(open_group)
    launch(tmp_path, *arguments, environment=environment)
    found = assemble(tmp_path, expected)
    assert_right(found, ops)
    assert helpers.bits(found) == helpers.bits(expected)


def test_staging_within_a_process(open_group: OpenGroup) -> None:
    staged, ops = in_one_process(open_group, staged=True)
    assert_right(staged, ops)
    assert helpers.bits(staged) == helpers.bits(in_one_process(open_group)[0])


@pytest.mark.skipif(ON_CPU or GPUS >= MORE_RANKS, reason="for few GPUs")
def test_more_ranks_than_gpus(open_group: OpenGroup, tmp_path: Path) -> None:
    on_cpu, ops = in_one_process(open_group, mesh=Mesh(np.array(jax.devices("cpu")[:MORE_RANKS]), ("ep",)))
    launch(tmp_path, processes=MORE_RANKS)
    assert_right(assemble(tmp_path, on_cpu, MORE_RANKS), ops)


def test_a_dead_process(tmp_path: Path) -> None:
    launch(tmp_path, "--lose")
