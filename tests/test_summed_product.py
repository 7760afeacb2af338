"""The sum of two grouped products in one kernel, on Hopper: one sum, rounded once."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup
from helpers import DTYPES

from jax_ep._kit import gemm
from jax_ep.ops.matmul.api import add_lhs_gradients

on_hopper = pytest.mark.skipif(not gemm.has_gemm(), reason="needs GPUs with the GEMM core")
GROUPS = 5


def draw(rng: np.random.Generator, rows: int, n: int, k: int, dtype: np.dtype, scale: float) -> Any:
    cotangents = (rng.standard_normal((2, rows, k)) * scale).astype(dtype)
    rhs = (rng.standard_normal((2, GROUPS, n, k)) / k**0.5).astype(dtype)
    sizes = rng.multinomial(rows - rows // 8, [0.5, 0.2, 0, 0.3, 0]).astype(np.int32)
    return tuple(cotangents), tuple(rhs), sizes


@pytest.mark.matrix
@on_hopper
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("tiny", [False, True], ids=["", "subnormal"])
@pytest.mark.parametrize(("rows", "n", "k"), [(5, 8, 8), (300, 72, 136), (1500, 328, 264), (4100, 640, 768)])
def test_rounded_once(rows: int, n: int, k: int, tiny: bool, dtype: np.dtype, rng: np.random.Generator) -> None:
    """Half a unit in the last place of the exact sum, and what float32 loses of its terms."""
    scale = 4 * float(jnp.finfo(dtype).tiny) if tiny else 1
    cotangents, rhs, sizes = draw(rng, rows, n, k, dtype, scale)
    together = jax.jit(lambda cotangents, rhs: add_lhs_gradients(jnp.zeros((rows, n), dtype), cotangents, rhs, sizes))
    assert 'epilogue = "summed"' in together.lower(cotangents, rhs).as_text()
    actual = helpers.wide(together(cotangents, rhs)).astype(np.float64)
    (exact, terms), end = np.zeros((2, rows, n)), np.cumsum(sizes)
    for group, size in enumerate(sizes):
        part = slice(end[group] - size, end[group])
        for cotangent, matrix in zip(cotangents, rhs, strict=True):
            left, right = helpers.wide(cotangent)[part].astype(np.float64), helpers.wide(matrix)[group].T
            exact[part] += left @ right
            terms[part] += np.abs(left) @ np.abs(right)
    limits = jnp.finfo(dtype)
    allowed = 0.5 * float(limits.eps) * np.abs(exact) + 0.5 * float(limits.smallest_subnormal) + 2e-6 * terms
    assert (np.abs(actual - exact) <= allowed).all()
    assert not actual[end[-1] :].any()


@on_hopper
def test_once_in_a_gradient(open_group: OpenGroup) -> None:
    group = open_group(1)
    tokens, ids = jnp.ones((1, 4096, 64), jnp.bfloat16), jnp.zeros((1, 4096, 1), jnp.int32)
    gate = up = jnp.ones((1, 1, 64, 64), jnp.bfloat16)

    def loss(tokens: Any, ids: Any, gate: Any, up: Any) -> Any:
        return helpers.moe_sums(tokens, ids, None, gate, up, gate, group=group).astype(jnp.float32).sum()

    gradient = helpers.per_rank(jax.grad(loss, argnums=(0, 2, 3)), group.mesh)
    text = gradient.lower(tokens, ids, gate, up).compile().as_text() or ""
    assert text.count('epilogue = "summed"') == 1
    assert text.count('epilogue = "gated"') == 1  # forward


def test_elsewhere(rng: np.random.Generator) -> None:
    """Near the exact sum, with what was there before."""
    cotangents, rhs, sizes = draw(rng, 64, 16, 24, np.dtype(np.float32), 1)
    total = rng.standard_normal((64, 16)).astype(np.float32)
    actual = np.asarray(add_lhs_gradients(jnp.asarray(total), cotangents, rhs, sizes))
    group = np.repeat(np.arange(GROUPS), sizes)
    wanted = total.astype(np.float64)
    for cotangent, matrix in zip(cotangents, rhs, strict=True):
        wanted[: len(group)] += np.einsum(
            "mk,mnk->mn", *(x.astype(np.float64) for x in (cotangent[: len(group)], matrix[group]))
        )
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
