"""The Python blocks of the README and of the docs run as they stand, one after the other, and print what the page says.

A block of text behind a Python block holds what that block prints. Pages that name AxisType.Auto run with Explicit axes,
too, which `jax.make_mesh` makes by itself.
"""

import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import helpers
import jax
import pytest

from jax_ep import Group

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
PAGES = [name for name, text in TEXTS.items() if "```python" in text]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
CASES = [(page, "Auto") for page in PAGES] + [(page, "Explicit") for page in PAGES if "AxisType.Auto" in TEXTS[page]]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("page", "axis_type"), CASES)
def test_the_blocks_of_a_page_run(page: str, axis_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.mesh_of(ep=8)
    initialize = inspect.signature(jax.distributed.initialize)
    monkeypatch.setattr(jax.distributed, "initialize", initialize.bind)  # takes what JAX takes
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    text = TEXTS[page]
    names: dict[str, Any] = {"__name__": "guide"}
    try:
        for block in BLOCK.finditer(text):
            code = block[1].replace('jax.config.update("jax_num_cpu_devices", 8)', "")  # as conftest.py has it
            code = code.replace("hosts = 16", "hosts = 2").replace("AxisType.Auto", f"AxisType.{axis_type}")
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile("\n" * text.count("\n", 0, block.start(1)) + code, page, "exec"), names)
            assert block[2] in (None, printed.getvalue())
    finally:
        jax.set_mesh(None)
        groups = [x for x in names.values() if isinstance(x, Group)]
        for group in groups:
            group.close()
    assert groups
