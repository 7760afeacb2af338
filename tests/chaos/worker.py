"""A process of a lineup (lineup.py), run by jax_ep.launch: opens groups and runs ops as it is told, line by line.

Process 0 takes no part: it holds the coordinator of jax.distributed, whose end would end all others.
A process that shall be killed or stopped does that to itself, in the middle of a phase of an op.
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import helpers
import jax
import numpy as np
from jax.sharding import Mesh

from jax_ep import Group, JaxEpError

from .compare import assert_near
from .faulty_ops import Op, draw_ops

OPEN_SECONDS = 30.0  # for a group: a busy machine needs more than the timeout of its ops
OPS_AT_ONCE = 3  # of a group: each is compiled
LOOK_SECONDS, LATEST_SECONDS = 0.03, 0.3  # for phases to strike in, and until one of them comes again
AWAITING = (jax.errors.JaxRuntimeError, ValueError, JaxEpError)  # ValueError where a program runs inline, on one device


class Prepared:
    """An op whose operands are on the devices; its first result is compared with numpy, later ones with that."""

    def __init__(self, name: str, op: Op, mesh: Mesh):
        self.name, self.wanted = name, op.wanted
        self.operands = [helpers.spread(mesh, x) for x in op.operands]
        self.run = op.run.lower(*self.operands).compile()  # now: some process may take longer than the timeout
        self.first: list[bytes] | None = None

    def __call__(self) -> list[Any]:
        return jax.tree.leaves(jax.block_until_ready(self.run(*self.operands)))

    def verify(self, results: list[Any]) -> None:
        """Compares the bits of this process' part with those of the first run."""
        bits = [np.asarray(shard.data).tobytes() for array in results for shard in array.addressable_shards]
        if self.first is None:
            for array, value in zip(results, self.wanted, strict=False):
                for shard in array.addressable_shards:
                    exact, magnitude = value.exact[shard.index], value.magnitude[shard.index]
                    assert_near(np.asarray(shard.data), exact, magnitude, value.roundings, self.name)
            self.first = bits
        strange = [not np.isfinite(np.asarray(x.data, np.float32)).all() for a in results for x in a.addressable_shards]
        assert bits == self.first, f"{self.name}: other bits than before; shards with NaN: {sum(strange)}"


class Strike(threading.Thread):
    """Sends a signal to its own process when a rank of it enters the phase that was struck least so far."""

    def __init__(self, group: Group, number: int, struck: dict[str, int]):
        super().__init__(daemon=True)
        self.group, self.number, self.struck = group, number, struck
        self.rank = next(i for i, d in enumerate(group.mesh.devices.flat) if d.process_index == jax.process_index())
        self.start()

    def run(self) -> None:
        began, seen, chosen, entered = time.monotonic(), set[str](), None, "no op"
        while (waited := time.monotonic() - began) < LATEST_SECONDS and (chosen is None or entered != chosen):
            entered = " ".join(helpers.native(self.group).test_hooks.last_phase(0, self.rank) or ("no op",))
            if waited < LOOK_SECONDS:
                seen.add(entered)
            elif chosen is None:
                chosen = min(sorted(seen), key=lambda phase: self.struck.get(phase, 0))
            time.sleep(0)  # others want to run
        os.write(1, f"@{json.dumps({'struck': entered})}\n".encode())
        os.kill(os.getpid(), self.number)


class Member:
    """The part of this process in the groups of its lineup."""

    group: Group
    strike: Strike | None = None
    ops: list[Prepared]

    def open(self, members: list[int], seed: list[int], timeout: float, poison: bool) -> dict[str, Any]:
        os.environ["JAX_EP_DEBUG_POISON"] = str(int(poison))
        devices = [device for device in jax.devices() if device.process_index in members]
        self.group = Group(Mesh(np.array(devices), ("ep",)), "ep", timeout=timeout, open_timeout=OPEN_SECONDS)
        helpers.native(self.group).start_profile()  # for last_phase
        drawn = draw_ops(np.random.default_rng(seed), self.group, OPS_AT_ONCE)
        self.ops = [Prepared(name, op, self.group.mesh) for name, op in drawn.items()]
        return {"ops": list(drawn)}

    def close(self) -> dict[str, Any]:
        if self.strike:
            self.strike.join()
        self.group.close()
        return {}

    def rounds(self, seed: list[int], count: int, strike: dict[str, Any] | None = None) -> dict[str, Any]:
        """Runs ops, all processes the same ones, until one fails, or this process strikes itself."""
        if strike:
            self.strike = Strike(self.group, **strike)
        rng, found = np.random.default_rng(seed), dict[str, Any](error=None, wrong=None, rounds=0)
        while found["rounds"] < count and not found["error"] and not found["wrong"]:
            op = self.ops[rng.integers(len(self.ops))]
            found |= self.once(op) | {"op": op.name, "rounds": found["rounds"] + 1}
        return found | {"at": time.monotonic()}

    def once(self, op: Prepared) -> dict[str, Any]:
        try:
            results = op()
            self.group.check()
        except AWAITING as error:
            return self.typed(error)
        try:
            op.verify(results)
        except AssertionError as error:
            time.sleep(0.5)  # is it found out later?
            return {"wrong": str(error)[:500], "later": self.typed(error)}
        return {}

    def typed(self, error: Exception) -> dict[str, Any]:
        try:
            self.group.check()
        except JaxEpError as typed:
            error = typed
        name = type(error).__name__ if isinstance(error, JaxEpError) else "none of jax_ep"
        return {"error": name, "message": str(error)[:500]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1, help="CPU devices of this process")
    options = parser.parse_args()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    jax.config.update("jax_num_cpu_devices", options.devices)
    jax.config.update("jax_default_matmul_precision", "highest")
    helpers.let_kernels_cross_cpu_processes()
    jax.devices()
    member = Member()
    answer = {"pid": os.getpid()}
    while True:
        print("@" + json.dumps(answer), flush=True)
        command = json.loads(sys.stdin.readline() or '{"do": "leave"}')
        do = command.pop("do")
        if do == "leave":
            os._exit(0)  # jax.distributed would wait for those who are dead
        answer = getattr(member, do)(**command)


if __name__ == "__main__":
    main()
