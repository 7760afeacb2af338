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
LONGEST_FILE = 600

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
        chosen = (CHOSEN,) if folder in ("runtime", "bindings") else ()
        for path, text in native_files(root, folder):
            for quoted, _ in headers(text):
                known = quoted.startswith((*(f"{each}/" for each in (folder, *below)), *chosen))
                xla = quoted.startswith("xla/ffi/") and folder in ("runtime", "bindings")
                if quoted and not known and not xla:
                    found.append(f"{path} includes {quoted}")
    return found


OP_NAMES = re.compile(r"dispatch|combine|scatter|gather|ragged|sparse|matmul|moe|expert", re.IGNORECASE)


def comm_names_no_op(root: Path) -> list[str]:
    return [f"{path} names {name}" for path, text in native_files(root, "comm") for name in OP_NAMES.findall(text)]


def peers_are_reached_by_windows(root: Path) -> list[str]:
    """Device code finds a peer's signal pad, and what is posted there, in the headers of Op and Window alone."""
    return [
        f"{path} contains {found}"
        for path, text in native_files(root, "comm", "rows", "gemm", "kernels")
        for found in re.findall(r"\bheaps\[|->buffers\[|\bmail\[", text)
        if path not in ("comm/window.h", "comm/op.h", "comm/work_queue.h", "comm/signals.h", "comm/heap.h")
    ]


def families_know_no_other(root: Path) -> list[str]:
    """kernels/<family> includes itself and what lies in kernels/ for all."""
    return [
        f"{path} includes {quoted}"
        for path, text in native_files(root, "kernels")
        for quoted, _ in headers(text)
        if path.count("/") == 2 and quoted.startswith("kernels/") and quoted.count("/") == 2
        if quoted.split("/")[1] != path.split("/")[1]
    ]


def devices_know_only_their_compiler(root: Path) -> list[str]:
    """Where kernels are written: no header of an operating system, of XLA or of a library."""

    def may_include(path: str, header: str) -> bool:
        if path.startswith("comm/") and PLATFORM_HEADER.fullmatch(header):
            return True
        if path.startswith(("gemm/", "kernels/matmul/")) and CUDA_HEADER.fullmatch(header):
            return True
        return STANDARD_HEADER.fullmatch(header) is not None

    return [
        f"{path} includes {angled}"
        for path, text in native_files(root, "comm", "rows", "gemm", "kernels")
        for _, angled in headers(text)
        if angled and not may_include(path, angled)
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
        for path, text in native_files(root, "bindings")
        for quoted, _ in headers(text)
        if quoted.endswith("layout.h")
    ]


def only_platform_h_asks_for_the_platform(root: Path) -> list[str]:
    return [
        f"{path} asks {condition.strip()}"
        for path, text in native_files(root, *MAY_INCLUDE)
        for condition in CONDITION.findall(text)
        if path != "comm/platform.h" and PLATFORM_MACRO.search(condition)
    ]


def only_rows_ask_for_ptx(root: Path) -> list[str]:
    """What platform.h found out: whether there are headers that only one compiler can read."""
    return [
        f"{path} asks {condition.strip()}"
        for path, text in native_files(root, *MAY_INCLUDE)
        for condition in CONDITION.findall(text)
        if "JAX_EP_HAS_PTX" in condition and not path.startswith("rows/")
    ]


def includes_name_files(root: Path) -> list[str]:
    """No macro chooses what is included, and a name says the folder."""
    return [
        f"{path} includes {name}"
        for path, text in native_files(root, *MAY_INCLUDE)
        for name in re.findall(r"^[ \t]*#[ \t]*include[ \t]*([^\s<]\S*)", text, re.MULTILINE)
        if not re.fullmatch(r'"[\w.]+(/[\w.]+)+"', name)
    ]


def a_platform_is_reached_by_its_path(root: Path) -> list[str]:
    """Nobody names the folder of a platform but that platform itself: others include "platform/...", which every
    platform of GPUs has alike."""
    found = []
    for path, text in native_files(root, "runtime", "bindings"):
        for quoted, _ in headers(text):
            parts = quoted.split("/")
            at_home = path.startswith("/".join(parts[:2]) + "/")
            if parts[0] == "runtime" and parts[1] in PLATFORMS and not at_home:
                found.append(f"{path} includes {quoted}")
            if quoted.startswith(CHOSEN):
                users = [path.split("/")[1]] if path.split("/")[1] in PLATFORMS else ["cuda", "hip"]
                for each in users:
                    shared = ["gpu"] if each != "cpu" else []
                    if not any((root / "ffi" / "runtime" / place / quoted).is_file() for place in (each, *shared)):
                        found.append(f"{path} includes {quoted}, which runtime/{each} lacks")
    return found


def assembly_only_for_memory_order(root: Path) -> list[str]:
    """In comm/target/, where every platform has its own."""
    return [
        f"{path} contains assembly"
        for path, text in native_files(root, "comm", "rows", "kernels")
        if ASSEMBLY.search(text) and not path.startswith("comm/target/")
    ]


def protocol_throws_nothing(root: Path) -> list[str]:
    return [
        f"{path} throws"
        for path, text in native_files(root, "comm", "rows", "kernels", "gemm")
        if re.search(r"\bthrow\b", text)
    ]


def runtime_knows_xla_in_three_places(root: Path) -> list[str]:
    """How a custom call finds its group, and how its kernel is launched."""
    places = re.compile(r"runtime/(registry|\w+/(platform/)?launch)\.(h|cc)")
    return [
        f"{path} includes {quoted or angled}"
        for path, text in native_files(root, "runtime")
        for quoted, angled in headers(text)
        if (quoted or angled).startswith(("xla/", "pybind11/")) and not places.fullmatch(path)
    ]


OP_ARGUMENTS = re.compile(r"(?<![:.])\b[A-Z]\w*Args\b")


def bindings_name_no_op(root: Path) -> list[str]:
    """Nor does the runtime, but where kernels are instantiated for a GPU: all of it follows from the ops' specs."""
    return [
        f"{path} names {argument}"
        for path, text in native_files(root, "bindings", "runtime")
        for argument in OP_ARGUMENTS.findall(text)
        if not path.startswith(("runtime/gpu/", "runtime/cuda/")) and argument != "Args"
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
    (folders_include_only_those_below, "ffi/comm/a.h", '#include "xla/ffi/api/ffi.h"'),
    (folders_include_only_those_below, "ffi/comm/target/a.h", '  #  include "rows/movers.h"'),
    (folders_include_only_those_below, "ffi/rows/a.h", '#include "gemm/kernel.h"'),
    (folders_include_only_those_below, "ffi/gemm/ptx/a.h", '#include "rows/movers.h"'),
    (folders_include_only_those_below, "ffi/comm/a.h", '#include "gemm/plan.h"'),
    (folders_include_only_those_below, "ffi/kernels/moe/a.h", '#include "runtime/group.h"'),
    (folders_include_only_those_below, "ffi/kernels/a.h", '#include "platform/launch.h"'),
    (folders_include_only_those_below, "ffi/runtime/cpu/a.cc", '#include "bindings/decode.h"'),
    (comm_names_no_op, "ffi/comm/a.h", "constexpr int kMaxExperts = 4096;"),
    (comm_names_no_op, "ffi/comm/target/a.h", "int64_t sparse_scratch(int rows);"),
    (peers_are_reached_by_windows, "ffi/kernels/moe/a.h", "store_release(&comm.heaps[peer]->posted[rank], stamp);"),
    (peers_are_reached_by_windows, "ffi/rows/a.h", "char* to = box->buffers[0];"),
    (families_know_no_other, "ffi/kernels/moe/a.h", '#include "kernels/sparse/args.h"'),
    (devices_know_only_their_compiler, "ffi/comm/a.h", "#include <pybind11/pybind11.h>"),
    (devices_know_only_their_compiler, "ffi/comm/a.h", "#include <unistd.h>"),
    (devices_know_only_their_compiler, "ffi/kernels/a.h", "#include <cuda_runtime.h>"),
    (devices_know_only_their_compiler, "ffi/gemm/a.h", "#include <cublas_v2.h>"),
    (gemm_assembly_only_in_ptx, "ffi/gemm/kernel.h", 'asm volatile("wgmma.fence.sync.aligned;");'),
    (binding_knows_no_offsets, "ffi/bindings/a.cc", '#include "kernels/moe/layout.h"'),
    (only_platform_h_asks_for_the_platform, "ffi/comm/a.h", "#ifdef __CUDACC__\n#endif"),
    (only_platform_h_asks_for_the_platform, "ffi/comm/target/a.h", "#if __CUDA_ARCH__ >= 900\n#endif"),
    (only_platform_h_asks_for_the_platform, "ffi/kernels/a.h", "#if 0\n#elif defined(__HIP_PLATFORM_AMD__)\n#endif"),
    (only_platform_h_asks_for_the_platform, "ffi/kernels/a.h", "#if !defined(__x86_64__)\n#endif"),
    (only_platform_h_asks_for_the_platform, "ffi/gemm/a.h", "#if defined(__CUDACC__)\n#endif"),
    (only_platform_h_asks_for_the_platform, "ffi/bindings/a.cc", "#ifdef JAX_EP_CUDA\n#endif"),
    (only_rows_ask_for_ptx, "ffi/kernels/a.h", "#if JAX_EP_HAS_PTX\n#endif"),
    (includes_name_files, "ffi/rows/a.h", "#include JAX_EP_MOVER"),
    (includes_name_files, "ffi/runtime/a.cc", '#include "launch.h"'),
    (a_platform_is_reached_by_its_path, "ffi/bindings/a.cc", '#include "runtime/cpu/launch.h"'),
    (a_platform_is_reached_by_its_path, "ffi/runtime/gpu/a.h", '#include "runtime/cuda/matmul.h"'),
    (a_platform_is_reached_by_its_path, "ffi/runtime/gpu/a.h", '#include "platform/matmul.h"'),
    (assembly_only_for_memory_order, "ffi/comm/copy.h", 'asm volatile("membar.sys;");'),
    (assembly_only_for_memory_order, "ffi/kernels/a.h", '__asm__("nop");'),
    (protocol_throws_nothing, "ffi/kernels/a.h", "void f() { throw 1; }"),
    (protocol_throws_nothing, "ffi/gemm/a.cc", "void f() { throw 1; }"),
    (runtime_knows_xla_in_three_places, "ffi/runtime/a.cc", '#include "xla/ffi/api/ffi.h"'),
    (runtime_knows_xla_in_three_places, "ffi/runtime/gpu/a.h", "#include <pybind11/stl.h>"),
    (bindings_name_no_op, "ffi/bindings/a.cc", "template BoundOp bind<DispatchArgs>();"),
    (bindings_name_no_op, "ffi/runtime/reach.h", "void reach(const CombineArgs& args);"),
    (files_are_short, "ffi/kernels/a.h", "\n" * LONGEST_FILE),
    (files_are_short, "tests/a.py", "\n" * LONGEST_FILE),
    *python_rules.BROKEN,
]

# What must pass, for no rule may be so strict that it cannot be kept.
KEPT = {
    "ffi/comm/platform.h": '#if defined(__CUDACC__)\n#include "comm/target/cuda.h"\n#endif',
    "ffi/comm/target/cuda.h": '#include <cuda_runtime.h>\nasm volatile("fence;");',
    "ffi/comm/target/hip.h": "#include <hip/hip_runtime.h>\n",
    "ffi/kernels/hardware_model.h": "struct DispatchRates { int sparse; };",
    "ffi/comm/a.h": '// never asm or throw, nor __CUDACC__\n#include "comm/platform.h"\n#include <cstdint>',
    "ffi/kernels/a.h": '#pragma once\n#include "comm/part.h"\n#include "kernels/b.h"\n#if defined(NDEBUG)\n#endif',
    "ffi/gemm/a.cc": '#include <cuda_bf16.h>\n#include "gemm/ptx/tma.h"\n#include "comm/integers.h"',
    "ffi/gemm/ptx/a.h": 'asm volatile("setmaxnreg;");',
    "ffi/bindings/a.cc": '#include "xla/ffi/api/ffi.h"\n#include "kernels/a.h"\nvoid f(ffi::RemainingArgs) { throw; }',
    "ffi/runtime/a.h": '#include "runtime/gpu/a.h"\n#include "platform/vmm.h"\n#include <poll.h>',
    "ffi/runtime/cuda/platform/vmm.h": '#include "platform/vmm.h"',
    "ffi/runtime/hip/platform/vmm.h": "#include <hip/hip_runtime_api.h>",
    "ffi/rows/a.h": '#if JAX_EP_HAS_PTX\n#include "comm/target/ptx/bulk.h"\n#endif',
    "ffi/runtime/gpu/launch.h": '#include "xla/ffi/api/ffi.h"',
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
    for folder in MAY_INCLUDE:
        assert list(native_files(ROOT, folder)), f"ffi/{folder} is empty"
    for folder in ("_kit", "runtime", "ops", "nn"):
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
