"""Opens and closes many groups, and looks at what they leave."""

import gc
import os
import subprocess
from pathlib import Path

import helpers
import jax
import numpy as np
from jax.sharding import Mesh

from jax_ep import Group

EXPERTS = 8
WARM_UP, OPENINGS = 8, 50
MOST_MB = 24  # the allocator's own; a signal pad has 5 MB
MOST_PROGRAMS = 25


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


def run(group: Group) -> None:
    case = helpers.draw_case(np.random.default_rng(1), group.size, 4, 2, EXPERTS, 16)
    operands = [helpers.spread(group.mesh, x) for x in case]
    jax.block_until_ready(helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="kernels")(*operands))


def open_and_close(mesh: Mesh, openings: int = 0) -> None:
    """So many groups, or `OPENINGS`. Those over several processes are kept when they are closed, as what was compiled
    for them may keep them.

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
                run(group)
        if jax.process_count() > 1:
            kept.append(group)
    gc.collect()
    after = resources(on_gpus=openings > 0)
    print(before, after)
    for name, most in before.items():
        assert after[name] <= most + (MOST_MB if "MB" in name else 0), name
