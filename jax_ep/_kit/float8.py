"""float8_e4m3fn with a float32 scale per block: 128 values of a row, or 128 x 128 of a matrix of weights.

Values stand behind an `optimization_barrier` before they are widened: XLA would else leave out a conversion to float8
and the one back, and go on with values that were never rounded.

The scale makes the largest magnitude of a block 448, the largest that the format holds (as in DeepSeek-V3's training
and in DeepGEMM). A block of zeros has the scale 1. A block with a NaN or an infinity becomes NaN as a whole.

XLA divides on GPUs to within 2 units in the last place. There scales may differ by so much from those of kernels, and a
value that is nearly between two of float8 may become the other one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

BLOCK = 128  # values of a row, rows of a matrix, and its columns
LARGEST = 448.0


class Float8Rows(NamedTuple):
    """Rows: row[i] = values[i] * scales[i // 128], for every row and i < H.

    Attributes:
      values: [M, H] float8_e4m3fn.
      scales: [M, H / 128] float32.
    """

    values: jax.Array
    scales: jax.Array


class Float8Weights(NamedTuple):
    """Matrices of weights: weight[k, n] = values[n, k] * scales[n // 128, k // 128], for each of them.

    They are transposed, since tensor cores read float8 along the contraction.

    Attributes:
      values: [..., N, K] float8_e4m3fn.
      scales: [..., N / 128, K / 128] float32.
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weights before they were quantized: [..., K, N]."""
        *others, n, k = self.values.shape
        return (*others, k, n)


def quantize_rows(rows: jax.Array) -> Float8Rows:
    """[..., H], H a multiple of 128."""
    blocks = rows.astype(jnp.float32).reshape(*rows.shape[:-1], rows.shape[-1] // BLOCK, BLOCK)
    values, scales = _quantized(blocks, axes=(-1,))
    return Float8Rows(values.reshape(rows.shape), scales.reshape(blocks.shape[:-1]))


def dequantize_rows(rows: Float8Rows, dtype: DTypeLike) -> jax.Array:
    """[..., H], rounded to `dtype`."""
    blocks = _widened(rows.values).reshape(*rows.scales.shape, BLOCK)
    return (blocks * rows.scales[..., None]).reshape(rows.values.shape).astype(dtype)


def quantize_weights(weights: jax.Array) -> Float8Weights:
    """[..., K, N], both multiples of 128."""
    transposed = weights.swapaxes(-1, -2)
    blocks = _in_blocks(transposed.astype(jnp.float32))
    values, scales = _quantized(blocks, axes=(-3, -1))
    return Float8Weights(values.reshape(transposed.shape), scales.reshape(*blocks.shape[:-3], blocks.shape[-2]))


def dequantize_weights(weights: Float8Weights, dtype: DTypeLike) -> jax.Array:
    """[..., K, N], rounded to `dtype`."""
    blocks = _in_blocks(_widened(weights.values)) * weights.scales[..., :, None, :, None]
    return blocks.reshape(weights.values.shape).astype(dtype).swapaxes(-1, -2)


def _widened(values: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(values).astype(jnp.float32)


def _in_blocks(weights: jax.Array) -> jax.Array:
    """[..., N, K] -> [..., N / 128, 128, K / 128, 128]."""
    *others, n, k = weights.shape
    return weights.reshape(*others, n // BLOCK, BLOCK, k // BLOCK, BLOCK)


def _quantized(blocks: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Values, and the scale of each block, whose values lie along `axes`: of size 1 there."""
    largest = jnp.max(jnp.abs(blocks), axis=axes, keepdims=True)
    inverse = jnp.where(largest == 0, 1.0, jnp.minimum(LARGEST / largest, jnp.finfo(jnp.float32).max))
    divisor = jnp.where(largest < 0, largest, LARGEST)  # XLA would multiply by the rounded inverse of a constant
    return (blocks * inverse).astype(jnp.float8_e4m3fn), jnp.where(largest == 0, 1.0, largest / divisor)
