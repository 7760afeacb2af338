"""Checks of meshes: the mesh of a group, and the mesh of the `jax.shard_map` around an op."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh

from jax_ep._kit.checks import AxisName, axes_of, check_axis, describe


def check_mesh(mesh: object, axis_name: AxisName) -> None:
    """Raises unless `mesh` is a mesh of devices that has the axes, each once."""
    if isinstance(jnp.zeros(()), Tracer):
        raise RuntimeError(
            "Group: must be opened outside of traced code (jax.jit, jax.shard_map, jax.eval_shape): open it once, and "
            "let the function that is traced use it"
        )
    if isinstance(mesh, AbstractMesh):
        raise TypeError(
            "Group: mesh must have devices, got an AbstractMesh: open the group over the jax.sharding.Mesh, outside of "
            "traced code; it serves ops inside a jax.shard_map over an AbstractMesh of the same axes and sizes"
        )
    if not isinstance(mesh, Mesh):
        raise TypeError(f"Group: mesh must be a jax.sharding.Mesh, got {describe(mesh)}; call Group(mesh, axis_name)")
    check_axis("Group", axis_name)
    axes = axes_of(axis_name)
    if not set(axes) <= set(mesh.axis_names):
        raise ValueError(f"Group: axis_name must name axes of the mesh, {mesh.axis_names}, got {axis_name!r}")
    if len(set(axes)) < len(axes):
        raise ValueError(f"Group: axis_name must name each axis once, got {axis_name!r}")


def line_size(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> int:
    return math.prod(mesh.shape[axis] for axis in axes_of(axis_name))


def check_manual_axis(op: str, axis_name: AxisName) -> None:
    here = jax.sharding.get_abstract_mesh()
    if not set(axes_of(axis_name)) <= set(here.manual_axes):
        what = "axis" if isinstance(axis_name, str) else "axes"
        raise ValueError(
            f"{op}: must be called inside jax.shard_map over {what} {axis_name!r}; "
            f"the manual axes here are {tuple(here.manual_axes)}"
        )


def is_mesh_here(mesh: Mesh) -> bool:
    """Whether `jax.shard_map` runs over a mesh of these axes in this order. Its devices are not known here."""
    return tuple(jax.sharding.get_abstract_mesh().shape.items()) == tuple(mesh.shape.items())


def check_inside_shard_map(op: str, mesh: Mesh, axis_name: AxisName) -> None:
    """Raises unless every axis of the group's mesh is manual here, as the kernels' rank tables assume.

    If an axis is left to the compiler, types do not say how it shards an operand.
    """
    check_manual_axis(op, axis_name)
    here: AbstractMesh = jax.sharding.get_abstract_mesh()
    if not is_mesh_here(mesh):
        raise ValueError(
            f"{op}: the mesh of jax.shard_map must have the axes of the group's mesh in this order, "
            f"{dict(mesh.shape)}, got {dict(here.shape)}"
        )
    automatic = [name for name in here.axis_names if here.shape[name] > 1 and name not in here.manual_axes]
    if automatic:
        raise ValueError(
            f"{op}: every mesh axis must be manual in jax.shard_map; {automatic} are not: leave axis_names out there, "
            f"or call the op in a second jax.shard_map inside, with axis_names={set(automatic)}, whose in_specs say "
            "how its operands are sharded over them; for a gradient both need check_vma=False"
        )


# An identity whose lowering raises an error that names the op if devices have another order than in the group's mesh.
# The order is not known before.
_guard_p = Primitive("jax_ep_guard")
_guard_p.def_impl(lambda x, *, op, mesh: x)
_guard_p.def_abstract_eval(lambda x, *, op, mesh: x)
ad.deflinear2(_guard_p, lambda ct, x, *, op, mesh: [ct])
batching.defvectorized(_guard_p)


def _refuse_other_devices(ctx: mlir.LoweringRuleContext, x: Any, *, op: str, mesh: Mesh) -> Any:
    here = getattr(ctx.module_context.axis_context, "mesh", None)
    if isinstance(here, Mesh) and here.devices.tolist() != mesh.devices.tolist():
        got, wanted = ([device.id for device in one.devices.flat] for one in (here, mesh))
        raise ValueError(f"{op}: the devices of jax.shard_map must be the group's in this order, {wanted}, got {got}")
    return [x]


mlir.register_lowering(_guard_p, _refuse_other_devices)


def on_these_devices(op: str, x: jax.Array, mesh: Mesh) -> jax.Array:
    """`x`, an operand of an op whose kernels run on the devices of `mesh`, in its order."""
    return _guard_p.bind(x, op=op, mesh=mesh)
