"""Groups that come and go in one process, while ops, threads, the garbage collector and forks are under way.

    python -m tests.chaos.lifecycle --configurations 200 --seed 1

A configuration is one group that is opened. In between the numbers must be right.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jax_ep import CapacityError, Group, GroupClosedError, JaxEpError

from .report import Report, devices_here, parser, prepare_devices

EXPERTS_EACH, TOKENS, TOP_K, HIDDEN = 2, 12, 2, 16
CLOSE_SECONDS = 5.0
AWAITING = (jax.errors.JaxRuntimeError, ValueError, JaxEpError)  # XLA's ValueError where a program runs inline


class Layer:
    """dispatch and combine on some of the devices, with the case that it is given."""

    def __init__(self, rng: helpers.Rng, devices: list[Any], **options: Any):
        self.group = Group(Mesh(np.array(devices), ("ep",)), "ep")
        self.experts = EXPERTS_EACH * self.group.size
        self.case = helpers.draw_case(rng, self.group.size, TOKENS, TOP_K, self.experts, HIDDEN)
        self.run = helpers.dispatch_combine(self.group, num_experts=self.experts, implementation="kernels", **options)

    def check(self) -> None:
        helpers.assert_round_trip(helpers.fetch(self.run(*self.case)), self.case, num_experts=self.experts)
        self.group.check()


def some_devices(rng: helpers.Rng) -> list[Any]:
    devices = jax.devices()
    return devices[: rng.integers(1, min(8, len(devices)) + 1)]


def reopened(rng: helpers.Rng) -> None:
    """Opened, used or not, closed once or twice, or left to the garbage collector."""
    devices = some_devices(rng)
    if rng.random() < 0.8:
        group = Group(Mesh(np.array(devices), ("ep",)), "ep")
        if rng.random() < 0.5:
            group.close()
            with pytest.raises(GroupClosedError):
                group.check()
        group.close() if rng.random() < 0.5 else gc.collect()
        return
    layer = Layer(rng, devices)
    layer.check()
    layer.group.close()


def two_at_once(rng: helpers.Rng) -> None:
    """Threads that run ops of two groups over the same devices, or over halves of them."""
    devices = jax.devices()[:8]
    half = max(1, len(devices) // 2)
    layers = [Layer(rng, devices[:half]), Layer(rng, devices[half : 2 * half] or devices)]

    def work(layer: Layer) -> None:
        for _ in range(20):
            layer.check()

    with ThreadPoolExecutor(2) as threads:
        working = [threads.submit(work, layer) for layer in layers]
        for _ in range(5):
            gc.collect()
    for layer in layers:
        layer.group.close()
    for each in working:
        each.result()


def closed_in_flight(rng: helpers.Rng) -> None:
    """What is under way is right or fails with GroupClosedError, soon. A GPU's op cannot raise: it delivers NaN."""
    layer = Layer(rng, some_devices(rng))
    layer.check()
    results: list[Any] = []

    def work() -> None:
        with contextlib.suppress(*AWAITING):
            for _ in range(2000):
                results.append(helpers.fetch(layer.run(*layer.case)))

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(float(10 ** rng.uniform(-4, -1.5)))
    began = time.monotonic()
    layer.group.close()
    thread.join()
    assert time.monotonic() - began < CLOSE_SECONDS, "closing took long"
    if layer.group.platform != "cpu" and results and np.isnan(results[-1][1]).any():
        results.pop()
    for result in results:
        helpers.assert_round_trip(result, layer.case, num_experts=layer.experts)
    with pytest.raises(GroupClosedError):
        layer.group.check()
    with pytest.raises(AWAITING, match="closed"):
        helpers.fetch(layer.run(*layer.case))


def exceptions_in_between(rng: helpers.Rng) -> None:
    """An overflow, an exception of the program's own, then right numbers; results die unread."""
    layer = Layer(rng, some_devices(rng), capacity=TOKENS * TOP_K * 8)
    everything = np.zeros_like(layer.case.ids)
    tight = helpers.dispatch_combine(layer.group, num_experts=layer.experts, capacity=1, implementation="kernels")
    with layer.group:
        for _ in range(3):
            with contextlib.suppress(*AWAITING):
                helpers.fetch(tight(*layer.case._replace(ids=everything)))
            with pytest.raises(CapacityError):
                layer.group.check()
            layer.run(*layer.case)  # never awaited by us
            with contextlib.suppress(KeyError):
                raise KeyError
            gc.collect()
            layer.check()


def forked(rng: helpers.Rng) -> None:
    """A child may drop or close the group and end; the parent must not notice."""
    layer = Layer(rng, some_devices(rng))
    layer.check()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that JAX has threads: the child touches nothing of it
        child = os.fork()
    if child == 0:
        if rng.integers(2):
            layer.group.close()
        if layer.group.platform == "cpu":  # a GPU's programs of XLA abort a child that drops them
            del layer
            gc.collect()
        os._exit(0)
    layer.check()
    deadline = time.monotonic() + CLOSE_SECONDS
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
    assert ended == (child, 0), f"the child has not ended well: {ended}"
    layer.check()
    layer.group.close()


SCENES: tuple[tuple[Callable[[helpers.Rng], None], float], ...] = (  # with how often they are played
    (reopened, 0.84),
    (closed_in_flight, 0.05),
    (two_at_once, 0.03),
    (exceptions_in_between, 0.04),
    (forked, 0.04),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, 200)
    options.add_argument("--scene", type=int, help="this one alone")
    given = options.parse_args(arguments)
    prepare_devices()
    report = Report("lifecycle", given.seed, devices_here())
    for index in report.indices(given, given.scene):
        rng = np.random.default_rng([report.seed, index])
        weights = [weight for _, weight in SCENES]
        scene = SCENES[index if index < len(SCENES) else rng.choice(len(SCENES), p=weights)][0]
        report.configurations += 1
        report.faults += scene is not reopened
        try:
            scene(rng)
        except Exception as error:
            report.failed(error, scene.__name__, f"--scene {index}")
    gc.collect()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
