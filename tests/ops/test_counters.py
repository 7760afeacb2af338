"""Bytes that `Group.report()` counts, against numpy: what has to cross, each token once per pair of ranks."""

from functools import partial
from typing import Any

import helpers
import jax
import matmul_cases
import numpy as np
import pytest
import sparse_cases
from chaos.ragged import slices_of
from conftest import OpenGroup, Rng

from jax_ep import Group, dispatch
from jax_ep.lax import ragged_all_to_all

SIZE, EXPERTS, TOP_K, HIDDEN = 4, 8, 3, 256

pytestmark = pytest.mark.usefixtures("native")


def received(group: Group) -> np.ndarray:
    """[receiver, source]"""
    return np.array([rank.received_bytes for rank in group.report()])


def tokens_between(case: helpers.Case, size: int) -> np.ndarray:
    """[source, owner]: tokens of `source` with an expert at `owner`; zero on the diagonal."""
    owners = case.ids // (EXPERTS // size)
    counts = np.stack([(owners == owner).any(axis=-1).sum(axis=-1) for owner in range(size)], axis=1)
    return counts * ~np.eye(size, dtype=bool)


@pytest.mark.parametrize("tokens", [24, 600])
def test_dispatch_combine_and_gradients(tokens: int, group: Group, rng: Rng) -> None:
    case = helpers.draw_case(rng, SIZE, tokens, TOP_K, EXPERTS, HIDDEN)
    options: dict[str, Any] = {"group": group, "num_experts": EXPERTS, "implementation": "kernels"}
    both, there = helpers.round_trip(**options), tokens_between(case, SIZE).T
    for body, rows, row_bytes in (
        (partial(dispatch, **options), there, HIDDEN * 4),
        (partial(dispatch, wire="float8_rows", **options), there, HIDDEN + HIDDEN // 128 * 4),
        # There and back, and both ways again for the gradients.
        (jax.value_and_grad(lambda *x: both(*x)[1].sum()), 2 * (there + there.T), HIDDEN * 4),
    ):
        before = received(group)
        helpers.run(group, body, *case)
        np.testing.assert_array_equal(received(group) - before, rows * row_bytes)


def test_ragged_all_to_all(open_group: OpenGroup, rng: Rng) -> None:
    group, sizes = open_group(2), rng.integers(0, 5, (2, 2, 1))
    rows = rng.standard_normal((2, 10, 3)).astype(np.float32)
    body = partial(ragged_all_to_all, axis_name="ep")
    helpers.run(group, body, rows, rows, *slices_of(rng, sizes, 10, 10))
    np.testing.assert_array_equal(received(group), sizes[..., 0].T * ~np.eye(2, dtype=bool) * 12)


@pytest.mark.parametrize("dtype", helpers.DTYPES[::2], ids=str)
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_sparse(sharded: bool, dtype: np.dtype, group: Group, rng: Rng) -> None:
    rows, width = 100, 16
    ids = sparse_cases.zipf(rng, SIZE, 40, rows)
    values = sparse_cases.draw_values(rng, ids, width, dtype)
    program = sparse_cases.program(group, rows, capacity=rows, sharded=sharded, implementation="kernels")
    helpers.fetch(program(ids, values))
    block, total = (rows + SIZE - 1) // SIZE, 0
    for row in np.unique(ids):
        entries = (ids == row).sum(axis=1)
        parts = np.count_nonzero(entries) - 1  # to the rank that sums them, in float32 where a rank has several entries
        total += parts * (4 if entries.max() > 1 else dtype.itemsize)
        total += dtype.itemsize * (entries[row // block] == 0 if sharded else SIZE - 1)
    assert received(group).sum() == total * width
    assert np.trace(received(group)) == 0


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("op", matmul_cases.OPS)
def test_products(op: str, size: int, open_group: OpenGroup, rng: Rng) -> None:
    group, (m, k, n) = open_group(size), (48, 32, 40)
    operands = matmul_cases.draw(rng, size, (m, k, n), helpers.DTYPES[0])
    helpers.fetch(matmul_cases.program(op, group, implementation="kernels")(*operands))
    rows = {
        "all_gather_matmul": operands[0].shape[1] * k,
        "matmul_reduce_scatter": m * n // size,
        "matmul_all_reduce": m * n if size == 2 else 2 * m * n // size,  # two ranks exchange their products
    }[op]
    np.testing.assert_array_equal(received(group), rows * 2 * ~np.eye(size, dtype=bool))
