"""float8_e4m3fn with a float32 scale per block: 128 values of a row, or 128 x 128 of a matrix of weights.

Arrays hold the bits of the values as uint8, also in FFI calls. `jax.checkpoint` applies
`reduce_precision(exponent_bits=4, mantissa_bits=3)` to every float that it keeps. XLA takes this for a format whose
largest number is 240, so the 448 of each block would become NaN. JAX leaves integers alone.

`..._to_float8` and `..._from_float8` check nothing. The public functions do (ops/matmul/quantize.py).

Values pass an `optimization_barrier` before they are dequantized. Without it XLA would remove the conversions to float8
and back, and with them the rounding.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep._kit import checks
from jax_ep.pallas_kernels import BLOCK as BLOCK, blocks_to_float8

BITS, FLOAT8 = np.dtype(np.uint8), np.dtype(jnp.float8_e4m3fn)


@dataclasses.dataclass(frozen=True, repr=False)
class Float8:
    """What the formats have in common."""

    bits: jax.Array
    scales: jax.Array

    @property
    def values(self) -> jax.Array:
        """float8_e4m3fn in the shape of `bits`."""
        return _bitcast(self.bits, FLOAT8)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({checks.described(bits=self.bits, scales=self.scales)})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Float8Rows(Float8):
    """Rows: row[i] = values[i] * scales[i // 128], for every row and i < H.

    Attributes:
      bits: [M, H] uint8, the bits of `values`, which are float8_e4m3fn.
      scales: [M, H / 128] float32.
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Float8Weights(Float8):
    """Matrices of weights: weight[k, n] = values[n, k] * scales[n // 128, k // 128] for each matrix.

    They are transposed, since tensor cores read float8 along the contraction.

    Attributes:
      bits: [..., N, K] uint8, the bits of `values`. An array of float8_e4m3fn is replaced by its bits.
      scales: [..., N / 128, K / 128] float32.
    """

    def __post_init__(self) -> None:
        if isinstance(self.bits, checks.ARRAYS) and self.bits.dtype == FLOAT8:  # else a leaf of any kind
            object.__setattr__(self, "bits", _bitcast(self.bits, BITS))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights before they were quantized: [..., K, N]."""
        *others, n, k = self.bits.shape
        return (*others, k, n)


def rows_to_float8(rows: jax.Array) -> Float8Rows:
    """[..., H], H a multiple of 128."""
    blocks = rows.reshape(*rows.shape[:-1], rows.shape[-1] // BLOCK, BLOCK)
    bits, scales = blocks_to_float8(blocks, axes=(-1,))
    return Float8Rows(bits.reshape(rows.shape), scales.reshape(blocks.shape[:-1]))


def packed(rows: Float8Rows) -> jax.Array:
    """Rows and scales in one float32 array: four values in each float32, then the scales, padded to 16 bytes."""
    fours = rows.bits.reshape(rows.bits.shape[0], rows.bits.shape[1] // 4, 4)
    padding = (0, 0), (0, -rows.scales.shape[1] % 4)
    return jnp.concatenate([jax.lax.bitcast_convert_type(fours, jnp.float32), jnp.pad(rows.scales, padding)], axis=1)


def unpacked(rows: jax.Array, hidden: int) -> Float8Rows:
    """The inverse of `packed`, for rows of `hidden` values. A row of NaN gives NaN."""
    fours, scales = rows[:, : hidden // 4], rows[:, hidden // 4 :]
    bits = jax.lax.bitcast_convert_type(fours, BITS)
    return Float8Rows(bits.reshape(rows.shape[0], hidden), scales[:, : hidden // BLOCK])


def rows_from_float8(rows: Float8Rows, dtype: DTypeLike) -> jax.Array:
    """[..., H], rounded to `dtype`."""
    blocks = _to_float32(rows.values).reshape(*rows.scales.shape, BLOCK)
    return (blocks * rows.scales[..., None]).reshape(rows.bits.shape).astype(dtype)


def weights_to_float8(weights: jax.Array) -> Float8Weights:
    """[..., K, N], both multiples of 128."""
    transposed = weights.swapaxes(-1, -2)
    blocks = _in_blocks(transposed)
    bits, scales = blocks_to_float8(blocks, axes=(-3, -1))
    return Float8Weights(bits.reshape(transposed.shape), scales.reshape(*blocks.shape[:-3], blocks.shape[-2]))


def weights_from_float8(weights: Float8Weights, dtype: DTypeLike) -> jax.Array:
    """[..., K, N], rounded to `dtype`."""
    blocks = _in_blocks(_to_float32(weights.values)) * weights.scales[..., :, None, :, None]
    return blocks.reshape(weights.bits.shape).astype(dtype).swapaxes(-1, -2)


def _bitcast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return x.view(dtype) if isinstance(x, np.ndarray) else jax.lax.bitcast_convert_type(x, dtype)


def _to_float32(values: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(values).astype(jnp.float32)


def _in_blocks(weights: jax.Array) -> jax.Array:
    """[..., N, K] -> [..., N / 128, 128, K / 128, 128]."""
    *others, n, k = weights.shape
    return weights.reshape(*others, n // BLOCK, BLOCK, k // BLOCK, BLOCK)
