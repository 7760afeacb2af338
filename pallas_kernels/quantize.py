"""Matrices in float8, with a scale for each 128 x 128 values. The GPU must convert to float8 (from sm_89)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from .varying import result_type, vary_alike

BLOCK = 128
LARGEST = 448.0  # of float8_e4m3fn


def quantize_matrices(
    *matrices: jax.Array, transpose: bool = True, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Each value over the scale of its block; the scale makes the block's largest magnitude 448.

    A program reads a block once. A block of zeros has the scale 1. One with a NaN or an infinity becomes NaN.

    Args:
      matrices: [G, K, N] of bfloat16, float16 or float32, K and N multiples of 128. Several of one shape are taken side
        by side, as one [G, K, N + N + ...].
      transpose: the results are of the transposed matrices.
      interpret: run without a GPU.

    Returns:
      [G, N, K] uint8, the bits of float8_e4m3fn, and [G, N / 128, K / 128] float32, the scales; with transpose=False
      [G, K, N] and [G, K / 128, N / 128].
    """
    groups, k, n = matrices[0].shape
    rows, columns = k // BLOCK, n // BLOCK  # blocks of each matrix
    shape = (len(matrices) * columns, rows) if transpose else (rows, len(matrices) * columns)

    def operand(i: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, BLOCK, BLOCK), lambda column, row, g: (g, row, jnp.clip(column - i * columns, 0, columns - 1))
        )

    def result(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *block), lambda column, row, g: (g, column, row) if transpose else (g, row, column))

    matrices = vary_alike(*matrices)
    return pl.pallas_call(
        partial(_quantize_block, columns=columns, transpose=transpose),
        out_shape=(
            result_type((groups, *(BLOCK * blocks for blocks in shape)), jnp.uint8, matrices[0]),
            result_type((groups, *shape), jnp.float32, matrices[0]),
        ),
        grid=(len(matrices) * columns, rows, groups),
        in_specs=[operand(i) for i in range(len(matrices))],
        out_specs=(result(BLOCK, BLOCK), result(1, 1)),
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret,
    )(*matrices)


def _quantize_block(*refs: Any, columns: int, transpose: bool) -> None:
    *matrices, bits, scale = refs
    for i, matrix in enumerate(matrices):
        pl.when(pl.program_id(0) // columns == i)(partial(_quantize, matrix, bits, scale, transpose))


def _quantize(matrix: Any, bits: Any, scale: Any, transpose: bool) -> None:
    values = matrix[...].astype(jnp.float32)
    # Magnitudes have the order of their bits, and NaN the largest.
    magnitudes = jax.lax.bitcast_convert_type(jnp.abs(values), jnp.int32)
    largest = jax.lax.bitcast_convert_type(jnp.max(magnitudes), jnp.float32)
    inverse = jnp.where(largest == 0, 1.0, jnp.minimum(LARGEST / largest, jnp.finfo(jnp.float32).max))
    rounded = jax.lax.bitcast_convert_type((values * inverse).astype(jnp.float8_e4m3fn), jnp.uint8)
    bits[...] = rounded.T if transpose else rounded
    divisor = jnp.where(largest < 0, largest, LARGEST)  # a compiler may multiply by the rounded inverse of a constant
    scale[...] = jnp.where(largest == 0, 1.0, largest / divisor)[None, None]
