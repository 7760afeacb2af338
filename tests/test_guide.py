"""The Python blocks of the guide's pages run as they stand, one after the other."""

import re
from pathlib import Path
from typing import Any

import helpers
import pytest

from jax_ep import Group

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("page", ["guide", "serving", "embeddings"])
def test_the_guide_runs(page: str) -> None:
    helpers.mesh_of(ep=8)
    file = DOCS / f"{page}.md"
    text = file.read_text()
    names: dict[str, Any] = {"__name__": "guide"}
    try:
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start(1))
            code = block[1].replace('jax.config.update("jax_num_cpu_devices", 8)', "")  # as conftest.py has it
            exec(compile("\n" * line + code, str(file), "exec"), names)
    finally:
        groups = [x for x in names.values() if isinstance(x, Group)]
        left = [group for group in groups if not group.closed]
        for group in left:
            group.close()
    assert groups
    assert not left
