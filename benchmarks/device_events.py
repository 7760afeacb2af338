"""How long kernels take by the device's own events, which JAX's profiler collects."""

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

OURS = "jax_ep"  # in the names of our kernels


def kernel_microseconds(execute: Callable[[], Any]) -> float | None:
    """Median duration, over all devices, of our kernels of one execution.

    None where the profiler sees none: on the CPU, or where device events cannot be collected.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(execute())
        traces = [ProfileData.from_file(str(path)) for path in Path(folder).rglob("*.xplane.pb")]
    durations = [
        event.duration_ns / 1e3
        for trace in traces
        for plane in trace.planes
        if plane.name.startswith("/device:")
        for line in plane.lines
        for event in line.events
        if OURS in event.name
    ]
    return statistics.median(durations) if durations else None
