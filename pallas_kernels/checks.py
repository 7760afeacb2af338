"""Checks of arguments."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))


def check_array(
    op: str, name: str, x: Any, layout: str, kinds: tuple[Any, ...], shape: tuple[int, ...] | None = None
) -> None:
    """Raises ValueError or TypeError unless `x` is an array of this shape and of one of these dtypes.

    Args:
      layout: the shape in words, such as "[N, D]". Without `shape` only its number of axes is checked.
    """
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{op}: {name} must be an array, got {type(x).__name__}")
    if shape is not None and x.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {layout} = {shape}, got {x.shape}")
    if x.ndim != layout.count(",") + 1:
        raise ValueError(f"{op}: {name} must have shape {layout}, got {x.shape}")
    if not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
        wanted = ", ".join(kind.__name__ if isinstance(kind, type) else str(kind) for kind in kinds)
        raise TypeError(f"{op}: {name} must be of dtype {wanted}, got {x.dtype}")
