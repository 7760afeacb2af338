"""Run by `jax_ep.launch` in every process of `test_nodes_processes.py`, each of which is a node, or part of one."""

import argparse
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import mismatch_cases
import moe_oracle
import nodes_cases
import numpy as np
import pytest
import sparse_cases
from jax.experimental import multihost_utils
from nodes_cases import AXES, EXPERTS, HIDDEN, TOKENS, TOP_K

import jax_ep
from jax_ep import CapacityError, Group, MismatchError, NodeOptions, PeerLostError, PlatformError, combine
from jax_ep.__main__ import load
from jax_ep._kit import ffi
from jax_ep.group import OnLost

LOST_TIMEOUT = 3.0  # of the group that loses a process
ALLOWED = 1.0  # seconds beyond the timeout in which a loss is named
CLOSING = 2.0  # seconds that closing a group of lost processes takes
SPARSE_ROWS = 200


def spread(group: Group, x: np.ndarray) -> jax.Array:
    """[R, ...] as [N, L, ...], a rank's part on every device, each process putting its own."""
    return helpers.spread(group.mesh, helpers.on_mesh(group.mesh, x))


def gathered(results: Any) -> Any:
    """The parts of all processes, [R, ...] in each of them."""
    everywhere = multihost_utils.process_allgather(jax.block_until_ready(results), tiled=True)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), everywhere)


def run(group: Group, case: helpers.Case, **options: Any) -> Any:
    program = helpers.dispatch_combine(group, num_experts=EXPERTS, **options)
    return gathered(program(*(spread(group, x) for x in case)))


def check_round_trip(group: Group, case: helpers.Case, **options: Any) -> None:
    found = run(group, case, implementation="kernels", **options)
    how = {"fp8": "wire" in options, "alignment": options.get("alignment", 1)}
    nodes_cases.assert_there_and_back(found, group, case, **how)
    group.check()


def check_overflow(group: Group, case: helpers.Case) -> None:
    """Every process learns of it, and the group goes on."""
    out, _ = run(group, case, implementation="kernels", capacity=8)
    assert np.isnan(out.rows).all()
    with pytest.raises(CapacityError, match="capacity is 8"):
        group.check()
    group.check()


def check_mismatch(mesh: jax.sharding.Mesh) -> None:
    """The last process calls what process 0 does not: all are told, none hangs or aborts, and the group goes on."""
    odd = jax.process_index() == jax.process_count() - 1

    def differ(group: Group, ours: str, theirs: str) -> None:
        last = group.size - group.size // group.nodes
        seen = f"rank 0 calls {CALLS[ours][2]}.*; rank {last} calls {CALLS[theirs][2]}"
        op, tokens, _ = CALLS[theirs if odd else ours]
        program = helpers.per_rank(lambda x: op(group, x), mesh)
        start = time.monotonic()
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=seen):
            jax.block_until_ready(program(spread(group, np.ones((group.size, tokens, HIDDEN), np.float32))))
        with pytest.raises(MismatchError, match=seen):
            group.check()
        print(f"{ours}, {theirs}: told after {time.monotonic() - start:.2f} s, with compiling", flush=True)

    with open_group(mesh, 60, nodes=NodeOptions(chunks=2) if odd else None) as group:
        differ(group, "dispatch", "in chunks")
    with open_group(mesh, 60) as group:
        for ours, theirs in MISMATCHES:
            differ(group, ours, theirs)
        rng = np.random.default_rng(helpers.SEED)
        check_round_trip(group, helpers.draw_case(rng, group.size, TOKENS, TOP_K, EXPERTS, HIDDEN))


def twice(group: Group, x: jax.Array) -> jax.Array:
    both, ids = helpers.round_trip(group, num_experts=EXPERTS, implementation="kernels"), mismatch_cases.ids_of(x)
    return both(both(x, ids, None)[1], ids, None)[1]


def gradient(group: Group, x: jax.Array) -> jax.Array:
    both, ids = helpers.round_trip(group, num_experts=EXPERTS, implementation="kernels"), mismatch_cases.ids_of(x)
    return jax.grad(lambda x: jnp.sum(both(x, ids, None)[1] ** 2))(x)


def needed(group: Group, x: jax.Array) -> jax.Array:
    ids = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jax_ep.embedding.rows_needed(ids, num_rows=mismatch_cases.ROWS, group=group)


multiplied = partial(mismatch_cases.multiplied, implementation="xla")
# On a rank, with so many tokens or entries, and what an error says of it.
CALLS: dict[str, tuple[Callable[[Group, jax.Array], jax.Array], int, str]] = {
    "dispatch": (mismatch_cases.dispatched, TOKENS, f"dispatch num_tokens={TOKENS} .*float32 chunks=1 "),
    "fewer tokens": (mismatch_cases.dispatched, 4, "dispatch num_tokens=4 .*float32 chunks=1 "),
    "in chunks": (mismatch_cases.dispatched, TOKENS, f"dispatch num_tokens={TOKENS} .*float32 chunks=2 "),
    "product": (multiplied, TOKENS, "matmul_all_reduce lhs="),
    "sparse": (mismatch_cases.reduced, 8, f"sparse_all_reduce entries=8 columns={HIDDEN} .* capacity=50 "),
    "more entries": (mismatch_cases.reduced, 9, f"sparse_all_reduce entries=9 columns={HIDDEN} .* capacity=50 "),
    "rows needed": (needed, 8, "rows_needed entries=8 "),
    "rows needed by more": (needed, 9, "rows_needed entries=9 "),
    "gradient": (gradient, TOKENS, "gradient of combine "),
    "twice": (twice, TOKENS, "dispatch "),
}
MISMATCHES = [
    ("dispatch", "fewer tokens"),
    ("product", "dispatch"),
    ("dispatch", "sparse"),
    ("sparse", "more entries"),
    ("rows needed", "rows needed by more"),
    ("gradient", "twice"),
]


def check_layer(group: Group, rng: helpers.Rng, **options: Any) -> None:
    case = helpers.draw_case(rng, group.size, TOKENS, TOP_K, EXPERTS, HIDDEN)
    layer = moe_oracle.draw_layer(rng, case.tokens, case.weights, EXPERTS, 8)
    cotangent = rng.standard_normal(case.tokens.shape).astype(np.float32)

    def both(layer: moe_oracle.Layer, ids: jax.Array, cotangent: jax.Array) -> Any:
        out, pull = jax.vjp(lambda m: helpers.moe_sums(m.tokens, ids, *m[1:], group=group, **options), layer)
        return out, pull(cotangent)[0]

    operands = jax.tree.map(lambda x: spread(group, x), (layer, case.ids, cotangent))
    found = gathered(helpers.per_rank(both, group.mesh)(*operands))
    group.check()
    moe_oracle.assert_near(found, moe_oracle.gated_experts(layer, case.ids, cotangent), 2e-5)


def check_lines(mesh: jax.sharding.Mesh, axis: str, rng: helpers.Rng) -> None:
    """A group over one axis alone: the ranks of a node, which have kernels, or one rank of each node, by XLA alone."""
    shape, inside = mesh.devices.shape, axis == "ep"
    size, lines = shape if not inside else shape[::-1]
    drawn = [helpers.draw_case(rng, size, TOKENS, TOP_K, EXPERTS, HIDDEN) for _ in range(lines)]
    parts = [np.stack(x, axis=0 if inside else 1) for x in zip(*drawn, strict=True)]
    with Group(mesh, axis, timeout=60) as group:
        assert (group.size, group.nodes) == (size, 1)
        assert group._resolve("dispatch", "auto", serves_nodes=True) == ("kernels" if inside else "xla")
        with contextlib.nullcontext() if inside else pytest.raises(PlatformError, match="mentation='xla'"):
            group._resolve("dispatch", "kernels", serves_nodes=True)
        program = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="auto")
        results = gathered(program(*(helpers.spread(mesh, x) for x in parts)))
        found = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), results)
        for index, case in enumerate(drawn):
            mine = jax.tree.map(lambda x, i=index: x[i] if inside else x[:, i], found)
            helpers.assert_round_trip(mine, case, num_experts=EXPERTS)
        group.check()


def check_sparse(group: Group, rng: helpers.Rng) -> None:
    ids = sparse_cases.zipf(rng, group.size, 24, SPARSE_ROWS)
    values = sparse_cases.draw_values(rng, ids, 5)
    options: dict[str, Any] = {"capacity": 150, "op": "mean_by_count"}
    program: Callable[..., Any] = sparse_cases.program(group, SPARSE_ROWS, **options)
    found = gathered(program(spread(group, ids), spread(group, values)))
    wanted = sparse_cases.expected(ids, values, num_rows=SPARSE_ROWS, **options)
    sparse_cases.assert_reduced(found, wanted, values.dtype)


def check_all(mesh: jax.sharding.Mesh) -> None:
    rng, (nodes, inside) = np.random.default_rng(helpers.SEED), mesh.devices.shape
    with open_group(mesh, 60) as group:
        assert (group.nodes, group.size, group.node_axes) == (nodes, nodes * inside, ("node",))
        assert group._resolve("dispatch", "auto", serves_nodes=True) == "kernels"
        check_overflow(group, nodes_cases.uneven(rng, group.size))
        check_sparse(group, rng)
        check_round_trip(group, nodes_cases.uneven(rng, group.size, 128, helpers.DTYPES[0]), wire="float8")
        check_layer(group, rng, implementation="xla")
    with open_group(mesh, 60, nodes=NodeOptions(chunks=3)) as group:
        uneven = nodes_cases.uneven(rng, group.size)
        check_round_trip(group, uneven, capacity=24, alignment=4, on_overflow="drop")
        check_layer(group, rng)
    with open_group(mesh, 60, nodes=NodeOptions(3)) as group:
        check_round_trip(group, nodes_cases.uneven(rng, group.size), on_overflow="drop")
    for axis in AXES if on_cpu() else AXES[1:]:
        check_lines(mesh, axis, rng)


def losses_of_the_demo(nodes: int | None) -> np.ndarray:
    """The losses of a few steps, with the group that the demo opens for `--nodes`."""
    demo = load("examples", "train_moe_lm")
    config = demo.moe_lm.Config(layers=1)
    with demo.open_group(nodes, config) as group:
        assert group.size == 8
        params = demo.moe_lm.init_params(jax.random.key(demo.SEED), config, group)
        losses = demo.train(params, demo.load_bytes(), 4, config, group)[1].loss
        group.check()
    return losses


def print_losses(mesh: jax.sharding.Mesh) -> None:
    line = " ".join(map(str, losses_of_the_demo(mesh.devices.shape[0])))
    print(f"\nlosses {line}\n", end="", flush=True)  # in one piece: others write into the pipe, too


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def open_group(
    mesh: jax.sharding.Mesh, timeout: float, on_lost: OnLost = "raise", nodes: NodeOptions | None = None
) -> Group:
    """By itself it crosses nodes on CPUs; on the GPUs of one host it is asked to. Without a library it has no nodes."""
    if not ffi.is_built(jax.default_backend().replace("gpu", "cuda")):
        return Group(mesh, AXES, timeout=timeout, across_nodes=False, on_lost=on_lost, nodes=nodes)
    return Group(mesh, AXES, timeout=timeout, across_nodes=None if on_cpu() else True, on_lost=on_lost, nodes=nodes)


def lose(mesh: jax.sharding.Mesh, how: str) -> None:
    """A process is killed or stopped while the others wait for it; each of these names it in time."""
    lost = 0 if how == "stop the coordinator" else jax.process_count() - 1
    group = open_group(mesh, LOST_TIMEOUT)
    case = helpers.draw_case(np.random.default_rng(helpers.SEED), group.size, TOKENS, TOP_K, EXPERTS, HIDDEN)
    operands = [spread(group, x) for x in case]
    by_kernels = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="kernels")
    program = by_kernels
    if group.intranode is None:  # there is no library
        program = helpers.dispatch_combine(group, num_experts=EXPERTS)
        with pytest.raises(PlatformError, match="no jax_ep library is built"):
            by_kernels(*operands)
        assert group.report() == []
        helpers.assert_round_trip(gathered(program(*operands)), case, num_experts=EXPERTS)
    jax.block_until_ready(program(*operands))
    group.check()
    pids = multihost_utils.process_allgather(np.int32(os.getpid()))
    start = time.monotonic()
    if jax.process_index() == lost:
        if how != "kill":
            os.kill(os.getpid(), signal.SIGSTOP)
        leave()  # no goodbye, and nothing that the launcher would end the others for
    # Not awaited: it fails or hangs, as XLA's collectives do. On GPUs the very call may not return.
    pending = program(*operands) if on_cpu() else None
    who = "process 0, did not answer" if lost == 0 else rf"process {lost} \(node {lost}, rank .*\) sent no heartbeat"
    with pytest.raises(PeerLostError, match=who):
        check_until(group, start + LOST_TIMEOUT + ALLOWED + late())
    print(f"process {lost} was named after {time.monotonic() - start:.2f} s", flush=True)
    with pytest.raises(PeerLostError, match=f"process {lost}"):
        jax.eval_shape(helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="auto"), *operands)
    group.close()
    assert time.monotonic() - start < LOST_TIMEOUT + ALLOWED + CLOSING + late()
    if how != "kill" and jax.process_index() == jax.process_count() - 1 - lost:
        os.kill(int(pids[lost]), signal.SIGCONT)
    del pending
    leave()  # jax.distributed would wait for the dead process


def hang(mesh: jax.sharding.Mesh, how: str) -> None:
    """Process 1 waits in XLA's collectives for process 0, which lives and does not come; both learn of it in time.

    Nothing frees a GPU process that waits: it ends.
    """
    exits = how == "exit" or not on_cpu()
    group = open_group(mesh, LOST_TIMEOUT, on_lost="exit" if exits else "raise")
    case = helpers.draw_case(np.random.default_rng(helpers.SEED), group.size, TOKENS, TOP_K, EXPERTS, HIDDEN)
    operands = [spread(group, x) for x in case]
    forward = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="kernels")
    out, _ = jax.block_until_ready(forward(*operands))
    waits = jax.process_index() == 1
    called = [partial(forward, *operands)] * {"close": waits}.get(how, 1 + waits)
    if how == "other":  # an all-reduce against an all-to-all
        product = helpers.per_rank(partial(CALLS["product"][0], group), mesh)
        again = helpers.per_rank(lambda rows, routing: combine(rows, routing, group=group), mesh)
        others = [partial(product, operands[0]), partial(again, *out[::2])]
        for program in others:
            jax.block_until_ready(program())
        called = [others[waits]]
    begun = group._progress.marks.begun
    multihost_utils.sync_global_devices("all is compiled")
    start = time.monotonic()
    if waits:
        print(f"waits from {time.time()}", flush=True)
    pending = threading.Thread(target=lambda: [jax.block_until_ready(program()) for program in called], daemon=True)
    pending.start()
    if exits or not waits:
        pending.join()
        group.check()
    if how == "close" and not waits:
        group.close()
    if exits or (how == "close" and not waits):
        time.sleep(3 * LOST_TIMEOUT)  # alive
    else:
        waited = "dispatch .*: this process waited .* s for process 0 .* in vain: it has"
        seen = {
            "close": (PeerLostError, f"op {begun + 1}, {waited} closed the group"),
            "wait": (jax_ep.PeerTimeoutError, f"op {begun + 3}, {waited} ended its op {begun + 2}, combine"),
        }
        error, match = seen[how] if waits else (PeerLostError, "process 1 .* left the group by an error")
        with pytest.raises(error, match=match):
            check_until(group, start + (1 if waits else 2) * (LOST_TIMEOUT + ALLOWED) + late())
        print(f"{error.__name__} after {time.monotonic() - start:.2f} s", flush=True)
    leave()


HANGS = ["hang, wait", "hang, close", "hang, exit", "hang, other"]


def late() -> float:
    """Seconds that threads may wait for a core besides: none unless more of them run than there are cores."""
    return 2.0 if os.getloadavg()[0] > (os.cpu_count() or 1) else 0.0


def check_until(group: Group, deadline: float) -> None:
    while time.monotonic() < deadline:
        group.check()
        time.sleep(0.05)


def leave_in_order(mesh: jax.sharding.Mesh) -> None:
    """Who has closed its group may end: nobody misses it."""
    with open_group(mesh, 2.0) as group:
        if jax.process_index() == 0:
            time.sleep(3.5)
            group.check()
    multihost_utils.sync_global_devices("all have closed it")
    with open_group(mesh, 60) as again:  # processes meet again
        again.check()


def drop(mesh: jax.sharding.Mesh) -> None:
    """Groups that are not closed leave no threads, and processes may go on without them."""
    before = helpers.own_threads()
    for _ in range(20):
        open_group(mesh, 60)
    gc.collect()
    helpers.wait_until(lambda: helpers.own_threads() <= before, 10)


def leave() -> None:
    print(f"process {jax.process_index()} of {jax.process_count()} is done", flush=True)
    os._exit(0)


CHECKS = {"all": check_all, "mismatch": check_mismatch, "demo": print_losses}


def main() -> None:
    parser = argparse.ArgumentParser()
    last = (*HANGS, "kill", "stop", "stop the coordinator")
    parser.add_argument("what", choices=[*CHECKS, "close", *last], nargs="+", help="in this order; the last ones alone")
    parser.add_argument("--cpu-devices", type=int, default=1)
    parser.add_argument("--nodes", type=int, required=True, help="of equally many processes")
    parser.add_argument("--without-library", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    jax.config.update("jax_default_matmul_precision", "highest")
    if options.without_library:
        ffi.is_built = lambda platform: False
        helpers.let_kernels_cross_cpu_processes()  # as if between GPUs
    mesh = helpers.mesh_of(node=options.nodes, ep=jax.device_count() // options.nodes)
    print(f"JAX_EP_TEST_SEED={helpers.SEED}")
    for what in options.what:
        print(f"\n{what}", flush=True)
        if what in CHECKS:
            CHECKS[what](mesh)
        elif what == "close":
            leave_in_order(mesh)
            drop(mesh)
        elif what in HANGS:
            hang(mesh, what.removeprefix("hang, "))
        else:
            lose(mesh, what)
    print(f"process {jax.process_index()} of {jax.process_count()} is done", flush=True)


if __name__ == "__main__":
    main()
