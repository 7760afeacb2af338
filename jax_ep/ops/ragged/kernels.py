"""The kernel of ragged_all_to_all as an FFI call."""

import jax

from jax_ep._core import checks, ffi
from jax_ep.group import Group


def ragged_all_to_all(group: Group, operand: jax.Array, output: jax.Array, *indices: jax.Array) -> jax.Array:
    return ffi.call(
        "ragged_all_to_all",
        checks.result_type(output.shape, output.dtype, output),
        operand,
        output,
        *indices,
        aliases={1: 0},
        group=group,
    )
