"""What a benchmark prints: when, where and with what it measured, and tables in markdown; and how that is kept."""

import argparse
import contextlib
import datetime
import importlib.metadata
import io
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jax_ep

from .in_jit_loop import AXIS

_ROOT = Path(__file__).resolve().parents[1]
_ENVIRONMENT = ("XLA_FLAGS", "NCCL_NVLS_ENABLE")  # they change what is measured


def cpu_name() -> str:
    """The processor's own name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def header(devices: Sequence[Any], note: str, command: Sequence[str], packages: Sequence[str] = ()) -> str:
    """`note` says how jax_ep ran. Of `packages` those that are installed are named with their versions, too."""
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    names = ("jax", "jaxlib", "numpy", *(name for name in packages if name in installed))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    settings = [f"{name}={shlex.quote(os.environ[name])} " for name in _ENVIRONMENT if name in os.environ]
    return "\n".join(
        (
            f"- date: {datetime.date.today().isoformat()}",
            f"- hardware: {cpu_name()}, {os.cpu_count()} cores; {len(devices)} x {devices[0].device_kind} devices",
            f"- versions: jax_ep {jax_ep.__version__} ({note}), {versions}, python {platform.python_version()}",
            f"- command: `{''.join(settings)}{shlex.join(['python', '-m', 'jax_ep', 'bench', *command])}`",
        )
    )


@contextlib.contextmanager
def open_group(
    command: Sequence[str], note: str = "", devices: int | None = None, packages: Sequence[str] = ()
) -> Iterator[jax_ep.Group]:
    """Of all devices, or of so many; prints the header. Whatever made the group fail is raised at the end."""
    with jax_ep.Group(Mesh(np.array(jax.devices()[:devices]), (AXIS,)), AXIS) as group:
        note = note or repr(group._resolve("bench", "auto"))
        print(header(list(group.mesh.devices.flat), note, command, packages), flush=True)
        yield group
        group.check()


def heading(columns: str) -> str:
    """`columns`: their names, between bars."""
    return f"| {columns} |\n|{'---|' * (columns.count('|') + 1)}"


def row(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def command_line(
    name: str, description: str | None, quick: str = "", *, products: bool = False
) -> argparse.ArgumentParser:
    """With the options of many benchmarks. `quick`: what --quick leaves, of those that have shapes to choose from.

    `products`: a GPU that multiplies without rest runs at its power limit, below its highest clocks.
    """
    parser = argparse.ArgumentParser(prog=f"python -m jax_ep bench {name}", description=description)
    parser.add_argument("--repeats", type=int, default=5, help="timed loops of each [%(default)s]")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
        parser.add_argument("--shapes", default="", metavar="TEXT", help="only shapes whose name has TEXT")
    if products:
        rest = "rest before each timed loop, which is short then [%(default)g]"
        parser.add_argument("--pause", type=float, default=0, metavar="MS", help=rest)
    return parser


def select(cases: Iterable[Any], options: argparse.Namespace) -> list[Any]:
    """Those whose name has the text of --shapes; with --quick those that are quick."""
    chosen = [each for each in cases if options.shapes in str(each) and (each.quick or not options.quick)]
    if not chosen:
        raise SystemExit(f"--shapes: no name of a shape has {options.shapes!r}")
    return chosen


def parse(text: str) -> dict[str, Any]:
    """What a benchmark printed: the entries of its header, its notes, and its tables with the line before each."""
    entries = re.findall(r"^- (?:(date|hardware|versions|command): )?(.*)$", text, re.MULTILINE)
    found: dict[str, Any] = {name: value for name, value in entries if name}
    found["notes"] = [value for name, value in entries if not name]
    found["tables"] = []
    for title, table in re.findall(r"(?:^([^|\n]*)\n\n?)?((?:^\|.*\n)+)", text + "\n", re.MULTILINE):
        columns, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()]
        title = "" if title.startswith("- ") else title.strip("* ")
        found["tables"].append({"title": title, "columns": columns, "rows": rows})
    return found


def git(*arguments: str) -> str:
    """What git prints in the checkout that this file is in; nothing where there is none."""
    if not (_ROOT / ".git").exists():
        return ""
    command = ["git", "-C", str(_ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class _Tee(io.StringIO):
    def __init__(self, shown: Any):
        super().__init__()
        self._shown = shown

    def write(self, text: str, /) -> int:
        self._shown.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._shown.flush()


def run(what: str, main: Callable[[list[str]], int], arguments: Sequence[str]) -> int:
    """Runs a benchmark. With `--json [FILE]` it also writes what was printed as JSON, by default into a file named as
    those in benchmarks/results/. `--commit` names the sources where there is no git.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json", nargs="?", type=Path, const=Path())
    parser.add_argument("--commit", default="")
    options, rest = parser.parse_known_args(arguments)
    printed = _Tee(sys.stdout)
    with contextlib.redirect_stdout(printed):
        ended = main(rest)
    if options.json is None or ended:
        return ended
    changed = git("status", "--porcelain", "--untracked-files=no")
    result = {"commit": options.commit or git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")}
    result |= parse(printed.getvalue())
    devices = re.search(r"(\d+) x .*?\b([A-Z]+\d+\w*)", result["hardware"].rpartition(";")[2])
    where = f"{devices[2].lower()}x{devices[1]}" if devices else "cpu"
    path = options.json if options.json.name else Path(f"{result['date']}-{where}-{what.replace('_', '-')}.json")
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwrote {path}")
    return ended
