"""Operands of the collective matmuls, and what they give in numpy, in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax
import numpy as np
from chaos.compare import assert_near

import jax_ep
from jax_ep import Group, Implementation

FLOAT32 = helpers.DTYPES[2]
OPS: dict[str, Callable[..., jax.Array]] = {
    "matmul_all_reduce": jax_ep.matmul_all_reduce,
    "matmul_reduce_scatter": jax_ep.matmul_reduce_scatter,
    "all_gather_matmul": jax_ep.all_gather_matmul,
}

Operands = tuple[np.ndarray, np.ndarray]


def draw(rng: helpers.Rng, size: int, shape: tuple[int, int, int], dtype: np.dtype) -> Operands:
    m, k, n = shape
    return rng.standard_normal((size, m, k)).astype(dtype), rng.standard_normal((size, k, n)).astype(dtype)


def exact(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """On all ranks, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    if op == "all_gather_matmul":
        return np.concatenate(a) @ b
    total = np.einsum("rmk,rkn->mn", a, b)
    if op == "matmul_all_reduce":
        return np.broadcast_to(total, (len(a), *total.shape))
    return total.reshape(len(a), -1, total.shape[1])


def exact_gradients(op: str, a: np.ndarray, b: np.ndarray, above: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`above`: the cotangents on all ranks; of the result of an all-reduce every rank has one of its own."""
    a, b, above = (x.astype(np.float64) for x in (a, b, above))
    if op == "all_gather_matmul":
        d_rows = np.einsum("rmn,rkn->mk", above, b)
        return d_rows.reshape(a.shape), np.einsum("mk,rmn->rkn", np.concatenate(a), above)
    total = above.sum(axis=0) if op == "matmul_all_reduce" else np.concatenate(above)
    return np.einsum("mn,rkn->rmk", total, b), np.einsum("rmk,mn->rkn", a, total)


def assert_right(op: str, actual: Any, operands: Operands) -> None:
    magnitude = exact(op, *(np.abs(x) for x in operands))
    assert_near(actual, exact(op, *operands), magnitude, 1 + len(operands[0]), op)


def program(op: str, group: Group, **options: Any) -> Callable[..., Any]:
    return helpers.per_rank(partial(OPS[op], group=group, **options), group.mesh)


def served(group: Group, implementation: Implementation, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Kernels on a GPU take 16-bit operands and multiples of 8 alone."""
    multiples = all(size % 8 == 0 for size in shape[1:])
    return implementation == "xla" or group.platform == "cpu" or (dtype != FLOAT32 and multiples)
