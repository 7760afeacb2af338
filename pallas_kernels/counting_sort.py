"""A stable sort of few ids in one launch, for GPUs that Triton compiles for.

Every id is compared with all others: its place is the number of smaller ids, and of equal ids before it. For few ids
this takes less time than the launches of a sort in several steps.
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

# A program places few ids and compares them with many at once. 1,024 ids in 128 groups take 1.8 us; with 64 and 64 ids
# they take 17.7 us (one H200).
BLOCK = 4  # ids of a program
MOST_AT_ONCE = 1024  # ids with which it compares them at once
MOST_IDS = 2048


def counting_sort(ids: jax.Array, groups: int, *, interpret: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts ids in [0, groups). Equal ids stay in order, and ids outside come last.

    Args:
      ids: [N] int32 or int64, at most `MOST_IDS`.
      interpret: run without a GPU; inside `jax.shard_map` only with check_vma=False.

    Returns:
      place: [N] int32, the place of each id in the order, or -1 for an id outside. order: [N] int32, the id at each
      place, or -1 for an id outside. sizes: [groups] int32, the number of each id. Under `jax.vmap` one element of the
      batch is computed after the other.
    """
    check_array("counting_sort", "ids", ids, "[N]", (np.int32, np.int64))
    if not 0 < ids.shape[0] <= MOST_IDS:
        raise ValueError(f"counting_sort: ids must have 1 to {MOST_IDS} elements, got {ids.shape[0]}")
    if not 0 < groups < 2**31 - BLOCK:
        raise ValueError(f"counting_sort: groups must be in [1, 2**31 - {BLOCK}), got {groups}")
    return sequential_vmap(partial(_sort, groups, interpret))(ids)


def _sort(groups: int, interpret: bool, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    results = [jax.ShapeDtypeStruct((size,), np.int32) for size in (*ids.shape, *ids.shape, groups)]
    grid = (pl.cdiv(max(ids.shape[0], groups), BLOCK),)
    place, order, sizes = call_kernel(_place, "counting_sort", grid, [ids], results, interpret)
    return place, order, sizes


def _place(ids: Any, place: Any, order: Any, sizes: Any) -> None:
    """A program places a block of ids, and counts the ids of a block of groups."""
    (count,), (groups,) = ids.shape, sizes.shape
    at_once = min(power_of_two(count), MOST_AT_ONCE)
    mine = pl.program_id(0) * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    own = _load(ids, mine, groups)[:, None]

    def add(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at = i * at_once + jnp.arange(at_once, dtype=jnp.int32)
        other, exists = _load(ids, at, groups)[None, :], (at < count)[None, :]
        earlier = (other < own) | ((other == own) & (at[None, :] < mine[:, None]))
        here = other == mine[:, None]  # `mine` also numbers the program's groups
        before, size = (jnp.sum(exists & each, axis=1, dtype=jnp.int32) for each in (earlier, here))
        return sums[0] + before, sums[1] + size

    zeros = jnp.zeros(BLOCK, jnp.int32)
    before, size = jax.lax.fori_loop(np.int32(0), np.int32(pl.cdiv(count, at_once)), add, (zeros, zeros))
    inside, belongs = mine < count, own[:, 0] < groups
    at = jnp.where(inside, mine, count)  # interpret mode writes masked elements, but not out of bounds
    triton.store(place.at[at], jnp.where(belongs, before, -1), mask=inside)
    triton.store(order.at[jnp.where(inside, before, count)], jnp.where(belongs, mine, -1), mask=inside)
    triton.store(sizes.at[jnp.where(mine < groups, mine, groups)], size, mask=mine < groups)


def _load(ids: Any, at: jax.Array, groups: int) -> jax.Array:
    """int32: the ids; `groups` stands for an id outside [0, groups) and past the end."""
    inside = at < ids.shape[0]
    found = triton.load(ids.at[jnp.where(inside, at, 0)], mask=inside, other=0)
    return jnp.where(inside & (found >= 0) & (found < groups), found, groups).astype(jnp.int32)
