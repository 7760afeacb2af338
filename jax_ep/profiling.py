"""`with jax_ep.profile("trace.json"):` a timeline of what every CTA of every rank does inside the ops."""

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import jax

from jax_ep._kit.ffi import Ranks
from jax_ep.runtime.native import ROLES, NativeGroup, RankProfile, Span, stop_profile

_lock = threading.RLock()
_groups: weakref.WeakKeyDictionary[Ranks, NativeGroup] = weakref.WeakKeyDictionary()  # open, with kernels
_profile: "_Profile | None" = None


@contextlib.contextmanager
def profile(path: str | Path) -> Iterator[None]:
    """Writes when each CTA enters and leaves each phase of each op, on all ranks, as a Chrome trace.

    Open the file in https://ui.perfetto.dev or chrome://tracing. A process of the trace is a rank (pid: the rank, for
    the first line of the first group; further lines and groups follow), a thread is the first sender warp of a CTA
    (tid: 3 * cta), its first receiver warp (3 * cta + 1) or its first multiplying warp (3 * cta + 2), and one thread
    stands for a rank of the CPU. A slice is an op, or in it a phase: "arrive", on the CPU, until all ranks of the
    process have called the op; "count" ids, "post" counts and addresses to the peers, "wait" for a peer, "layout" of
    rows, "place" (the row of every assignment), "barrier" among the CTAs of a rank, "send" rows, "pad" segments with
    zeros, "expand" rows that arrived, "reduce" them to sums, "give up" after a failure. Every slice has `args`: the
    `op` and its `epoch`, the number of the op on that rank. Times are microseconds of the host's monotonic clock.
    `python -m jax_ep report trace.json` prints the time of every rank, op and phase, and who waited for whom.

    On Hopper GPUs the grouped products of our kernels have slices, too, named after the matrix of a group: "product
    2048 x 1536". Each "multiply" in it is a tile of that warp, from the end of its tile before. The `epoch` counts the
    products of the profile. If several groups share a device, the first of them shows the products. Products of XLA
    and Pallas have no slices, so the CPU has none.

    Covers all groups that are open or are opened inside, also under `jax.jit` and in replayed CUDA graphs, but no ops
    with implementation="xla", and no group that only a compiled program held when the profile began. A rank keeps its
    last 4096 to 32768 phases a CTA; the rank's label in the trace says if earlier ones were lost. Costs nothing when
    off.

    Await results inside the block (`jax.block_until_ready`): profile awaits nothing, and ops that still run when it
    ends are cut off, as the label says. Where JAX runs in several processes, each writes its own ranks: process 1
    writes `trace.1.json`.

    Args:
      path: the file to write; overwritten if there is one.

    Raises:
      RuntimeError: another profile is under way.
      OSError: the file cannot be written.
      TypeError: this is no path.
    """
    global _profile
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"profile: path must be a str or a path, got {type(path).__name__}")
    with contextlib.ExitStack() as at_end:
        with _lock:
            if _profile is not None:
                raise RuntimeError(f"profile: already writing to {str(_profile.path)!r}; profiles do not nest")
            current = _Profile(Path(path))
            file = at_end.enter_context(_open_trace(current.path))
            at_end.callback(_write, file, current)
            at_end.callback(_end, current)
            _profile = current
            for group, native in _groups.items():
                current.start(group, native)
        yield


class _Profile:
    def __init__(self, path: Path):
        self.path = path
        self.groups: dict[Ranks, NativeGroup] = {}  # profiled now; kept alive until they are read
        self.ranks: list[tuple[Ranks, list[RankProfile]]] = []

    def start(self, group: Ranks, native: NativeGroup) -> None:
        native.start_profile()
        self.groups[group] = native

    def stop(self, group: Ranks) -> None:
        self.ranks.append((group, stop_profile(self.groups.pop(group))))


def group_opened(group: Ranks, native: NativeGroup) -> None:
    with _lock:
        _groups[group] = native
        if _profile is not None:
            _profile.start(group, native)


def group_closing(group: Ranks) -> None:
    with _lock:
        _groups.pop(group, None)
        if _profile is not None and group in _profile.groups:
            _profile.stop(group)


def _end(current: _Profile) -> None:
    global _profile
    with _lock:
        _profile = None
        for group in list(current.groups):
            current.stop(group)


def _open_trace(path: Path) -> IO[str]:
    if jax.process_count() > 1:
        path = path.with_suffix(f".{jax.process_index()}{path.suffix}")
    try:
        return path.open("w")
    except OSError as error:
        raise OSError(f"profile: path must be a file that can be written, got {str(path)!r}: {error}") from error


def _write(file: IO[str], current: _Profile) -> None:
    file.write('{"displayTimeUnit": "ns", "traceEvents": [')
    for number, event in enumerate(_events(current)):  # too many for one text
        file.write(("," if number else "") + "\n" + json.dumps(event))
    file.write("\n]}\n")


def _events(current: _Profile) -> Iterator[Mapping[str, object]]:
    first_pid = 0
    for group, ranks in sorted(current.ranks, key=lambda each: each[0].id):
        for rank in ranks:
            pid = first_pid + rank.line * group.size + rank.rank
            yield from _names(group, rank, pid)
            yield from _slices(rank.spans, pid)
        first_pid += len(ranks)


def _names(group: Ranks, rank: RankProfile, pid: int) -> Iterator[Mapping[str, object]]:
    def metadata(what: str, tid: int = 0, **args: str | int) -> Mapping[str, object]:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}

    line = f", line {rank.line}" if group.mesh.size > group.size else ""
    of = {"line": f"{group.axis_name!r}{line}, group {group.id:x}", "rank": rank.rank}  # for trace_report.py
    yield metadata("process_name", name=f"rank {rank.rank} of {group.axis_name!r}{line}", **of)
    yield metadata("process_sort_index", sort_index=pid)
    notes = []
    if rank.lost:
        notes.append(f"{rank.lost} earlier phases lost: the profile was too long")
    if rank.unfinished:
        notes.append(f"{rank.unfinished} rows end inside an op: its results were not awaited")
    if notes:
        yield metadata("process_labels", labels="; ".join(notes))
    for tid in sorted({_tid(span) for span in rank.spans}):
        cta, role = divmod(tid, len(ROLES))
        yield metadata(
            "thread_name", tid=tid, name="thread" if group.platform == "cpu" else f"CTA {cta}, {ROLES[role]}"
        )
        yield metadata("thread_sort_index", tid=tid, sort_index=tid)


def _slices(spans: list[Span], pid: int) -> Iterator[Mapping[str, object]]:
    """A slice per op of a thread, before the slices of its phases: the outer of two that begin together comes first."""
    ops = _ops_of_threads(spans)
    numbers = _number_products(phases for phases in ops if phases[0].is_product)
    for phases in ops:
        first = phases[0]
        number = numbers[_tid(first), first.begin_ns] if first.is_product else first.epoch
        same = {"ph": "X", "pid": pid, "tid": _tid(first), "args": {"op": first.op, "epoch": number}}
        category = "product" if first.is_product else "op"
        yield same | {"name": first.op, "cat": category} | _times(first.begin_ns, phases[-1].end_ns)
        for span in phases:
            yield same | {"name": span.phase, "cat": "phase"} | _times(span.begin_ns, span.end_ns)


def _tid(span: Span) -> int:
    return len(ROLES) * span.cta + span.role


def _ops_of_threads(spans: list[Span]) -> list[list[Span]]:
    """The phases of each op of each thread. They follow each other without a gap."""
    ops: list[list[Span]] = []
    for span in spans:
        last = ops[-1][-1] if ops else None
        if last and (_tid(last), last.epoch, last.end_ns) == (_tid(span), span.epoch, span.begin_ns):
            ops[-1].append(span)
        else:
            ops.append([span])
    return ops


def _number_products(of_threads: Iterable[list[Span]]) -> dict[tuple[int, int], int]:
    """The number of the product in each thread, by tid and begin. A device runs one product after the other, so threads
    that multiply at one time work on one product."""
    numbers: dict[tuple[int, int], int] = {}
    number, end_ns = 0, -1
    for phases in sorted(of_threads, key=lambda phases: phases[0].begin_ns):
        number += phases[0].begin_ns >= end_ns
        end_ns = max(end_ns, phases[-1].end_ns)
        numbers[_tid(phases[0]), phases[0].begin_ns] = number
    return numbers


def _times(begin_ns: int, end_ns: int) -> dict[str, float]:
    return {"ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000}
