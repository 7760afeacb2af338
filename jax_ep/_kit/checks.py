"""Argument checks shared by the ops: each names the argument, what it was and what it must be."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, ManualAxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

Chosen = Literal["ffi", "xla"]  # by kernels, or by jax.lax alone
Implementation = Literal["auto"] | Chosen
OnOverflow = Literal["raise", "drop"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("auto", *get_args(Chosen))
ON_OVERFLOW: tuple[OnOverflow, ...] = get_args(OnOverflow)
AxisName = str | tuple[str, ...]  # an axis of a mesh; or several, whose devices are ranks in row-major order
ARRAYS = (jax.Array, np.ndarray, np.generic)
TOKEN_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))


def describe(x: Any) -> str:
    """float32[4,2] for an array, the name of the type for everything else."""
    if not isinstance(x, ARRAYS):
        return type(x).__name__
    return str(jax.typeof(x)) if is_jax_dtype(x.dtype) else f"{x.dtype}[{','.join(map(str, x.shape))}]"


def is_jax_dtype(dtype: Any) -> bool:
    """Whether jax has arrays of this dtype: it has none of numpy's objects, strings and dates."""
    kinds = (np.number, np.bool_, jax.dtypes.extended)
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def check_array(op: str, name: str, x: Any) -> None:
    if not isinstance(x, ARRAYS):
        raise TypeError(f"{op}: {name} must be an array, got {describe(x)}")


def check_rank(op: str, name: str, x: Any, ndim: int, layout: str) -> None:
    check_array(op, name, x)
    if x.ndim != ndim:
        raise ValueError(f"{op}: {name} must have shape {layout}, got {x.shape}")


def check_shape(op: str, name: str, x: Any, shape: tuple[int, ...], layout: str) -> None:
    check_array(op, name, x)
    if x.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {layout} = {shape}, got {x.shape}")


def check_dtype(op: str, name: str, x: Any, allowed: Sequence[np.dtype]) -> None:
    check_array(op, name, x)
    if x.dtype not in allowed:
        names = ", ".join(str(d) for d in allowed)
        raise TypeError(f"{op}: {name} must be of dtype {names}, got {x.dtype}")


def check_whole_bytes(op: str, name: str, x: Any) -> None:
    """Refuses what is narrower than a byte: some platforms pack several values into one, and kernels move bytes."""
    check_array(op, name, x)
    if not is_jax_dtype(x.dtype):
        raise TypeError(f"{op}: {name} must be of a dtype that jax has, got {x.dtype}")
    if not jnp.issubdtype(x.dtype, jax.dtypes.extended) and jax.dtypes.itemsize_bits(x.dtype) < 8:
        raise TypeError(f"{op}: {name} must be of a dtype of whole bytes, such as int8, got {x.dtype}")


def check_kind(op: str, name: str, x: Any, kind: Any, what: str) -> None:
    check_array(op, name, x)
    if not is_jax_dtype(x.dtype) or not jnp.issubdtype(x.dtype, kind):
        raise TypeError(f"{op}: {name} must be of {what} dtype, got {x.dtype}")


def to_int32(indices: jax.Array | np.ndarray) -> jax.Array:
    """What int32 does not hold becomes the nearest that it does: for integers that are out of bounds there too."""
    at = jnp if isinstance(indices, jax.Array) else np  # jax may not hold the array of numpy
    held, info = jnp.iinfo(np.int32), jnp.iinfo(indices.dtype)
    if info.min < held.min or info.max > held.max:
        indices = at.clip(indices, max(info.min, held.min), held.max)
    return jnp.asarray(indices.astype(np.int32))


def check_int(op: str, name: str, value: int, *, least: int = 1, below_32_bits: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{op}: {name} must be a Python int, known when the op is traced; got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
    if value >= 2**31 and below_32_bits:
        raise ValueError(f"{op}: {name} must be below 2**31, got {value}")


def check_number(op: str, name: str, value: Any) -> None:
    """A real number: Python's, or an array of one, which may be traced."""
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    kinds = (np.integer, np.floating)
    if array.ndim or not is_jax_dtype(array.dtype) or not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise TypeError(f"{op}: {name} must be a number, got {describe(value)}")


def check_seconds(op: str, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{op}: {name} must be a number of seconds, got {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{op}: {name} must be a positive number of seconds, got {value}")


def check_bool(op: str, name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be True or False, got {value!r}")


def canonical_dtype(op: str, name: str, dtype: DTypeLike | None) -> np.dtype | None:
    try:
        return None if dtype is None else np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{op}: {name} must be a dtype or None, got {dtype!r}") from None


def check_one_of(op: str, name: str, value: Any, allowed: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def axes_of(axis_name: str | Sequence[str]) -> tuple[str, ...]:
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def canonical_axis(axis_name: Any) -> Any:
    """The name of a single axis as it is; a sequence as a tuple, but one of a single name as that name."""
    if isinstance(axis_name, list | tuple):
        return axis_name[0] if len(axis_name) == 1 else tuple(axis_name)
    return axis_name


def check_axis(op: str, axis_name: Any) -> None:
    axes = axes_of(axis_name) if isinstance(axis_name, str | list | tuple) else ()
    if not axes or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(f"{op}: axis_name must be an axis of the mesh or a tuple of axes, got {describe(axis_name)}")


def check_mesh(mesh: Any, axis_name: Any) -> None:
    """What a group asks: a mesh of devices, and axes of it, each once."""
    op = "Group"
    if isinstance(jnp.zeros(()), Tracer):
        raise RuntimeError(
            f"{op}: must be opened outside of traced code (jax.jit, jax.shard_map, jax.eval_shape): open it once, and "
            "let the function that is traced use it"
        )
    if isinstance(mesh, AbstractMesh):
        raise TypeError(
            f"{op}: mesh must have devices, got an AbstractMesh: open the group over the jax.sharding.Mesh, outside of "
            "traced code; it serves ops inside a jax.shard_map over an AbstractMesh of the same axes and sizes"
        )
    if not isinstance(mesh, Mesh):
        raise TypeError(f"{op}: mesh must be a jax.sharding.Mesh, got {describe(mesh)}; call Group(mesh, axis_name)")
    check_axis(op, axis_name)
    axes = axes_of(axis_name)
    if not set(axes) <= set(mesh.axis_names):
        raise ValueError(f"{op}: axis_name {axis_name!r} is not an axis of the mesh, which has {mesh.axis_names}")
    if len(set(axes)) < len(axes):
        raise ValueError(f"{op}: axis_name {axis_name!r} names an axis twice")


def check_ranks(size: int, most: int) -> None:
    """What the kernels ask."""
    if size > most:
        raise ValueError(
            f"Group: at most {most} devices along axis_name, got {size}: exchange over an axis within a host, "
            "and shard batches, or experts' matrices, over the others"
        )


def check_manual_axis(op: str, axis_name: AxisName) -> None:
    here = jax.sharding.get_abstract_mesh()
    if not set(axes_of(axis_name)) <= set(here.manual_axes):
        what = "axis" if isinstance(axis_name, str) else "axes"
        raise ValueError(
            f"{op}: must be called inside jax.shard_map over {what} {axis_name!r}; "
            f"the manual axes here are {tuple(here.manual_axes)}"
        )


def is_mesh_here(mesh: Mesh) -> bool:
    """Whether jax.shard_map runs over a mesh of these axes in this order. Nothing is known of its devices."""
    return tuple(jax.sharding.get_abstract_mesh().shape.items()) == tuple(mesh.shape.items())


def check_inside_shard_map(op: str, mesh: Mesh, axis_name: AxisName) -> None:
    """Raises unless every axis of the group's mesh is manual here, which is what the kernels' rank tables assume.

    A type does not say how the compiler shards an operand over an axis that is left to it.
    """
    check_manual_axis(op, axis_name)
    here: AbstractMesh = jax.sharding.get_abstract_mesh()
    if not is_mesh_here(mesh):
        raise ValueError(
            f"{op}: the mesh of this jax.shard_map is {dict(here.shape)}, "
            f"the group's is {dict(mesh.shape)}, with its axes in this order"
        )
    automatic = [name for name in here.axis_names if here.shape[name] > 1 and name not in here.manual_axes]
    if automatic:
        raise ValueError(
            f"{op}: every mesh axis must be manual in jax.shard_map; {automatic} are not: leave axis_names out there, "
            f"or call the op in a second jax.shard_map inside, with axis_names={set(automatic)}, whose in_specs say "
            "how its operands are sharded over them"
        )


def tracks_varying(axis_name: AxisName) -> bool:
    """Whether this is traced with `check_vma=True`."""
    return bool(jax.typeof(jax.lax.axis_index(axis_name)).manual_axis_type.varying)


def varies(x: jax.Array, axis_name: AxisName) -> bool:
    """Over each of the axes."""
    return set(axes_of(axis_name)) <= jax.typeof(x).manual_axis_type.varying


def vary_alike(axis_name: AxisName, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Casts the operands to one varying set: the group's axes and whatever any of them varies over.

    Without it, `check_vma=True` would reject operands that differ. It does nothing where `check_vma=False`.
    """
    return vary_as_any(*arrays, axes=frozenset(axes_of(axis_name))) if tracks_varying(axis_name) else arrays


def vary_as_any(*arrays: jax.Array, axes: frozenset[str] = frozenset()) -> tuple[jax.Array, ...]:
    """Casts the operands to vary over `axes` and all that any of them varies over."""
    axes = axes.union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))
    return tuple(_pcast(x, axes - jax.typeof(x).manual_axis_type.varying) for x in arrays)


def _pcast(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def result_type(
    shape: tuple[int, ...], dtype: Any, like: jax.Array, unvarying: frozenset[str] = frozenset()
) -> jax.ShapeDtypeStruct:
    """The type of a result that varies over the axes `like` varies over, but for those it is the same along.

    A plain result counts as unvarying.
    """
    varying = jax.typeof(like).manual_axis_type.varying - unvarying
    sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())  # says which axes are manual
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=ManualAxisType(varying=varying))


# An identity that turns what no type tells into an error that names the op: it runs where devices have another order
# than in the group's mesh, which shows only when the op is lowered.
_guard_p = Primitive("jax_ep_guard")
_guard_p.def_impl(lambda x, *, op, mesh: x)
_guard_p.def_abstract_eval(lambda x, *, op, mesh: x)
ad.deflinear2(_guard_p, lambda ct, x, *, op, mesh: [ct])
batching.defvectorized(_guard_p)


def _refuse_other_devices(ctx: mlir.LoweringRuleContext, x: Any, *, op: str, mesh: Mesh) -> Any:
    here = getattr(ctx.module_context.axis_context, "mesh", None)
    if isinstance(here, Mesh) and here.devices.tolist() != mesh.devices.tolist():
        ids = [[device.id for device in one.devices.flat] for one in (here, mesh)]
        raise ValueError(f"{op}: the devices of this jax.shard_map are {ids[0]}, the group's are {ids[1]}")
    return [x]


mlir.register_lowering(_guard_p, _refuse_other_devices)


def on_these_devices(op: str, x: jax.Array, mesh: Mesh) -> jax.Array:
    """x, an operand of an op whose kernels take the devices to be those of `mesh`, in its order."""
    return _guard_p.bind(x, op=op, mesh=mesh)
