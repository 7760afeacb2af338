"""What `jax.shard_map(check_vma=True)` asks of a kernel: operands and result that vary over the same mesh axes."""

from typing import Any

import jax
from jax.sharding import ManualAxisType


def vary_alike(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """The operands, each cast to vary over whatever any of them varies over."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    axes = frozenset().union(*varying)

    def cast(x: jax.Array, missing: frozenset[str]) -> jax.Array:
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return tuple(cast(x, axes - own) for x, own in zip(operands, varying, strict=True))


def result_type(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a result that varies as `like` does."""
    varying = jax.typeof(like).manual_axis_type.varying
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=ManualAxisType(varying=varying))
