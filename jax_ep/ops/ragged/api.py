"""ragged_all_to_all: `jax.lax`'s, on every platform of jax_ep, with its gradient."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._core import checks, ffi
from jax_ep._core.undelivered import undelivered_if
from jax_ep.errors import InvalidRoutingError
from jax_ep.group import Group, find_open_group
from jax_ep.ops.ragged import kernels, xla

OUTSIDE = (
    "ragged_all_to_all: on some rank a slice lies outside its buffer or its size differs from what the receiver expects"
)
MAX_ROWS = 2**31 - 2**16  # kernels count rows in int32, each team from one of its own to the next


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
    axis_index_groups: None = None,
) -> jax.Array:
    """`jax.lax.ragged_all_to_all`, on every platform of jax_ep, through the open group of `axis_name`.

    Slice i goes to rank i // (len(send_sizes) / size): rows [input_offsets[i], input_offsets[i] + send_sizes[i]) of
    `operand` land there at row output_offsets[i]. Differentiable in `operand` and `output`; as in `jax.lax`,
    the gradient takes the slices of `operand` not to overlap.

    Args:
      operand: [N, ...] rows to send, of any dtype of whole bytes: not int4, float4_e2m1fn and other narrow ones.
      output: [M, ...] of the same dtype and row shape; what no peer writes keeps its value.
      input_offsets, send_sizes, output_offsets, recv_sizes: [size * slices] integers; `recv_sizes` must equal what
        the peers send.
      axis_name: the axis of the one open group over this mesh.
      axis_index_groups: must be None.

    Returns:
      [M, ...], `output` with the received slices written into it.

    Raises:
      ValueError, TypeError: an argument is wrong, or no single open group has this axis; when the op is traced.
      JaxEpError: an earlier op of this group failed. Where this one fails, awaiting its results raises
        `jax.errors.JaxRuntimeError` on a CPU, and on a GPU they are NaN, or -1 in integers; `group.check()` and the
        next op raise the typed error: `InvalidRoutingError`, when a slice lies outside its buffer or the sizes of two
        ranks disagree.
    """
    op = "ragged_all_to_all"
    group = find_open_group(op, axis_name)
    group.check()
    checks.check_inside_shard_map(op, group.mesh, axis_name)
    if axis_index_groups is not None:
        raise ValueError(f"{op}: axis_index_groups must be None, got {axis_index_groups}")
    checks.check_whole_bytes(op, "operand", operand)
    checks.check_whole_bytes(op, "output", output)
    operand, output = jnp.asarray(operand), jnp.asarray(output)
    if operand.ndim < 1 or output.shape[1:] != operand.shape[1:] or output.ndim != operand.ndim:
        raise ValueError(
            f"{op}: output must have the row shape of operand, got operand {operand.shape} and output {output.shape}"
        )
    if output.dtype != operand.dtype:
        raise TypeError(f"{op}: output must have the dtype of operand, {operand.dtype}, got {output.dtype}")
    for name, array in (("operand", operand), ("output", output)):
        if array.shape[0] > MAX_ROWS:
            raise ValueError(f"{op}: {name} must have at most {MAX_ROWS} rows, got {array.shape}")
    offsets = {
        "input_offsets": input_offsets,
        "send_sizes": send_sizes,
        "output_offsets": output_offsets,
        "recv_sizes": recv_sizes,
    }
    for name, array in offsets.items():
        checks.check_rank(op, name, array, 1, "[size * slices]")
        if not jnp.issubdtype(array.dtype, np.integer):
            raise TypeError(f"{op}: {name} must be of an integer dtype, got {array.dtype}")
        checks.check_shape(op, name, array, input_offsets.shape, "that of input_offsets")
    if input_offsets.shape[0] % group.size:
        raise ValueError(
            f"{op}: input_offsets must have a multiple of the group's size {group.size} entries, "
            f"got {input_offsets.shape[0]}"
        )
    if input_offsets.shape[0] // group.size > ffi.MAX_EXPERTS:
        raise ValueError(f"{op}: at most {ffi.MAX_EXPERTS} slices per rank, got {input_offsets.shape[0] // group.size}")
    if jnp.issubdtype(operand.dtype, jax.dtypes.prng_key):
        words = (jax.random.key_data(keys) for keys in (operand, output))
        words = ragged_all_to_all(*words, *offsets.values(), axis_name=axis_name)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(operand))
    operands = checks.vary_alike(axis_name, operand, output, *map(_to_int32, offsets.values()))
    operand, output, *indices = (checks.not_batched(op, x) for x in operands)
    if group.resolve(op, "auto") == "xla":
        result, wrong = xla.ragged_all_to_all(operand, output, *indices, axis_name=axis_name)
        return undelivered_if(wrong, result, InvalidRoutingError(OUTSIDE), group.keep_error)
    return _ragged_all_to_all(group, operand, output, *indices)


def _to_int32(indices: jax.Array) -> jax.Array:
    """What int32 does not hold becomes the nearest that it does, which lies outside every buffer, and is refused."""
    at = jnp if isinstance(indices, jax.Array) else np  # jax may not hold the array of numpy
    held, info = jnp.iinfo(np.int32), jnp.iinfo(indices.dtype)
    if info.min < held.min or info.max > held.max:
        indices = at.clip(indices, max(info.min, held.min), held.max)
    return jnp.asarray(indices.astype(np.int32))


_ragged_all_to_all = jax.custom_vjp(kernels.ragged_all_to_all, nondiff_argnums=(0,))


def _fwd(group: Group, operand: jax.Array, output: jax.Array, *indices: jax.Array) -> Any:
    # The backward pass needs only the operand's type: a constant, which XLA makes where it is used.
    return _ragged_all_to_all(group, operand, output, *indices), (jnp.zeros_like(operand), indices)


def _bwd(group: Group, residuals: Any, cotangent: jax.Array) -> Any:
    """The same exchange backwards: what came from a rank goes back to where it started."""
    like_operand, (input_offsets, send_sizes, output_offsets, recv_sizes) = residuals
    exchange = partial(jax.lax.all_to_all, axis_name=group.axis_name, split_axis=0, concat_axis=0, tiled=True)
    arrived_at, came_from = exchange(output_offsets), exchange(input_offsets)
    d_operand = _ragged_all_to_all(group, cotangent, like_operand, arrived_at, recv_sizes, came_from, send_sizes)
    edges = jnp.zeros(cotangent.shape[0] + 1, jnp.int32).at[arrived_at].add(1).at[arrived_at + recv_sizes].add(-1)
    overwritten = jnp.cumsum(edges)[:-1].reshape(-1, *[1] * (cotangent.ndim - 1)) > 0
    return d_operand, jnp.where(overwritten, jnp.zeros_like(cotangent), cotangent), None, None, None, None


_ragged_all_to_all.defvjp(_fwd, _bwd)
