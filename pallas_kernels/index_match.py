"""Local-to-global index matching: where each id of a rank lies in the sorted union of the ids of all ranks."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from .arguments import check_array, check_block
from .varying import result_type, vary_alike


def index_match(global_ids: jax.Array, local_ids: jax.Array, *, block: int = 128, interpret: bool = False) -> jax.Array:
    """position[i] = where local_ids[i] first lies in `global_ids`, or U where it does not.

    Every id is searched for on its own, by halving: bit_length(U) dependent loads, and no memory but the result. What
    is scattered to position U with mode="drop" goes nowhere; the id of the padding is found where the padding begins.

    Args:
      global_ids: [U] sorted integers, such as different row ids with padding at the end.
      local_ids: [N] of the same dtype, in any order, with duplicates; searches run side by side, so sorted ids share
        more of their loads.
      block: ids that one program searches for; a power of two.
      interpret: run without a GPU; inside `jax.shard_map` only with check_vma=False.

    Returns:
      [N] int32 in [0, U].

    Raises:
      ValueError, TypeError: the ids are not vectors of one integer dtype, or `block` is not a power of two.
    """
    check_array("global_ids", global_ids, 1, "[U]")
    check_array("local_ids", local_ids, 1, "[N]")
    if global_ids.dtype != local_ids.dtype or not jnp.issubdtype(local_ids.dtype, jnp.integer):
        raise ValueError(
            f"global_ids and local_ids must be of one integer dtype, got {global_ids.dtype} and {local_ids.dtype}"
        )
    check_block(block)
    (size,), (count,) = global_ids.shape, local_ids.shape
    if not size or not count:
        return jnp.zeros(count, jnp.int32)
    global_ids, local_ids = vary_alike(global_ids, local_ids)
    kernel = pl.pallas_call(
        partial(_match_kernel, size=size, count=count, block=block),
        out_shape=result_type((count,), jnp.int32, local_ids),
        grid=(pl.cdiv(count, block),),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        compiler_params=triton.CompilerParams(
            num_warps=1
        ),  # Mosaic GPU of jax 0.12 loads from no index of a lane's own
        interpret=interpret,
    )
    return kernel(global_ids, local_ids)


def _match_kernel(global_ref: Any, local_ref: Any, out_ref: Any, *, size: int, count: int, block: int) -> None:
    # The last block repeats the last id instead of masking what lies behind it.
    position = jnp.minimum(pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32), count - 1)
    ids = local_ref[position]
    smaller = jnp.zeros(block, jnp.int32)  # at least so many of the global ids are smaller
    for step in reversed([1 << bit for bit in range(size.bit_length())]):
        probe = smaller + step
        below = global_ref[jnp.minimum(probe, size) - 1] < ids
        smaller = jnp.where((probe <= size) & below, probe, smaller)
    found = global_ref[jnp.minimum(smaller, size - 1)] == ids
    out_ref[position] = jnp.where(found, smaller, size)
