"""The kernel of ragged_all_to_all as an FFI call, with its derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit import ffi
from jax_ep._kit.linear import linear
from jax_ep.group import Group

_Arrays = tuple[jax.Array, ...]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def ragged_all_to_all(group: Group, operand: jax.Array, output: jax.Array, *indices: jax.Array) -> jax.Array:
    called = ffi.call(
        "ragged_all_to_all",
        operand,
        *indices,
        updated=output,
        ranks=group._ranks,
        slices=indices[0].shape[0] // group.size,
        operand_rows=operand.shape[0],
        output_rows=output.shape[0],
        row_bytes=int(np.prod(output.shape[1:])) * output.dtype.itemsize,
    )
    return called["output"]


@ragged_all_to_all.defjvp
def _jvp(group: Group, primals: _Arrays, tangents: _Arrays) -> tuple[jax.Array, jax.Array]:
    operand, _, *indices = primals

    def forward(indices: list[jax.Array], rows: _Arrays) -> jax.Array:
        return ragged_all_to_all(group, *rows, *indices)

    backward = partial(_backward, group, operand.shape[0])
    return ragged_all_to_all(group, *primals), linear(forward, backward, indices, tangents[:2])


def _backward(group: Group, rows: int, indices: list[jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The reverse exchange: each received row goes back to its source row."""
    input_offsets, send_sizes, output_offsets, recv_sizes = indices
    size, entries = group.size, input_offsets.shape[0]
    overlaps = jnp.broadcast_to(_overlap(input_offsets, send_sizes), (entries,)).astype(input_offsets.dtype)
    sent = jnp.stack([x.reshape(size, -1) for x in (output_offsets, input_offsets, overlaps)], axis=1)
    received = jax.lax.all_to_all(sent, group.axis_name, split_axis=0, concat_axis=0, tiled=True)
    arrived_at, came_from, overlaps = (received[:, i].reshape(entries) for i in range(3))
    nothing = jnp.zeros_like(cotangent, shape=(rows, *cotangent.shape[1:]))

    def at_once(cotangent: jax.Array) -> jax.Array:
        return ragged_all_to_all(group, cotangent, nothing, arrived_at, recv_sizes, came_from, send_sizes)

    def one_by_one(cotangent: jax.Array) -> jax.Array:
        """The reverse exchange of overlapping slices, one at a time."""
        each = entries // size
        me = jax.lax.axis_index(group.axis_name)
        peer, number = jnp.divmod(jnp.arange(entries, dtype=jnp.int32), each)

        def add(total: jax.Array, turn: jax.Array) -> tuple[jax.Array, None]:
            away, mine = turn // each, number == turn % each
            back = jnp.where(mine & (peer == (me - away) % size), recv_sizes, 0)
            taken = jnp.where(mine & (peer == (me + away) % size), send_sizes, 0)
            part = ragged_all_to_all(group, cotangent, nothing, arrived_at, back, came_from, taken)
            return total + part, None

        return jax.lax.scan(add, nothing, jnp.arange(entries, dtype=jnp.int32))[0]

    d_operand = jax.lax.cond(jnp.any(overlaps > 0), one_by_one, at_once, cotangent)  # the same on all ranks
    edges = jnp.zeros(cotangent.shape[0] + 1, jnp.int32).at[arrived_at].add(1).at[arrived_at + recv_sizes].add(-1)
    overwritten = jnp.cumsum(edges)[:-1].reshape(-1, *[1] * (cotangent.ndim - 1)) > 0
    return d_operand, jnp.where(overwritten, jnp.zeros_like(cotangent), cotangent)


def _overlap(starts: jax.Array, sizes: jax.Array) -> jax.Array:
    starts = jnp.where(sizes > 0, starts, jnp.iinfo(starts.dtype).max)  # empty slices come last
    order = jnp.argsort(starts)
    ends = jax.lax.cummax((starts + jnp.maximum(sizes, 0))[order])
    return jnp.any((starts[order][1:] < ends[:-1]) & (sizes[order][1:] > 0))
