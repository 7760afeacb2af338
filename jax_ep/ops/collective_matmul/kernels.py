"""The kernels of the products with a collective as FFI calls."""

from typing import NamedTuple

import jax
import numpy as np

from jax_ep._core import checks, ffi
from jax_ep.group import Group


class Config(NamedTuple):
    """What the kernels are told besides their operands."""

    group: Group
    dtype: np.dtype  # of the result
    transpose_b: bool = False  # b is [N, K]
    scatter: bool = False


def matmul_reduce(config: Config, a: jax.Array, b: jax.Array) -> jax.Array:
    """[M, K], [K, N] (or [N, K], to be transposed) -> the sum of the ranks' products [M, N], or a share of its rows."""
    group, axis = config.group, frozenset({config.group.axis_name})
    shape = (a.shape[0], b.shape[0 if config.transpose_b else 1])
    if config.scatter:
        result = checks.result_type((shape[0] // group.size, shape[1]), config.dtype, a)
    else:
        result = checks.result_type(shape, config.dtype, a, unvarying=axis)
    partial = checks.result_type(shape, config.dtype, a)
    return ffi.call(
        "matmul_reduce",
        (result, partial),
        a,
        b,
        op="matmul_reduce_scatter" if config.scatter else "matmul_all_reduce",
        group=group,
        transpose_b=config.transpose_b,
        scatter=config.scatter,
    )[0]


def gather_matmul(config: Config, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[M, K], [K, N] (or [N, K], to be transposed) -> the rows of all ranks times b [R M, N], and those rows."""
    rows = config.group.size * a.shape[0]
    result = checks.result_type((rows, b.shape[0 if config.transpose_b else 1]), config.dtype, a)
    gathered = checks.result_type((rows, a.shape[1]), a.dtype, a)
    out, everyone = ffi.call(
        "gather_matmul",
        (result, gathered),
        a,
        b,
        op="all_gather_matmul",
        group=config.group,
        transpose_b=config.transpose_b,
    )
    return out, everyone
