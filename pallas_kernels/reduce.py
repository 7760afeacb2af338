"""Weighted sums of picked rows: what an expert's rank does for a token before it sends one row."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.varying import result_type, vary_alike


def weighted_row_sum(
    rows: jax.Array, index: jax.Array, weights: jax.Array, *, block: int = 512, interpret: bool = False
) -> jax.Array:
    """out[t] = the sum over k of weights[t, k] * rows[index[t, k]], summed in float32 in the order of k.

    Args:
      rows: [C, H] of a float dtype.
      index: [T, K] int32 in [0, C); -1 adds nothing.
      weights: [T, K] float32.
      block: values of a row that one program sums; a power of two.
      interpret: run without a GPU; inside `jax.shard_map` only with check_vma=False.

    Returns:
      [T, H] in the dtype of `rows`.

    Raises:
      ValueError: the shapes of `index` and `weights` differ, or `block` is not a power of two.
    """
    if index.shape != weights.shape or index.ndim != 2:
        raise ValueError(f"index and weights must both be [T, K], got {index.shape} and {weights.shape}")
    if block < 1 or block & (block - 1):
        raise ValueError(f"block must be a power of two, got {block}")
    (num_tokens, top_k), hidden = index.shape, rows.shape[1]
    blocks = pl.cdiv(hidden, block)
    warps = min(max(block * rows.dtype.itemsize // (32 * 16), 1), 16)  # so that a lane loads 16 bytes at once
    rows, index, weights = vary_alike(rows, index, weights)
    padded = jnp.pad(rows, ((0, 0), (0, blocks * block - hidden)))
    kernel = pl.pallas_call(
        partial(_sum_kernel, top_k=top_k, block=block),
        out_shape=result_type((num_tokens, blocks * block), rows.dtype, rows),
        grid=(num_tokens, blocks),
        in_specs=[
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec((1, top_k), lambda t, h: (t, 0)),
            pl.BlockSpec((1, top_k), lambda t, h: (t, 0)),
        ],
        out_specs=pl.BlockSpec((1, block), lambda t, h: (t, h)),
        compiler_params=triton.CompilerParams(num_warps=warps),
        interpret=interpret,
    )
    return kernel(padded, index, weights)[:, :hidden]


def _sum_kernel(rows_ref, index_ref, weights_ref, out_ref, *, top_k: int, block: int) -> None:
    piece = pl.ds(pl.program_id(1) * block, block)
    total = jnp.zeros((1, block), jnp.float32)
    for k in range(top_k):
        row = index_ref[0, k]
        values = rows_ref[pl.ds(jnp.maximum(row, 0), 1), piece].astype(jnp.float32)
        total += jnp.where(row >= 0, weights_ref[0, k] * values, 0)
    out_ref[...] = total.astype(out_ref.dtype)
