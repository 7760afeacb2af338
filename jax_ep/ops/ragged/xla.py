"""ragged_all_to_all in plain jax.numpy and jax.lax: `implementation="xla"`."""

import jax
import jax.numpy as jnp

from jax_ep._kit.checks import AxisName


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: AxisName,
) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.ragged_all_to_all`: gathers every rank's operand and picks this rank's rows.

    Also returns whether, on any rank, a slice is outside its buffer or has a size that the receiver does not expect.
    """
    me = jax.lax.axis_index(axis_name)
    size = jax.lax.axis_size(axis_name)

    def slices_for_me(x: jax.Array) -> jax.Array:  # [R, slices]: from each rank, the slices it sends here
        return jax.lax.all_gather(x, axis_name).reshape(size, size, -1)[:, me]

    operands = jax.lax.all_gather(operand, axis_name)
    starts, sizes, offsets = map(slices_for_me, (input_offsets, send_sizes, output_offsets))
    fits = (send_sizes >= 0) & (input_offsets >= 0) & (input_offsets <= operand.shape[0] - send_sizes)
    fits &= (output_offsets >= 0) & (output_offsets <= output.shape[0] - send_sizes)
    wrong = jnp.any((send_sizes != 0) & ~fits) | jnp.any(sizes.reshape(-1) != recv_sizes)
    index = jnp.arange(output.shape[0], dtype=output_offsets.dtype)
    result = output
    for source in range(size if operand.shape[0] else 0):
        for i in range(starts.shape[1]):
            offset = index - offsets[source, i]
            inside = (offset >= 0) & (offset < sizes[source, i])
            picked = operands[source].at[offset + starts[source, i]].get(mode="clip")
            result = jnp.where(inside.reshape(-1, *[1] * (output.ndim - 1)), picked, result)
    return result, jax.lax.psum(wrong.astype(jnp.int32), axis_name) > 0
