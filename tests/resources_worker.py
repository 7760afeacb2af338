"""Opens and closes many groups, and looks at what they leave. Run by `test_group_resources.py`, in one process and by
`jax_ep.launch` in two; by hand, `python tests/resources_worker.py --openings 1000` looks at the GPUs' memory, too."""

import argparse
import gc
import os
from pathlib import Path

import helpers
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_ep import Group, group as group_module

SIZE, EXPERTS = 4, 8
WARM_UP, OPENINGS = 8, 50
MOST_MB = 24  # the allocator's own; a heap has 5 MB
MOST_PROGRAMS = 25


def resources() -> dict[str, int]:
    """Open files, mappings, threads of ours (XLA starts some of its own late), and MB of memory of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared mappings": Path("/proc/self/maps").read_text().count("memfd:jax_ep"),
        "threads": helpers.own_threads(),
        "MB": int(status["VmRSS"].split()[0]) // 1024,
    }


def run(group: Group) -> None:
    case = helpers.draw_case(np.random.default_rng(1), group.size, 4, 2, EXPERTS, 16)
    sharding = NamedSharding(group.mesh, P("ep"))
    operands = [jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index]) for x in case]
    jax.block_until_ready(helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="ffi")(*operands))


def open_and_close(size: int, openings: int = OPENINGS) -> None:
    """Groups over several processes are kept when they are closed, as what was compiled for them may keep them."""
    mesh = helpers.mesh_of(ep=size)
    kept: list[Group] = []
    before: dict[str, int] = {}
    for i in range(WARM_UP + openings):
        if i == WARM_UP:
            gc.collect()
            before = resources()
        with Group(mesh, "ep", timeout=60.0) as group:
            if i % max(4, openings // MOST_PROGRAMS) == 0:
                run(group)
        if jax.process_count() > 1:
            kept.append(group)
    gc.collect()
    after = resources()
    print(before, after)
    assert after["descriptors"] <= before["descriptors"]
    assert after["shared mappings"] <= before["shared mappings"]
    assert after["threads"] <= before["threads"]
    assert after["MB"] <= before["MB"] + MOST_MB


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--openings", type=int, default=0)
    openings = parser.parse_args().openings
    jax.config.update("jax_num_cpu_devices", 1)
    group_module._CPU_PROCESSES_SHARE = True
    on_gpus = openings > 0 and jax.default_backend() == "gpu"
    if on_gpus:
        open_and_close(jax.device_count())
    before = helpers.gpu_megabytes() if on_gpus else 0
    open_and_close(jax.device_count(), openings or OPENINGS)
    if on_gpus:
        after = helpers.gpu_megabytes()
        print(f"MB in use on the GPUs: {before} before {openings} groups, {after} after")
        assert after <= before + MOST_MB
    print(f"process {jax.process_index()} of {jax.process_count()} is done", flush=True)
