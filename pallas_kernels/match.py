"""The place of each id among sorted ids, by bisection, for GPUs that Triton compiles for."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl

from jax_ep.pallas_kernels.call import call_kernel, triton
from jax_ep.pallas_kernels.checks import check_array
from jax_ep.pallas_kernels.varying import vary_alike

BLOCK = 128  # ids of a program, one per thread: steps wait for memory


def places_in_sorted(union: jax.Array, ids: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Returns the number of sorted ids below each id, which is the first place of an id that is there.

    Args:
      union: [U] integers, not decreasing.
      ids: [N] integers. Unsigned 32- or 64-bit ids need an unsigned union, and the reverse.
      interpret: run without a GPU; inside `jax.shard_map` only with check_vma=False.

    Returns:
      [N] int32. Under `jax.vmap` one element of the batch is computed after the other.
    """
    for name, x, layout in (("union", union, "[U]"), ("ids", ids, "[N]")):
        check_array("places_in_sorted", name, x, layout, (np.integer,))
        if x.shape[0] >= 2**31 - BLOCK:
            raise ValueError(
                f"places_in_sorted: {name} must have fewer than 2**31 - {BLOCK} elements, got {x.shape[0]}"
            )
    operands = vary_alike(union, ids)
    if not (union.size and ids.size):
        return jnp.zeros_like(operands[1], np.int32)
    return sequential_vmap(partial(_places, interpret))(*operands)


def _places(interpret: bool, union: jax.Array, ids: jax.Array) -> jax.Array:
    grid, result = (pl.cdiv(ids.shape[0], BLOCK),), jax.ShapeDtypeStruct(ids.shape, np.int32)
    return call_kernel(_search, "places_in_sorted", grid, (union, ids), [result], interpret)[0]


def _search(union: Any, ids: Any, places: Any) -> None:
    (size,), (count,) = union.shape, ids.shape
    wide = max(4, union.dtype.itemsize, ids.dtype.itemsize)
    is_unsigned = all(jnp.issubdtype(x.dtype, np.unsignedinteger) for x in (union, ids))
    dtype = np.dtype(f"{'u' if is_unsigned else 'i'}{wide}")
    at = pl.program_id(0) * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    inside = at < count
    own = triton.load(ids.at[jnp.where(inside, at, 0)], mask=inside, other=0).astype(dtype)
    below = jnp.zeros(BLOCK, jnp.int32)
    for bit in reversed(range(size.bit_length())):
        more = below + (1 << bit)
        exists = more <= size
        here = triton.load(union.at[jnp.where(exists, more - 1, 0)], mask=exists, other=0).astype(dtype)
        below = jnp.where(exists & (here < own), more, below)
    triton.store(places.at[jnp.where(inside, at, count)], below, mask=inside)
