"""The rules of the house for the Python package, which test_house.py checks: who may import and name what."""

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

Rule = Callable[[Path], list[str]]

PACKAGES = ("jax_ep", "pallas_kernels", "examples", "benchmarks")
EXPORTS = ("jax_ep/lax.py", "jax_ep/float8.py", "jax_ep/embedding.py")  # besides every __init__.py


def python_files(root: Path, *folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), ast.parse(path.read_text())


def imports(path: str, tree: ast.Module) -> Iterator[str]:
    """Full names of what a file imports, anywhere in it: `a.b` of `import a.b`, `a.b` too of `from a import b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = path.split("/")[: -node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imported_modules(root: Path) -> dict[str, set[str]]:
    """For every module of our packages, those of them that it imports: a package stands for its __init__.py."""
    files = {_module(path): (path, tree) for path, tree in python_files(root, *PACKAGES)}
    found: dict[str, set[str]] = {}
    for module, (path, tree) in files.items():
        names = {(name, name.rpartition(".")[0]) for name in imports(path, tree)}  # a module, or what one holds
        found[module] = {next((each for each in pair if each in files), "") for pair in names} - {""}
    return found


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def no_import_cycle(root: Path) -> list[str]:
    """A depth-first search. Imports inside functions and under `if TYPE_CHECKING` count as any others."""
    graph = imported_modules(root)
    cycles: list[str] = []
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        if module in above:
            cycles.append(" imports ".join([*above[above.index(module) :], module]))
        elif module not in done:
            for each in sorted(graph[module]):
                visit(each, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())
    return cycles


def _imports_of(root: Path, folder: str) -> Iterator[tuple[str, str]]:
    """(path, full name of what it imports) of all files in a folder."""
    for path, tree in python_files(root, folder):
        yield from ((path, name) for name in imports(path, tree))


def core_knows_no_op(root: Path) -> list[str]:
    """_kit, runtime and errors stand below everything else, the groups too; _kit below runtime."""
    found = [*_imports_of(root, "jax_ep/_kit"), *_imports_of(root, "jax_ep/runtime")]
    found += [(path, name) for path, name in _imports_of(root, "jax_ep") if path == "jax_ep/errors.py"]
    allowed = ("jax_ep._kit.", "jax_ep.errors.", "jax_ep.version.")
    return [
        f"{path} imports {name}"
        for path, name in found
        if name.split(".")[0] in ("jax_ep", "pallas_kernels")
        and not f"{name}.".startswith((*allowed, "jax_ep.runtime.") if path.startswith("jax_ep/runtime/") else allowed)
    ]


# Families whose ops are those of others in one: they may know these, and nobody knows them.
FUSES = {"moe_fused": ("moe", "matmul")}


def families_know_not_each_other(root: Path) -> list[str]:
    """What two families of ops share stands in _kit; a family of fused ops knows those that it fuses."""
    found = []
    for path, name in _imports_of(root, "jax_ep/ops"):
        family = path.split("/")[2]
        if name.startswith("jax_ep.ops.") and name.split(".")[2] not in (family, *FUSES.get(family, ())):
            found.append(f"{path} imports {name}")
    return found


def ops_know_no_layers(root: Path) -> list[str]:
    return [
        f"{path} imports {name}"
        for path, name in _imports_of(root, "jax_ep/ops")
        if f"{name}.".startswith(("jax_ep.nn.", "jax_ep.lax.", "jax_ep.float8.", "jax_ep.embedding."))
    ]


def only_ffi_py_names_libraries(root: Path) -> list[str]:
    def names_library(node: ast.AST) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str) and "_jax_ep_" in node.value
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        return name == "ffi_call" or name.startswith("register_ffi_")

    return [
        path
        for path, tree in python_files(root, "jax_ep")
        if path != "jax_ep/_kit/ffi.py"
        and (
            any(map(names_library, ast.walk(tree)))
            or any(name.startswith(("_jax_ep_", "jax.ffi")) for name in imports(path, tree))
        )
    ]


def only_kernels_py_calls_targets(root: Path) -> list[str]:
    """By `ffi.call` and `ffi.call_alone` of _kit/ffi.py, each family in its kernels.py."""
    return [
        path
        for path, tree in python_files(root, "jax_ep")
        if not (path.startswith("jax_ep/ops/") and path.endswith("/kernels.py"))
        and (
            any(isinstance(node, ast.Attribute) and ast.unparse(node).startswith("ffi.call") for node in ast.walk(tree))
            or any(name.startswith("jax_ep._kit.ffi.call") for name in imports(path, tree))
        )
    ]


def only_jax_private_touches_private_jax(root: Path) -> list[str]:
    """Names under a leading underscore, which jax may change in any release."""

    def is_private(name: str) -> bool:
        package, *parts = name.split(".")
        return package in ("jax", "jaxlib") and any(p.startswith("_") and not p.startswith("__") for p in parts)

    return [
        f"{path} names {name}"
        for path, tree in python_files(root, "jax_ep", "pallas_kernels")
        if path != "jax_ep/runtime/jax_private.py"
        for name in (
            *imports(path, tree),
            *(ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)),
        )
        if is_private(name)
    ]


def pallas_kernels_know_no_jax_ep(root: Path) -> list[str]:
    return [
        f"{path} imports {name}" for path, name in _imports_of(root, "pallas_kernels") if name.split(".")[0] == "jax_ep"
    ]


def exports_only_export(root: Path) -> list[str]:
    return [
        f"{path} line {node.lineno}"
        for path, tree in python_files(root, "jax_ep")
        if path in EXPORTS or path.endswith("/__init__.py")
        for index, node in enumerate(tree.body)
        if not isinstance(node, (ast.Import, ast.ImportFrom))
        and not (index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
    ]


def python_touches_no_pointer(root: Path) -> list[str]:
    return [
        f"{path} imports {name}"
        for folder in ("jax_ep", "pallas_kernels")
        for path, name in _imports_of(root, folder)
        if path != "jax_ep/launch.py"  # asks the kernel for a signal: numbers alone
        and name.split(".")[0] in ("ctypes", "cffi", "_ctypes")
    ]


def bootstrap_knows_no_jax(root: Path) -> list[str]:
    return [
        f"{path} imports {name}"
        for path, name in _imports_of(root, "jax_ep/runtime")
        if path == "jax_ep/runtime/bootstrap.py"
        and name.split(".")[0] not in sys.stdlib_module_names
        and not name.startswith("jax_ep.errors.")
    ]


# Every rule, and files that break it: the path, and what it holds beside KEPT.
BROKEN: list[tuple[Rule, str, str]] = [
    (no_import_cycle, "jax_ep/group.py", "from jax_ep.ops.a.api import op"),
    (no_import_cycle, "jax_ep/group.py", "from typing import *\nif TYPE_CHECKING:\n    from jax_ep.ops.a import api"),
    (no_import_cycle, "jax_ep/group.py", "def f():\n    import jax_ep"),
    (no_import_cycle, "jax_ep/_kit/ffi.py", "from .. import group"),
    (no_import_cycle, "examples/a.py", "from . import a"),
    (core_knows_no_op, "jax_ep/_kit/a.py", "from jax_ep.ops.a import types"),
    (core_knows_no_op, "jax_ep/_kit/a.py", "from jax_ep.group import Group"),
    (core_knows_no_op, "jax_ep/_kit/a.py", "from jax_ep import nn"),
    (core_knows_no_op, "jax_ep/_kit/a.py", "from .. import Group"),
    (core_knows_no_op, "jax_ep/_kit/a.py", "import jax_ep"),
    (core_knows_no_op, "jax_ep/_kit/a.py", "from jax_ep.runtime import native"),
    (core_knows_no_op, "jax_ep/errors.py", "from jax_ep.nn import layers"),
    (families_know_not_each_other, "jax_ep/ops/b/api.py", "from jax_ep.ops.a.types import Routing"),
    (families_know_not_each_other, "jax_ep/ops/b/api.py", "from jax_ep.ops import a"),
    (families_know_not_each_other, "jax_ep/ops/b/api.py", "from ..a import types"),
    (families_know_not_each_other, "jax_ep/ops/moe_fused/api.py", "from jax_ep.ops.sparse import types"),
    (families_know_not_each_other, "jax_ep/ops/moe/api.py", "from jax_ep.ops.moe_fused import types"),
    (families_know_not_each_other, "jax_ep/ops/matmul/api.py", "from jax_ep.ops.moe import types"),
    (ops_know_no_layers, "jax_ep/ops/b/api.py", "from jax_ep.nn.layers import moe_mlp"),
    (ops_know_no_layers, "jax_ep/ops/b/api.py", "from jax_ep import nn"),
    (only_ffi_py_names_libraries, "jax_ep/a.py", "import _jax_ep_cpu"),
    (only_ffi_py_names_libraries, "jax_ep/a.py", "import importlib\nimportlib.import_module('_jax_ep_cpu')"),
    (only_ffi_py_names_libraries, "jax_ep/ops/a/kernels.py", "import jax\njax.ffi.ffi_call('x', None)"),
    (only_ffi_py_names_libraries, "jax_ep/a.py", "from jax.ffi import ffi_call as call"),
    (only_ffi_py_names_libraries, "jax_ep/a.py", "import jax\njax.ffi.register_ffi_target('x', None)"),
    (only_kernels_py_calls_targets, "jax_ep/ops/a/api.py", "from jax_ep._kit import ffi\nffi.call('x', None)"),
    (only_kernels_py_calls_targets, "jax_ep/group.py", "from jax_ep._kit.ffi import call as run"),
    (only_jax_private_touches_private_jax, "jax_ep/a.py", "from jax._src import distributed"),
    (only_jax_private_touches_private_jax, "jax_ep/_kit/a.py", "import jax\njax._src.core.Trace"),
    (only_jax_private_touches_private_jax, "pallas_kernels/a.py", "from jax.interpreters.mlir import _lowerings"),
    (pallas_kernels_know_no_jax_ep, "pallas_kernels/a.py", "import jax_ep.group"),
    (pallas_kernels_know_no_jax_ep, "pallas_kernels/a.py", "def f():\n    from jax_ep import Group"),
    (exports_only_export, "jax_ep/__init__.py", '"""Doc."""\nfrom a import b\nx = b()'),
    (exports_only_export, "jax_ep/ops/a/__init__.py", "def f(): ..."),
    (exports_only_export, "jax_ep/lax.py", "x = 1"),
    (python_touches_no_pointer, "jax_ep/a.py", "import ctypes.util"),
    (python_touches_no_pointer, "pallas_kernels/a.py", "from ctypes import c_int"),
    (bootstrap_knows_no_jax, "jax_ep/runtime/bootstrap.py", "import jax.numpy as jnp"),
    (bootstrap_knows_no_jax, "jax_ep/runtime/bootstrap.py", "from jax_ep._kit import ffi"),
]

# What must pass, for no rule may be so strict that it cannot be kept.
KEPT = {
    "jax_ep/__init__.py": '"""Doc."""\nfrom jax_ep.ops.a.api import op as op\n__all__ = ["op"]',
    "jax_ep/errors.py": "class JaxEpError(RuntimeError): ...",
    "jax_ep/group.py": "from jax_ep._kit import ffi\nfrom jax_ep.runtime import jax_private\nffi.library('cpu')",
    "jax_ep/_kit/__init__.py": '"""Doc."""',
    "jax_ep/runtime/bootstrap.py": "import socket\nfrom jax_ep.errors import PeerLostError",
    "jax_ep/_kit/ffi.py": "import jax, importlib\njax.ffi.ffi_call(importlib.import_module('_jax_ep_cpu'), None)",
    "jax_ep/runtime/jax_private.py": "from jax._src import distributed",
    "jax_ep/ops/a/api.py": "from jax_ep.group import Group\nfrom jax_ep.ops.a import kernels\nfrom . import types",
    "jax_ep/ops/a/kernels.py": "import jax\nfrom jax_ep._kit import ffi\nffi.call('x', jax.__version__)",
    "jax_ep/ops/a/types.py": "import jax",
    "jax_ep/ops/moe_fused/api.py": "from jax_ep.ops.matmul.api import op\nfrom jax_ep.ops.moe import types",
    "jax_ep/nn/layers.py": "from jax_ep.ops.a.api import op\nfrom jax_ep.ops.b.api import other",
    "pallas_kernels/a.py": "import jax",
    "examples/a.py": "import jax_ep",
}
