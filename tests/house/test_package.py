"""The installed package: versions, names, options, call sites; and the environment of the tests (environment.py)."""

import importlib.metadata
import inspect
import pydoc
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import gpu
import helpers
import pytest

import jax_ep
import jax_ep.errors
import jax_ep.pallas_kernels
from jax_ep.__main__ import load, main
from jax_ep._kit import ffi


def test_the_version_stands_in_one_place() -> None:
    assert importlib.metadata.version("jax_ep") == jax_ep.__version__
    assert f"version: {jax_ep.__version__}\n" in (gpu.ROOT / "CITATION.cff").read_text()


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"jax_ep {jax_ep.__version__}\n"


def test_the_wheel_installs_one_package() -> None:
    files = importlib.metadata.files("jax_ep") or []
    assert {file.parts[0].partition("-")[0] for file in files} == {"jax_ep"}
    assert [file for file in files if file.name.startswith("_jax_ep_") and file.suffix == ".so"]


@pytest.mark.usefixtures("native")
def test_a_library_of_another_version_is_refused() -> None:
    script = "import jax, jax_ep; from jax_ep._kit import ffi; ffi.__version__ = '0.0.9'; "
    script += "jax_ep.Group(jax.make_mesh((1,), ('ep',)), 'ep')"
    output = helpers.run_python("-c", script, exit_code=1)
    assert f"is of jax_ep {jax_ep.__version__}, the Python code of 0.0.9: install jax_ep again" in output
    assert output.count("Traceback") == 1


def test_the_page_has_the_last_runs_on_gpus() -> None:
    """`python -m tests.gpu --page` writes the table."""
    page = gpu.PAGE.read_text()
    assert gpu.with_stamps(page) == page
    assert all(stamp["commit"] in page for stamp in gpu.stamps().values())


@pytest.mark.parametrize(("package", "script"), [("examples", "moe_lm_data"), ("benchmarks", "moe_cases")])
def test_scripts_are_modules_of_packages(package: str, script: str) -> None:
    before = list(sys.path)
    assert load(package, script).__name__ in (f"{package}.{script}", f"jax_ep.{package}.{script}")
    assert sys.path == before


@pytest.mark.parametrize(
    ("module", "is_the_users"),
    [
        *((name, True) for name in ("train", "__main__", "jax_ep_user", "jax_ep.examples.train", "examples.train")),
        *((name, False) for name in ("jax_ep.nn.layers", "jax_ep.ops.moe.api", "jax_ep", "jax.lax", "functools")),
    ],
)
def test_what_is_a_call_site(module: str, is_the_users: bool) -> None:
    """Of a function in a file train.py whose module has this name."""
    names: dict[str, Any] = {"__name__": module}
    exec(compile("def step(call):\n    return call()", "/home/me/train.py", "exec"), names)
    wanted = "train.py, step" if is_the_users else "test_package.py, test_what_is_a_call_site"
    assert names["step"](ffi._call_site) == wanted


MODULES: list[ModuleType] = [jax_ep, jax_ep.nn, jax_ep.lax, jax_ep.float8, jax_ep.embedding, jax_ep.pallas_kernels]
OF_ARGUMENTS = {"Implementation", "OnOverflow", "Placement", "Scalar", "Tree", "BLOCK", "ZERO_ROW"}


def public_names(module: ModuleType) -> set[str]:
    return {name for name, thing in vars(module).items() if name[0] != "_" and not inspect.ismodule(thing)}


def test_every_public_name_is_on_the_page() -> None:
    page = (gpu.ROOT / "docs" / "api.md").read_text()
    names = set().union(*map(public_names, MODULES))
    errors = {name for name, thing in vars(jax_ep.errors).items() if inspect.isclass(thing)}
    listed = errors if "::: jax_ep.errors" in page else set()
    for directive, members in re.findall(r"^::: (\S+)|members: \[(.*)\]", page, re.MULTILINE):
        listed |= {directive.rsplit(".", 1)[-1], *re.findall(r"\w+", members)}
    assert names - OF_ARGUMENTS <= listed


def test_dir_shows_public_names_alone() -> None:
    modules = {name for name in dir(jax_ep) if inspect.ismodule(getattr(jax_ep, name))}
    assert modules == {"embedding", "float8", "lax", "nn"}
    assert {"Group", "dispatch", "moe_mlp", "OnOverflow", "__version__"} <= set(dir(jax_ep))


@pytest.mark.parametrize("module", MODULES)
def test_help_lists_the_public_names(module: ModuleType) -> None:
    """pydoc leaves out what a module imports, unless `__all__` names it."""
    text = pydoc.plain(pydoc.render_doc(module))
    for name in public_names(module):
        assert re.search(rf"^ +(class )?{name}\b", text, re.MULTILINE), name


def options(module: ModuleType) -> Iterator[tuple[str, str, Any]]:
    """("function: parameter", its default, its type) where the default is a string, of what a module exports."""
    for name, function in inspect.getmembers(module, inspect.isfunction):
        hints = get_type_hints(function)
        for parameter in inspect.signature(function).parameters.values():
            if isinstance(parameter.default, str):
                yield f"{name}: {parameter.name}", parameter.default, hints[parameter.name]


def literals(hint: Any) -> set[Any]:
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    return set().union(*map(literals, get_args(hint)))


def test_string_options_have_literal_types() -> None:
    """So that an editor knows them, and a type checker finds a wrong one."""
    found = [option for module in (jax_ep, jax_ep.nn, jax_ep.lax) for option in options(module)]
    assert {name.split(": ")[1] for name, _, _ in found} >= {"implementation", "on_overflow", "method", "op", "score"}
    for name, default, hint in found:
        assert default in literals(hint), f"{name} is {hint}"
        assert str not in get_args(hint), f"{name} is {hint}"


SCRIPT = """
import os
print(len(jax.devices("cpu")), jax.numpy.arange(1.0).dtype, jax.config.jax_compilation_cache_dir)
print([name for name in os.environ if name == "XLA_FLAGS" or name.startswith("JAX_") and name[:7] != "JAX_EP_"])
"""


def test_the_variables_of_the_caller_do_not_matter() -> None:
    given: Any = {"JAX_PLATFORMS": "tpu", "JAX_ENABLE_X64": "1", "JAX_NUM_CPU_DEVICES": "5"}
    given |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=3", "JAX_COMPILATION_CACHE_DIR": "/nowhere"}
    given |= {"JAX_EP_TEST_ENVIRONMENT": ""}
    assert helpers.run_python("-c", helpers.knowing("helpers", SCRIPT), **given) == "8 float32 None\n[]\n"
