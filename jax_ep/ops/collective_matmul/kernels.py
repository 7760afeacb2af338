"""The kernels of the collective matmuls as FFI calls."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ep._kit import ffi
from jax_ep.group import Group


class MatmulConfig(NamedTuple):
    group: Group
    dtype: np.dtype  # of the result
    transpose_rhs: bool = False  # rhs is [N, K]
    reduce_scatter: bool = False


def matmul_reduce(config: MatmulConfig, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """[M, K], [K, N] (or [N, K], to be transposed) -> the sum of the ranks' products [M, N], or a part of its rows."""
    return _call("matmul_reduce", config, lhs, rhs, reduce_scatter=config.reduce_scatter)["result"]


def all_gather_matmul(config: MatmulConfig, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[M, K], [K, N] (or [N, K], to be transposed) -> all ranks' rows times rhs [R M, N], and all ranks' rows."""
    called = _call("all_gather_matmul", config, lhs, rhs)
    return called["result"], called["gathered"]


def _call(name: str, config: MatmulConfig, lhs: jax.Array, rhs: jax.Array, **settings: Any) -> dict[str, jax.Array]:
    return ffi.call(
        name,
        lhs,
        rhs,
        ranks=config.group._ranks,
        dtype=config.dtype,
        operand_dtype=lhs.dtype,
        m=lhs.shape[0],
        n=rhs.shape[0 if config.transpose_rhs else 1],
        k=lhs.shape[1],
        transpose_rhs=config.transpose_rhs,
        **settings,
    )
