"""Runs a benchmark: its command line, the ranks, loops in turns, and its rows as a table and as JSON.

A benchmark is a module with a `BENCH`. Its cases have names, and `rows` measures one of them.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jax_ep

from .in_jit_loop import AXIS, HEAT_SECONDS, MOST_BEFORE, Loop, Name, Program, compile_loops, take_turns

_ROOT = Path(__file__).resolve().parents[1]
_ENVIRONMENT = ("XLA_FLAGS", "NCCL_NVLS_ENABLE")  # they change what is measured
_PACKAGES = ("jax", "jaxlib", "numpy")

Row = dict[str, Any]  # its cells by their columns


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a benchmark."""

    options: argparse.Namespace
    mesh: Mesh
    opened: jax_ep.Group | None
    noted: list[str] = dataclasses.field(default_factory=list)  # while it measured

    @property
    def group(self) -> jax_ep.Group:
        assert self.opened is not None
        return self.opened

    @property
    def on_cpu(self) -> bool:
        return self.mesh.devices.flat[0].platform == "cpu"

    def time(self, loops: Mapping[Name, Loop], hot: bool = False, most: int = 1000) -> dict[Name, float]:
        """Microseconds per call of each loop, all in turns: medians of --repeats turns, or of `most`.

        `hot`: on a GPU, a loop runs for a while before the calls that count.
        """
        return self.turns(compile_loops(loops, self.mesh), hot, most)

    def turns(self, programs: Mapping[Name, Program], hot: bool = False, most: int = 1000) -> dict[Name, float]:
        """As `time`, of compiled loops."""
        hot, loops = hot and not self.on_cpu, min(self.options.repeats, most)
        times = take_turns(programs, loops, hot)
        how = f"us: per call inside one jitted loop, all in turns, median of {loops} loops"
        if hot:
            how += f"; hot: after {HEAT_SECONDS:g} s of the same, or as much of it as {MOST_BEFORE} loops take"
        self.note(how)
        if self.opened is not None:
            self.opened.check()
        return times

    def note(self, text: str) -> None:
        """For the end of the table, once."""
        if text not in self.noted:
            self.noted.append(text)
            log(text)


def open_all(options: argparse.Namespace) -> jax_ep.Group:
    """Of all devices, or of as many as --devices says."""
    devices = jax.devices()[: getattr(options, "devices", None)]
    return jax_ep.Group(Mesh(np.array(devices), (AXIS,)), AXIS)


@dataclasses.dataclass(frozen=True)
class Bench:
    about: str | None  # for --help
    cases: Callable[[Run], Iterable[Any]]
    rows: Callable[[Any, Run], Iterator[Row]]  # of a case
    notes: Callable[[Run], Iterable[str]] = lambda run: ()
    arguments: Callable[[argparse.ArgumentParser], Any] = lambda parser: None
    quick: str = ""  # what --quick leaves of the cases, which then have an attribute `quick`
    repeats: int = 5
    open: Callable[[argparse.Namespace], jax_ep.Group | None] = open_all  # None: one device, no group
    packages: tuple[str, ...] = ()  # whose versions count, where they are installed


def main(what: str, bench: Bench, arguments: Sequence[str]) -> int:
    """In several processes the first prints and writes."""
    parser = command_line(what, bench)
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    with bench.open(options) or contextlib.nullcontext() as group:
        first = jax.process_index() == 0  # which starts the backend, so `open` comes before
        if first and options.json is not None:
            path = options.json.absolute()
            if (options.json.name and path.is_dir()) or not os.access(path if path.exists() else path.parent, os.W_OK):
                parser.error(f"--json must be a file that can be written, got {options.json}")
        show: Callable[..., None] = print if first else lambda *_, **__: None
        mesh = group.mesh if group is not None else Mesh(np.array(jax.devices()[:1]), ("one",))
        run, kept = Run(options, mesh, group), []
        how = "one device" if group is None else repr(group._resolve("bench", "auto", serves_nodes=True))
        result = provenance(list(mesh.devices.flat), ["bench", what, *arguments], how, bench.packages)
        lines = [f"{name}: {value}" for name, value in result.items() if name != "commit"]
        result["notes"] = list(bench.notes(run))
        show(*(f"- {line}" for line in lines + result["notes"]), sep="\n", flush=True)
        for case in chosen(bench, run):
            for cells in bench.rows(case, run):
                if not kept:
                    result["columns"] = list(cells)
                    show(f"\n{line_of(cells)}\n|{'---|' * len(cells)}")
                kept.append([str(cell) for cell in cells.values()])
                show(line_of(kept[-1]), flush=True)
    for line in run.noted:
        show("-", line)
    result["notes"] += run.noted
    if first and options.json is not None:
        if options.commit:
            result["commit"] = options.commit
        name = f"{machine(result['hardware'])}-{what.replace('_', '-')}.json"
        path = options.json if options.json.name else Path(name)
        path.write_text(dumps(result | {"rows": kept}))
        print(f"\nwrote {path}")
    return 0


def command_line(what: str, bench: Bench) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m jax_ep bench {what}",
        description=bench.about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=bench.repeats, help="turns, each a timed loop [%(default)s]")
    parser.add_argument("--json", nargs="?", type=Path, const=Path(), help="write a file for benchmarks/results/")
    parser.add_argument("--commit", help="of the sources, where there is no git")
    if bench.quick:
        parser.add_argument("--quick", action="store_true", help=bench.quick)
        parser.add_argument("--shapes", default="", metavar="TEXT", help="only shapes whose name has TEXT")
    bench.arguments(parser)
    return parser


def chosen(bench: Bench, run: Run) -> list[Any]:
    """The cases whose name has the text of --shapes; with --quick those that are quick."""
    cases, options = list(bench.cases(run)), run.options
    if not bench.quick:
        return cases
    found = [case for case in cases if options.shapes in str(case) and (case.quick or not options.quick)]
    if not found:
        raise SystemExit(f"--shapes: no name of a shape has {options.shapes!r}")
    return found


def line_of(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def dumps(result: Mapping[str, Any]) -> str:
    """JSON with an entry a line, and a row a line."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in result.items() if name != "rows"]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in result["rows"])
    return "{\n" + ",\n".join([*lines, f' "rows": [\n{rows}\n ]']) + "\n}\n"


def provenance(
    devices: Sequence[Any], command: Sequence[str], how: str, packages: Sequence[str] = ()
) -> dict[str, Any]:
    """When, where and with what. `how`: jax_ep's implementation."""
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    names = (*_PACKAGES, *(name for name in packages if name in installed))
    versions = [f"jax_ep {jax_ep.__version__} ({how})"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in names]
    versions.append(f"python {platform.python_version()}")
    settings = [f"{name}={shlex.quote(os.environ[name])} " for name in _ENVIRONMENT if name in os.environ]
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": git("rev-parse", "--short=10", "HEAD") + ("+" if changed else ""),
        "date": datetime.date.today().isoformat(),
        "hardware": f"{cpu_name()}, {os.cpu_count()} cores; {len(devices)} x {devices[0].device_kind} devices",
        "versions": ", ".join(versions),
        "command": f"`{''.join(settings)}{shlex.join(['python', '-m', 'jax_ep', *command])}`",
    }


def machine(hardware: str) -> str:
    """As names of results have it: h200x2, or cpu."""
    devices = re.search(r"(\d+) x .*?\b([A-Z]+\d+\w*)", hardware.rpartition(";")[2])
    return f"{devices[2].lower()}x{devices[1]}" if devices else "cpu"


def cpu_name() -> str:
    """The processor's own name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def git(*arguments: str) -> str:
    """What git prints in the checkout that this file is in; nothing where there is none."""
    if not (_ROOT / ".git").exists():
        return ""
    try:
        return subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def log(text: str) -> None:
    """Progress, beside the table."""
    print(text, file=sys.stderr, flush=True)
