"""The Python blocks of docs/guide.md run as they stand, one after the other."""

import re
from pathlib import Path
from typing import Any

import helpers
import pytest

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guide.md"


@pytest.mark.usefixtures("native")
def test_the_guide_runs() -> None:
    helpers.mesh_of(ep=8)
    text = GUIDE.read_text()
    names: dict[str, Any] = {"__name__": "guide"}
    try:
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start(1))
            code = block[1].replace('jax.config.update("jax_num_cpu_devices", 8)', "")  # as conftest.py has it
            exec(compile("\n" * line + code, str(GUIDE), "exec"), names)
    finally:
        if "group" in names:
            names["group"].close()
    assert names["group"].closed
