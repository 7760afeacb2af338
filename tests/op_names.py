"""The table of docs/adding-an-op.md: the names of each op in Python, in FFI calls and in C++.

python -m tests.op_names writes it, from the specs in the library for CPUs.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from jax_ep._kit import ffi

PAGE = Path(__file__).resolve().parents[1] / "docs" / "adding-an-op.md"
SECTION = re.compile(r"(?<=<!-- python -m tests\.op_names writes this table -->\n\n)(\|.*\n)*")

# What users write where a spec has another name, or another value.
PUBLIC: dict[str, dict[str, str]] = {
    "dispatch": {"token_weights": "weights", "wire": "wire, None if plain", "drop": "on_overflow"},
    "combine": {"rows": "expert_outputs"},
    "sparse_union": {"ids": "rows.indices"},
    "sparse_reduce": {"values": "rows.values", "scale": "op", "by_count": "op", "drop": "on_overflow"},
    "matmul_reduce": {"dtype": "preferred_element_type"},
    "all_gather_matmul": {"dtype": "preferred_element_type"},
    "grouped_matmul": {"dtype": "preferred_element_type", "indices": "lhs_indices"},
}


def row(target: str, op: ffi.OpNames) -> str:
    cells = [
        [target, *(each for each in op.ops if each != target)],
        [op.arguments],
        [name if label in ("", name) else f"{name} ({label})" for name, label in op.settings.items()],
        op.operands,
        op.results,
        [f"{name}: {public}" for name, public in PUBLIC.get(target, {}).items()],
    ]
    return f"| {' | '.join(', '.join(cell) for cell in cells)} |\n"


def section(names: Mapping[str, ffi.OpNames]) -> str:
    head = "| FFI target, op in errors | C++ | settings (in errors) | operands | results | in public functions |\n"
    return head + "|---|---|---|---|---|---|\n" + "".join(row(*each) for each in names.items())


if __name__ == "__main__":
    PAGE.write_text(SECTION.sub(section(ffi.op_names("cpu")), PAGE.read_text()))
