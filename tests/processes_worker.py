"""Run by `jax_ep.launch` in every process of `test_processes.py`, and in one process by that test itself."""

import argparse
import contextlib
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from chaos.faulty_ops import OPS, Op, round_trip
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_ep import (
    CapacityError,
    Group,
    JaxEpError,
    PeerLostError,
    PeerTimeoutError,
    group as group_module,
)

EXPERTS, HIDDEN = 16, 256
TIMEOUT = 40.0
FAILURES = (jax.errors.JaxRuntimeError, ValueError)  # the latter where a process' only device runs a program inline


def ops_of(group: Group) -> dict[str, Op]:
    """Those of the chaos scripts, and a dispatch that drops."""
    options = {"capacity": 96, "alignment": 8, "on_overflow": "drop"}
    every = OPS | {"dropped": partial(round_trip, tokens=64, dtype=np.float16, **options)}
    return {name: draw(np.random.default_rng([helpers.SEED, len(name)]), group) for name, draw in every.items()}


def case_of(size: int) -> helpers.Case:
    return helpers.draw_case(np.random.default_rng(helpers.SEED), size, 37, 3, EXPERTS, HIDDEN)


def spread(group: Group, x: np.ndarray) -> jax.Array:
    """A rank's part on every device, each process putting its own."""
    return jax.make_array_from_callback(x.shape, NamedSharding(group.mesh, P("ep")), lambda index: x[index])


def results(group: Group) -> dict[str, Any]:
    """Every op on all ranks, by name, the arrays with a leading axis of ranks."""
    found = {}
    for name, op in ops_of(group).items():
        found[name] = jax.block_until_ready(op.run(*(spread(group, x) for x in op.operands)))
    group.check()
    return found


def save_shards(found: dict[str, Any], path: Path) -> None:
    """This process' part of every array, named by array and rank."""
    shards: dict[str, Any] = {
        f"{index} {shard.index[0].start or 0}": np.ascontiguousarray(shard.data).view(np.uint8)
        for index, array in enumerate(jax.tree.leaves(found))
        for shard in array.addressable_shards
    }
    np.savez(path, **shards)


def check_errors(group: Group) -> None:
    """What one process sees of an overflow, after which the group goes on, and of a rank that never comes."""
    operands = [spread(group, x) for x in case_of(group.size)]
    overflowing = helpers.dispatch_combine(group, num_experts=EXPERTS, capacity=8, implementation="ffi")
    with helpers.expect_failure(group, CapacityError, "capacity is 8"):
        jax.block_until_ready(overflowing(*operands))
    program = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="ffi")
    jax.block_until_ready(program(*operands))
    group.check()

    assert group._native is not None
    stalled, holder = group.size - 1, jax.process_count() - 1
    group._native.stall(stalled, "protocol")
    with contextlib.suppress(*FAILURES):
        jax.block_until_ready(program(*operands))
    if jax.process_index() == holder:  # on a GPU the stalled rank does not even notice
        time.sleep(3 * group.timeout)  # left at once, the group would report that instead
    else:
        with pytest.raises((PeerTimeoutError, PeerLostError), match=f"rank {stalled}"):
            group.check()


def lose_process(group: Group) -> None:
    """The last process dies; the others learn of it long before the timeout, and never hang."""
    start = time.monotonic()
    if jax.process_index() == jax.process_count() - 1:
        os._exit(0)  # no goodbye, and nothing that the launcher would end the others for
    with pytest.raises((JaxEpError, *FAILURES)):
        results(group)
    with pytest.raises(PeerLostError, match=r"has ended|did not answer"):
        group.check()
    group.close()
    assert time.monotonic() - start < TIMEOUT / 2
    with pytest.raises(PeerTimeoutError, match=r"process \d+ did not"):
        Group(group.mesh, "ep", timeout=0.5)
    print(f"process {jax.process_index()} of {jax.process_count()} is done", flush=True)
    os._exit(0)  # jax.distributed would wait for the dead process


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", action="store_true", help="everything goes through staging")
    parser.add_argument("--lose", action="store_true", help="a process dies")
    parser.add_argument("--cpu-devices", type=int, default=1)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    jax.config.update("jax_default_matmul_precision", "highest")
    group_module._CPU_PROCESSES_SHARE = True
    with Group(helpers.mesh_of(ep=jax.device_count()), "ep", timeout=TIMEOUT) as group:
        assert group._native is not None
        if options.stage:
            group._native.stage_all()
        if options.lose:
            lose_process(group)
        save_shards(results(group), options.folder / f"{jax.process_index()}.npz")
    with Group(group.mesh, "ep", timeout=1.0) as group:  # a second one, in the memory of the first on GPUs
        check_errors(group)
    print(f"process {jax.process_index()} of {jax.process_count()} is done", flush=True)


if __name__ == "__main__":
    main()
