"""Tables that are spread over the ranks, several tables in one, and bags, against dense tables and numpy."""

from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import OpenGroup
from jax.sharding import PartitionSpec as P

from jax_ep import CapacityError, Group, Implementation, embedding

SIZE, D, N = 4, 5, 12
HEIGHTS = {"words": 21, "tags": 3}  # stacked, and spread over the ranks: 6 rows each
V = sum(HEIGHTS.values())
IDS_SPEC = P("ep")


def draw(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """A table, ids of all ranks with duplicates and some outside, and a weight per looked up value."""
    ids = {name: rng.integers(-2, height + 3, (SIZE * N,)).astype(np.int32) for name, height in HEIGHTS.items()}
    ids["words"][:N] = 2  # one row, whose owner is rank 0
    table = rng.standard_normal((V, D)).astype(np.float32)
    return table, ids, rng.standard_normal((2, SIZE * N, D)).astype(np.float32)


def dense_rows(table: Any, ids: dict[str, Any]) -> dict[str, Any]:
    """What lookups in the two tables of a stacked one find."""
    begin, found = 0, {}
    for name, height in sorted(HEIGHTS.items()):
        its = jnp.asarray(ids[name])
        rows = table[begin : begin + height][jnp.clip(its, 0, height - 1)]
        found[name] = jnp.where(((its >= 0) & (its < height))[:, None], rows, 0)
        begin += height
    return found


def loss(rows: dict[str, Any], weights: Any) -> Any:
    return jnp.sum(jnp.tanh(rows["words"] * weights[0]) ** 2) + jnp.sum(jnp.sin(rows["tags"] * weights[1]))


def on_ranks(group: Group, function: Any, in_specs: Any, out_specs: Any, check_vma: bool = True) -> Any:
    return jax.jit(
        jax.shard_map(function, mesh=group.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    )


def test_rows_come_home(implementation: Implementation, group: Group, rng: np.random.Generator) -> None:
    """Also in 16 bits, by int64 ids, and for no ids at all; the gradient of the table is dense there."""
    table, ids, weights = draw(rng)
    find = partial(embedding.sharded_lookup, group=group, implementation=implementation)

    def body(table: jax.Array, ids: Any) -> Any:
        return find(table, embedding.stacked_ids(ids, HEIGHTS))

    both = on_ranks(group, body, IDS_SPEC, IDS_SPEC)
    found = helpers.fetch(both(table, ids))
    for name, rows in dense_rows(table, ids).items():
        np.testing.assert_array_equal(found[name], rows)
    by_table = jax.grad(lambda t: loss(both(t, ids), weights))(table)
    np.testing.assert_allclose(by_table, jax.grad(lambda t: loss(dense_rows(t, ids), weights))(table), atol=1e-5)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        far = np.where(np.arange(SIZE * N) % 3, np.arange(SIZE * N) % V, 2**32 + 1)
        low = on_ranks(group, find, IDS_SPEC, IDS_SPEC)(table.astype(jnp.bfloat16), far)
    expected = np.where((far < V)[:, None], table.astype(jnp.bfloat16)[far % V], 0)
    np.testing.assert_array_equal(helpers.wide(low), helpers.wide(expected))
    assert on_ranks(group, find, IDS_SPEC, IDS_SPEC)(table, np.zeros((0, 3), np.int32)).shape == (0, 3, D)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_training(check_vma: bool, implementation: Implementation, group: Group, rng: np.random.Generator) -> None:
    """Steps on the ranks' parts are steps of dense optax on the whole table, as every row is named."""
    optimizer, dense = embedding.by_rows(optax.adamw(0.1)), optax.adamw(0.1)
    table, ids, weights = draw(rng)
    ids["words"][N:] = np.arange(3 * N) % HEIGHTS["words"]
    ids["tags"][:] = np.arange(SIZE * N) % HEIGHTS["tags"]
    gradient_of = embedding.sparse_value_and_grad(
        loss, 1, group=group, capacity_factor=3, implementation=implementation
    )

    def step(table: jax.Array, state: Any, ids: Any, weights: Any) -> Any:
        value, (rows, by_weights) = gradient_of(table, embedding.stacked_ids(ids, HEIGHTS), weights)
        norm = embedding.global_norm(rows, axis_name="ep")
        updates, state = optimizer.update(rows, state, table)
        entries = jax.lax.psum(rows.count, "ep")
        return embedding.apply_updates(table, updates), state, jax.lax.psum(value, "ep"), by_weights, norm, entries

    state, spread, moved = optimizer.init(table), P(None, "ep"), dense.init(table)
    specs = (IDS_SPEC, jax.tree.map(lambda x: P("ep") if x.ndim else P(), state), IDS_SPEC, spread)
    program = on_ranks(group, step, specs, (IDS_SPEC, specs[1], P(), spread, P(), P()), check_vma)
    whole, dense_loss = table, jax.value_and_grad(lambda t, w: loss(dense_rows(t, ids), w), (0, 1))
    entries = 0
    for _ in range(3):
        table, state, value, by_weights, norm, entries = program(table, state, ids, weights)
        expected, (gradient, expected_by_weights) = dense_loss(whole, weights)
        updates, moved = dense.update(gradient, moved, whole)
        whole = jax.tree.map(jnp.add, whole, updates)
        np.testing.assert_allclose(value, expected, rtol=1e-4)
        np.testing.assert_allclose(by_weights, expected_by_weights, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(norm, jnp.linalg.norm(gradient), rtol=1e-4)
    np.testing.assert_allclose(table, whole, rtol=1e-4, atol=1e-4)
    named = [len(np.unique(x)) for name in HEIGHTS for x in ids[name].reshape(SIZE, N)]
    assert int(entries) == sum(named)  # a rank asks for a row once


def test_an_owner_without_room(implementation: Implementation, open_group: OpenGroup) -> None:
    group = open_group(2)
    ids = np.arange(8, dtype=np.int32) % 4  # all at rank 0, which has rows 0 .. 3
    table = np.ones((8, D), np.float32)
    options: dict[str, Any] = {"group": group, "capacity": 6, "implementation": implementation}

    def dropping(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = embedding.sharded_lookup(table, ids, on_overflow="drop", **options)
        total = embedding.sparse_value_and_grad(jnp.sum, on_overflow="drop", **options)
        return found, total(table, ids)[1].dropped[None]

    found, dropped = helpers.fetch(on_ranks(group, dropping, IDS_SPEC, IDS_SPEC)(table, ids))
    assert np.sum(~found.any(axis=1)) == dropped.sum() == 2
    raising = on_ranks(group, partial(embedding.sharded_lookup, **options), IDS_SPEC, IDS_SPEC)
    with helpers.expect_failure(group, CapacityError, "rank 0 needs 8 rows", implementation):
        assert np.isnan(helpers.fetch(raising(table, ids))).any()


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_bags(combiner: Any, rng: np.random.Generator) -> None:
    bags, longest = 6, 4
    ids: Any = rng.integers(-1, 9, (bags, longest)).astype(np.int32)
    ids[2] = -1
    rows: Any = rng.standard_normal((bags, longest, D)).astype(np.float32)
    weights: Any = rng.uniform(0.5, 2, ids.shape).astype(np.float32)
    for given in (weights, None):
        expected = np.zeros((bags, D))
        for i, j in zip(*np.nonzero(ids >= 0), strict=True):
            expected[i] += rows[i, j] * (1 if given is None else given[i, j])
        used = np.where(ids >= 0, 1 if given is None else given, 0)
        divisor = {"sum": np.ones(bags), "mean": used.sum(1), "sqrtn": np.sqrt((used**2).sum(1))}[combiner]
        expected /= np.where(divisor == 0, 1, divisor)[:, None]
        square = embedding.bag(rows, ids, given, combiner=combiner)
        np.testing.assert_allclose(square, expected, rtol=1e-5, atol=1e-6)
        flat_weights = None if given is None else given.ravel()
        bag_of: Any = np.repeat(np.arange(bags), longest).astype(np.uint8)
        ragged = embedding.bag(
            rows.reshape(-1, D), ids.ravel(), flat_weights, combiner=combiner, bag_of=bag_of, num_bags=300
        )
        np.testing.assert_allclose(ragged[:bags], expected, rtol=1e-5, atol=1e-6)
        assert not np.any(ragged[bags:])
    gradient = jax.grad(lambda w: jnp.sum(embedding.bag(rows, ids, w, combiner=combiner) ** 2))(weights)
    assert np.isfinite(gradient).all()
    assert not np.any(gradient[ids < 0])


def test_wrong_arguments(open_group: OpenGroup) -> None:
    wrong: Any = "max"
    group, rows, ids = open_group(2), jnp.zeros((4, 3, D)), jnp.zeros((4, 3), jnp.int32)

    def find(**options: Any) -> Any:
        arguments: dict[str, Any] = {"table": rows[0], "ids": ids, "group": group} | options
        return embedding.sharded_lookup(**arguments)

    for call, error, message in (
        (lambda: find(group=None), TypeError, "sharded_lookup: group must be an open jax_ep.Group"),
        (lambda: find(ids=[0]), TypeError, "sharded_lookup: ids must be an array, got int"),
        (lambda: find(ids={}), ValueError, "sharded_lookup: ids must hold an array at least for every table, got {}"),
        (lambda: find(table=rows), ValueError, r"sharded_lookup: table must have shape \[V, D\], got"),
        (lambda: embedding.stacked_ids(1.0, 3), TypeError, "stacked_ids: ids must be an array, got float"),
        (lambda: embedding.stacked_ids(ids, 0), ValueError, "stacked_ids: num_rows must be at least 1, got 0"),
        (lambda: embedding.bag(rows, ids[0]), ValueError, r"bag: rows must have shape \[..., L, D\] for ids"),
        (lambda: embedding.bag(rows, ids, ids[0]), ValueError, "bag: weights must have shape that of ids = "),
        (lambda: embedding.bag(rows, ids, num_bags=3), ValueError, "bag: num_bags must be given with bag_of and not"),
        (lambda: embedding.bag(rows, ids, combiner=wrong), ValueError, "bag: combiner must be one of 'sum', 'mean', "),
    ):
        with pytest.raises(error, match=f"^{message}"):
            helpers.trace(group, call)
