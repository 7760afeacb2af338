"""Where the time of an op goes: `python -m jax_ep bench phases`. One call in a jitted loop."""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import jax_ep

from . import collective_matmul, moe, sparse
from .formulations import AXIS, jax_ep_ops
from .in_jit_loop import Loop, compile_loops, on_ranks
from .moe_cases import Case, Shape, capacity, load, make_ids, make_inputs
from .provenance import header
from .tables import heading, row

OPS = ("moe", "sparse", "products")
CALLS = 20
FEW_SMS = 24
MOE_SHAPES = tuple(Shape(tokens, 7168, 8, 256, "bfloat16") for tokens in (128, 4096))
MOE_CPU_SHAPES = (Shape(16, 256, 2, 16, "bfloat16"),)
SPARSE_CPU_SHAPE = sparse.Shape(1000, 64, 100)
PRODUCTS = (collective_matmul.SEED_SHAPE, collective_matmul.Shape(8192, 8192, 14336))


class Span(NamedTuple):
    """A phase of the first sender or the first receiver warp of a CTA, in microseconds since its rank began the op."""

    phase: str
    track: tuple[int, int]  # rank, thread
    begin: float
    end: float


def read_calls(path: Path) -> list[list[Span]]:
    """The spans of every call, by its epoch. Ranks' clocks need not agree: each counts from its own beginning."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "phase"]
    begins: dict[tuple[int, int], float] = defaultdict(lambda: float("inf"))
    for event in events:
        key = event["pid"], event["args"]["epoch"]
        begins[key] = min(begins[key], event["ts"])
    calls: dict[int, list[Span]] = defaultdict(list)
    for event in events:
        rank, epoch = event["pid"], event["args"]["epoch"]
        begin = event["ts"] - begins[rank, epoch]
        calls[epoch].append(Span(event["name"], (rank, event["tid"]), begin, begin + event["dur"]))
    return [calls[epoch] for epoch in sorted(calls)]


def table(name: str, calls: list[list[Span]]) -> str:
    """A line per phase, of medians over the calls; kernels of one call follow each other."""
    kernels = len(calls) // CALLS
    lines = [heading(f"{name} | first begins, us | half have ended, us | last ends, us | of a warp's time, us | warps")]
    for kernel in range(kernels):
        same = calls[kernel::kernels]
        for phase in dict.fromkeys(span.phase for spans in same for span in sorted(spans, key=_begin)):
            columns = [_summary([span for span in spans if span.phase == phase]) for spans in same]
            cells = [statistics.median(column) for column in zip(*filter(None, columns), strict=True)]
            which = f"{kernel + 1}, {phase}" if kernels > 1 else phase
            lines.append(row(which, *(f"{cell:,.1f}" for cell in cells[:4]), f"{cells[4]:,.0f}"))
    return "\n".join(lines)


def _begin(span: Span) -> float:
    return span.begin


def _summary(spans: list[Span]) -> tuple[float, ...] | None:
    if not spans:
        return None
    total: dict[tuple[int, int], float] = defaultdict(float)
    last: dict[tuple[int, int], float] = defaultdict(float)
    for span in spans:
        total[span.track] += span.end - span.begin
        last[span.track] = max(last[span.track], span.end)
    return (
        min(span.begin for span in spans),
        statistics.median(last.values()),
        max(last.values()),
        statistics.mean(total.values()),
        len(total),
    )


def record(name: str, group: jax_ep.Group, op: Callable[..., Any], operands: tuple[Any, ...], own: Any) -> None:
    """Prints the table of an op."""
    (program,) = compile_loops([Loop(op, operands, own, CALLS)], group.mesh)
    jax.block_until_ready(program())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with jax_ep.profile(path):
            jax.block_until_ready(program())
        calls = read_calls(path)
    group.check()
    print(f"\n{table(name, calls)}", flush=True)


def record_moe(group: jax_ep.Group, case: Case, sms: str) -> None:
    ids = make_ids(case, group.size)
    room = capacity(case, load(ids, case.shape.experts, group.size))
    inputs = make_inputs(case.shape, ids, group.mesh)
    state = on_ranks(jax_ep_ops(group, case.shape.experts, room).dispatch, group.mesh)(*inputs)
    for one in moe.our_candidates(case.shape, room, group, inputs, state):
        record(f"{one.op}, {case}{sms}", group, one.loop.op, one.loop.operands, one.loop.own)


def record_sparse(group: jax_ep.Group, kind: str, shape: sparse.Shape) -> None:
    ids = sparse.draw_ids(kind, shape, group.size)
    needed = sparse.load(ids, shape.num_rows)
    flat_ids, values = sparse.place_entries(ids, shape.width, group.mesh)
    for sharded in (False, True):
        room = sparse.round_up(needed.largest_share if sharded else needed.union)
        ours = sparse.ours(group, shape.num_rows, room, sharded=sharded)
        record(f"{ours.name}, {kind} ids, {shape}", group, ours.run, (flat_ids,), values)


def record_products(group: jax_ep.Group, shape: collective_matmul.Shape) -> None:
    for name, op in collective_matmul.OPS.items():
        own, b, _, _ = collective_matmul.draw_operands(name, shape, group)
        ours = partial(collective_matmul.with_collective, op, group, "ffi")
        record(f"{name}, {shape}", group, ours, (b,), own)


def run(devices: np.ndarray, ops: Sequence[str]) -> None:
    on_cpu = devices[0].platform == "cpu"
    mesh = Mesh(devices, (AXIS,))
    with jax_ep.Group(mesh, AXIS) as group, jax_ep.Group(mesh, AXIS, max_sms=FEW_SMS) as few:
        if "moe" in ops:
            for shape in MOE_CPU_SHAPES if on_cpu else MOE_SHAPES:
                record_moe(group, Case(shape), "")
                if shape.tokens > moe.SMALL:
                    record_moe(few, Case(shape), f", {FEW_SMS} SMs")
        if "sparse" in ops:
            for kind in sparse.KINDS:
                record_sparse(group, kind, SPARSE_CPU_SHAPE if on_cpu else sparse.GPU_SHAPE)
    if "products" in ops:
        axis = collective_matmul.AXIS
        with jax_ep.Group(Mesh(devices, (axis,)), axis) as group:
            for product in collective_matmul.CPU_SHAPES if on_cpu else PRODUCTS:
                record_products(group, product)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep bench phases", description=__doc__)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    options = parser.parse_args(arguments)
    devices = np.array(jax.devices())
    print(header(list(devices), "'ffi'", ["phases", *arguments]))
    print(f"- medians over {CALLS} calls, of the first sender and the first receiver warp of each CTA", flush=True)
    run(devices, options.ops)
    return 0
