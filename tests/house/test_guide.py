"""The Python blocks of the README and of the docs run as they stand, one after the other."""

import inspect
import re
from pathlib import Path
from typing import Any

import helpers
import jax
import pytest

from jax_ep import Group

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ["docs/guide.md", "docs/models.md", "docs/serving.md", "docs/embeddings.md"]  # close their groups


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("page", [*GUIDE, "docs/scaling.md", "README.md"])
def test_the_blocks_of_a_page_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.mesh_of(ep=8)
    initialize = inspect.signature(jax.distributed.initialize)
    monkeypatch.setattr(jax.distributed, "initialize", initialize.bind)  # takes what JAX takes
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    text = (ROOT / page).read_text()
    names: dict[str, Any] = {"__name__": "guide"}
    try:
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start(1))
            code = block[1].replace('jax.config.update("jax_num_cpu_devices", 8)', "")  # as conftest.py has it
            code = code.replace("hosts = 16", "hosts = 2")
            exec(compile("\n" * line + code, page, "exec"), names)
    finally:
        groups = [x for x in names.values() if isinstance(x, Group)]
        left = [group for group in groups if not group.closed]
        for group in left:
            group.close()
    assert groups
    assert not left or page not in GUIDE


def test_every_page_with_python_is_run() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {str(path.relative_to(ROOT)) for path in pages if "```python" in path.read_text()}
    assert found == {*GUIDE, "docs/scaling.md", "README.md"}
