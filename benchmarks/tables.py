"""Tables in markdown."""

from typing import Any


def heading(columns: str) -> str:
    """`columns`: their names, between bars."""
    return f"| {columns} |\n|{'---|' * (columns.count('|') + 1)}"


def row(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"
