"""sparse_all_reduce over several nodes: kernels add up inside nodes, XLA's collectives carry the sums between them.

Each place of the union has one owner. If the result is sharded, the rank that holds the place owns it. Otherwise rank r
owns places [r S, (r + 1) S). One kernel call adds up the rows of a node, and puts the sum of a place on the rank with
the owner's index. Ranks of the same index exchange these sums between nodes, and the owner adds them up in the order of
the nodes. A replicated result is then gathered from all owners.

Sums travel in float32, so that a 16-bit row is rounded once, as in a group of one node. Owners round sums before they
are gathered. Sums travel for all places that a rank can own, so a tight capacity saves time.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._kit import vary
from jax_ep._kit.node_sums import sum_over_nodes
from jax_ep.group import Group
from jax_ep.ops.sparse import kernels
from jax_ep.ops.sparse.types import SparseConfig, Union


def reduce(group: Group, config: SparseConfig, values: jax.Array, union: Union) -> jax.Array:
    """Adds up rows [N, D] of every rank in the places of the union: [capacity, D], as in a group of one node.

    Rows without room are left out, even if `config.drop` is False.
    """
    at = _at_owners(config, union)
    entries = _entries_owned(group, at)
    parts = _sums_for_owners(group, config, values, union, at)

    def held(part: jax.Array, node: int) -> jax.Array:
        return jnp.where(entries[node][:, None] > 0, part, 0)

    sums = sum_over_nodes(parts, group.node_axes, held)
    count = jnp.maximum(entries.sum(axis=0), 1).astype(jnp.float32)[:, None]
    sums = (sums / count if config.by_count else sums * config.scale).astype(values.dtype)
    if not config.sharded:
        sums = jax.lax.all_gather(sums, group.axis_name, tiled=True, to="invarying")[: config.capacity]
    return jnp.pad(sums, ((0, config.capacity - sums.shape[0]), (0, 0)))


class _AtOwners(NamedTuple):
    """The owners of the entries of all ranks."""

    owner: jax.Array  # [R, N] int32, the rank that owns the place of an entry
    row: jax.Array  # [R, N] int32, the place among its owner's places; S without an owner
    rows: int  # S, the most places that a rank owns


def _at_owners(config: SparseConfig, union: Union) -> _AtOwners:
    places = union.places
    if config.sharded:
        rows = min(config.capacity, config.rank_rows, places.size)
        owner = union.owners(places)
        row = places - union.bounds[owner]
    else:
        rows = -(-min(config.capacity, config.num_rows, places.size) // config.size)
        owner, row = places // rows, places % rows
    present = (places < union.bounds[-1]) & (owner < config.size) & (row < rows)
    return _AtOwners(owner, jnp.where(present, row, rows), rows)


def _entries_owned(group: Group, at: _AtOwners) -> jax.Array:
    """[nodes, S] int32: the entries of each node in each place that this rank owns."""
    mine = jnp.where(at.owner == jax.lax.axis_index(group.axis_name), at.row, at.rows)
    node = jnp.arange(group.nodes)[:, None]
    return jnp.zeros((group.nodes, at.rows), jnp.int32).at[node, mine.reshape(group.nodes, -1)].add(1, mode="drop")


def _sums_for_owners(group: Group, config: SparseConfig, values: jax.Array, union: Union, at: _AtOwners) -> jax.Array:
    """[nodes, S, D] float32: for each node n, this node's sums in the places owned by n's rank of this rank's index.

    A place without an entry of this node is undefined.
    """
    assert group.intranode is not None
    size, nodes, rows = group.intranode.size, group.nodes, at.rows
    of_rank = at.owner % size * nodes + at.owner // size  # by index, then by node
    places = jnp.where(at.row < rows, of_rank * rows + at.row, group.size * rows)
    places = places.reshape(nodes, size, -1)[jax.lax.axis_index(group.node_axes)]
    bounds = jnp.arange(size + 1, dtype=jnp.int32) * (nodes * rows)
    values, places, bounds = vary.vary_alike(group.axis_name, values.astype(jnp.float32), places, bounds)
    here = union._replace(places=places, bounds=bounds)
    inside = dataclasses.replace(config, size=size, capacity=nodes * rows, op="sum", sharded=True, drop=True)
    sums = kernels.sparse_reduce(group.intranode, inside, values, here, group.size * rows)
    return sums.reshape(nodes, rows, -1)
