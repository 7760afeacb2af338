"""Weighted sums of picked rows: what an expert's rank does for a token before it sends one row."""

import importlib.util
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from .arguments import check_array, check_block
from .varying import result_type, vary_alike

Backend = Literal["auto", "mosaic", "triton"]
_WARPGROUP = 128  # threads of a program of Mosaic GPU: each has one value at least


def weighted_row_sum(
    rows: jax.Array,
    index: jax.Array,
    weights: jax.Array,
    *,
    block: int = 512,
    backend: Backend = "auto",
    interpret: bool = False,
) -> jax.Array:
    """out[t] = the sum over k of weights[t, k] * rows[index[t, k]], summed in float32 in the order of k.

    Args:
      rows: [C, H] of a float dtype.
      index: [T, K] int32 in [0, C); -1 adds nothing.
      weights: [T, K] float32.
      block: values of a row that one program sums; a power of two. Mosaic GPU takes 128 at least.
      backend: how Pallas compiles the kernel: "mosaic" by Mosaic GPU, for Hopper and newer; "triton" by Triton, which
        JAX has deprecated; "auto": by Mosaic GPU where all GPUs of this process run it and absl-py, which it needs, is
        installed.
      interpret: run without a GPU; inside `jax.shard_map` only with check_vma=False.

    Returns:
      [T, H] in the dtype of `rows`.

    Raises:
      ValueError, TypeError: an argument is no such array, the shapes of `index` and `weights` differ, `block` is not a
        power of two, or `backend` is unknown.
    """
    check_array("rows", rows, 2, "[C, H]")
    check_array("index", index, 2, "[T, K]")
    check_array("weights", weights, 2, "[T, K]")
    if index.shape != weights.shape:
        raise ValueError(f"index and weights must both be [T, K], got {index.shape} and {weights.shape}")
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"index must be of an integer dtype, got {index.dtype}")
    check_block(block)
    if not isinstance(backend, str) or backend not in ("auto", "mosaic", "triton"):
        raise ValueError(f"backend must be 'auto', 'mosaic' or 'triton', got {backend!r}")
    by_mosaic = not interpret and (backend == "mosaic" or (backend == "auto" and _runs_mosaic()))
    block = max(block, _WARPGROUP) if by_mosaic else block
    (num_tokens, top_k), hidden = index.shape, rows.shape[1]
    blocks = pl.cdiv(hidden, block)
    rows, index, weights = vary_alike(rows, index, weights)
    padded = jnp.pad(rows, ((0, 0), (0, blocks * block - hidden)))
    out = result_type((num_tokens, blocks * block), rows.dtype, rows)
    if not num_tokens or not top_k or not blocks or not rows.shape[0]:
        return jnp.zeros((num_tokens, hidden), rows.dtype)
    sum_block = partial(_sum_block, top_k=top_k, block=block)
    by = _by_mosaic if by_mosaic else partial(_by_triton, interpret=interpret)
    return by(sum_block, out, (num_tokens, blocks), padded, index, weights)[:, :hidden]


def _runs_mosaic() -> bool:
    if importlib.util.find_spec("absl") is None:  # Mosaic GPU imports it, and jax does not require it
        return False
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # no such backend
        return False
    return all(float(device.compute_capability) >= 9.0 for device in devices)


def _by_mosaic(sum_block: Any, out: Any, grid: tuple[int, int], *operands: jax.Array) -> jax.Array:
    from jax.experimental.pallas import mosaic_gpu  # needs a package that others do without

    def body(*refs: Any) -> None:
        sum_block(jax.lax.axis_index("token"), jax.lax.axis_index("block"), *refs)

    return mosaic_gpu.kernel(body, out_type=out, grid=grid, grid_names=("token", "block"))(*operands)


def _by_triton(sum_block: Any, out: Any, grid: tuple[int, int], *operands: jax.Array, interpret: bool) -> jax.Array:
    def body(*refs: Any) -> None:
        sum_block(pl.program_id(0), pl.program_id(1), *refs)

    block_bytes = out.shape[1] // grid[1] * out.dtype.itemsize
    kernel = pl.pallas_call(
        body,
        out_shape=out,
        grid=grid,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(operands),
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        # So that a lane loads 16 bytes at once.
        compiler_params=triton.CompilerParams(num_warps=min(max(block_bytes // (32 * 16), 1), 16)),
        interpret=interpret,
    )
    return kernel(*operands)


def _sum_block(
    token: jax.Array,
    number: jax.Array,
    rows_ref: Any,
    index_ref: Any,
    weights_ref: Any,
    out_ref: Any,
    *,
    top_k: int,
    block: int,
) -> None:
    """The columns of one block of one token. What is not picked is selected away, as it may be NaN."""
    columns = pl.ds(number * block, block)
    total = jnp.zeros(block, jnp.float32)
    for k in range(top_k):
        row = index_ref[token, k]
        values = rows_ref[jnp.maximum(row, 0), columns].astype(jnp.float32)
        weighted = jnp.broadcast_to(weights_ref[token, k], (block,)) * values
        total += jnp.where(jnp.broadcast_to(row >= 0, (block,)), weighted, jnp.zeros(block, jnp.float32))
    out_ref[token, columns] = total.astype(out_ref.dtype)
