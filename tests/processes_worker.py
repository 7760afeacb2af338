"""Run by `jax_ep.launch` in every process of `test_processes.py`; its ops in one process by that test itself."""

import argparse
import gc
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import helpers
import jax
import mismatch_cases
import mixed_cases
import numpy as np
from chaos.faulty_ops import OPS, Op, round_trip
from jax.sharding import Mesh

from jax_ep import CapacityError, Group

EXPERTS, HIDDEN = 16, 256
TIMEOUT = 40.0
WARM_UP, OPENINGS = 8, 50  # of groups
MOST_MB = 24  # the allocator's own; a signal pad has 5 MB
MOST_PROGRAMS = 25


def ops_of(group: Group) -> dict[str, Op]:
    """Those of the chaos scripts, and a dispatch that drops."""
    options = {"capacity": 96, "alignment": 8, "on_overflow": "drop"}
    every = OPS | {"dropped": partial(round_trip, tokens=64, dtype=np.float16, **options)}
    return {name: draw(np.random.default_rng([helpers.SEED, len(name)]), group) for name, draw in every.items()}


def results(group: Group) -> dict[str, Any]:
    """Every op on all ranks, by name, the arrays with a leading axis of ranks."""
    found = {}
    for name, op in ops_of(group).items():
        found[name] = jax.block_until_ready(op.run(*(helpers.spread(group.mesh, x) for x in op.operands)))
    group.check()
    return found


def save_results(mesh: Mesh, folder: Path, *, stage: bool) -> None:
    """This process' part of every array, named by array and rank."""
    with Group(mesh, "ep", timeout=TIMEOUT) as group:
        if stage:  # everything, and not only what peers cannot map
            helpers.native(group).test_hooks.stage_all()
        shards: dict[str, Any] = {
            f"{index} {shard.index[0].start or 0}": np.ascontiguousarray(shard.data).view(np.uint8)
            for index, array in enumerate(jax.tree.leaves(results(group)))
            for shard in array.addressable_shards
        }
        np.savez(folder / f"{'staged' if stage else 'mapped'}-{jax.process_index()}.npz", **shards)


def run_into_an_overflow(mesh: Mesh) -> None:
    """What one process sees of an overflow, after which the group goes on."""
    with Group(mesh, "ep", timeout=TIMEOUT) as group:  # in the memory of the one before on GPUs
        case = helpers.draw_case(np.random.default_rng(helpers.SEED), group.size, 37, 3, EXPERTS, HIDDEN)
        operands = [helpers.spread(mesh, x) for x in case]
        overflowing = helpers.dispatch_combine(group, num_experts=EXPERTS, capacity=8, implementation="kernels")
        with helpers.expect_failure(group, CapacityError, "capacity is 8"):
            jax.block_until_ready(overflowing(*operands))
        program = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="kernels")
        jax.block_until_ready(program(*operands))
        group.check()


def run_beside_collectives(mesh: Mesh, shared: bool) -> None:
    on_cpu, size = jax.default_backend() == "cpu", jax.device_count()
    operands = mixed_cases.draw(np.random.default_rng(helpers.SEED), size, 8 * size)
    options: dict[str, Any] = {"collectives": not shared, "in_turn": on_cpu}
    options |= {"turns": 4 if on_cpu else 50 if shared else 1000, "look": 1 if on_cpu else 25}
    with Group(mesh, "ep", timeout=60) as one, Group(mesh, "ep", timeout=60) as other:
        mixed_cases.run(one, other, operands, **options)


def gpu_megabytes() -> int:
    """In use on all GPUs, by all processes."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = subprocess.run(query, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
    return sum(map(int, used.split()))


def resources(*, on_gpus: bool) -> dict[str, int]:
    """Open files, mappings, threads of ours (XLA starts some of its own late), and MB of memory of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared mappings": Path("/proc/self/maps").read_text().count("memfd:jax_ep"),
        "threads": helpers.own_threads(),
        "MB": int(status["VmRSS"].split()[0]) // 1024,
        "MB on GPUs": gpu_megabytes() if on_gpus and jax.default_backend() == "gpu" else 0,
    }


def open_and_close(mesh: Mesh, openings: int = 0) -> None:
    """So many groups, or `OPENINGS`, and looks at what they leave. Those over several processes are kept when they are
    closed, as what was compiled for them may keep them.

    `python tests/processes_worker.py FOLDER resources --openings 1000` looks at the GPUs' memory, too, which no other
    process may use meanwhile.
    """
    kept: list[Group] = []
    before: dict[str, int] = {}
    warm_up, count = (OPENINGS, openings) if openings else (WARM_UP, OPENINGS)
    for i in range(warm_up + count):
        if i == warm_up:
            gc.collect()
            before = resources(on_gpus=openings > 0)
        with Group(mesh, "ep", timeout=60.0) as group:
            if i % max(4, count // MOST_PROGRAMS) == 0:
                case = helpers.draw_case(np.random.default_rng(1), group.size, 4, 2, EXPERTS, 16)
                program = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="kernels")
                jax.block_until_ready(program(*(helpers.spread(mesh, x) for x in case)))
        if jax.process_count() > 1:
            kept.append(group)
    gc.collect()
    after = resources(on_gpus=openings > 0)
    print(before, after)
    for name, most in before.items():
        assert after[name] <= most + (MOST_MB if "MB" in name else 0), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("checks", nargs="+", help="in this order")
    parser.add_argument("--cpu-devices", type=int, default=1)
    # NCCL refuses two ranks on one GPU, and processes take turns there.
    parser.add_argument("--shared", action="store_true", help="processes share a GPU: fewer executions, ours alone")
    parser.add_argument("--openings", type=int, default=0, help="resources: so many groups, and the GPUs' memory")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    jax.config.update("jax_default_matmul_precision", "highest")
    helpers.let_kernels_cross_cpu_processes()
    mesh = helpers.mesh_of(ep=jax.device_count())
    checks = {
        "mapped": lambda: save_results(mesh, options.folder, stage=False),
        "staged": lambda: save_results(mesh, options.folder, stage=True),
        "overflow": lambda: run_into_an_overflow(mesh),
        "mismatches": lambda: mismatch_cases.differ_in_all(mesh),
        "beside": lambda: run_beside_collectives(mesh, options.shared),
        "resources": lambda: open_and_close(mesh, options.openings),
    }
    for check in options.checks:
        print(f"\n{check}", flush=True)
        checks[check]()
    print(f"process {jax.process_index()} of {jax.process_count()} is done", flush=True)


if __name__ == "__main__":
    main()
