"""Argument checks shared by the ops: each names the argument, what it was and what it must be."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, ManualAxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

IMPLEMENTATIONS = ("auto", "ffi", "xla")
ARRAYS = (jax.Array, np.ndarray, np.generic)
TOKEN_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))


def describe(x: Any) -> str:
    """float32[4,2] for an array, the name of the type for everything else."""
    if not isinstance(x, ARRAYS):
        return type(x).__name__
    return str(jax.typeof(x)) if is_jax_dtype(x.dtype) else f"{x.dtype}[{','.join(map(str, x.shape))}]"


def is_jax_dtype(dtype: Any) -> bool:
    """Whether jax has arrays of it: not so of numpy's objects, strings and dates."""
    kinds = (np.number, np.bool_, jax.dtypes.extended)
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def check_array(op: str, name: str, x: Any) -> None:
    if not isinstance(x, ARRAYS):
        raise TypeError(f"{op}: {name} must be an array, got {describe(x)}")


def check_rank(op: str, name: str, x: jax.Array, ndim: int, layout: str) -> None:
    check_array(op, name, x)
    if x.ndim != ndim:
        raise ValueError(f"{op}: {name} must have shape {layout}, got {x.shape}")


def check_shape(op: str, name: str, x: jax.Array, shape: tuple[int, ...], layout: str) -> None:
    check_array(op, name, x)
    if x.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {layout} = {shape}, got {x.shape}")


def check_dtype(op: str, name: str, x: jax.Array, allowed: Sequence[np.dtype]) -> None:
    check_array(op, name, x)
    if np.dtype(x.dtype) not in allowed:
        names = ", ".join(str(d) for d in allowed)
        raise TypeError(f"{op}: {name} must be of dtype {names}, got {x.dtype}")


def check_whole_bytes(op: str, name: str, x: jax.Array) -> None:
    """Refuses what is narrower than a byte: some platforms pack several values into one, and kernels move bytes."""
    check_array(op, name, x)
    if not is_jax_dtype(x.dtype):
        raise TypeError(f"{op}: {name} must be of a dtype that jax has, got {x.dtype}")
    if not jnp.issubdtype(x.dtype, jax.dtypes.extended) and jax.dtypes.itemsize_bits(x.dtype) < 8:
        raise TypeError(f"{op}: {name} must be of a dtype of whole bytes, such as int8, got {x.dtype}")


def check_positive(op: str, name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{op}: {name} must be a Python int, known when the op is traced; got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{op}: {name} must be at least 1, got {value}")


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
    if value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def check_manual_axis(op: str, axis_name: str) -> None:
    here = jax.sharding.get_abstract_mesh()
    if axis_name not in here.manual_axes:
        raise ValueError(
            f"{op}: must be called inside jax.shard_map over axis {axis_name!r}; "
            f"the manual axes here are {tuple(here.manual_axes)}"
        )


def is_mesh_here(mesh: Mesh) -> bool:
    """Whether jax.shard_map runs over such a mesh: the same axes in the same order. Of its devices nothing is known."""
    return tuple(jax.sharding.get_abstract_mesh().shape.items()) == tuple(mesh.shape.items())


def check_inside_shard_map(op: str, mesh: Mesh, axis_name: str) -> None:
    """Raises unless every axis of the group's mesh is manual here, which is what the kernels' rank tables assume."""
    check_manual_axis(op, axis_name)
    here: AbstractMesh = jax.sharding.get_abstract_mesh()
    if not is_mesh_here(mesh):
        raise ValueError(
            f"{op}: the mesh of this jax.shard_map is {dict(here.shape)}, "
            f"the group's is {dict(mesh.shape)}, with its axes in this order"
        )
    automatic = [name for name in here.axis_names if here.shape[name] > 1 and name not in here.manual_axes]
    if automatic:
        raise ValueError(f"{op}: every mesh axis must be manual in jax.shard_map; {automatic} are not")


def tracks_varying(axis_name: str) -> bool:
    """Whether this is traced with `check_vma=True`."""
    return bool(jax.typeof(jax.lax.axis_index(axis_name)).manual_axis_type.varying)


def varies(x: jax.Array, axis_name: str) -> bool:
    return axis_name in jax.typeof(x).manual_axis_type.varying


def vary_alike(axis_name: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Casts the operands to one varying set: the group's axis and whatever any of them varies over.

    Without it, `check_vma=True` would reject operands that differ. It does nothing where `check_vma=False`.
    """
    return vary_as_any(*arrays, axes=frozenset({axis_name})) if tracks_varying(axis_name) else arrays


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


# An identity that turns what a collective cannot do into an error that names the op: to be batched, and to run where
# devices have another order than in the group's mesh, which shows only when the op is lowered.
_guard_p = Primitive("jax_ep_guard")
_guard_p.def_impl(lambda x, *, op, mesh: x)
_guard_p.def_abstract_eval(lambda x, *, op, mesh: x)
ad.deflinear2(_guard_p, lambda ct, x, *, op, mesh: [ct])


def _refuse_batching(args: Any, dims: Any, *, op: str, mesh: Mesh | None) -> Any:
    raise NotImplementedError(
        f"{op} does not support jax.vmap, nor jax.jacrev, which is one: call it once on all tokens, or use jax.lax.map"
    )


def _refuse_other_devices(ctx: mlir.LoweringRuleContext, x: Any, *, op: str, mesh: Mesh | None) -> Any:
    here = getattr(ctx.module_context.axis_context, "mesh", None)
    if mesh is not None and isinstance(here, Mesh) and here.devices.tolist() != mesh.devices.tolist():
        ids = [[device.id for device in one.devices.flat] for one in (here, mesh)]
        raise ValueError(f"{op}: the devices of this jax.shard_map are {ids[0]}, the group's are {ids[1]}")
    return [x]


batching.primitive_batchers[_guard_p] = _refuse_batching
mlir.register_lowering(_guard_p, _refuse_other_devices)


def not_batched(op: str, x: jax.Array, mesh: Mesh | None = None) -> jax.Array:
    """`mesh`: that of the group whose kernels look at it."""
    return _guard_p.bind(x, op=op, mesh=mesh)
