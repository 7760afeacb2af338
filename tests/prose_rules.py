"""Rules of the house for comments, docstrings and pages: see test_house.py."""

import re
from collections.abc import Callable
from pathlib import Path

# At the beginning of a comment, a docstring or a line of a page, or behind another sentence.
HARD_BEGINNING = re.compile(
    r"(?:^[ \t]*(?://+|#+|[-*|]|\"\"\")?[ \t]*|(?<![.\d])[.:!?][ \t]+)((?:Of|The same) [a-z]\w*)", re.MULTILINE
)


def sentences_begin_with_their_subject(root: Path) -> list[str]:
    """Not with "Of ...", nor with "The same ...", which say late, or not at all, what they are about."""
    paths = [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").rglob("*.md"))]
    for folder in ("jax_ep", "ffi", "examples", "benchmarks"):
        paths += [path for path in sorted((root / folder).rglob("*")) if path.suffix in {".py", ".h", ".cc", ".cu"}]
    return [
        f"{path.relative_to(root)}: {found} ..."
        for path in paths
        if path.is_file()
        for found in HARD_BEGINNING.findall(path.read_text())
    ]


BROKEN: list[tuple[Callable[[Path], list[str]], str, str]] = [
    (sentences_begin_with_their_subject, "ffi/kernels/a.h", "// Of few tokens: every rank tells all."),
    (sentences_begin_with_their_subject, "jax_ep/a.py", '"""It moves rows. The same rows go back."""'),
    (sentences_begin_with_their_subject, "docs/a.md", "The same by another script."),
]
