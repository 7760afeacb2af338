"""docs/api.md, which is made of docstrings, has every public name."""

import inspect
import re
from pathlib import Path
from types import ModuleType

import jax_ep
import jax_ep.errors
import jax_ep.pallas_kernels

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "api.md").read_text()
MODULES: list[ModuleType] = [jax_ep, jax_ep.nn, jax_ep.lax, jax_ep.float8, jax_ep.embedding, jax_ep.pallas_kernels]
TYPES_OF_ARGUMENTS = {"Implementation", "OnOverflow", "Scalar", "Tree", "ActivationName", "ACTIVATIONS"}


def test_every_public_name_is_on_the_page() -> None:
    names = {
        name
        for module in MODULES
        for name, thing in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(thing)
    }
    errors = {name for name, thing in vars(jax_ep.errors).items() if inspect.isclass(thing)}
    listed = errors if "::: jax_ep.errors" in PAGE else set()
    for directive, members in re.findall(r"^::: (\S+)|members: \[(.*)\]", PAGE, re.MULTILINE):
        listed |= {directive.rsplit(".", 1)[-1], *re.findall(r"\w+", members)}
    assert names - TYPES_OF_ARGUMENTS <= listed
