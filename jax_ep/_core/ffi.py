"""The only module that names the compiled libraries: loads them, registers their FFI targets and calls these."""

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ep._core import checks
from jax_ep.errors import PlatformError
from jax_ep.version import __version__

PLATFORMS = ("cpu", "cuda", "hip")
MAX_EXPERTS = 4096  # ffi/comm/heap.h: the size of a mailbox

_JAX_PLATFORM = {"cpu": "cpu", "cuda": "CUDA", "hip": "ROCM"}
_BETWEEN_USER_AND_CALL = ("jax_ep", "jax", "contextlib", "functools")  # packages whose code is no call site
_INSTALLED_SCRIPTS = ("jax_ep.examples.", "jax_ep.benchmarks.")  # parts of it where it is installed, but its users


def library_name(device: Any) -> str:
    """The name of the library for a device: jax says "gpu" for CUDA and ROCm alike."""
    if device.platform != "gpu":
        return device.platform
    return "hip" if "rocm" in device.client.platform_version.lower() else "cuda"


def ordinal(device: Any) -> int:
    """What XLA calls a device of this process when it calls a handler."""
    return device.id if device.platform == "cpu" else device.local_hardware_id


def is_built(platform: str) -> bool:
    return platform in PLATFORMS and importlib.util.find_spec(f"_jax_ep_{platform}") is not None


def built_platforms() -> tuple[str, ...]:
    return tuple(platform for platform in PLATFORMS if is_built(platform))


def loaded_platforms() -> tuple[str, ...]:
    return tuple(platform for platform in PLATFORMS if f"_jax_ep_{platform}" in sys.modules)


@functools.cache
def library(platform: str) -> ModuleType:
    """Imports a platform's library and registers its handlers: after `jax.devices()`, as state types require."""
    library = importlib.import_module(f"_jax_ep_{platform}")
    if library.version != __version__:
        raise PlatformError(
            f"the compiled library for {platform!r} is of jax_ep {library.version}, the Python code of {__version__}: "
            "install jax_ep again"
        )
    assert library.max_experts == MAX_EXPERTS
    for name, type_info in library.types().items():
        jax.ffi.register_ffi_type(name, type_info, platform=_JAX_PLATFORM[platform])
    for name, handlers in library.handlers().items():
        jax.ffi.register_ffi_target(f"jax_ep_{name}", handlers, platform=_JAX_PLATFORM[platform])
    return library


def _call_site() -> str:
    """The file and function of the user's code that calls an op, for errors and flight records.

    Without the line, which would make the compilation cache forget a program whenever the file changes above it.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_INSTALLED_SCRIPTS) or module.partition(".")[0] not in _BETWEEN_USER_AND_CALL:
            return f"{Path(frame.f_code.co_filename).name}, {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


class Ranks(Protocol):
    """What a call needs to know of the group whose ranks it joins: a `jax_ep.Group` is one."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def native_id(self) -> int: ...


def call(
    name: str,
    results: Any,
    *operands: jax.Array,
    group: Ranks | None = None,
    op: str = "",
    aliases: dict[int, int] | None = None,
    vmap_method: str | None = None,
    **attributes: Any,
):
    """Calls an FFI target, for the kernels.py of a family of ops.

    Args:
      name: of the target, without prefix; `results` and `attributes` are those of its handler.
      group: of a collective.
      op: what the user knows it as, if not by this name.
      aliases, vmap_method: as in `jax.ffi.ffi_call`.
    """
    if group is not None:  # refused also where nothing but a gradient is batched, as by jax.jacrev
        operands = tuple(checks.not_batched(op or name, x, group.mesh) for x in operands)
        attributes["group"] = np.int64(group.native_id)
        attributes["site"] = _call_site()
    target = jax.ffi.ffi_call(f"jax_ep_{name}", results, input_output_aliases=aliases, vmap_method=vmap_method)
    return target(*operands, **attributes)
