"""Kernels by the device's own events, which JAX's profiler collects: how long they take, and which run at one time."""

import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from .tables import heading, row

OURS = "jax_ep"  # in the names of our kernels
EXCHANGE = "jax_ep::kernel<"  # in those of ops on rows
SPANS = "GPU | kernels | from-to, us"  # the columns of timeline()
SHOWN = 0.002  # of the whole time: shorter gaps between two other kernels are not shown


def kernel_microseconds(execute: Callable[[], Any]) -> float | None:
    """Median duration, over all devices, of our kernels of one execution.

    None where the profiler sees none: on the CPU, or where device events cannot be collected.
    """
    durations = [
        event.duration_ns / 1e3
        for plane in _device_planes(execute)
        for line in plane.lines
        for event in line.events
        if OURS in event.name
    ]
    return statistics.median(durations) if durations else None


def timeline(execute: Callable[[], Any]) -> Iterator[str]:
    """Lines of a table: when exchanges ran in one execution, and when other kernels did, on each GPU."""
    yield heading(SPANS)
    yield from busy_spans(_device_planes(execute))


def busy_spans(planes: list[Any]) -> Iterator[str]:
    """The rows of the table, in us since the first kernel began."""
    gpus = sorted((plane for plane in planes if plane.name.startswith("/device:GPU:")), key=lambda plane: plane.name)
    events = {
        number: [event for line in plane.lines if line.name.startswith("Stream") for event in line.events]
        for number, plane in enumerate(gpus)
    }
    first = min((event.start_ns for each in events.values() for event in each), default=0)
    last = max((event.start_ns + event.duration_ns for each in events.values() for event in each), default=0)
    for number, each in events.items():
        for exchanges, name in ((True, "exchanges"), (False, "other kernels")):
            spans: list[tuple[float, float]] = []
            for event in sorted(each, key=lambda event: event.start_ns):
                begin, end = event.start_ns - first, event.start_ns + event.duration_ns - first
                if (EXCHANGE in event.name) is not exchanges:
                    continue
                if spans and not exchanges and begin - spans[-1][1] < SHOWN * (last - first):
                    begin, end = spans[-1][0], max(spans.pop()[1], end)
                spans.append((begin, end))
            yield row(number, name, " ".join(f"{begin / 1e3:.0f}-{end / 1e3:.0f}" for begin, end in spans))


def _device_planes(execute: Callable[[], Any]) -> list[Any]:
    """What the profiler has of each device in one execution."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(execute())
        traces = [ProfileData.from_file(str(path)) for path in Path(folder).rglob("*.xplane.pb")]
    return [plane for trace in traces for plane in trace.planes if plane.name.startswith("/device:")]
