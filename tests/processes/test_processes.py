"""A group whose ranks live in several processes: the oracle's results, and bit for bit those of one process."""

import os
import re
from pathlib import Path
from typing import Any

import helpers
import jax
import mismatch_cases
import numpy as np
import processes_worker as worker
import pytest
from chaos.compare import assert_near
from chaos.faulty_ops import Op
from jax.sharding import Mesh

from jax_ep import Group

ON_CPU = jax.default_backend() == "cpu"
# On the CPU two processes of two ranks each, so that a rank has peers in its own process and in another.
GPUS = 1 if ON_CPU else helpers.largest_size()
PROCESSES, CPU_DEVICES = (2, 2) if ON_CPU else (max(GPUS, 2), 1)
SIZE = PROCESSES * CPU_DEVICES
MORE_RANKS = 4  # where there are fewer GPUs, they are shared

# On GPUs: XLA's pool as one region, not as regions that grow as conftest asks for; memory that nobody else can map.
PREALLOCATED: dict[str, Any] = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}
UNMAPPABLE: dict[str, Any] = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
# Between processes XLA's ragged_all_to_all goes by NCCL, which jax 0.11 and newer refuse unless told so.
ALLOW_NCCL = "--xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback=true" if jax.__version_info__ >= (0, 11) else ""
RAGGED_BY_NCCL: dict[str, Any] = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {ALLOW_NCCL}".strip()}

pytestmark = [pytest.mark.usefixtures("native"), pytest.mark.timeout(300)]
on_gpus = pytest.mark.skipif(GPUS < 2, reason="needs several GPUs")


def launch(folder: Path, *arguments: str, processes: int = PROCESSES, **variables: Any) -> str:
    """Runs the worker in all processes; what it prints."""
    options = (str(folder), f"--cpu-devices={CPU_DEVICES}", *arguments)
    return launch_script(worker.__file__, *options, processes=processes, **variables)


def launch_script(script: str, *arguments: str, processes: int, exit_code: int = 0, **variables: Any) -> str:
    """Runs a script of this folder in all processes; its output.

    Args:
      exit_code: of the launcher; that of the first process that fails.
    """
    command = ("-m", "jax_ep.launch", f"-n={processes}", f"--gpus={min(processes, GPUS)}", script)
    output = helpers.run_python(*command, *arguments, exit_code=exit_code, **variables)
    assert exit_code or f"process 0 of {processes} is done" in output, output
    return output


def assemble(folder: Path, way: str, like: dict[str, Any], size: int = SIZE) -> dict[str, Any]:
    """The arrays of all ranks from what the processes saved."""
    shards: dict[str, np.ndarray] = {}
    for path in folder.glob(f"{way}-*.npz"):
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


def in_one_process(*, staged: bool = False, mesh: Mesh | None = None) -> tuple[dict[str, Any], dict[str, Op]]:
    """The results, and the ops that gave them."""
    with Group(mesh or helpers.mesh_of(ep=SIZE), "ep", timeout=30) as group:
        if staged:
            helpers.native(group).test_hooks.stage_all()
        return helpers.fetch(worker.results(group)), worker.ops_of(group)


def test_as_one_process(tmp_path: Path) -> None:
    """Whether peers map memory or stage it, also within a process. Then calls that differ, and what
    test_concurrency.py has of one."""
    print(f"JAX_EP_TEST_SEED={helpers.SEED}")
    expected, ops = in_one_process()
    assert helpers.bits(in_one_process(staged=True)[0]) == helpers.bits(expected)
    checks = ["mapped", "staged", "overflow", "mismatches", "beside", *["resources"] * (jax.device_count() > 1)]
    shared = [] if ON_CPU or GPUS >= PROCESSES else ["--shared"]
    output = launch(tmp_path, *checks, *shared, **({} if ON_CPU else RAGGED_BY_NCCL))
    for way in ("mapped", "staged"):
        found = assemble(tmp_path, way, expected)
        assert_right(found, ops)
        assert helpers.bits(found) == helpers.bits(expected)
    assert "Exception in thread" not in output, output
    by_plan = [mismatch_cases.PLANS] if not ON_CPU and PROCESSES == 2 else []
    for name in [*mismatch_cases.CASES, *by_plan]:
        errors = re.findall(rf"^\[{name}\] (.*)$", output, re.MULTILINE)
        assert len(errors) == PROCESSES, output
        assert all("all ranks must run the same ops" in error for error in errors), errors


@on_gpus
@pytest.mark.parametrize(
    "environment",
    [PREALLOCATED, UNMAPPABLE, {"JAX_EP_DEBUG_POISON": "1"}],
    ids=["preallocated", "unmappable", "poisoned"],
)
def test_other_memory(environment: dict[str, Any], tmp_path: Path) -> None:
    expected, ops = in_one_process()
    launch(tmp_path, "mapped", "overflow", **environment)
    found = assemble(tmp_path, "mapped", expected)
    assert_right(found, ops)
    assert helpers.bits(found) == helpers.bits(expected)


@pytest.mark.skipif(ON_CPU or GPUS >= MORE_RANKS, reason="for few GPUs")
def test_more_ranks_than_gpus(tmp_path: Path) -> None:
    on_cpu, ops = in_one_process(mesh=Mesh(np.array(jax.devices("cpu")[:MORE_RANKS]), ("ep",)))
    launch(tmp_path, "mapped", "overflow", processes=MORE_RANKS)
    assert_right(assemble(tmp_path, "mapped", on_cpu, MORE_RANKS), ops)


def test_what_a_group_leaves_behind() -> None:
    """Nothing, however many are opened and closed; of several processes, too, in the test above."""
    worker.open_and_close(helpers.mesh_of(ep=4 if ON_CPU else helpers.largest_size()))
