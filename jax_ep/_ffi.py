"""The only module that names the compiled libraries and their FFI targets."""

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _checks
from jax_ep.errors import PlatformError
from jax_ep.routing import FP8_BLOCK, DispatchConfig, Dispatched, Float8Rows, Routing
from jax_ep.sparse_union import SparseConfig, Union
from jax_ep.version import __version__

if TYPE_CHECKING:
    from jax_ep.collective_matmul import Config
    from jax_ep.group import Group

PLATFORMS = ("cpu", "cuda", "hip")
MAX_EXPERTS = 4096  # ffi/device/heap.h: the size of a mailbox

_JAX_PLATFORM = {"cpu": "cpu", "cuda": "CUDA", "hip": "ROCM"}


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
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("jax_ep", "jax", "contextlib", "functools"):
            return f"{Path(frame.f_code.co_filename).name}, {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _call(
    name: str,
    results: Any,
    *operands: jax.Array,
    group: "Group | None" = None,
    op: str = "",
    aliases: dict[int, int] | None = None,
    vmap_method: str | None = None,
    **attributes: Any,
):
    """`group`: of a collective. `op`: what the user knows it as, if not by this name."""
    if group is not None:  # refused also where nothing but a gradient is batched, as by jax.jacrev
        operands = tuple(_checks.not_batched(op or name, x, group.mesh) for x in operands)
        attributes["group"] = np.int64(group.native_id)
        attributes["site"] = _call_site()
    call = jax.ffi.ffi_call(f"jax_ep_{name}", results, input_output_aliases=aliases, vmap_method=vmap_method)
    return call(*operands, **attributes)


def dispatch(
    group: "Group", config: DispatchConfig, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> Dispatched:
    (num_tokens, hidden), top_k = tokens.shape, expert_ids.shape[1]
    table = (config.size, num_tokens, top_k)
    compiled = library(group.platform)
    float8 = not config.dequantize
    wire_float8 = config.wire_dtype is not None
    early = compiled.early_tokens(num_tokens, top_k, wire_float8, float8)
    slot_bytes = compiled.landing_slot_bytes(hidden, tokens.dtype.itemsize, wire_float8, float8)
    scales_row = hidden // FP8_BLOCK if float8 else 0
    result = functools.partial(_checks.result_type, like=tokens)
    out, scales, sizes, targets, rows, arrived, counts, dropped, invalid, *_ = _call(
        "dispatch",
        (
            result((config.capacity, hidden), config.wire_dtype if float8 else tokens.dtype),
            result((config.capacity, scales_row), jnp.float32),
            result((config.local_experts,), jnp.int32),
            result((num_tokens, top_k), jnp.int32),
            result(table, jnp.int32),
            result(table, jnp.float32),
            result((config.size, config.local_experts), jnp.int32),
            result((1,), jnp.int32),
            result((1,), jnp.int32),
            result((compiled.route_scratch(config.num_experts),), jnp.int32),
            result((config.size * early, slot_bytes), jnp.uint8),  # where they land
        ),
        tokens,
        expert_ids,
        weights,
        group=group,
        alignment=np.int32(config.alignment),
        drop=config.drop,
        wire_float8=wire_float8,
    )
    rows_or_float8 = Float8Rows(out, scales) if float8 else out
    return Dispatched(rows_or_float8, sizes, Routing(targets, rows, arrived, counts, dropped, invalid, config))


def scatter(group: "Group", tokens: jax.Array, routing: Routing) -> jax.Array:
    """Rows [T, H] along a routing that is already known: [capacity, H]."""
    config = routing.config
    return _call(
        "scatter",
        _checks.result_type((config.capacity, tokens.shape[1]), tokens.dtype, tokens),
        tokens,
        routing.targets,
        routing.rows,
        routing.counts,
        op="the gradient of combine",
        group=group,
        alignment=np.int32(config.alignment),
    )


def combine(group: "Group", expert_outputs: jax.Array, weights: jax.Array, routing: Routing) -> jax.Array:
    none = jnp.zeros((0,), jnp.float32)
    return _combine("combine", group, expert_outputs, weights, none, (0,), routing)[0]


def return_rows(group: "Group", rows: jax.Array, weights: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """Unweighted row sums per token, and [R, T, K] scalars returned to the [T, K] they belong to."""
    none = jnp.zeros((0,), jnp.float32)
    return _combine("the gradient of dispatch", group, rows, none, weights, routing.targets.shape, routing)


def _combine(
    op: str,
    group: "Group",
    rows: jax.Array,
    weights: jax.Array,
    scalars: jax.Array,
    returned: tuple[int, ...],
    routing: Routing,
) -> tuple[jax.Array, jax.Array]:
    num_tokens, hidden = routing.targets.shape[0], rows.shape[1]
    result = functools.partial(_checks.result_type, like=rows)
    out, back, _ = _call(
        "combine",
        (
            result((num_tokens, hidden), rows.dtype),
            result(returned, jnp.float32),
            result((routing.config.size, num_tokens, hidden), rows.dtype),  # where partial sums land
        ),
        rows,
        weights,
        scalars,
        routing.targets,
        routing.rows,
        op=op,
        group=group,
    )
    return out, back


def ragged_all_to_all(group: "Group", operand: jax.Array, output: jax.Array, *indices: jax.Array) -> jax.Array:
    return _call(
        "ragged_all_to_all",
        _checks.result_type(output.shape, output.dtype, output),
        operand,
        output,
        *indices,
        aliases={1: 0},
        group=group,
    )


def matmul_reduce(config: "Config", a: jax.Array, b: jax.Array) -> jax.Array:
    """[M, K], [K, N] (or [N, K], to be transposed) -> the sum of the ranks' products [M, N], or a share of its rows."""
    group, axis = config.group, frozenset({config.group.axis_name})
    shape = (a.shape[0], b.shape[0 if config.transpose_b else 1])
    if config.scatter:
        result = _checks.result_type((shape[0] // group.size, shape[1]), config.dtype, a)
    else:
        result = _checks.result_type(shape, config.dtype, a, unvarying=axis)
    partial = _checks.result_type(shape, config.dtype, a)
    return _call(
        "matmul_reduce",
        (result, partial),
        a,
        b,
        op="matmul_reduce_scatter" if config.scatter else "matmul_all_reduce",
        group=group,
        transpose_b=config.transpose_b,
        scatter=config.scatter,
    )[0]


def gather_matmul(config: "Config", a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[M, K], [K, N] (or [N, K], to be transposed) -> the rows of all ranks times b [R M, N], and those rows."""
    rows = config.group.size * a.shape[0]
    result = _checks.result_type((rows, b.shape[0 if config.transpose_b else 1]), config.dtype, a)
    gathered = _checks.result_type((rows, a.shape[1]), a.dtype, a)
    out, everyone = _call(
        "gather_matmul",
        (result, gathered),
        a,
        b,
        op="all_gather_matmul",
        group=config.group,
        transpose_b=config.transpose_b,
    )
    return out, everyone


@functools.cache
def has_gemm() -> bool:
    """Whether every CUDA device of this process has the GEMM core: the library is built, the device is a Hopper."""
    if not is_built("cuda"):
        return False
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # no such backend
        return False
    if not all(device.compute_capability.startswith("9.") for device in devices):
        return False
    library("cuda")
    return True


def grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, dtype: Any, transpose_rhs: bool
) -> jax.Array:
    """[M, K], [G, K, N] (or [G, N, K], to be transposed), [G] -> [M, N]: a group's rows times its matrix."""
    columns = rhs.shape[1 if transpose_rhs else 2]
    result = _checks.result_type((lhs.shape[0], columns), dtype, lhs)
    return _call("grouped_matmul", result, lhs, rhs, group_sizes, vmap_method="sequential", transpose_rhs=transpose_rhs)


def grouped_outer(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, dtype: Any) -> jax.Array:
    """[M, K], [M, N], [G] -> [G, K, N]: over a group's rows, `lhs` transposed times `rhs`."""
    result = _checks.result_type((group_sizes.shape[0], lhs.shape[1], rhs.shape[1]), dtype, lhs)
    return _call("grouped_outer", result, lhs, rhs, group_sizes, vmap_method="sequential")


def sparse_union(group: "Group", config: SparseConfig, ids: jax.Array, missing: jax.Array) -> Union:
    """From this rank's ids [N]: the union of all ranks' ids."""
    table = (config.size, ids.shape[0])
    same = functools.partial(_checks.result_type, like=ids, unvarying=frozenset({group.axis_name}))
    mine = functools.partial(_checks.result_type, like=ids) if config.sharded else same
    return Union(
        *_call(
            "sparse_union",
            (
                mine((config.capacity,), jnp.int32),
                same(table, jnp.int32),
                same((config.size + 1,), jnp.int32),
                same((2,), jnp.int32),
                mine((library(group.platform).bitmap_scratch(config.num_rows),), jnp.int32),
            ),
            ids,
            missing,
            op="sparse_all_reduce",
            group=group,
            num_rows=np.int32(config.num_rows),
            sharded=config.sharded,
        )[:-1]
    )


def sparse_reduce(group: "Group", config: SparseConfig, values: jax.Array, union: Union) -> jax.Array:
    """Rows [N, D] of every rank, added up in the slots of the union: [capacity, D]."""
    (entries, hidden), unvarying = values.shape, frozenset() if config.sharded else frozenset({group.axis_name})
    result, slots = functools.partial(_checks.result_type, like=values), config.slots_kept(entries)
    row_bytes = hidden * values.dtype.itemsize
    landing = library(group.platform).sparse_landing_bytes(config.size, slots, entries, config.sharded, row_bytes)
    return _call(
        "sparse_reduce",
        (
            result((config.capacity, hidden), values.dtype, unvarying=unvarying),
            result((config.size, slots, 2), jnp.int32),
            result((slots,), jnp.int32),
            result((entries,), jnp.int32),
            result((entries,), jnp.int32),
            result((slots,), jnp.int32),
            result((1,), jnp.int32),
            result((entries,), jnp.int32),
            result((1,), jnp.int32),
            result((config.size,), jnp.int32),
            result((landing,), jnp.uint8),
            result((entries, hidden), jnp.float32),  # sums over entries of one rank
        ),
        values,
        union.slots,
        union.bounds,
        op="sparse_all_reduce",
        group=group,
        scale=np.float32(config.scale),
        by_count=config.by_count,
        sharded=config.sharded,
        drop=config.drop,
    )[0]
