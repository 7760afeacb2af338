"""The second step of sparse_all_reduce in plain jax.numpy and jax.lax: the oracle, and `implementation="xla"`."""

import jax
import jax.numpy as jnp

from jax_ep.sparse_union import SparseConfig, Union


def reduce(config: SparseConfig, axis_name: str, values: jax.Array, union: Union) -> jax.Array:
    """Like `_ffi.sparse_reduce`: every rank adds up its rows in float32 in an array of all slots; `psum` adds those."""
    slots = slots_of_entries(union, axis_name)
    kept = config.slots_kept(values.shape[0])
    rows = jnp.zeros((kept, values.shape[1]), jnp.float32)
    rows = jax.lax.psum(rows.at[slots].add(values.astype(jnp.float32), mode="drop"), axis_name)
    rows = rows * (1 / jnp.maximum(entries_of_slots(union, kept), 1)[:, None] if config.by_count else config.scale)
    if config.sharded:
        place = jnp.arange(config.capacity, dtype=jnp.int32)
        mine = rows.at[union.bounds[jax.lax.axis_index(axis_name)] + place].get(mode="clip")
        present = place < union.needed(config)[jax.lax.axis_index(axis_name)]
        rows = jnp.where(present[:, None], mine, 0)
    return rows.astype(values.dtype)


def slots_of_entries(union: Union, axis_name: str) -> jax.Array:
    """[N] int32: the slot of each entry of this rank, in their own order; 2**31 - 1 if it stands for no row."""
    slots = union.slots[jax.lax.axis_index(axis_name)]
    return jnp.where(slots < union.bounds[-1], slots, 2**31 - 1)


def entries_of_slots(union: Union, slots: int) -> jax.Array:
    """[slots] float32: how many entries of all ranks each of the first slots has."""
    return jnp.zeros(slots, jnp.float32).at[union.slots.reshape(-1)].add(1, mode="drop")
