"""Which kernels ran on which streams of a GPU, and when, from a trace of `jax.profiler`.

`python -m benchmarks.stream_trace FOLDER PNG` draws what `python -m jax_ep bench overlap --trace` has recorded in the
folder of one program: two GPUs, as exchanges wait for each other.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

SHOWN = 0.01  # of the whole time: shorter kernels are counted, not shown
NAME = 56  # characters of a name that are shown
EXCHANGE = "jax_ep::kernel<"  # how kernels of ops on rows are called


class Kernel(NamedTuple):
    """Microseconds since the first kernel began."""

    stream: str
    name: str
    begin: float
    end: float


def record(program: Callable[[], Any], folder: Path) -> list[Kernel]:
    """The kernels of one execution, which another one precedes."""
    jax.block_until_ready(program())
    with jax.profiler.trace(str(folder)):
        jax.block_until_ready(program())
    return read(folder)


def read(folder: Path, gpus: int = 1) -> list[Kernel]:
    """The kernels of the last trace in a folder, in the order in which they began, as `kernels` finds them."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise SystemExit(f"no trace in {folder}")
    return kernels(ProfileData.from_file(str(files[-1])), gpus)


def kernels(data: Any, gpus: int = 1) -> list[Kernel]:
    """Those of the first GPUs, from a `ProfileData`. Where these are several, the names of streams say which."""
    planes = sorted((plane for plane in data.planes if plane.name.startswith("/device:GPU:")), key=lambda p: p.name)
    found = [
        Kernel(name, event.name, event.start_ns / 1e3, (event.start_ns + event.duration_ns) / 1e3)
        for number, plane in enumerate(planes[:gpus])
        for line in plane.lines
        if line.name.startswith("Stream")
        for name in [line.name if gpus == 1 else f"GPU {number}, {line.name.partition('(')[0]}"]
        for event in line.events
    ]
    first = min((kernel.begin for kernel in found), default=0.0)
    moved = (kernel._replace(begin=kernel.begin - first, end=kernel.end - first) for kernel in found)
    return sorted(moved, key=lambda kernel: kernel.begin)


def busy_times(shown: Sequence[Kernel], stream: str) -> tuple[float, float]:
    """How long kernels of a stream ran, and how much of that beside one of another stream."""
    own, others = (_merged(kernel for kernel in shown if (kernel.stream == stream) is mine) for mine in (True, False))
    together = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in own for b in others)
    return sum(end - begin for begin, end in own), together


def _merged(shown: Iterator[Kernel]) -> list[tuple[float, float]]:
    """The times in which at least one of them ran."""
    spans: list[tuple[float, float]] = []
    for kernel in sorted(shown, key=lambda kernel: kernel.begin):
        if spans and kernel.begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], kernel.end))
        else:
            spans.append((kernel.begin, kernel.end))
    return spans


def table(shown: Sequence[Kernel]) -> Iterator[str]:
    """Lines of markdown: the longer kernels, then all of each stream."""
    whole = max((kernel.end for kernel in shown), default=0.0)
    yield "| stream | kernel | start, us | end, us |"
    yield "|---|---|---|---|"
    for stream, name, begin, end in shown:
        if end - begin >= SHOWN * whole:
            yield f"| {stream} | `{name[:NAME]}` | {begin:,.1f} | {end:,.1f} |"
    yield ""
    for stream in sorted({kernel.stream for kernel in shown}):
        busy, together = busy_times(shown, stream)
        yield f"- {stream}: {busy:,.1f} us, {100 * together / busy:.0f} % of it beside another stream's kernels"


def draw(shown: Sequence[Kernel], title: str, path: Path) -> None:
    """Writes a PNG: a row a stream, exchanges in another colour."""
    from matplotlib.figure import Figure

    streams = sorted({kernel.stream for kernel in shown})
    figure = Figure(figsize=(12, 1.5 + 0.6 * len(streams)), layout="constrained")
    axes = figure.subplots()
    for exchange, name, colour in ((True, "our exchanges", "tab:orange"), (False, "other kernels", "tab:blue")):
        kept = [kernel for kernel in shown if (EXCHANGE in kernel.name) is exchange]
        for row, stream in enumerate(streams):
            spans = [(kernel.begin, kernel.end - kernel.begin) for kernel in kept if kernel.stream == stream]
            axes.broken_barh(spans, (row - 0.4, 0.8), color=colour, label=None if row else name, edgecolor="white")
    axes.set_yticks(range(len(streams)), streams)
    axes.invert_yaxis()
    axes.set(title=title, xlabel="us")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(read(Path(sys.argv[1]), gpus=2), Path(sys.argv[1]).name, Path(sys.argv[2]))
