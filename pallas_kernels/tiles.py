"""Tiles of programs. Triton's sizes are powers of two."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.pallas_kernels.call import triton


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def ceil_div(count: jax.Array, size: int) -> jax.Array:
    """int32 of `count` int32, also with 64-bit ints, where `pl.cdiv` mixes dtypes."""
    return jax.lax.div(count + (size - 1), jnp.int32(size))


def store_rows(ref: Any, mask: jax.Array, row: jax.Array, column: jax.Array, values: jax.Array) -> None:
    """Writes `values` [R, C] to the rows [R] where `mask` [R] is set, and the columns [C] that the array has."""
    rows, width = ref.shape
    row = jnp.where(mask, row, rows)  # interpret mode writes masked elements back
    at = ref.at[row[:, None], column[None, :]]
    triton.store(at, values.astype(ref.dtype), mask=mask[:, None] & (column < width)[None, :])
