"""`python -m jax_ep report DIR`: what the dumps in a folder say of each group, as one view of all its ranks.

The ranks of a group run the same ops in the same order, so the number of an op stands for the same op on every rank.
The first op that is not delivered on all ranks, or not the same on all, is where they diverged (PyTorch's flight
recorder analyzer compares collectives in the same way). Clocks of ranks differ, and are not compared.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from jax_ep.runtime.flight_recorder import NAMES, Call, Dump
from jax_ep.runtime.native import OpRecord

Rank = tuple[int, int]  # line, rank
Ops = dict[int, OpRecord]  # of a rank, by number


def report(folder: Path) -> str:
    """Where the ranks and processes of the dumps in a folder first differ, group by group. Other files are named, and
    what a terminal would not print is escaped.

    Raises:
      ValueError: there is no dump in the folder.
    """
    groups: dict[int, list[Dump]] = {}
    lines: list[str] = []
    for path in sorted(folder.glob(NAMES)):
        try:
            dump = Dump.read(path)
            groups.setdefault(dump.id, []).append(dump)
        except (ValueError, OSError, RecursionError) as error:
            lines.append(f"{path} is no dump: {type(error).__name__}: {error}")
    for dumps in groups.values():
        lines += _of_group(sorted(dumps, key=lambda dump: dump.time))
    text = "\n".join(map(printable, lines))
    if not groups:
        raise ValueError(f"no dumps ({NAMES}) in {printable(str(folder))}\n{text}".rstrip())
    return text


def printable(line: str) -> str:
    """The line, with what a terminal would not print escaped."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)


def _of_group(dumps: list[Dump]) -> Iterator[str]:
    latest = {(dump.host, dump.process): dump for dump in dumps}  # of each process
    latest = dict(sorted(latest.items(), key=lambda item: item[1].time))
    owners = {rank: process for process, dump in latest.items() for rank in _own_ranks(dump)}
    earlier = {process for process, dump in latest.items() if any(owners[x] != process for x in _own_ranks(dump))}
    ops: dict[Rank, Ops] = {}
    for dump in dumps:
        if (dump.host, dump.process) in earlier:
            continue
        for each in dump.ranks:
            known = ops.setdefault((each.line, each.rank), {})
            known.update((op.epoch, op) for op in each.ops)
    yield dumps[0].group
    for process, dump in latest.items():
        if process in earlier:
            yield f"  {_process_name(process)}: of an earlier run, left out"
            continue
        when, where = time.strftime("%H:%M:%S", time.localtime(dump.time)), _innermost_call(dump.stack)
        what = f"{dump.error}: {dump.message}" if dump.error else "dumped on request"
        yield f"  {_process_name(process)}, {_ranks(_own_ranks(dump))}, at {when}, main thread in {where}: {what}"
    sizes = {each.line: len(each.waited_ns) for dump in latest.values() for each in dump.ranks}
    ranks = [(line, rank) for line, size in sizes.items() for rank in range(size)]
    if missing := [rank for rank in ranks if owners.get(rank) in {None, *earlier}]:
        yield f"  no dump of the process of {_ranks(missing)}"
    yield from _divergence(ops)


def _divergence(ops: Mapping[Rank, Ops]) -> Iterator[str]:
    first = max((min(known) for known in ops.values() if known), default=1)  # the first that all have recorded
    first = min([first, *(max(known, default=0) + 1 for known in ops.values())])  # or that a rank has not begun
    for number in range(first, max((max(known, default=0) for known in ops.values()), default=0) + 1):
        ranks: dict[str, list[Rank]] = {}
        for rank, known in ops.items():
            ranks.setdefault(_state_of_op(known, number), []).append(rank)
        if len(ranks) > 1 or not next(iter(ranks)).endswith(", delivered"):
            yield f"  first divergence: op {number}"
            for state, of in sorted(ranks.items(), key=lambda item: ("not begun" not in item[0], len(item[1]))):
                yield f"    {_ranks(of)}: {state}"
            return
    yield "  no divergence: every recorded op was delivered, and was the same on all ranks"


def _state_of_op(known: Ops, number: int) -> str:
    if number in known:
        return f"{known[number].call}, {known[number].outcome}"
    last = max(known, default=0)
    if number < last:
        return f"no longer recorded; the last is op {last}"
    return "not begun" + (f"; the last is op {last}, {known[last].call}, {known[last].outcome}" if known else "")


def _own_ranks(dump: Dump) -> list[Rank]:
    """The ranks of the process itself."""
    return [(each.line, each.rank) for each in dump.ranks if not each.process]


def _ranks(ranks: Iterable[Rank]) -> str:
    by_line: dict[int, list[str]] = {}
    for line, rank in sorted(ranks):
        by_line.setdefault(line, []).append(str(rank))
    return "; ".join(f"line {line} rank {', '.join(its)}" for line, its in by_line.items())


def _process_name(process: tuple[str, int]) -> str:
    return f"process {process[1]} of {process[0]}"


def _innermost_call(stack: list[Call]) -> str:
    """The innermost call of code that is not installed."""
    own = [call for call in stack if "site-packages" not in call.file] or stack or [Call("?", 0, "?")]
    return f"{Path(own[-1].file).name}:{own[-1].line} ({own[-1].function})"
