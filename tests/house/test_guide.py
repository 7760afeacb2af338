"""The Python blocks of the README, the docs and notebooks run as they stand, one after the other.

A block of text behind a Python block, or the output of a cell, is what that block prints. Pages that name AxisType.Auto
also run with Explicit axes, which are the default of `jax.make_mesh`.
"""

import contextlib
import inspect
import io
import json
import re
from pathlib import Path
from typing import Any

import helpers
import jax
import pytest
from helpers import ROOT

from jax_ep import Group


def text_of(page: Path) -> str:
    """A page; a notebook as the page that has its code and what it prints, without its installation."""
    if page.suffix != ".ipynb":
        return page.read_text()
    text = ""
    for cell in json.loads(page.read_text())["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code" and not code.startswith("%"):
            text += f"```python\n{code}\n```\n\n"
            text += "".join("```text\n" + "".join(each["text"]) + "```\n" for each in cell["outputs"])
    return text


FILES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*.ipynb")]
TEXTS = {str(path.relative_to(ROOT)): text_of(path) for path in FILES}
PAGES = [name for name, text in TEXTS.items() if "```python" in text]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
FIRST = next(BLOCK.finditer(TEXTS["README.md"]))[1]
CASES = [(page, "Auto") for page in PAGES] + [(page, "Explicit") for page in PAGES if "AxisType.Auto" in TEXTS[page]]


@pytest.mark.usefixtures("native", "compiled_anew")
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


def test_the_notebook_has_the_example_of_the_readme() -> None:
    assert FIRST in TEXTS["examples/quickstart.ipynb"]


def test_the_first_program_runs_without_a_library() -> None:
    code = "".join(block[1] for block in list(BLOCK.finditer(TEXTS["docs/guide.md"]))[:3])
    code = code.replace('jax.config.update("jax_num_cpu_devices", 8)', "").replace("(2, 4)", "(1, len(jax.devices()))")
    code = helpers.knowing("test_guide", code + "\nprint('fell to', value)")
    output = helpers.run_python("-c", code, JAX_EP_TEST_WITHOUT_LIBRARY="1")
    assert output.count("Group: its ops are computed by XLA") == 1, output
    assert 0 < float(output.split("fell to")[1]) < 1


@pytest.mark.usefixtures("native")
def test_the_first_example_warns_of_nothing() -> None:
    """On GPUs Pallas kernels multiply its float32 rows."""
    assert helpers.run_python("-W", "error", "-c", FIRST).endswith("(64, 32)\n")
