"""Fills the tables of docs/performance.md from benchmarks/results/, and says which files are old.

In a table with a column "GPUs" the columns before it name a row of a result, and those behind it are figures. All have
the names that they have in the result. The newest file of these GPUs that holds the row is copied from, and named last.
To show another row, write its names into the page and run `python -m jax_ep bench report --write`.
"""

import argparse
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import pictures
from .provenance import git, parse

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results")
PAGE = ROOT / "docs" / "performance.md"
GPUS, FILE = "GPUs", "file"
OLD_NAME = ("fp8", "float8")  # files and pages may have the first, new results have the second

# What a result depends on, by the name of its benchmark; the first that begins so counts.
_LAUNCHES = [":(glob)ffi/kernels/*", "ffi/runtime/gpu", "jax_ep/_kit"]
_EXCHANGES = [*_LAUNCHES, "ffi/comm", "ffi/rows"]
_ROWS = [*_EXCHANGES, "ffi/kernels/moe", "jax_ep/ops/moe"]
_PRODUCTS = [*_LAUNCHES, "ffi/gemm", "ffi/kernels/collective_matmul"]
_PRODUCTS += ["ffi/kernels/grouped_matmul", "ffi/runtime/cuda", "jax_ep/ops/matmul", "pallas_kernels"]
SOURCES = {
    "moe": _ROWS,
    "deep-ep": _ROWS,
    "layer": _ROWS + _PRODUCTS,
    "peers": _ROWS + _PRODUCTS,
    "ragged": [*_EXCHANGES, "ffi/kernels/ragged", "jax_ep/ops/ragged"],
    "sparse": [*_EXCHANGES, "ffi/kernels/sparse", "jax_ep/ops/sparse"],
    "matmul": _PRODUCTS,
    "gemm-bench": _PRODUCTS,
}


class Result:
    """A file of what a benchmark measured: JSON, or the text that was printed before there was any."""

    def __init__(self, path: Path):
        self.path = path
        self.date, self.name = path.stem[:10], path.stem[11:]  # 2026-11-25, h200x2-layer
        text = path.read_text().replace(*OLD_NAME)
        self.content: dict[str, Any] = json.loads(text) if path.suffix == ".json" else parse(text)

    def figures(self, names: dict[str, str], headings: Sequence[str], title: str = "") -> list[str] | None:
        """Of the last row with these names by column, in a table with these headings, with this title if one is."""
        found: list[tuple[bool, list[str]]] = []
        wanted = [name.replace(*OLD_NAME) for name in names.values()]
        for table in self.content["tables"]:
            columns = table["columns"]
            if columns[: len(names)] == list(names) and set(headings) <= set(columns):
                at = [columns.index(heading) for heading in headings]
                rows = [row for row in table["rows"] if row[: len(names)] == wanted]
                found += [(table["title"] == title, [row[i] for i in at]) for row in rows]
        return sorted(found, key=lambda each: each[0])[-1][1] if found else None

    def change_since(self) -> str:
        """The last change of the sources, unless the result is of it or of a later day."""
        benchmark = self.name.partition("-")[2]
        sources = next((SOURCES[each] for each in SOURCES if benchmark.startswith(each)), ["ffi", "jax_ep"])
        commit = self.content.get("commit", "").rstrip("+")
        of_this = [f"{commit}..HEAD"] if commit and git("cat-file", "-t", commit) else ["HEAD"]
        change = git("log", "-1", "--format=%cs %h %s", *of_this, "--", *sources)
        return change if of_this[-1] != "HEAD" or change[:10] > self.date else ""


@functools.cache
def results() -> list[Result]:
    """Newest first."""
    paths = [path for path in RESULTS.iterdir() if re.match(r"\d{4}-\d\d-\d\d-", path.name)]
    return [Result(path) for path in sorted(paths, key=lambda path: path.name, reverse=True)]


def find(gpus: str, names: dict[str, str], headings: Sequence[str], title: str = "") -> tuple[Result, list[str]]:
    """`gpus`: "2 H200", and words that the file's name has."""
    number, kind, *words = gpus.lower().split()
    for result in results():
        if result.name.startswith(f"{kind}x{number}-") and all(word in result.name for word in words):
            figures = result.figures(names, headings, title)
            if figures:
                return result, figures
    raise LookupError(f"no result of {gpus} has {' | '.join(headings)} of {' | '.join(names.values())}")


def filled(page: str) -> tuple[str, list[Result]]:
    """The page with the newest figures, and the results that they are from."""
    used: dict[Path, Result] = {}

    def fill(match: re.Match[str]) -> str:
        lines = match[2].splitlines()
        columns, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
        if GPUS not in columns:
            return match[0]
        at = columns.index(GPUS)
        for i, row in enumerate(rows):
            names = dict(zip(columns[:at], row[:at], strict=True))
            result, figures = find(row[at], names, columns[at + 1 : -1], match[1].strip())
            used[result.path] = result
            lines[i + 2] = f"| {' | '.join([*row[: at + 1], *figures, f'`{result.path.name}`'])} |"
        return match[1] + "\n".join(lines) + "\n"

    return re.sub(r"((?:^[^|\n]*\n\n?)?)((?:^\|.*\n)+)", fill, page, flags=re.MULTILINE), list(used.values())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep bench report", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the page and its pictures")
    options = parser.parse_args(arguments)
    if not PAGE.exists():
        parser.error(f"needs a checkout: there is no {PAGE}")
    page, used = filled(PAGE.read_text())
    if options.write:
        PAGE.write_text(page)
        pictures.write(find)
    else:
        print("\n\n".join(re.findall(rf"(?:^\|.*\| {FILE} \|\n)(?:^\|.*\n)+", page, re.MULTILINE)))
    print(f"\n{len(used)} files. Measured before the last change of their sources:")
    for result in used:
        if change := result.change_since():
            print(f"- {result.path.name}: {change}")
    return 0
