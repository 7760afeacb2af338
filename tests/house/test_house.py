"""The rules of the house (docs/design.md) that no linter knows: what folders of ffi/ may include and name, and who may
touch libraries and private JAX. Who imports whom in Python stands in pyproject.toml (`lint-imports`).

Every rule is shown to fail on a file that breaks it.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONGEST_FILE = 600
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

Rule = Callable[[Path], list[str]]


def native_files(root: Path, *folders: str) -> Iterator[tuple[str, str]]:
    """(path below ffi/, text without comments) of the files in these folders of ffi/."""
    for folder in folders:
        for path in sorted((root / "ffi" / folder).rglob("*")):
            if path.is_file():
                yield path.relative_to(root / "ffi").as_posix(), COMMENT.sub(" ", path.read_text())


def quoted_includes(text: str) -> list[str]:
    return re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', text, re.MULTILINE)


# What each folder of ffi/ may include: itself, and those below. rows and gemm do not know each other.
MAY_INCLUDE = {
    "comm": (),
    "rows": ("comm",),
    "gemm": ("comm",),
    "kernels": ("comm", "rows", "gemm"),
    "runtime": ("comm", "rows", "gemm", "kernels"),
    "bindings": ("comm", "rows", "gemm", "kernels", "runtime"),
}
PLATFORMS = ("cpu", "cuda", "hip")
CHOSEN = "platform/"  # of runtime/<platform>, which CMake puts on the include path: for runtime and bindings alone


def folders_include_only_those_below(root: Path) -> list[str]:
    found = []
    for folder, below in MAY_INCLUDE.items():
        others = (CHOSEN, "xla/ffi/") if folder in ("runtime", "bindings") else ()
        known = (*(f"{each}/" for each in (folder, *below)), *others)
        for path, text in native_files(root, folder):
            found += [f"{path} includes {each}" for each in quoted_includes(text) if not each.startswith(known)]
    return found


def families_know_no_other(root: Path) -> list[str]:
    """kernels/<family> includes itself and what lies in kernels/ for all."""
    return [
        f"{path} includes {header}"
        for path, text in native_files(root, "kernels")
        for header in quoted_includes(text)
        if path.count("/") == 2 and header.startswith("kernels/") and header.count("/") == 2
        if header.split("/")[1] != path.split("/")[1]
    ]


def a_platform_is_reached_by_its_path(root: Path) -> list[str]:
    """Only a platform itself names its folder: others include "platform/...", which every platform of GPUs has."""
    found = []
    for path, text in native_files(root, "runtime", "bindings"):
        here = path.split("/")[1]
        for header in quoted_includes(text):
            parts = header.split("/")
            if parts[0] == "runtime" and parts[1] in PLATFORMS and not path.startswith(f"runtime/{parts[1]}/"):
                found.append(f"{path} includes {header}")
            if header.startswith(CHOSEN):
                for each in [here] if here in PLATFORMS else ["cuda", "hip"]:
                    folders = [each] if each == "cpu" else [each, "gpu"]
                    if not any((root / "ffi" / "runtime" / folder / header).is_file() for folder in folders):
                        found.append(f"{path} includes {header}, which runtime/{each} lacks")
    return found


def specs_name_members(root: Path) -> list[str]:
    """A spec gives a setting or a buffer the name of the member that holds it."""
    return [
        f"{path} calls {member} {name}"
        for path, text in native_files(root, "kernels")
        for name, member in re.findall(r'\bvisit\([^;"]*"(\w+)"[^;]*&Args::(\w+)\);', text)
        if name != member
    ]


def files_are_short(root: Path) -> list[str]:
    endings = {".py", ".h", ".cc", ".cu", ".hip", ".txt", ".cmake"}
    folders = ("jax_ep", "pallas_kernels", "ffi", "tests", "examples", "benchmarks")
    return [
        f"{path.relative_to(root)} has {lines} lines"
        for folder in folders
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in endings and (lines := len(path.read_text().splitlines())) > LONGEST_FILE
    ]


CONDITION = r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif)\b.*"
PLATFORM_MACRO = r"(?:__(?:CUDA|HIP|NVCC|AMD|GFX|NVPTX|x86_64|aarch64|linux)|_WIN32|JAX_EP_(?:CUDA|HIP|CPU|GPU)\b)"
INCLUDE = r"^[ \t]*#[ \t]*include[ \t]*"
OPS = r"(?i:dispatch|combine|scatter|gather|ragged|sparse|matmul|moe|expert|token|routing)"


class Ban(NamedTuple):
    """Code of these folders of ffi/ does not match the pattern, but in the files that are excepted."""

    name: str
    folders: str
    pattern: str
    excepted: str = ""

    def __call__(self, root: Path) -> list[str]:
        return [
            f"{path} contains {match[0].strip()}"
            for path, text in native_files(root, *self.folders.split())
            if not (self.excepted and re.fullmatch(self.excepted, path))
            for match in re.finditer(self.pattern, text, re.MULTILINE)
        ]


ALL, DEVICE = " ".join(MAY_INCLUDE), "comm rows gemm kernels"  # the latter run on GPUs
ASSEMBLY, WINDOWS = r"\b(?:asm|__asm__|__asm)\b", r"\bsignal_pads\[|->buffers\[|\bmail\["
STANDARD, COMPILER = INCLUDE + r"<(?![a-z_]+>).*", INCLUDE + r"<(?![a-z_]+>|cuda\w*\.h>|hip/|cooperative_groups).*"
NAMED, XLA = INCLUDE + r'(?!<)(?!"[\w.]+(?:/[\w.]+)+")\S+', INCLUDE + r'["<](?:xla|pybind11)/.*'
ARGUMENTS = r"(?<![:.])\b[A-Z]\w*Args\b"  # of an op
BANS = [
    Ban("comm_names_no_op", "comm", OPS),
    Ban("peers_are_reached_by_windows", DEVICE, WINDOWS, r"comm/(window|op|signal_pad)\.h"),
    Ban("assembly_stays_in_its_folders", DEVICE, ASSEMBLY, "comm/platform/.*|gemm/ptx/.*"),
    Ban("devices_throw_nothing", DEVICE, r"\bthrow\b"),
    Ban("devices_include_only_standard_headers", "rows kernels", STANDARD, "kernels/collective_matmul/.*"),
    Ban("protocol_and_products_include_their_compiler", "comm gemm kernels/collective_matmul", COMPILER),
    Ban("only_platform_h_asks_for_the_platform", ALL, CONDITION + PLATFORM_MACRO, r"comm/platform\.h"),
    Ban("only_rows_ask_for_ptx", ALL, CONDITION + "JAX_EP_HAS_PTX", "rows/.*"),
    Ban("includes_name_a_folder_and_a_file", ALL, NAMED),
    Ban("bindings_know_no_offsets", "bindings", INCLUDE + r'".*layout\.h"'),
    # But where kernels are instantiated.
    Ban("bindings_and_runtime_name_no_op", "bindings runtime", ARGUMENTS, "runtime/(gpu|cuda)/.*"),
    Ban("runtime_knows_xla_in_three_places", "runtime", XLA, r"runtime/(registry|\w+/(platform/)?launch)\.(h|cc)"),
]
BROKEN_BANS = [  # files that break them
    ("comm/a.h", "int kMaxExperts = 4096;"),
    ("rows/a.h", "char* to = box->buffers[0];"),
    ("gemm/kernel.h", 'asm volatile("wgmma.fence.sync.aligned;");'),
    ("gemm/a.cc", "void f() { throw 1; }"),
    ("kernels/a.h", "#include <cuda_runtime.h>"),
    ("gemm/a.cc", "#include <cublas_v2.h>"),
    ("comm/a.h", "#if 0\n#elif defined(__HIP_PLATFORM_AMD__)\n#endif"),
    ("kernels/a.h", "#if JAX_EP_HAS_PTX\n#endif"),
    ("rows/a.h", "#include JAX_EP_MOVER"),
    ("bindings/a.cc", '#include "kernels/moe/layout.h"'),
    ("bindings/a.cc", "template BoundOp bind<DispatchArgs>();"),
    ("runtime/gpu/a.h", "#include <pybind11/stl.h>"),
]


def python_files(root: Path, *folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), ast.parse(path.read_text())


def names_in(tree: ast.Module) -> Iterator[str]:
    """Dotted names of a file, and what its imports name: `a.b` of `from a import b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, (ast.Attribute, ast.Name)):
            yield ast.unparse(node)


def only_ffi_py_reaches_libraries(root: Path) -> list[str]:
    """_kit/ffi.py finds compiled libraries and calls JAX's FFI; each family of ops calls it in its kernels.py."""
    found = []
    for path, tree in python_files(root, "jax_ep"):
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        jax_ffi = [name for name in names_in(tree) if re.match(r"jax\.ffi|.*\b(ffi_call|register_ffi_\w+)$", name)]
        calls = [name for name in names_in(tree) if re.match(r"(jax_ep\._kit\.)?ffi\.call", name)]
        if path != "jax_ep/_kit/ffi.py" and (jax_ffi or any("_jax_ep_" in text for text in texts)):
            found.append(f"{path} reaches a library")
        if calls and not re.fullmatch(r"jax_ep/ops/\w+/kernels\.py", path):
            found.append(f"{path} names {calls[0]}")
    return found


def only_jax_private_touches_private_jax(root: Path) -> list[str]:
    """Names under a leading underscore, which JAX may change in any release."""
    return [
        f"{path} names {name}"
        for path, tree in python_files(root, "jax_ep")
        for name in names_in(tree)
        if path != "jax_ep/runtime/jax_private.py" and re.match(r"(jax|jaxlib)\.(.*\.)?_(?!_)", name)
    ]


def exports_only_export(root: Path) -> list[str]:
    """Every __init__.py, and the modules of public names: a docstring, imports, __all__ and __dir__."""
    return [
        f"{path} line {node.lineno}"
        for path, tree in python_files(root, "jax_ep")
        if path in ("jax_ep/lax.py", "jax_ep/embedding.py", "jax_ep/float8.py") or path.endswith("/__init__.py")
        for node in tree.body[ast.get_docstring(tree) is not None :]
        if not isinstance(node, (ast.Import, ast.ImportFrom))
        and not ast.unparse(node).startswith(("__all__ =", "def __dir__("))
    ]


BROKEN: list[tuple[Rule, str, str]] = [
    (folders_include_only_those_below, "ffi/comm/a.h", '#include "gemm/plan.h"'),
    (folders_include_only_those_below, "ffi/kernels/a.h", '#include "platform/launch.h"'),
    (families_know_no_other, "ffi/kernels/moe/a.h", '#include "kernels/sparse/args.h"'),
    (a_platform_is_reached_by_its_path, "ffi/bindings/a.cc", '#include "runtime/cpu/launch.h"'),
    (a_platform_is_reached_by_its_path, "ffi/runtime/gpu/a.h", '#include "platform/matmul.h"'),
    (specs_name_members, "ffi/kernels/a/args.h", 'visit(operand("ids", Values::int32, a.n).when(a.m), &Args::row_of);'),
    (files_are_short, "tests/a.py", "\n" * (LONGEST_FILE + 1)),
    (only_ffi_py_reaches_libraries, "jax_ep/a.py", "import importlib\nimportlib.import_module('jax_ep._jax_ep_cpu')"),
    (only_ffi_py_reaches_libraries, "jax_ep/a.py", "from jax.ffi import ffi_call as call"),
    (only_ffi_py_reaches_libraries, "jax_ep/ops/a/api.py", "from jax_ep._kit import ffi\nffi.call('x', None)"),
    (only_jax_private_touches_private_jax, "jax_ep/_kit/a.py", "import jax\njax._src.core.Trace"),
    (only_jax_private_touches_private_jax, "jax_ep/nn/a.py", "from jax.interpreters.mlir import _lowerings"),
    (exports_only_export, "jax_ep/__init__.py", '"""Doc."""\nfrom a import b\nx = b()'),
    *((ban, f"ffi/{path}", text) for ban, (path, text) in zip(BANS, BROKEN_BANS, strict=True)),
]


def name_of(rule: Rule) -> str:
    return rule.name if isinstance(rule, Ban) else rule.__name__


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _, _ in BROKEN), ids=name_of)
def test_the_house_keeps(rule: Rule) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize(
    ("rule", "path", "text"), [pytest.param(*case, id=f"{name_of(case[0])}-{i}") for i, case in enumerate(BROKEN)]
)
def test_a_broken_rule_is_found(rule: Rule, path: str, text: str, tmp_path: Path) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    assert rule(tmp_path)


def test_the_rules_have_something_to_read() -> None:
    assert all(list(native_files(ROOT, folder)) for folder in MAY_INCLUDE)
    assert list(python_files(ROOT, "jax_ep/ops"))
