"""The mesh axes over which arrays vary, which `jax.shard_map` with check_vma=True tracks in types."""

from typing import TypeVarTuple

import jax
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jax_ep._kit.checks import AxisName, axes_of
from jax_ep.pallas_kernels import varying

_Operands = TypeVarTuple("_Operands")


def tracks_varying(axis_name: AxisName) -> bool:
    """Whether this is traced with `check_vma=True`."""
    return bool(jax.typeof(jax.lax.axis_index(axis_name)).manual_axis_type.varying)


def varies(x: jax.Array, axis_name: AxisName) -> bool:
    """Whether `x` varies over each of the axes."""
    return set(axes_of(axis_name)) <= jax.typeof(x).manual_axis_type.varying


def vary_alike(axis_name: AxisName | None, *operands: *_Operands) -> tuple[*_Operands]:
    """Casts arrays in pytrees to vary over the same axes: all axes that any of them varies over, and `axis_name`.

    `check_vma=True` rejects operands that differ. With `check_vma=False` it does nothing.
    """
    arrays, structure = jax.tree.flatten(operands)
    over = axes_of(axis_name) if axis_name is not None and tracks_varying(axis_name) else ()
    return structure.unflatten(varying.vary_alike(*arrays, over=over))


def result_type(
    shape: tuple[int, ...], dtype: DTypeLike, like: jax.Array, unvarying: frozenset[str] = frozenset()
) -> jax.ShapeDtypeStruct:
    """The type of a result that varies over the axes of `like` without `unvarying`.

    A plain result counts as unvarying.
    """
    axes = jax.typeof(like).manual_axis_type.varying - unvarying
    sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())  # says which axes are manual
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=ManualAxisType(varying=axes))
