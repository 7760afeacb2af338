"""`python -m jax_ep report trace.json`: where the time of a `jax_ep.profile` went, and who waited for whom.

Threads of an op differ in what they do, so a phase counts as the mean over the threads of the rank. The rank that
waited least in an op is taken to be the one that the others waited for: it came last, or was slow inside the op.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_ep.runtime.report import printable

_WAITS = ("arrive", "wait")  # the phases in which a rank waits for others
_LONGEST = 5  # waits that are listed


class _OpOfRank(NamedTuple):
    """An op on one rank. Times are microseconds."""

    begin: float
    end: float
    phases: dict[str, float]  # of the mean thread

    @property
    def waited(self) -> float:
        return sum(self.phases.get(phase, 0.0) for phase in _WAITS)


class _Op(NamedTuple):
    number: int
    name: str
    is_product: bool = False


_Line = dict[int, dict[_Op, _OpOfRank]]  # the ops of each rank, of ranks that exchange with each other


def report(paths: Sequence[Path]) -> str:
    """The tables of traces that `jax_ep.profile` has written, one from each process.

    Raises:
      OSError: a file cannot be read.
      ValueError: a file is no such trace.
    """
    lines: dict[str, _Line] = {}
    notes: list[str] = []
    for path in paths:
        try:
            _read(json.loads(path.read_text()), lines, notes)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(printable(f"{path} is no trace of jax_ep.profile: {what}")) from error
    text = [each for name, line in lines.items() for each in _of_line(name, line)]
    if not any(ops for line in lines.values() for ops in line.values()):
        text = ["no op has ended in this profile"]
    return "\n".join(map(printable, [*notes, *text]))


def _read(trace: Any, lines: dict[str, _Line], notes: list[str]) -> None:
    events, ranks = trace["traceEvents"], dict[int, dict[_Op, _OpOfRank]]()
    threads: dict[tuple[int, _Op], list[Any]] = defaultdict(list)
    phases: dict[tuple[int, int, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            line = lines.setdefault(str(event["args"]["line"]), {})
            ranks[event["pid"]] = line.setdefault(int(event["args"]["rank"]), {})
        if event["ph"] == "M" and event["name"] == "process_labels":
            notes.append(f"process {event['pid']} of the trace: {event['args']['labels']}")
        if event["ph"] == "X":
            pid, number, op = event["pid"], int(event["args"]["epoch"]), str(event["args"]["op"])
            if event["cat"] == "phase":
                phases[pid, number, op][str(event["name"])] += float(event["dur"])
            else:
                threads[pid, _Op(number, op, event["cat"] == "product")].append(event)
    for (pid, op), slices in threads.items():
        mean = {phase: time / len(slices) for phase, time in phases[pid, op.number, op.name].items()}
        begin, end = min(float(each["ts"]) for each in slices), max(each["ts"] + each["dur"] for each in slices)
        ranks[pid][op] = _OpOfRank(begin, end, mean)


def _of_line(name: str, line: _Line) -> Iterator[str]:
    yield name
    for op in dict.fromkeys(op.name for ops in line.values() for op in ops):
        yield from _times(op, {rank: [each for of, each in ops.items() if of.name == op] for rank, ops in line.items()})
    if len(line) > 1:
        yield from _waits(line)


def _times(op: str, of_ranks: dict[int, list[_OpOfRank]]) -> Iterator[str]:
    phases = list(dict.fromkeys(phase for ops in of_ranks.values() for each in ops for phase in each.phases))
    yield f"  {op}, mean us"
    table = [
        [str(rank), str(len(ops)), *(_mean(ops, phase) for phase in ("", *phases))] for rank, ops in of_ranks.items()
    ]
    yield from _table(["rank", "times", "op", *phases], table)


def _mean(ops: list[_OpOfRank], phase: str) -> str:
    """Of a phase, or of the whole ops."""
    each = [op.phases.get(phase, 0.0) if phase else op.end - op.begin for op in ops]
    return f"{statistics.fmean(each):.1f}" if each else "-"


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        yield "    " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))


class _Wait(NamedTuple):
    """An op, and the rank that the others are taken to have waited for."""

    op: _Op
    rank: int
    own: _OpOfRank | None  # None if the profile has no such op of the rank
    others: dict[int, _OpOfRank]

    def waited(self, other: int) -> float:
        """How long another rank waited, without what `rank` waited as well."""
        return self.others[other].waited - (self.own.waited if self.own else 0.0)

    @property
    def longest(self) -> float:
        return max(map(self.waited, self.others))

    def why(self) -> str:
        if self.own is None:
            return "it has no such op in this profile"
        first = min(self.others, key=lambda other: self.others[other].begin)
        late = max(self.own.begin - self.others[first].begin, 0.0)
        excess = {phase: time - self._usual(phase) for phase, time in self.own.phases.items() if phase not in _WAITS}
        phase = max(excess, key=lambda phase: excess[phase], default="")
        if not phase or late >= excess[phase]:
            return f"it came {late:.1f} us after rank {first}"
        return f"its {phase} took {self.own.phases[phase]:.1f} us, that of the others {self._usual(phase):.1f}"

    def _usual(self, phase: str) -> float:
        return statistics.median(op.phases.get(phase, 0.0) for op in self.others.values())


def _waits(line: _Line) -> Iterator[str]:
    waits = list(_find_waits(line))
    total: dict[tuple[int, int], float] = defaultdict(float)
    for wait in waits:
        for rank in wait.others:
            total[rank, wait.rank] += wait.waited(rank)
    yield "  who waited for whom, us in all"
    head = ["rank", *(f"for {rank}" for rank in line)]
    yield from _table(head, [[str(a), *("-" if a == b else f"{total[a, b]:.1f}" for b in line)] for a in line])
    yield "  longest waits"
    for wait in sorted(waits, key=lambda wait: -wait.longest)[:_LONGEST]:
        yield f"    {wait.op.name} {wait.op.number}: {wait.longest:.1f} us for rank {wait.rank}; {wait.why()}"


def _find_waits(line: _Line) -> Iterator[_Wait]:
    """An op that no rank has waited in is left out, and so is one that a rank has lost from its ring."""
    for op in sorted({op for ops in line.values() for op in ops if not op.is_product}):
        ops = {rank: known[op] for rank, known in line.items() if op in known}
        absent = [rank for rank in line if rank not in ops]
        if any(known.number > op.number and not known.is_product for rank in absent for known in line[rank]):
            continue
        rank = absent[0] if absent else min(ops, key=lambda rank: (ops[rank].waited, -ops[rank].begin))
        own = ops.pop(rank, None)
        if ops and any(each.waited for each in ops.values()):
            yield _Wait(op, rank, own, ops)
