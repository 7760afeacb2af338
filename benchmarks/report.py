"""Fills the tables of docs/performance.md, and its pictures, from benchmarks/results/, and says how old these are.

In a table with a column "GPUs" the columns before it name a row of a result, and those behind it are figures. All have
the names that they have in the result. "2 H200 float8": a result on two H200, whose file's name has "float8". To show
another row, write its names into the page and run `python -m jax_ep bench report --write`.
"""

import argparse
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import pictures
from .runner import git

RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
GPUS = "GPUs"


@functools.cache
def results() -> dict[str, dict[str, Any]]:
    """By the names of their files, newest first."""
    paths = sorted(RESULTS.glob("*x*-*.json"), key=lambda path: len(path.name))  # first those without a word of options
    found = {path.stem: json.loads(path.read_text()) for path in paths}
    return dict(sorted(found.items(), key=lambda each: each[1]["date"], reverse=True))


def find(gpus: str, names: dict[str, str], headings: Sequence[str]) -> list[str]:
    """The figures under these headings, in the row with these names, of the newest result that has it."""
    number, kind, *words = gpus.lower().split()
    for file, result in results().items():
        columns = result["columns"]
        if not file.startswith(f"{kind}x{number}-") or not all(word in file for word in words):
            continue
        if {*names, *headings} <= {*columns}:
            for cells in result["rows"]:
                row = dict(zip(columns, cells, strict=True))
                if names.items() <= row.items():
                    return [row[heading] for heading in headings]
    raise LookupError(f"no result of {gpus} has {' | '.join(headings)} of {' | '.join(names.values())}")


def filled(page: str) -> str:
    """The page with the newest figures."""

    def fill(match: re.Match[str]) -> str:
        lines = match[0].splitlines()
        columns, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
        if GPUS not in columns:
            return match[0]
        at = columns.index(GPUS)
        for i, row in enumerate(rows):
            figures = find(row[at], dict(zip(columns[:at], row[:at], strict=True)), columns[at + 1 :])
            lines[i + 2] = f"| {' | '.join([*row[: at + 1], *figures])} |"
        return "\n".join(lines) + "\n"

    return re.sub(r"(?:^\|.*\n)+", fill, page, flags=re.MULTILINE)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep bench report", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the page and its pictures")
    options = parser.parse_args(arguments)
    if not PAGE.exists():
        parser.error(f"needs a checkout: there is no {PAGE}")
    if options.write:
        PAGE.write_text(filled(PAGE.read_text()))
        pictures.write(find)
    for file, result in results().items():
        commit = result["commit"].rstrip("+")
        since = git("rev-list", "--count", f"{commit}..HEAD", "--", "ffi", "jax_ep", "pallas_kernels") if commit else ""
        print(f"{file}: {result['date']}, commit {commit}, {since or '?'} commits to sources since")
    return 0
