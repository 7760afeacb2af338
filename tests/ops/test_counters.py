"""Bytes that `Group.report()` counts, against numpy: what has to cross, each token once per pair of ranks."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import matmul_cases
import numpy as np
import pytest
import sparse_cases
from conftest import OpenGroup, Rng

from jax_ep import Group, dispatch
from jax_ep.lax import ragged_all_to_all

SIZE, EXPERTS, TOKENS, TOP_K, HIDDEN = 4, 8, 24, 3, 256

pytestmark = pytest.mark.usefixtures("native")


def received(group: Group) -> np.ndarray:
    """[receiver, source]"""
    return np.array([rank.received_bytes for rank in group.report()])


def tokens_between(case: helpers.Case, size: int) -> np.ndarray:
    """[source, owner]: tokens of `source` with an expert at `owner`; zero on the diagonal."""
    owners = case.ids // (EXPERTS // size)
    counts = np.stack([(owners == owner).any(axis=-1).sum(axis=-1) for owner in range(size)], axis=1)
    return counts * ~np.eye(size, dtype=bool)


@pytest.mark.parametrize("tokens", [TOKENS, 600])
@pytest.mark.parametrize(("wire", "row_bytes"), [(None, HIDDEN * 4), ("float8_rows", HIDDEN + HIDDEN // 128 * 4)])
def test_dispatch(wire: Any, row_bytes: int, tokens: int, group: Group, rng: Rng) -> None:
    case = helpers.draw_case(rng, 4, tokens, TOP_K, EXPERTS, HIDDEN)

    def body(*operands: jax.Array) -> Any:
        return dispatch(*operands, group=group, num_experts=EXPERTS, implementation="kernels", wire=wire)

    helpers.run(group, body, *case)
    np.testing.assert_array_equal(received(group), tokens_between(case, 4).T * row_bytes)


@pytest.mark.parametrize("tokens", [TOKENS, 600])
def test_combine_and_gradients(tokens: int, group: Group, rng: Rng) -> None:
    case = helpers.draw_case(rng, 4, tokens, TOP_K, EXPERTS, HIDDEN)
    both = helpers.round_trip(group, num_experts=EXPERTS, implementation="kernels")
    loss = jax.value_and_grad(lambda *x: both(*x)[1].sum())
    helpers.run(group, loss, *case)
    there = tokens_between(case, 4)
    # There and back, and both ways again for the gradients.
    np.testing.assert_array_equal(received(group), 2 * (there + there.T) * HIDDEN * 4)


def test_ragged_all_to_all(open_group: OpenGroup, rng: Rng) -> None:
    group = open_group(2)
    sizes = rng.integers(0, 5, (2, 2)).astype(np.int32)
    starts = np.zeros((2, 2), np.int32) + [0, 5]
    to = np.broadcast_to(np.array([[0, 0], [5, 5]], np.int32), (2, 2))

    def body(operand: jax.Array, *slices: jax.Array) -> jax.Array:
        return ragged_all_to_all(operand, jnp.zeros_like(operand), *slices, axis_name="ep")

    operand = rng.standard_normal((2, 10, 3)).astype(np.float32)
    helpers.run(group, body, operand, starts, sizes, to, sizes.T.copy())
    np.testing.assert_array_equal(received(group), sizes.T * ~np.eye(2, dtype=bool) * 12)


@pytest.mark.parametrize("dtype", helpers.DTYPES[::2], ids=str)
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_sparse(sharded: bool, dtype: np.dtype, open_group: OpenGroup, rng: Rng) -> None:
    size, rows, width = 4, 100, 16
    group = open_group(size)
    ids = sparse_cases.zipf(rng, size, 40, rows)
    values = sparse_cases.draw_values(rng, ids, width, dtype)
    program = sparse_cases.program(group, rows, capacity=rows, sharded=sharded, implementation="kernels")
    helpers.fetch(program(ids, values))
    block, total = (rows + size - 1) // size, 0
    for row in np.unique(ids):
        entries = (ids == row).sum(axis=1)
        parts = np.count_nonzero(entries) - 1  # to the rank that sums them, in float32 where a rank has several entries
        total += parts * (4 if entries.max() > 1 else dtype.itemsize)
        total += dtype.itemsize * (entries[row // block] == 0 if sharded else size - 1)
    assert received(group).sum() == total * width
    assert np.trace(received(group)) == 0


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("op", matmul_cases.OPS)
def test_products(op: str, size: int, open_group: OpenGroup, rng: Rng) -> None:
    group = open_group(size)
    m, k, n = 48, 32, 40
    operands = matmul_cases.draw(rng, size, (m, k, n), helpers.DTYPES[0])
    helpers.fetch(matmul_cases.program(op, group, implementation="kernels")(*operands))
    rows = {
        "all_gather_matmul": operands[0].shape[1] * k,
        "matmul_reduce_scatter": m * n // size,
        "matmul_all_reduce": m * n if size == 2 else 2 * m * n // size,  # two ranks exchange their products
    }[op]
    np.testing.assert_array_equal(received(group), rows * 2 * ~np.eye(size, dtype=bool))
