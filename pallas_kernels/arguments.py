"""What the kernels ask of their arguments: each error names the argument."""

from typing import Any

import jax
import numpy as np


def check_array(name: str, x: Any, ndim: int, layout: str) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    if x.ndim != ndim:
        raise ValueError(f"{name} must have shape {layout}, got {x.shape}")


def check_block(block: Any) -> None:
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"block must be a Python int, got {type(block).__name__}")
    if block < 1 or block & (block - 1) or block >= 2**31:
        raise ValueError(f"block must be a power of two below 2**31, got {block}")
