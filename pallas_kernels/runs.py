"""Runs of equal ids among sorted ids, for GPUs that Triton compiles for.

The first kernel counts the runs that begin in each block of ids. The second adds up the counts of all earlier blocks,
and so knows the number of each run that begins in its block.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl

from jax_ep.pallas_kernels.call import call_kernel, triton
from jax_ep.pallas_kernels.checks import check_array
from jax_ep.pallas_kernels.tiles import power_of_two

BLOCK = 1024  # ids of a program
_MOST_COUNTS = 1024  # added up at once by a program


def runs_of_sorted(ids: jax.Array, limit: int, *, interpret: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The runs of equal ids.

    Args:
      ids: [N] int32 or int64, not decreasing. Those outside [0, limit) are padding.
      limit: fits the dtype of the ids.
      interpret: run without a GPU; inside `jax.shard_map` only with check_vma=False.

    Returns:
      starts: [N + 1] int32. The first id of each run, then the end of the last run. different: [N], the id of each run,
      then `limit`. count: [] int32, the runs. Under `jax.vmap` one element of the batch is computed after the other.
    """
    check_array("runs_of_sorted", "ids", ids, "[N]", (np.signedinteger,))
    if ids.shape[0] >= 2**31 - BLOCK:
        raise ValueError(f"runs_of_sorted: ids must have fewer than 2**31 - {BLOCK} elements, got {ids.shape[0]}")
    if not 0 <= limit <= np.iinfo(ids.dtype).max:
        raise ValueError(f"runs_of_sorted: limit must be in [0, {np.iinfo(ids.dtype).max}], got {limit}")
    if not ids.shape[0]:
        nothing = jnp.zeros_like(ids, np.int32, shape=(1,))
        return nothing, ids, nothing[0]
    return sequential_vmap(partial(_runs, limit, interpret))(ids)


def _runs(limit: int, interpret: bool, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    total = ids.shape[0]
    blocks = pl.cdiv(total, BLOCK)

    def call(body: Any, sizes: tuple[int, ...], dtypes: tuple[Any, ...], *operands: jax.Array) -> list[jax.Array]:
        results = [jax.ShapeDtypeStruct((size,), dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
        kernel = partial(body, limit=limit)
        return call_kernel(kernel, body.__name__.strip("_"), (blocks,), operands, results, interpret)

    counts = call(_count_runs, (blocks, blocks), (np.int32, np.int32), ids)
    sizes, dtypes = (total + 1, total, 1), (np.int32, ids.dtype, np.int32)
    starts, different, count = call(_place_runs, sizes, dtypes, ids, *counts)
    return starts, different, count[0]


def _load(ids: Any, limit: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """For a block of ids: position, whether it exists, id, whether it is below the limit, and whether it begins a
    run."""
    at = pl.program_id(0) * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    inside = at < ids.shape[0]
    here, before = (
        triton.load(ids.at[jnp.maximum(jnp.where(inside, at, 0) - i, 0)], mask=inside, other=limit) for i in (0, 1)
    )
    below = inside & (here < limit)
    return at, inside, here, below, below & (here >= 0) & ((at == 0) | (here != before))


def _count_runs(ids: Any, runs_of: Any, below_of: Any, *, limit: int) -> None:
    """The number of ids of each block that begin a run, and that are below the limit."""
    *_, below, first = _load(ids, limit)
    runs_of[pl.program_id(0)] = jnp.sum(first, dtype=jnp.int32)
    below_of[pl.program_id(0)] = jnp.sum(below, dtype=jnp.int32)


def _place_runs(ids: Any, runs_of: Any, below_of: Any, starts: Any, different: Any, count: Any, *, limit: int) -> None:
    """Runs go to the front in order. Every other id fills one of the places after them."""
    block, blocks, total = pl.program_id(0), runs_of.shape[0], ids.shape[0]
    at, inside, here, _, first = _load(ids, limit)
    chunk = min(_MOST_COUNTS, power_of_two(blocks))

    def add(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        of = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        there, below = (
            triton.load(ref.at[jnp.minimum(of, blocks - 1)], mask=of < blocks, other=0) for ref in (runs_of, below_of)
        )
        return sums[0] + jnp.where(of < block, there, 0), sums[1] + there, sums[2] + below

    zeros = jnp.zeros(chunk, jnp.int32)
    sums = jax.lax.fori_loop(np.int32(0), np.int32(pl.cdiv(blocks, chunk)), add, (zeros, zeros, zeros))
    earlier, found, end = (jnp.sum(x, dtype=jnp.int32) for x in sums)
    upto = earlier + jnp.cumsum(first, dtype=jnp.int32)  # runs that begin here or before
    place = jnp.where(first, upto - 1, found + at - upto)
    place = jnp.where(inside, place, total + 1)  # interpret mode writes masked elements back
    triton.store(starts.at[place], jnp.where(first, at, end), mask=inside)
    triton.store(different.at[place], jnp.where(first, here, limit), mask=inside)
    last = at == total - 1
    triton.store(starts.at[jnp.where(last, total, total + 1)], jnp.full(BLOCK, end), mask=last)
    count[0] = found
