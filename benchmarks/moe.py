"""dispatch and combine beside the capacity-padded all_to_all of XLA: `python -m jax_ep bench moe`."""

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_ep

from . import moe_formulations as forms, moe_sweep, padded_all_to_all as padded, token_sweep
from .moe_cases import SEED, Shape
from .moe_formulations import AXIS, Formulation
from .plots import Panel, add_plot, grouped_bars, write_plot
from .provenance import header

CPU_SHAPES = [Shape(512, 1024, 8, 64, "float32")]


@dataclasses.dataclass(frozen=True)
class Result:
    """Median microseconds per call of each formulation."""

    shape: Shape
    dispatch: dict[str, float]
    combine: dict[str, float]


def formulations(
    shape: Shape, group: jax_ep.Group, implementation: jax_ep.Implementation
) -> tuple[Formulation, Formulation]:
    """Ours and the padded all_to_all, each as jitted functions of global arrays."""
    mean_rows = shape.tokens * shape.top_k

    def jitted(one: Formulation) -> Formulation:
        wrap = partial(jax.shard_map, mesh=group.mesh, in_specs=P(AXIS), out_specs=P(AXIS))
        return Formulation(one.name, jax.jit(wrap(one.dispatch)), jax.jit(wrap(one.combine)))

    return (
        jitted(forms.jax_ep_ops(group, shape.experts, math.ceil(1.25 * mean_rows), implementation)),
        jitted(forms.padded_all_to_all(shape.experts, padded.block_rows(mean_rows / group.size))),
    )


def make_inputs(shape: Shape, group: jax_ep.Group) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, ids and weights of all ranks, routed uniformly to distinct experts."""
    rng = np.random.default_rng(SEED)
    total = group.size * shape.tokens
    tokens = rng.standard_normal((total, shape.hidden), np.float32)
    ids = np.argsort(rng.random((total, shape.experts)), axis=1)[:, : shape.top_k].astype(np.int32)
    weights = rng.random((total, shape.top_k), np.float32)
    place = partial(jax.device_put, device=NamedSharding(group.mesh, P(AXIS)))
    return place(jnp.asarray(tokens, shape.dtype)), place(ids), place(weights)


def check_equal(states: list[Any], outputs: list[jax.Array], size: int, dtype: str) -> None:
    """Raises unless the formulations delivered the same rows in the same order, and the same sums."""
    (rows_a, sizes_a), (rows_b, sizes_b) = (map(np.asarray, jax.tree.leaves(state)[:2]) for state in states)
    np.testing.assert_array_equal(sizes_a, sizes_b)
    used = sizes_a.reshape(size, -1).sum(axis=1)
    for count, a, b in zip(used, np.split(rows_a, size), np.split(rows_b, size), strict=True):
        np.testing.assert_array_equal(a[:count], b[:count])
    epsilon = float(jnp.finfo(dtype).eps)
    a, b = (np.asarray(output, np.float32) for output in outputs)
    np.testing.assert_allclose(a, b, rtol=16 * epsilon, atol=16 * epsilon * float(np.max(np.abs(b))))


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def measure(shape: Shape, group: jax_ep.Group, implementation: jax_ep.Implementation, repeats: int) -> Result:
    """Checks the formulations against each other, then times them in turns."""
    tokens, ids, weights = make_inputs(shape, group)
    both = formulations(shape, group, implementation)
    states = [jax.block_until_ready(one.dispatch(tokens, ids, weights)) for one in both]
    outputs = [jax.block_until_ready(one.combine(state, weights)) for one, state in zip(both, states, strict=True)]
    check_equal(states, outputs, group.size, shape.dtype)

    dispatch_times: dict[str, list[float]] = {one.name: [] for one in both}
    combine_times: dict[str, list[float]] = {one.name: [] for one in both}
    for _ in range(repeats):
        for one, state in zip(both, states, strict=True):
            dispatch_times[one.name].append(seconds(partial(one.dispatch, tokens, ids, weights)))
            combine_times[one.name].append(seconds(partial(one.combine, state, weights)))
    group.check()

    def medians(times: dict[str, list[float]]) -> dict[str, float]:
        return {name: 1e6 * statistics.median(values) for name, values in times.items()}

    return Result(shape, medians(dispatch_times), medians(combine_times))


def table(result: Result) -> str:
    """The result as a markdown table; the ratio says how many times faster ours is."""
    names = list(result.dispatch)
    total = {name: result.dispatch[name] + result.combine[name] for name in names}
    lines = [f"| {result.shape} | " + " | ".join(f"{name}, us" for name in names) + " | ratio |", "|---|---|---|---|"]
    for row, times in (("dispatch", result.dispatch), ("combine", result.combine), ("sum", total)):
        ours, other = (times[name] for name in names)
        lines.append(f"| {row} | {ours:,.0f} | {other:,.0f} | {other / ours:.2f} |")
    return "\n".join(lines)


def plot(results: list[Result], path: Path) -> None:
    """One panel a shape."""

    def bars(dispatch: float, combine: float) -> list[float]:
        return [dispatch / 1e3, combine / 1e3, (dispatch + combine) / 1e3]

    panels = [
        Panel(
            str(result.shape),
            ["dispatch", "combine", "sum"],
            {name: bars(result.dispatch[name], result.combine[name]) for name in result.dispatch},
        )
        for result in results
    ]
    grouped_bars(panels, "ms per call", path)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep bench moe", description=__doc__)
    parser.add_argument("--repeats", type=int, help="timed calls of each (CPU, default 30) or loops of calls (GPU, 5)")
    parser.add_argument("--implementation", choices=("auto", "ffi", "xla"), default="auto")
    parser.add_argument("--quick", action="store_true", help="GPU: only T=128 and T=4096, uniform routing")
    parser.add_argument("--shapes", default="", metavar="TEXT", help="GPU: only shapes whose name has TEXT")
    parser.add_argument("--sweep", action="store_true", help="ops and layer by the number of tokens, from one to many")
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)  # the GPU's way of timing on the CPU
    add_plot(parser, "moe")
    options = parser.parse_args(arguments)

    with jax_ep.Group(Mesh(np.array(jax.devices()), (AXIS,)), AXIS) as group:
        implementation = group._resolve("bench", options.implementation)
        print(header(list(group.mesh.devices.flat), repr(implementation), ["moe", *arguments]), flush=True)
        if options.sweep:
            for line in token_sweep.run(group, implementation, options.repeats or 5):
                print(line, flush=True)
            return 0
        if options.loop or group.platform != "cpu":
            swept = moe_sweep.run(group, implementation, options.repeats or 5, options.quick, options.shapes)
            draw = partial(moe_sweep.plot, swept)
        else:
            results = []
            for shape in CPU_SHAPES:
                results.append(measure(shape, group, options.implementation, options.repeats or 30))
                print(f"\n{table(results[-1])}", flush=True)
            draw = partial(plot, results)
    write_plot(options.plot, draw)
    return 0
