"""docs/api.md names all that is public, and has the signatures of the code."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import jax_ep
import jax_ep.pallas_kernels

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "api.md").read_text()
MODULES: list[ModuleType] = [jax_ep, jax_ep.nn, jax_ep.lax, jax_ep.embedding, jax_ep.pallas_kernels]
PUBLIC = {
    name: thing
    for module in reversed(MODULES)
    for name, thing in vars(module).items()
    if not (name.startswith("_") or inspect.ismodule(thing))
}
HINTS = {"Scalar", "Tree"}  # of jax_ep.embedding, in the types of its functions
FUNCTIONS = {name: thing for name, thing in PUBLIC.items() if inspect.isfunction(thing)} | {"Group": jax_ep.Group}

# name(arguments), indented as code, or in code at the beginning of an item or of a row of a table.
WRITTEN = dict(re.findall(r"(?:^    |^- `|^\| `)(\w+)\(([^()]*(?:\(\)[^()]*)*)\)", PAGE, re.MULTILINE))
BY_SHAPE = {"dot", "float8_ragged_dot", "quantize_rows", "quantize_weights"}  # the page shows what they map to what


def parameters_on_the_page(arguments: str) -> Iterator[tuple[str, bool, str | None]]:
    """Of each its name, whether it is given by name alone, and its default."""
    [function] = ast.parse(f"def f({' '.join(arguments.split())}): pass").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    defaults: list[ast.expr | None] = [None] * (len(given.args) - len(given.defaults)) + [*given.defaults]
    by_position = [(argument, False, default) for argument, default in zip(given.args, defaults, strict=True)]
    by_name = [(argument, True, default) for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    for argument, alone, default in by_position + by_name:
        yield argument.arg, alone, default and ast.unparse(default)


def parameters_of(function: Any) -> Iterator[tuple[str, bool, str | None]]:
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        shown = None if default is parameter.empty else repr(default)
        if callable(default) and default is not parameter.empty:
            shown = default.__name__
        yield parameter.name, parameter.kind == parameter.KEYWORD_ONLY, shown


def test_all_that_is_public_is_on_the_page() -> None:
    assert not {name for name in PUBLIC if not re.search(rf"\b{name}\b", PAGE)} - HINTS
    assert set(FUNCTIONS) - BY_SHAPE <= set(WRITTEN)


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - BY_SHAPE))
def test_signatures(name: str) -> None:
    page = [(n, alone, d and d.removeprefix("jax.nn.")) for n, alone, d in parameters_on_the_page(WRITTEN[name])]
    assert page == list(parameters_of(FUNCTIONS[name]))
