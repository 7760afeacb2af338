"""Values in float8 with a scale per block, and matrices with a scale per 128 x 128 values.

The scale makes the largest magnitude of a block 448, the format's maximum (as in DeepSeek-V3's training and in
DeepGEMM). A block of zeros has the scale 1. A block with a NaN or an infinity becomes NaN. The kernel needs a GPU that
converts to float8 (from sm_89).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jax_ep.pallas_kernels.call import compiler_params
from jax_ep.pallas_kernels.checks import FLOATS, check_array
from jax_ep.pallas_kernels.varying import result_type

BLOCK = 128  # values that share a float32 scale
LARGEST = 448.0  # of float8_e4m3fn

# In an array of up to 2^32 bytes Pallas' offsets have 31 bits, too few for one-byte values.
MOST_BYTES = 2**31


def quantize_matrices(matrices: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """The transposed matrices in float8.

    A result of more than 2 GiB is computed in parts, which are then copied together.

    Args:
      matrices: [G, K, N] of bfloat16, float16 or float32, K and N multiples of 128, K at most 2^24.
      interpret: run without a GPU.

    Returns:
      [G, N, K] uint8, the bits of float8_e4m3fn, and [G, N / 128, K / 128] float32, the scales.
    """
    op = "quantize_matrices"
    check_array(op, "matrices", matrices, "[G, K, N]", FLOATS)
    groups, k, n = matrices.shape
    if not matrices.size or k % BLOCK or n % BLOCK or k > MOST_BYTES // BLOCK:
        raise ValueError(
            f"{op}: matrices must not be empty, with K and N multiples of {BLOCK} and K at most {MOST_BYTES // BLOCK}, "
            f"got {matrices.shape}"
        )
    blocks = groups * n // BLOCK  # along the result's rows, of all matrices
    step = MOST_BYTES // (k * BLOCK)
    parts = [_quantize_part(matrices, first, min(step, blocks - first), interpret) for first in range(0, blocks, step)]
    bits, scales = map(jnp.concatenate, zip(*parts, strict=True))
    return bits.reshape(groups, n, k), scales.reshape(groups, n // BLOCK, k // BLOCK)


def _quantize_part(matrices: jax.Array, first: int, count: int, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """`count` blocks of rows of the results, [count * 128, K] and [count, K / 128], from block `first` on."""
    _, k, n = matrices.shape
    columns = n // BLOCK

    def source(block: Any, row: Any) -> tuple[Any, ...]:
        return (first + block) // columns, row, (first + block) % columns

    def result(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec(block, lambda block, row: (block, row))

    return pl.pallas_call(
        _quantize_block,
        out_shape=(
            result_type((count * BLOCK, k), jnp.uint8, matrices),
            result_type((count, k // BLOCK), jnp.float32, matrices),
        ),
        grid=(count, k // BLOCK),
        in_specs=[pl.BlockSpec((None, BLOCK, BLOCK), source)],
        out_specs=(result(BLOCK, BLOCK), result(1, 1)),
        compiler_params=compiler_params(8),
        interpret=interpret,
    )(matrices)


def _quantize_block(matrix: Any, bits: Any, scale: Any) -> None:
    rounded, scale_of_block = blocks_to_float8(matrix[...])
    bits[...] = rounded.T
    scale[...] = scale_of_block[None, None]


def blocks_to_float8(blocks: jax.Array, axes: tuple[int, ...] | None = None) -> tuple[jax.Array, jax.Array]:
    """The bits of the values in float8, and the scales of the blocks, in plain JAX.

    Every platform, and the CUDA kernels, give the same results.

    Args:
      axes: the axes of a block, which have size 1 in the scales. None: one block, with a scalar scale.
    """
    blocks = blocks.astype(jnp.float32)
    # The maximum of the bits, which have the order of the magnitudes, NaN last. XLA's CPU maximum of floats drops NaN
    # in large arrays.
    bits = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    largest = jax.lax.bitcast_convert_type(jnp.max(bits, axis=axes, keepdims=axes is not None), jnp.float32)
    factor = jnp.minimum(nearest_quotient(LARGEST, largest, LARGEST / largest), jnp.finfo(jnp.float32).max)
    scale = nearest_quotient(largest, LARGEST, largest / LARGEST)
    factor, scale = (jnp.where(largest == 0, 1.0, x) for x in (factor, scale))
    if axes is not None:  # otherwise XLA may divide once per value
        factor, scale = jax.lax.optimization_barrier((factor, scale))
    return jax.lax.bitcast_convert_type((blocks * factor).astype(jnp.float8_e4m3fn), jnp.uint8), scale


def nearest_quotient(a: jax.Array | float, b: jax.Array | float, near: jax.Array) -> jax.Array:
    """a / b of positive float32, rounded to nearest as on a CPU, from `near`, at most 2 units in the last place away.

    GPU compilers divide no better than that. The low 32 bits of the rest a - quotient * b are enough. If a, b or `near`
    is zero, subnormal or not finite, the result is `near`.
    """
    a_bits, b_bits, bits = map(_bits, (a, b, near))
    for _ in range(2):
        power = (a_bits >> 23) - (b_bits >> 23) - (bits >> 23) + 150  # of 2, between the digits of a and of the product
        rest = (_digits(a_bits) << power) - _digits(bits) * _digits(b_bits)
        bits += (2 * rest > _digits(b_bits)).astype(jnp.int32) - (2 * rest < -_digits(b_bits)).astype(jnp.int32)
    quotient = jax.lax.bitcast_convert_type(bits, jnp.float32)
    a_ordinary, b_ordinary, ordinary = ((x >= jnp.finfo(jnp.float32).tiny) & (x < jnp.inf) for x in (a, b, near))
    return jnp.where(a_ordinary & b_ordinary & ordinary, quotient, near)


def _bits(x: jax.Array | float) -> Any:
    return int(np.float32(x).view(np.int32)) if isinstance(x, float) else jax.lax.bitcast_convert_type(x, jnp.int32)


def _digits(bits: Any) -> Any:
    """The 24 digits of a normal float32, as an integer."""
    return bits & 0x7FFFFF | 0x800000
