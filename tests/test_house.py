"""The rules of the house (docs/design.md), by reading includes, imports and a few keywords.

Those of the Python package stand in python_rules.py.

Every rule is a function from a root folder to the places that break it, and is shown to fail on a tree that does.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import python_rules

ROOT = Path(__file__).resolve().parents[1]
LONGEST_FILE = 350

Rule = Callable[[Path], list[str]]

STANDARD_HEADER = re.compile(r"[a-z_]+")  # of C++: no folder, no ending
PLATFORM_HEADER = re.compile(r"(cuda|hip|cooperative_groups)[\w/]*(\.h)?")
CUDA_HEADER = re.compile(r"cuda\w*\.h")
PLATFORM_MACRO = re.compile(
    r"__(CUDA|HIP|NVCC|AMD|GFX|NVPTX|x86_64|aarch64|linux)\w*|_WIN32|JAX_EP_(CUDA|HIP|CPU|GPU)\b"
)
CONDITION = re.compile(r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif|elifdef|elifndef)\b(.*)$", re.MULTILINE)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
ASSEMBLY = re.compile(r"\b(?:asm|__asm|__asm__)\b")


def native_files(root: Path, *folders: str) -> Iterator[tuple[str, str]]:
    """(path below ffi/, text without comments) of the files in these folders of ffi/."""
    for folder in folders:
        for path in sorted((root / "ffi" / folder).rglob("*")):
            if path.is_file():
                yield path.relative_to(root / "ffi").as_posix(), COMMENT.sub(" ", path.read_text())


def headers(text: str) -> Iterator[tuple[str, str]]:
    """(quoted, angled): one of them is empty."""
    for match in INCLUDE.finditer(text):
        yield match[1] or "", match[2] or ""


def device_includes_only_device(root: Path) -> list[str]:
    return [
        f"{path} includes {quoted or angled}"
        for path, text in native_files(root, "device")
        for quoted, angled in headers(text)
        if not quoted.startswith("device/")
        and not STANDARD_HEADER.fullmatch(angled)
        and not PLATFORM_HEADER.fullmatch(angled)
    ]


def kernels_include_only_device_and_kernels(root: Path) -> list[str]:
    return [
        f"{path} includes {quoted or angled}"
        for path, text in native_files(root, "kernels")
        for quoted, angled in headers(text)
        if not quoted.startswith(("device/", "kernels/")) and not STANDARD_HEADER.fullmatch(angled)
    ]


def gemm_includes_only_gemm_and_cuda(root: Path) -> list[str]:
    return [
        f"{path} includes {quoted or angled}"
        for path, text in native_files(root, "gemm")
        for quoted, angled in headers(text)
        if not quoted.startswith("gemm/")
        and not STANDARD_HEADER.fullmatch(angled)
        and not CUDA_HEADER.fullmatch(angled)
    ]


def gemm_assembly_only_in_ptx(root: Path) -> list[str]:
    return [
        f"{path} contains assembly"
        for path, text in native_files(root, "gemm")
        if ASSEMBLY.search(text) and not path.startswith("gemm/ptx/")
    ]


def binding_knows_no_offsets(root: Path) -> list[str]:
    return [
        f"{path} includes {quoted}"
        for path, text in native_files(root, "binding")
        for quoted, _ in headers(text)
        if quoted.endswith("layout.h")
    ]


def only_platform_h_asks_for_the_platform(root: Path) -> list[str]:
    return [
        f"{path} asks {condition.strip()}"
        for path, text in native_files(root, "device", "kernels")
        for condition in CONDITION.findall(text)
        if path != "device/platform.h" and PLATFORM_MACRO.search(condition)
    ]


def assembly_only_for_memory_order(root: Path) -> list[str]:
    """In device/target/, where every platform has its own."""
    return [
        f"{path} contains assembly"
        for path, text in native_files(root, "device", "kernels")
        if ASSEMBLY.search(text) and not path.startswith("device/target/")
    ]


def protocol_throws_nothing(root: Path) -> list[str]:
    return [
        f"{path} throws"
        for path, text in native_files(root, "device", "kernels", "gemm")
        if re.search(r"\bthrow\b", text)
    ]


def heap_knows_no_xla(root: Path) -> list[str]:
    return [
        f"{path} includes {quoted or angled}"
        for path, text in native_files(root, "heap")
        for quoted, angled in headers(text)
        if (quoted or angled).startswith(("xla/", "pybind11/", "binding/"))
    ]


def files_are_short(root: Path) -> list[str]:
    endings = {".py", ".h", ".cc", ".cu", ".cpp", ".cuh", ".hip", ".txt", ".cmake"}
    folders = ("jax_ep", "pallas_kernels", "ffi", "tests", "examples", "benchmarks")
    return [
        f"{path.relative_to(root)} has {lines} lines"
        for folder in folders
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in endings and (lines := len(path.read_text().splitlines())) >= LONGEST_FILE
    ]


# Every rule, and files that break it: the path, what it holds, and nothing else in the tree.
BROKEN: list[tuple[Rule, str, str]] = [
    (device_includes_only_device, "ffi/device/a.h", '#include "xla/ffi/api/ffi.h"'),
    (device_includes_only_device, "ffi/device/a.h", "#include <pybind11/pybind11.h>"),
    (device_includes_only_device, "ffi/device/target/a.h", '#include "kernels/dispatch.h"'),
    (device_includes_only_device, "ffi/device/a.h", '  #  include "heap/group.h"'),
    (device_includes_only_device, "ffi/device/a.h", '#include "platform/cpu/executor.h"'),
    (device_includes_only_device, "ffi/device/a.h", "#include <unistd.h>"),
    (kernels_include_only_device_and_kernels, "ffi/kernels/a.h", '#include "binding/decode.h"'),
    (kernels_include_only_device_and_kernels, "ffi/kernels/a.h", '#include "heap/group.h"'),
    (kernels_include_only_device_and_kernels, "ffi/kernels/a.h", "#include <cuda_runtime.h>"),
    (gemm_includes_only_gemm_and_cuda, "ffi/gemm/a.h", '#include "kernels/op.h"'),
    (gemm_includes_only_gemm_and_cuda, "ffi/gemm/ptx/a.h", '#include "xla/ffi/api/ffi.h"'),
    (gemm_includes_only_gemm_and_cuda, "ffi/gemm/a.h", "#include <cublas_v2.h>"),
    (gemm_assembly_only_in_ptx, "ffi/gemm/kernel.h", 'asm volatile("wgmma.fence.sync.aligned;");'),
    (binding_knows_no_offsets, "ffi/binding/a.cc", '#include "device/layout.h"'),
    (only_platform_h_asks_for_the_platform, "ffi/device/a.h", "#ifdef __CUDACC__\n#endif"),
    (only_platform_h_asks_for_the_platform, "ffi/device/target/a.h", "#if __CUDA_ARCH__ >= 900\n#endif"),
    (only_platform_h_asks_for_the_platform, "ffi/kernels/a.h", "#if 0\n#elif defined(__HIP_PLATFORM_AMD__)\n#endif"),
    (only_platform_h_asks_for_the_platform, "ffi/kernels/a.h", "#if !defined(__x86_64__)\n#endif"),
    (assembly_only_for_memory_order, "ffi/device/copy.h", 'asm volatile("membar.sys;");'),
    (assembly_only_for_memory_order, "ffi/kernels/a.h", '__asm__("nop");'),
    (protocol_throws_nothing, "ffi/kernels/a.h", "void f() { throw 1; }"),
    (protocol_throws_nothing, "ffi/gemm/a.cc", "void f() { throw 1; }"),
    (heap_knows_no_xla, "ffi/heap/a.cc", '#include "xla/ffi/api/ffi.h"'),
    (heap_knows_no_xla, "ffi/heap/a.h", "#include <pybind11/stl.h>"),
    (heap_knows_no_xla, "ffi/heap/a.h", '#include "binding/registry.h"'),
    (files_are_short, "ffi/kernels/a.h", "\n" * LONGEST_FILE),
    (files_are_short, "tests/a.py", "\n" * LONGEST_FILE),
    *python_rules.BROKEN,
]

# What must pass, for no rule may be so strict that it cannot be kept.
KEPT = {
    "ffi/device/platform.h": '#if defined(__CUDACC__)\n#include "device/target/cuda.h"\n#endif',
    "ffi/device/target/cuda.h": '#include <cuda_runtime.h>\nasm volatile("fence;");',
    "ffi/device/target/hip.h": "#include <hip/hip_runtime.h>\n",
    "ffi/device/a.h": '// never asm or throw, nor __CUDACC__\n#include "device/platform.h"\n#include <cstdint>',
    "ffi/kernels/a.h": '#pragma once\n#include "device/layout.h"\n#include "kernels/b.h"\n#if defined(NDEBUG)\n#endif',
    "ffi/gemm/a.cc": '#include <cuda_bf16.h>\n#include <optional>\n#include "gemm/ptx/tma.h"',
    "ffi/gemm/ptx/a.h": 'asm volatile("setmaxnreg;");',
    "ffi/binding/a.cc": '#include "xla/ffi/api/ffi.h"\n#include "kernels/a.h"\nvoid f() { throw 1; }',
    "ffi/heap/a.h": '#include "device/heap.h"\n#include "platform/gpu/device_scope.h"\n#include <poll.h>',
    **python_rules.KEPT,
}

RULES = list(dict.fromkeys(rule for rule, _, _ in BROKEN))


def plant(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule: Rule) -> None:
    assert rule(ROOT) == []


def test_the_rules_have_something_to_read() -> None:
    for folder in ("device", "kernels", "gemm", "binding"):
        assert list(native_files(ROOT, folder)), f"ffi/{folder} is empty"
    for folder in ("_core", "ops", "nn"):
        assert list(python_rules.python_files(ROOT, f"jax_ep/{folder}")), f"jax_ep/{folder} is empty"


@pytest.mark.parametrize(
    ("rule", "path", "text"), [pytest.param(*case, id=f"{case[0].__name__}-{i}") for i, case in enumerate(BROKEN)]
)
def test_a_broken_rule_is_found(rule: Rule, path: str, text: str, tmp_path: Path) -> None:
    plant(tmp_path, KEPT | {path: text})
    assert rule(tmp_path) != []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_what_the_rules_allow(rule: Rule, tmp_path: Path) -> None:
    plant(tmp_path, KEPT)
    assert rule(tmp_path) == []
