"""The kernel of ragged_all_to_all as an FFI call."""

import jax
import numpy as np

from jax_ep._kit import ffi
from jax_ep.group import Group


def ragged_all_to_all(group: Group, operand: jax.Array, output: jax.Array, *indices: jax.Array) -> jax.Array:
    called = ffi.call(
        "ragged_all_to_all",
        operand,
        *indices,
        updated=output,
        ranks=group._ranks,
        slices=indices[0].shape[0] // group.size,
        operand_rows=operand.shape[0],
        result_rows=output.shape[0],
        row_bytes=int(np.prod(output.shape[1:])) * output.dtype.itemsize,
    )
    return called["output"]
