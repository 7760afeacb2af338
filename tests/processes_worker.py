"""Run by `jax_ep.launch` in every process of `test_processes.py`, and in one process by that test itself."""

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import matmul_cases
import ml_dtypes
import numpy as np
import oracle
import pytest
import sparse_cases
import test_lax
from jax._src import distributed
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_ep import (
    CapacityError,
    Group,
    JaxEpError,
    PeerLostError,
    PeerTimeoutError,
    combine,
    dispatch,
    group as group_module,
)

EXPERTS, HIDDEN = 16, 256
TIMEOUT = 40.0
FAILURES = (
    jax.errors.JaxRuntimeError,
    ValueError,
)  # the latter where the only device of a process runs a program inline
SETTINGS: dict[str, tuple[int, Any, dict[str, Any]]] = {  # tokens, dtype, options of dispatch
    "float32": (37, np.float32, {}),
    "bfloat16 in chunks": (helpers.LATE_TOKENS, ml_dtypes.bfloat16, {}),
    "float8 wire": (64, ml_dtypes.bfloat16, {"wire": "float8"}),
    "dropped": (64, np.float16, {"capacity": 96, "alignment": 8, "on_overflow": "drop"}),
}


def case_of(name: str, size: int) -> helpers.Case:
    tokens, dtype, _ = SETTINGS[name]
    rng = np.random.default_rng([helpers.SEED, len(name)])
    return helpers.draw_case(rng, size, tokens, 3, EXPERTS, HIDDEN, np.dtype(dtype))


def slices_of(size: int) -> tuple[np.ndarray, np.ndarray, oracle.Slices]:
    rng = np.random.default_rng(helpers.SEED)
    operand = rng.standard_normal((size, test_lax.ROWS, 24)).astype(np.float32)
    return operand, -operand, test_lax.draw_slices(rng, 2, size)


SPARSE: dict[str, dict[str, Any]] = {  # options of sparse_all_reduce
    "sparse": {"capacity": 200},
    "sparse, sharded": {"capacity": 90, "sharded": True, "op": "mean_by_count"},
}
SPARSE_ROWS = 300


def sparse_of(name: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and rows; some ids are often named."""
    rng = np.random.default_rng([helpers.SEED, len(name)])
    ids = sparse_cases.zipf(rng, size, 50, SPARSE_ROWS)
    return ids, sparse_cases.draw_values(rng, ids, 40, np.float16 if "sharded" in SPARSE[name] else np.float32)


def product_of(size: int) -> matmul_cases.Operands:
    rng = np.random.default_rng(helpers.SEED)
    return matmul_cases.draw(rng, size, (136, 40, 200), np.dtype(ml_dtypes.bfloat16))


def spread(group: Group, x: np.ndarray) -> jax.Array:
    """A rank's part on every device, each process putting its own."""
    return jax.make_array_from_callback(x.shape, NamedSharding(group.mesh, P("ep")), lambda index: x[index])


def results(group: Group) -> dict[str, Any]:
    """Every op on all ranks, by name, the arrays with a leading axis of ranks."""

    def run(program: Callable[..., Any], operands: Iterable[np.ndarray]) -> Any:
        return jax.block_until_ready(program(*(spread(group, x) for x in operands)))

    found: dict[str, Any] = {}
    for name, (_, _, options) in SETTINGS.items():
        program = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="ffi", **options)
        found[name] = run(program, case_of(name, group.size))
    for name, body in (("gradients", gradients), ("scan", repeated)):
        found[name] = run(helpers.per_rank(partial(body, group), group.mesh), case_of("float32", group.size))
    for name, options in SPARSE.items():
        program = sparse_cases.program(group, SPARSE_ROWS, method="bitmap", implementation="ffi", **options)
        found[name] = run(program, sparse_of(name, group.size))
    for op in matmul_cases.OPS:
        found[op] = run(matmul_cases.program(op, group, implementation="ffi"), product_of(group.size))
    operand, output, slices = slices_of(group.size)
    found["ragged"] = run(test_lax.exchange(group), (operand, output, *slices))
    group.check()
    return found


def layer(group: Group, tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, implementation="ffi")
    return combine(jnp.tanh(out.rows), out.routing, group=group, implementation="ffi")


def gradients(group: Group, tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
    return jax.grad(lambda t, w: jnp.sum(jnp.sin(layer(group, t, ids, w))), argnums=(0, 1))(tokens, weights)


def repeated(group: Group, tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    """Many launches in one program: on a GPU a captured graph."""
    return jax.lax.scan(lambda x, _: (layer(group, x, ids, weights), None), tokens, length=20)[0]


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
    operands = [spread(group, x) for x in case_of("float32", group.size)]
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


def come_late(late: int) -> None:
    """One process comes when the others have given up, again and again; at last all come, and open two groups."""
    mesh, me = helpers.mesh_of(ep=jax.device_count()), jax.process_index()
    for attempt in range(2):
        for turn in ("others", "late"):
            if (turn == "late") == (me == late):
                with pytest.raises(PeerTimeoutError, match=r"process \d+ did not .* within 0.5 s"):
                    Group(mesh, "ep", timeout=TIMEOUT, open_timeout=0.5)
            await_everyone(f"{turn} gave up {attempt}")
    if me == late:
        time.sleep(1.0)
    with Group(mesh, "ep", timeout=TIMEOUT) as one, Group(mesh, "ep", timeout=TIMEOUT) as other:
        for group in (one, other):
            program = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="ffi")
            jax.block_until_ready(program(*(spread(group, x) for x in case_of("float32", group.size))))
            group.check()


def await_everyone(name: str) -> None:
    client = distributed.global_state.client
    assert client is not None
    client.wait_at_barrier(name, int(TIMEOUT * 1000))


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
    parser.add_argument("--late", type=int, help="this process comes late")
    parser.add_argument("--cpu-devices", type=int, default=1)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    jax.config.update("jax_default_matmul_precision", "highest")
    group_module._CPU_PROCESSES_SHARE = True
    if options.late is not None:
        come_late(options.late)
        print(f"process {jax.process_index()} of {jax.process_count()} is done", flush=True)
        return
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
