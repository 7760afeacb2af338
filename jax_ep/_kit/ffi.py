"""The only module that names the compiled libraries: loads them, registers their FFI targets and calls these."""

import dataclasses
import functools
import importlib.util
import operator
import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.sharding import Mesh

from jax_ep._kit import checks, float8, meshes, vary
from jax_ep._kit.scopes import op_scope
from jax_ep.errors import PlatformError
from jax_ep.version import __version__

PLATFORMS = ("cpu", "cuda", "hip")
MAX_RANKS = 64  # ffi/comm/signal_pad.h: the size of a signal pad
MAIL_NUMBERS = 4096  # kMailNumbers of ffi/comm/signal_pad.h: of experts, or slices for a peer, in a mailbox
OLDEST_CUDA = 8.0  # ffi/CMakeLists.txt: the compute capability that the library for CUDA is compiled for
TMA_MULTIPLE = 8  # ffi/gemm/grouped_matmul.h: TMA wants rows of a multiple of this many 16-bit values

WORKSPACE = "workspace"  # the last result of an op that needs one; nobody reads it
_JAX_PLATFORM = {"cpu": "cpu", "cuda": "CUDA", "hip": "ROCM"}
_BETWEEN_USER_AND_CALL = ("jax_ep", "jax", "contextlib", "functools")  # packages whose code is no call site
_INSTALLED_SCRIPTS = ("jax_ep.examples.", "jax_ep.benchmarks.")  # in an installed jax_ep; its users
_loading = threading.Lock()
NO_SETTING = {"setting": False}  # the metadata of a field that is not one
_declared: dict[str, list[str]] = {}  # the settings of an op, by FFI target
_Record = TypeVar("_Record")
_Arrays = TypeVar("_Arrays")
Setting = bool | int | float | str  # of an op, in Python's own types


def library_name(device: Any) -> str:
    """The name of the library for a device: jax says "gpu" for CUDA and ROCm alike."""
    if device.platform != "gpu":
        return device.platform
    return "hip" if "rocm" in device.client.platform_version.lower() else "cuda"


def ordinal(device: Any) -> int:
    """The number by which XLA names a device of this process to a handler."""
    return device.id if device.platform == "cpu" else device.local_hardware_id


def _module_name(platform: str) -> str:
    return f"jax_ep._jax_ep_{platform}"


def _find(platform: str) -> ModuleSpec | None:
    """A platform's library, in any folder `jax_ep` on `sys.path`.

    The folder of a checkout holds no libraries, and shadows the installed one, which does.
    """
    folders = pkgutil.extend_path([*sys.modules["jax_ep"].__path__], "jax_ep")
    return PathFinder.find_spec(_module_name(platform), folders)


def is_built(platform: str) -> bool:
    return platform in PLATFORMS and _find(platform) is not None


def built_platforms() -> tuple[str, ...]:
    return tuple(platform for platform in PLATFORMS if is_built(platform))


def without_kernels(device: Any) -> tuple[str, bool] | None:
    """Why the ops of a device run without the kernels of a library, and whether one could serve it; None: they do not.

    Libraries serve CPUs, NVIDIA GPUs from Ampere on, and AMD GPUs whose waves have 64 lanes.
    """
    platform = library_name(device)
    capability = str(getattr(device, "compute_capability", ""))
    if platform == "cuda" and capability and float(capability) < OLDEST_CUDA:
        return f"its library needs a compute capability of {OLDEST_CUDA:g}, which {device.device_kind} has not", False
    if platform == "hip" and capability and not capability.startswith("gfx9"):
        return f"its library needs waves of 64 lanes (gfx9), which {device.device_kind} ({capability}) has not", False
    if platform not in PLATFORMS:
        return f"it has no library for platform {platform!r}", False
    if not is_built(platform):
        return f"{_not_built(platform)}: install jax_ep with it", True
    if platform != "cpu" and capability:
        built_for = str(getattr(_load(platform), "architectures", "all"))  # `library` refuses one of another version
        if not any(_has_code(name, capability) for name in built_for.split()):
            gpu = f"{device.device_kind} ({capability})"
            return f"its library is compiled for {built_for}, and not for {gpu}: install jax_ep again here", True
    return None


def _has_code(architecture: str, capability: str) -> bool:
    """Whether a library that is compiled for an architecture, as CMake calls it, has code for a GPU.

    Machine code runs on GPUs of its generation that are not older, and PTX on all that are not older.
    """
    if architecture.startswith("gfx"):
        return architecture.split(":")[0] == capability.split(":")[0] or "generic" in architecture
    parts = re.fullmatch(r"(\d+)([af]?)(-real|-virtual)?", architecture)
    if parts is None:
        return True  # "all", "native"
    oldest, gpu = int(parts[1]), round(10 * float(capability))
    if parts[2] == "a":
        return oldest == gpu
    has_ptx = not parts[2] and parts[3] != "-real"
    return oldest <= gpu and (has_ptx or oldest // 10 == gpu // 10)


def _not_built(platform: str) -> str:
    return f"no jax_ep library is built for platform {platform!r} (built: {built_platforms()})"


def loaded_libraries() -> list[ModuleType]:
    """Those that this process has imported, even if `library` then refused one of another version."""
    return [sys.modules[name] for name in map(_module_name, PLATFORMS) if name in sys.modules]


def _load(platform: str) -> ModuleType:
    spec = _find(platform)
    if spec is None or spec.loader is None:
        raise PlatformError(_not_built(platform))
    with _loading:
        if spec.name not in sys.modules:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[spec.name] = module
        return sys.modules[spec.name]


class OpNames(NamedTuple):
    """The names in the spec of an op."""

    arguments: str  # the C++ struct
    ops: list[str]  # for users; several if a setting decides
    settings: dict[str, str]  # with the label in errors, "" if errors leave it out
    operands: list[str]  # in the order of the call
    results: list[str]


@functools.cache
def op_names(platform: str) -> dict[str, OpNames]:
    """By FFI target, of every op in a platform's library. Needs no device of the platform."""
    names = _load(platform).names()
    return {
        target: OpNames(arguments, ops, dict(settings), operands, results)
        for target, (arguments, ops, settings, operands, results) in names.items()
    }


def settings_of(name: str, *of_operands: str) -> Callable[[type[_Record]], type[_Record]]:
    """Declares a dataclass whose fields, but those of `NO_SETTING`, are the settings of an op, by its FFI target.

    Each library compares them with its spec of the op when it is loaded.

    Args:
      of_operands: the settings that operands give, which are no fields.
    """

    def declare(record: type[_Record]) -> type[_Record]:
        _declared[name] = [*of_operands, *_names_of(record)]
        return record

    return declare


def settings(record: Any) -> dict[str, Any]:
    """The settings that the fields of a declared record hold, for `call`."""
    return {name: getattr(record, name) for name in _names_of(record)}


def _names_of(record: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(record) if field.metadata.get("setting", True)]


def _check_settings(platform: str, name: str, given: Collection[str]) -> None:
    wanted = op_names(platform)[name].settings
    if set(given) != set(wanted):
        raise PlatformError(f"{name}: settings must be {', '.join(wanted)}, got {', '.join(given)}")


@functools.cache
def library(platform: str) -> ModuleType:
    """Imports a platform's library and registers its handlers: after `jax.devices()`, as state types require."""
    library = _load(platform)
    if library.version != __version__:
        raise PlatformError(
            f"the compiled library for {platform!r} is of jax_ep {library.version}, the Python code of {__version__}: "
            "install jax_ep again"
        )
    limits = (library.max_ranks, library.mail_numbers, library.float8_block, library.tma_multiple)
    here = (MAX_RANKS, MAIL_NUMBERS, float8.BLOCK, TMA_MULTIPLE)
    if limits != here:
        raise PlatformError(
            f"ranks, numbers in a mailbox, float8 block, row multiple: the library has {limits}, Python {here}"
        )
    for name in _declared.keys() & op_names(platform).keys():
        _check_settings(platform, name, _declared[name])
    for name, type_info in library.types().items():
        jax.ffi.register_ffi_type(name, type_info, platform=_JAX_PLATFORM[platform])
    for name, handlers in library.handlers().items():
        jax.ffi.register_ffi_target(f"jax_ep_{name}", handlers, platform=_JAX_PLATFORM[platform])
    return library


class _Result(NamedTuple):
    name: str
    dtype: str | None  # None: the result aliases the last operand, and has its dtype and shape
    shape: Sequence[int]
    replicated: bool  # the same on all ranks


@functools.lru_cache(maxsize=4096, typed=True)
def _results_of(platform: str, name: str, ranks: int, **settings: Setting) -> tuple[str, list[_Result]]:
    """The name of an op that users know, and its results in order: from its OpSpec, and cached by settings."""
    _check_settings(platform, name, settings)
    op, results = library(platform).call_types(name, ranks, **settings)
    return op, [_Result(*each) for each in results]


def _call_site() -> str:
    """The file and function of the user's code that calls an op, for errors and the flight recorder.

    It has no line number: with one, a change above the call would miss the compilation cache.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_INSTALLED_SCRIPTS) or module.partition(".")[0] not in _BETWEEN_USER_AND_CALL:
            return f"{Path(frame.f_code.co_filename).name}, {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


@dataclasses.dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks of a group."""

    mesh: Mesh
    axis_name: checks.AxisName
    platform: str
    id: int = -1  # by which handlers find the group; -1 without kernels

    @property
    def size(self) -> int:
        return meshes.line_size(self.mesh, self.axis_name)


def call(
    name: str,
    *operands: jax.Array,
    ranks: Ranks | None,
    called_by: str = "",
    updated: jax.Array | None = None,
    **settings: Setting | np.dtype,
) -> dict[str, jax.Array]:
    """Calls an op, for the kernels.py of its family.

    Its OpSpec (ffi/kernels/<family>/args.h) lists operands, settings and results. Results vary over the axes that the
    first operand varies over. Under `jax.vmap` it runs once per element, in the same order on all devices:
    `sequential_vmap` traces the call anew with operands that vary over a `spmd_axis_name` too.

    Args:
      name: of the FFI target, without prefix.
      ranks: None for a local op. Only the library for CUDA has kernels for local ops.
      called_by: the op that a user called, for errors and the flight recorder.
      updated: the last operand, whose values a result starts from.

    Returns:
      Its results by name.
    """
    operands = (*operands, updated) if updated is not None else operands
    plain = {key: _python_value(value) for key, value in settings.items()}
    attributes = {"release": __version__}  # a saved program may meet a library of another release
    attributes |= {key: _attribute(value) for key, value in plain.items()}
    if ranks is None:
        op, types = _results_of("cuda" if is_built("cuda") else "cpu", name, 1, **plain)  # the CPU's: for tests
    else:
        op, types = _results_of(ranks.platform, name, ranks.size, **plain)
        caller = f"{called_by}: " if called_by not in ("", op) else ""
        attributes |= {"group": np.int64(ranks.id), "site": caller + _call_site()}
        operands = tuple(meshes.on_these_devices(op, x, ranks.mesh) for x in operands)
    names = [result.name for result in types if result.name != WORKSPACE]
    axes = frozenset(checks.axes_of(ranks.axis_name) if ranks else ())
    aliases = {len(operands) - 1: i for i, result in enumerate(types) if result.dtype is None}

    def type_of(result: _Result, operands: Sequence[jax.Array]) -> jax.ShapeDtypeStruct:
        if result.dtype is None:
            return vary.result_type(operands[-1].shape, operands[-1].dtype, operands[-1])
        unvarying = axes if result.replicated else frozenset()
        return vary.result_type(tuple(result.shape), np.dtype(result.dtype), operands[0], unvarying)

    def one_call(*operands: jax.Array) -> Sequence[jax.Array]:
        results = [type_of(result, operands) for result in types]
        called = jax.ffi.ffi_call(f"jax_ep_{name}", results, input_output_aliases=aliases)
        if updated is not None:
            operands = (*operands[:-1], _unfused(operands[-1]))
        returned = called(*operands, **attributes)[: len(names)]
        return returned if ranks is None else _unfused(returned)

    with op_scope(op):
        return dict(zip(names, sequential_vmap(one_call)(*operands), strict=True))


def mark(*arrays: jax.Array, ranks: Ranks, begins: bool, text: str) -> Sequence[jax.Array]:
    """The arrays, at least one. A rank marks that a call of this `text` begins, or ends, when they are there
    (ffi/comm/marks.h). The library of `ranks` keeps the marks.
    """
    called = jax.ffi.ffi_call(
        "jax_ep_mark",
        [vary.result_type(x.shape, x.dtype, x) for x in arrays],
        input_output_aliases={i: i for i in range(len(arrays))},
        vmap_method="broadcast_all",
    )
    attributes = {"group": np.int64(ranks.id), "site": text, "begins": begins, "release": __version__}
    return _unfused(called(*_unfused(arrays), **attributes))


def _unfused(arrays: _Arrays) -> _Arrays:
    """Operands that a call updates, or results of a call.

    In a loop, XLA:GPU fuses a call with the slice that makes an operand, and the call loses its alias. XLA:GPU also
    fuses a call with the update of the stacked array that takes one of its results, and runs the call again for the
    other results. A barrier prevents both.
    """
    return jax.lax.optimization_barrier(arrays)


def _python_value(value: Setting | np.dtype) -> Setting:
    """A setting as a value of Python's own types, also if the user gave one of numpy's."""
    if isinstance(value, np.dtype):
        return value.name
    return value if isinstance(value, (bool, float, str)) else operator.index(value)


def _attribute(value: Setting) -> bool | str | np.float32 | np.int64:
    """A plain setting as the libraries read it: numbers of a known width."""
    if isinstance(value, (bool, str)):
        return value
    return np.float32(value) if isinstance(value, float) else np.int64(value)
