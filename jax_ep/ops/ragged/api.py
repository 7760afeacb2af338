"""`jax.lax.ragged_all_to_all` on every platform of jax_ep, with its derivatives."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit import checks, ffi, vary
from jax_ep._kit.checks import AxisName, Implementation
from jax_ep._kit.scopes import op_scope
from jax_ep.errors import InvalidRoutingError
from jax_ep.group import Group, check_group, find_group
from jax_ep.ops.ragged import kernels, xla
from jax_ep.runtime.agreement import Agreement
from jax_ep.runtime.undelivered import undelivered_if

OUTSIDE = (
    "ragged_all_to_all: on some rank a slice lies outside its buffer or its size differs from what the receiver expects"
)
MAX_ROWS = 2**31 - 2**20 - 1  # kernels count rows in int32, in steps of all threads
MAX_SLICES = ffi.MAIL_NUMBERS  # for one peer


@op_scope("ragged_all_to_all")
def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: AxisName,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    group: Group | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """`jax.lax.ragged_all_to_all` on every platform of jax_ep, through the open group of `axis_name`.

    Slice i goes to rank i // (len(send_sizes) / size): rows [input_offsets[i], input_offsets[i] + send_sizes[i]) of
    `operand` are written to row output_offsets[i] there. Slices of `operand` may overlap. Slices of a result must not.
    Differentiable in `operand` and `output`, forward and backward. A row that is sent several times gets the sum of its
    cotangents (`jax.lax` keeps one of them). If slices of `operand` overlap on some rank, the backward pass is an
    exchange per slice.

    Args:
      operand: [N, ...] rows to send, of any dtype of whole bytes, so not int4 or float4_e2m1fn.
      output: [M, ...] of the same dtype and row shape. Rows that no peer writes keep their values.
      input_offsets, send_sizes, output_offsets, recv_sizes: [size * slices] integers. `recv_sizes` must equal the
        peers' `send_sizes`.
      axis_name: the axis of the one open group over this mesh, or a tuple of axes.
      axis_index_groups: None, or a partition of the ranks into parts of equal size. Each part exchanges separately,
        `size` is its size, and its ranks have the given order.
      group: the open group of `axis_name`, if several are open over meshes of these axes and sizes.
      implementation: as for `jax_ep.dispatch`.

    Returns:
      [M, ...], `output` with the received slices written into it.

    Raises:
      ValueError, TypeError: an argument is wrong, or no single open group has this axis; when the op is traced.
      JaxEpError: as for `jax_ep.dispatch`; undelivered integers are -1. `InvalidRoutingError`: a slice is outside its
        buffer, or the sizes of two ranks disagree.
    """
    op = "ragged_all_to_all"
    slices = (input_offsets, send_sizes, output_offsets, recv_sizes)
    _check_arrays(op, operand, output, *slices)
    operand, output = jnp.asarray(operand), jnp.asarray(output)
    group = _group(op, axis_name, group)
    _check_slices(op, input_offsets.shape[0], group.size if axis_index_groups is None else 1)
    if jnp.issubdtype(operand.dtype, jax.dtypes.prng_key):
        operand_words, output_words = (jax.random.key_data(keys) for keys in (operand, output))
        options: dict[str, Any] = {"axis_index_groups": axis_index_groups, "implementation": implementation}
        words = ragged_all_to_all(operand_words, output_words, *slices, axis_name=axis_name, group=group, **options)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(operand))
    indices = tuple(map(checks.to_int32, slices))
    if axis_index_groups is not None:
        parts = _partition(op, axis_index_groups, group.size, input_offsets.shape[0])
        indices = _among_all(group.axis_name, parts, *indices)
    operand, output, *indices = vary.vary_alike(group.axis_name, operand, output, *indices)
    if group._resolve(op, implementation) == "xla":
        settings = {"slices": len(indices[0]), "operand": operand.shape, "output": output.shape, "dtype": operand.dtype}
        agreement = Agreement(group._participants, op, **settings)
        operand, output, *indices = agreement.enter((operand, output, *indices))
        result, wrong = xla.ragged_all_to_all(operand, output, *indices, axis_name=group.axis_name)
        return agreement.leave(undelivered_if(wrong, result, group._keep_error, lambda: InvalidRoutingError(OUTSIDE)))
    return kernels.ragged_all_to_all(group, operand, output, *indices)


def _group(op: str, axis_name: AxisName, group: Group | None) -> Group:
    checks.check_axis(op, axis_name)
    found = find_group(op, axis_name) if group is None else group
    check_group(op, found)
    if checks.canonical_axis(axis_name) != found.axis_name:
        raise ValueError(f"{op}: axis_name must be that of group, {found.axis_name!r}, got {axis_name!r}")
    return found


def _check_arrays(op: str, operand: jax.Array, output: jax.Array, *slices: jax.Array) -> None:
    """Raises the errors of `jax.lax.ragged_all_to_all`."""
    checks.check_whole_bytes(op, "operand", operand)
    checks.check_whole_bytes(op, "output", output)
    if operand.ndim < 1 or output.shape[1:] != operand.shape[1:] or output.ndim != operand.ndim:
        raise ValueError(
            f"{op}: output must have the row shape of operand, got operand {operand.shape} and output {output.shape}"
        )
    if output.dtype != operand.dtype:
        raise TypeError(f"{op}: output must have the dtype of operand, {operand.dtype}, got {output.dtype}")
    for name, array in (("operand", operand), ("output", output)):
        if array.shape[0] > MAX_ROWS:
            raise ValueError(f"{op}: {name} must have at most {MAX_ROWS} rows, got {array.shape}")
    offsets = dict(zip(("input_offsets", "send_sizes", "output_offsets", "recv_sizes"), slices, strict=True))
    for name, array in offsets.items():
        checks.check_array(op, name, array)
        if not jnp.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{op} {name} must be integer type.")
    for name, array in offsets.items():
        if array.ndim != 1 or array.shape[0] < 1:
            raise ValueError(f"{op} {name} must be rank 1 with positive dimension size, but got shape {array.shape}")
    for name, array in offsets.items():
        checks.check_array(op, name, array, "that of input_offsets", shape=slices[0].shape)


def _check_slices(op: str, entries: int, size: int) -> None:
    if entries % size:
        raise ValueError(f"{op}: input_offsets must have a multiple of the group's size {size} entries, got {entries}")
    if entries // size > MAX_SLICES:
        raise ValueError(f"{op}: input_offsets must have at most {MAX_SLICES} entries per rank, got {entries // size}")


def _partition(op: str, axis_index_groups: Sequence[Sequence[int]], size: int, entries: int) -> np.ndarray:
    """[size, ranks of a part]: for each rank, the ranks of its part."""
    try:
        parts = [[operator.index(rank) for rank in part] for part in axis_index_groups]
    except TypeError:
        what = checks.describe(axis_index_groups)
        raise TypeError(
            f"{op}: axis_index_groups must be None, or a sequence of sequences of ranks, got {what}"
        ) from None
    if len({len(part) for part in parts}) > 1:
        raise ValueError(f"{op}: axis_index_groups must have parts of equal size, got {axis_index_groups}")
    if sorted(rank for part in parts for rank in part) != list(range(size)):
        raise ValueError(
            f"{op}: axis_index_groups must name each of the {size} ranks in one part, got {axis_index_groups}"
        )
    _check_slices(op, entries, len(parts[0]))
    part_of = {rank: part for part in parts for rank in part}
    return np.array([part_of[rank] for rank in range(size)], np.int32)


def _among_all(axis_name: AxisName, parts: np.ndarray, *indices: jax.Array) -> tuple[jax.Array, ...]:
    """Offsets or sizes among a part's ranks, extended to all ranks. Slices for other parts are empty."""
    size, of_part = parts.shape
    members = jnp.asarray(parts)[jax.lax.axis_index(axis_name)]
    each = indices[0].shape[0] // of_part

    def among_all(x: jax.Array) -> jax.Array:
        return jnp.zeros((size, each), x.dtype).at[members].set(x.reshape(of_part, each)).reshape(-1)

    return tuple(among_all(x) for x in indices)
