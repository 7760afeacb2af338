"""`jax.shard_map(check_vma=True)` requires kernels' operands and results to vary over the same mesh axes."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import ManualAxisType


def vary_alike(*operands: jax.Array, over: Iterable[str] = ()) -> tuple[jax.Array, ...]:
    """The operands, cast to vary over the union of their axes, and `over` further ones."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    axes = frozenset(over).union(*varying)

    def cast(x: jax.Array, missing: frozenset[str]) -> jax.Array:
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return tuple(cast(x, axes - own) for x, own in zip(operands, varying, strict=True))


def result_type(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    varying = jax.typeof(like).manual_axis_type.varying
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=ManualAxisType(varying=varying))
