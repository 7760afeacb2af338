"""SparseRows and coalesce, and what sparse_all_reduce says to bad arguments."""

import re
from dataclasses import replace
from typing import Any, cast

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_cases as cases
from helpers import DTYPES, Rng
from jax.experimental.sparse import BCOO

from jax_ep import Group, Implementation, SparseRows, coalesce, embedding, sparse_all_reduce
from jax_ep.ops.sparse.api import choose_method

ROWS, ENTRIES, WIDTH = 12, 6, 3
IDS, VALUES = jnp.zeros(ENTRIES, jnp.int32), jnp.zeros((ENTRIES, WIDTH))
RAW = SparseRows.from_entries(IDS, VALUES, num_rows=ROWS)


def dense(ids: np.ndarray, values: np.ndarray, num_rows: int) -> np.ndarray:
    table = np.zeros((num_rows, values.shape[1]))
    valid = (ids >= 0) & (ids < num_rows)
    np.add.at(table, ids[valid], values[valid].astype(np.float64))
    return table


@pytest.mark.matrix(1)
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("draw", cases.DRAWS)
def test_coalesce(draw: str, dtype: np.dtype, rng: Rng) -> None:
    ids = cases.DRAWS[draw](rng, 2, 40, 100)
    values = cases.draw_values(rng, ids, 5, dtype)
    for capacity in (None, 4, 60):
        options: dict[str, Any] = {"capacity": capacity, "on_overflow": "drop"}
        run = jax.jit(lambda i, v, o=options: coalesce(SparseRows.from_entries(i, v, num_rows=100), **o))
        actual = jax.tree.map(lambda x: x[None], run(ids[0], values[0]))
        wanted = cases.expected(ids[:1], values[:1], num_rows=100, capacity=capacity or 40)
        cases.assert_reduced(actual, wanted, dtype)


def test_coalesce_twice_changes_nothing_and_counts_once() -> None:
    ids = np.array([5, 3, -1, 5, 100, 9], np.int32)
    once = coalesce(
        SparseRows.from_entries(jnp.asarray(ids), VALUES + 1, num_rows=ROWS), capacity=2, on_overflow="drop"
    )
    twice = coalesce(once)
    np.testing.assert_array_equal(once.indices, [3, 5])
    assert (int(once.ignored), int(once.dropped)) == (2, 1)
    assert helpers.bits(twice) == helpers.bits(once)


def test_gradient_of_coalesce(rng: Rng) -> None:
    ids = jnp.asarray([5, 3, -1, 5, 100, 9])
    weights = jnp.asarray(rng.standard_normal((ROWS, WIDTH)), jnp.float32)

    def loss(values: jax.Array) -> jax.Array:
        rows = coalesce(SparseRows.from_entries(ids, values, num_rows=ROWS))
        return jnp.sum(weights.at[rows.indices].get(mode="fill", fill_value=0) * rows.values)

    wanted = np.where(np.isin(ids, [-1, 100])[:, None], 0, np.asarray(weights)[np.clip(ids, 0, ROWS - 1)])
    np.testing.assert_allclose(jax.grad(loss)(VALUES), wanted, rtol=1e-6)


def test_dense_and_bcoo(rng: Rng) -> None:
    ids = cases.out_of_range(rng, 1, 30, ROWS)[0]
    values = rng.standard_normal((30, WIDTH)).astype(np.float32)
    rows = SparseRows.from_entries(jnp.asarray(ids), jnp.asarray(values), num_rows=ROWS)
    wanted = dense(ids, values, ROWS)
    np.testing.assert_allclose(rows.todense(), wanted, atol=1e-5)
    np.testing.assert_allclose(rows.to_bcoo().todense(), wanted, atol=1e-5)
    np.testing.assert_allclose(SparseRows.from_bcoo(rows.to_bcoo()).todense(), wanted, atol=1e-5)
    fewer = SparseRows(rows.indices, rows.values, jnp.int32(7), ROWS)  # what lies behind `count` is padding
    np.testing.assert_allclose(fewer.todense(), dense(ids[:7], values[:7], ROWS), atol=1e-5)


wrongly: Any = SparseRows  # its functions with arguments that no type checker lets pass


def test_rows_of_numpy_arrays() -> None:
    rows = wrongly.from_entries(np.array([1, 1, 4], np.int32), np.ones((3, WIDTH), np.float32), num_rows=ROWS)
    np.testing.assert_array_equal(coalesce(rows).values[:2, 0], [2, 1])
    assert cast(Any, embedding).lookup(VALUES, np.int32(3)).shape == (WIDTH,)


def test_choice_of_method() -> None:
    assert choose_method(5_000_000, 4, 50_000, 8192) == "bitmap"
    assert choose_method(2**25, 1, 1, 1) == "bitmap"  # 4 MiB
    assert choose_method(2**25 + 8, 1, 1, 1) == "match"
    assert choose_method(2**30, 4, 50_000, 8192) == "bitmap"  # 128 MiB beside 1.6 GB
    assert choose_method(2**30, 4, 5_000, 8192) == "match"


def reduce(group: Group, rows: Any = None, **options: Any) -> SparseRows:
    if rows is None:
        rows = SparseRows.from_entries(IDS, VALUES, num_rows=ROWS)
    arguments: dict[str, Any] = {"capacity": 8} | options
    return sparse_all_reduce(rows, group=group, **arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rows": (IDS, VALUES)}, TypeError, "rows must be SparseRows, got tuple"),
        ({"rows": VALUES}, TypeError, "rows must be SparseRows, got float32[6,3]"),
        ({"rows": SparseRows(IDS[None], VALUES, jnp.int32(1), ROWS)}, ValueError, "indices must have shape [N]"),
        ({"rows": SparseRows(IDS, VALUES[0], jnp.int32(1), ROWS)}, ValueError, "values must have shape [N, D]"),
        ({"rows": SparseRows(IDS, VALUES[1:], jnp.int32(1), ROWS)}, ValueError, "values must have as many rows as"),
        ({"rows": SparseRows(IDS * 1.0, VALUES, jnp.int32(1), ROWS)}, TypeError, "indices must be of dtype int32, int"),
        ({"rows": SparseRows(IDS, IDS[:, None], jnp.int32(1), ROWS)}, TypeError, "values must be of dtype bfloat16"),
        ({"rows": SparseRows(IDS, VALUES[:, :0], jnp.int32(1), ROWS)}, ValueError, "values must have at least one col"),
        ({"rows": SparseRows(IDS, VALUES, jnp.int32(1), 0)}, ValueError, "num_rows must be at least 1, got 0"),
        ({"rows": SparseRows(IDS, VALUES, jnp.int32(1), 2**31)}, ValueError, "num_rows must be below 2**31"),
        ({"rows": SparseRows(IDS, VALUES, IDS, ROWS)}, ValueError, "count must have shape [] = ()"),
        ({"rows": SparseRows(IDS, VALUES, jnp.float32(1), ROWS)}, TypeError, "count must be of dtype int32, got flo"),
        ({"rows": replace(RAW, ignored=IDS)}, ValueError, "ignored must have shape [] = ()"),
        ({"rows": replace(RAW, dropped=None)}, TypeError, "dropped must be an array, got NoneType"),
        ({"rows": replace(RAW, dropped=jnp.uint32(1))}, TypeError, "dropped must be of dtype int32, got uint32"),
        ({"rows": jax.tree.map(lambda _: object(), RAW)}, TypeError, "indices must be an array, got object"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
        ({"capacity": 2.0}, TypeError, "capacity must be a Python int"),
        ({"capacity": 2**31}, ValueError, "capacity and the indices of all ranks must be below 2**31"),
        ({"op": "max"}, ValueError, "op must be one of 'sum', 'mean', 'mean_by_count'; got 'max'"),
        ({"sharded": 1}, TypeError, "sharded must be True or False, got 1"),
        ({"method": "sort"}, ValueError, "method must be one of 'auto', 'bitmap', 'match'; got 'sort'"),
        ({"on_overflow": "clip"}, ValueError, "on_overflow must be one of 'raise', 'drop'; got 'clip'"),
        ({"implementation": "gpu"}, ValueError, "implementation must be one of"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str, group: Group) -> None:
    with pytest.raises(error, match="^sparse_all_reduce: " + re.escape(message)):
        helpers.trace(group, lambda: reduce(group, **options))


def test_where_it_may_be_called(implementation: Implementation, group: Group) -> None:
    with pytest.raises(ValueError, match=r"^sparse_all_reduce: must be called inside jax\.shard_map"):
        reduce(group, implementation=implementation)


ONE, add_up = SparseRows(IDS, VALUES, jnp.int32(1), ROWS), cast(Any, coalesce)
REFUSED: list[tuple[Any, str]] = [
    (lambda: wrongly.from_entries([1], VALUES[:1], num_rows=ROWS), "SparseRows: indices must be an array, got list"),
    (lambda: wrongly.from_entries(IDS, 1.0, num_rows=ROWS), "SparseRows: values must be an array, got float"),
    (lambda: wrongly.from_bcoo(VALUES), "SparseRows.from_bcoo: matrix must be BCOO, got float32[6,3]"),
    (
        lambda: wrongly.from_bcoo(BCOO.fromdense(jnp.eye(3))),
        "SparseRows.from_bcoo: matrix must have n_batch, n_sparse, n_dense = 0, 1",
    ),
    (lambda: add_up((IDS, VALUES)), "coalesce: rows must be SparseRows, got tuple"),
    (lambda: add_up(ONE, capacity=0), "coalesce: capacity must be at least 1, got 0"),
    (lambda: add_up(ONE, capacity=2**31), "coalesce: capacity must be below 2**31, got 2147483648"),
    (lambda: add_up(SparseRows(IDS, VALUES > 0, jnp.int32(1), ROWS)), "coalesce: values must be of dtype"),
    (
        lambda: replace(ONE, indices=IDS * 1.0).todense(),
        "SparseRows.todense: indices must be of dtype int32, int64, got float32",
    ),
    (
        lambda: jax.tree.map(lambda x: x[None], ONE).to_bcoo(),
        "SparseRows.to_bcoo: indices must have shape [N], got (1, ",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        call()


def test_coalesce_of_nothing() -> None:
    assert coalesce(SparseRows(IDS[:0], VALUES[:0], jnp.int32(0), ROWS)).indices.shape == (0,)
