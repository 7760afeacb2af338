"""Tables that are spread over the ranks, several tables in one, and bags, against dense tables and numpy."""

import re
from functools import partial
from typing import Any, get_args

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import OpenGroup
from embedding_oracle import looked_up, stepped
from helpers import Rng
from jax.sharding import PartitionSpec as P

from jax_ep import CapacityError, Group, Implementation, embedding, sparse_all_reduce
from jax_ep.runtime.undelivered import capacity_error

SIZE, D, N = 4, 5, 12
HEIGHTS = {"words": 20, "tags": 3}  # stacked, and spread over the ranks: 6 rows each, of which the last is padding
V = sum(HEIGHTS.values())
PLACEMENTS = get_args(embedding.Placement)
IDS_SPEC = P("ep")


def draw(rng: Rng) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """A table, ids of all ranks with duplicates and some outside, and a weight per looked up value."""
    ids = {name: rng.integers(-2, height + 3, (SIZE * N,)).astype(np.int32) for name, height in HEIGHTS.items()}
    ids["words"][:N] = 2  # one row, whose owner is rank 0
    table = rng.standard_normal((V, D)).astype(np.float32)
    return table, ids, rng.standard_normal((2, SIZE * N, D)).astype(np.float32)


def located(i: int, ranks: int, placement: str) -> tuple[int, int]:
    """The rank that has row i, and the row's place there."""
    return (i % ranks, i // ranks) if placement == "mod" else divmod(i, -(-V // ranks))


def stored(table: np.ndarray, ranks: int, placement: str) -> np.ndarray:
    """The parts of all ranks, one after the other."""
    height = -(-V // ranks)
    parts = np.zeros((ranks, height, *table.shape[1:]), table.dtype)
    for i, row in enumerate(table):
        parts[located(i, ranks, placement)] = row
    return parts.reshape(ranks * height, *table.shape[1:])


def dense_rows(table: Any, ids: dict[str, Any]) -> dict[str, Any]:
    """What lookups in the two tables of a stacked one find."""
    begin, found = 0, {}
    for name, height in sorted(HEIGHTS.items()):
        found[name] = looked_up(table[begin : begin + height], ids[name])
        begin += height
    return found


def loss(rows: dict[str, Any], weights: Any) -> Any:
    return jnp.sum(jnp.tanh(rows["words"] * weights[0]) ** 2) + jnp.sum(jnp.sin(rows["tags"] * weights[1]))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_come_home(placement: embedding.Placement, implementation: Implementation, group: Group, rng: Rng) -> None:
    """Also in 16 bits, by int64 ids, and for no ids at all; the gradient of the table is dense there."""
    table, ids, weights = draw(rng)
    parts = stored(table, SIZE, placement)
    find = partial(embedding.sharded_lookup, group=group, placement=placement, implementation=implementation)

    def body(table: jax.Array, ids: Any) -> Any:
        return find(table, embedding.stacked_ids(ids, HEIGHTS))

    both = helpers.sharded(group.mesh, body, IDS_SPEC, IDS_SPEC)
    found = helpers.fetch(both(parts, ids))
    for name, rows in dense_rows(table, ids).items():
        np.testing.assert_array_equal(found[name], rows)
    by_table = jax.grad(lambda t: loss(both(t, ids), weights))(parts)
    dense = jax.grad(lambda t: loss(dense_rows(t, ids), weights))(table)
    np.testing.assert_allclose(by_table, stored(np.asarray(dense), SIZE, placement), atol=1e-5)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        far = np.where(np.arange(SIZE * N) % 3, np.arange(SIZE * N) % V, 2**32 + 1)
        low = helpers.sharded(group.mesh, find, IDS_SPEC, IDS_SPEC)(parts.astype(jnp.bfloat16), far)
    expected = np.where((far < V)[:, None], table.astype(jnp.bfloat16)[far % V], 0)
    np.testing.assert_array_equal(helpers.wide(low), helpers.wide(expected))
    assert helpers.sharded(group.mesh, find, IDS_SPEC, IDS_SPEC)(parts, np.zeros((0, 3), np.int32)).shape == (0, 3, D)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_rows_that_ranks_need(placement: embedding.Placement, group: Group, rng: Rng) -> None:
    ids = {"a": rng.zipf(1.3, (SIZE * N,)).astype(np.int32) - 2, "b": rng.integers(-2, V + 1, (SIZE * N, 2))}
    count = partial(embedding.rows_needed, num_rows=V, group=group, placement=placement)
    needed = helpers.sharded(group.mesh, count, IDS_SPEC, P())(ids)
    expected = np.zeros(SIZE, int)
    for parts in zip(*(np.split(x, SIZE) for x in ids.values()), strict=True):
        for i in {int(i) for part in parts for i in part.ravel()} & {*range(-(-V // SIZE) * SIZE)}:
            expected[located(i, SIZE, placement)[0]] += 1
    np.testing.assert_array_equal(needed, expected)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_tables_go_to_the_ranks_and_back(placement: embedding.Placement, ranks: int, rng: Rng) -> None:
    table: Any = rng.standard_normal((V, D)).astype(np.float32)
    for given in (table, jnp.asarray(table)):
        tree = {"table": given, "state": (given[:, :1], np.float32(3))}
        parts = embedding.shard_table(tree, ranks, placement=placement)
        assert type(parts["table"]) is type(given)
        np.testing.assert_array_equal(parts["table"], stored(table, ranks, placement))
        back = embedding.unshard_table(parts, ranks, num_rows=V, placement=placement)
        assert helpers.bits(back) == helpers.bits(tree)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_of_two_lines(placement: embedding.Placement, rng: Rng) -> None:
    """Their sum still knows the ranks' parts."""
    mesh = helpers.mesh_of(data=2, ep=2)
    table, ids = rng.standard_normal((V + 1, D)).astype(np.float32), rng.integers(V, size=SIZE * N, dtype=np.int32)
    with Group(mesh, "ep") as group, Group(mesh, "data") as lines:
        options: Any = {"group": group, "placement": placement, "capacity_factor": 3}
        gradient_of = embedding.sparse_value_and_grad(lambda rows: jnp.sum(jnp.sin(rows)), **options)

        def step(table: jax.Array, ids: jax.Array) -> jax.Array:
            rows = sparse_all_reduce(gradient_of(table, ids)[1], group=lines, capacity=V + 1)
            return table.at[rows.places].add(rows.values, mode="drop")

        program = helpers.sharded(group.mesh, step, (P("ep"), P(("data", "ep"))), P("ep"), False)
        found = program(embedding.shard_table(table, 2, placement=placement), ids)
        found = embedding.unshard_table(np.asarray(found), 2, num_rows=V + 1, placement=placement)
    wanted = table + np.bincount(ids, minlength=V + 1)[:, None] * np.cos(table)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "how", [("mod", True, True), ("ranges", True, False), ("ranges", False, True), ("mod", False, False)]
)
def test_training(how: Any, implementation: Implementation, group: Group, rng: Rng) -> None:
    """Steps on the ranks' parts are steps of dense optax on the whole table, as every row is named."""
    placement, at_once, check_vma = how
    optimizer, dense = embedding.by_rows(optax.adamw(0.1)), optax.adamw(0.1)
    table, ids, weights = draw(rng)
    ids["words"][N:] = np.arange(3 * N) % HEIGHTS["words"]
    ids["tags"][:] = np.arange(SIZE * N) % HEIGHTS["tags"]
    gradient_of = embedding.sparse_value_and_grad(
        loss, 1, group=group, placement=placement, capacity_factor=3, implementation=implementation
    )

    def step(table: jax.Array, state: Any, ids: Any, weights: Any) -> Any:
        value, (rows, by_weights) = gradient_of(table, embedding.stacked_ids(ids, HEIGHTS), weights)
        norm = embedding.global_norm(rows, axis_name="ep")
        table, state = stepped(optimizer, at_once, table, state, rows)
        value, entries, total = jax.lax.psum((value, rows.count, rows.todense()), "ep")
        return table, state, value, by_weights, norm, entries, total

    state, spread, moved = optimizer.init(table), P(None, "ep"), dense.init(table)
    specs = (IDS_SPEC, jax.tree.map(lambda x: P("ep") if x.ndim else P(), state), IDS_SPEC, spread)
    program = helpers.sharded(group.mesh, step, specs, (IDS_SPEC, specs[1], P(), spread, P(), P(), P()), check_vma)
    whole, dense_loss = table, jax.value_and_grad(lambda t, w: loss(dense_rows(t, ids), w), (0, 1))
    entries = 0
    table, state = embedding.shard_table((table, state), SIZE, placement=placement)
    for _ in range(3):
        table, state, value, by_weights, norm, entries, total = program(table, state, ids, weights)
        expected, (gradient, expected_by_weights) = dense_loss(whole, weights)
        updates, moved = dense.update(gradient, moved, whole)
        whole = jax.tree.map(jnp.add, whole, updates)
        np.testing.assert_allclose(value, expected, rtol=1e-4)
        np.testing.assert_allclose(by_weights, expected_by_weights, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(norm, jnp.linalg.norm(gradient), rtol=1e-4)
        np.testing.assert_allclose(total[:V], gradient, rtol=1e-4, atol=1e-5)
        assert not total[V:].any()
    table, state = embedding.unshard_table((table, state), SIZE, num_rows=V, placement=placement)
    np.testing.assert_allclose(table, whole, rtol=1e-4, atol=1e-4)
    for actual, expected in zip(jax.tree.leaves(state), jax.tree.leaves(moved), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-5)
    named = [len(np.unique(x)) for name in HEIGHTS for x in ids[name].reshape(SIZE, N)]
    assert int(entries) == sum(named)  # a rank asks for a row once


def test_an_owner_without_room(implementation: Implementation, open_group: OpenGroup) -> None:
    group = open_group(2)
    ids = np.arange(8, dtype=np.int32) % 4  # all at rank 0, which has rows 0 .. 3
    table = np.ones((8, D), np.float32)
    options: dict[str, Any] = {"group": group, "capacity": 6, "implementation": implementation}
    gradient_of = partial(embedding.sparse_value_and_grad, jnp.sum, **options)

    def dropping(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = embedding.sharded_lookup(table, ids, on_overflow="drop", **options)
        return found, gradient_of(on_overflow="drop")(table, ids)[1].dropped[None]

    found, dropped = helpers.fetch(helpers.sharded(group.mesh, dropping, IDS_SPEC, IDS_SPEC)(table, ids))
    assert np.sum(~found.any(axis=1)) == dropped.sum() == 2
    lookups: dict[str, Any] = {
        "sharded_lookup": partial(embedding.sharded_lookup, **options),
        "sparse_value_and_grad": lambda table, ids: gradient_of()(table, ids)[0][None],
    }
    for op, lookup in lookups.items():
        raising = helpers.sharded(group.mesh, lookup, IDS_SPEC, IDS_SPEC)
        says = re.escape(str(capacity_error(op, 0, 8, 6)))
        with helpers.expect_failure(group, CapacityError, rf"\b{says}", implementation):
            assert np.isnan(helpers.fetch(raising(table, ids))).any()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_bags(combiner: Any, weighted: bool, rng: Rng) -> None:
    bags, longest = 6, 4
    ids: Any = rng.integers(-1, 9, (bags, longest)).astype(np.int32)
    ids[2] = -1
    rows: Any = rng.standard_normal((bags, longest, D)).astype(np.float32)
    weights: Any = rng.uniform(0.5, 2, ids.shape).astype(np.float32) if weighted else np.ones_like(ids, np.float32)
    given = weights if weighted else None
    used = np.where(ids >= 0, weights, 0)
    divisor = {"sum": np.ones(bags), "mean": used.sum(1), "sqrtn": np.sqrt((used**2).sum(1))}[combiner]
    expected = np.einsum("bl,bld->bd", used, rows) / np.where(divisor == 0, 1, divisor)[:, None]
    square = embedding.bag(rows, ids, given, combiner=combiner)
    np.testing.assert_allclose(square, expected, rtol=1e-5, atol=1e-6)
    options: dict[str, Any] = {"bag_of": np.repeat(np.arange(bags), longest).astype(np.uint8), "num_bags": 300}
    flat = None if given is None else given.ravel()
    ragged = embedding.bag(rows.reshape(-1, D), ids.ravel(), flat, combiner=combiner, **options)
    np.testing.assert_allclose(ragged[:bags], expected, rtol=1e-5, atol=1e-6)
    assert not np.any(ragged[bags:])
    gradient = jax.grad(lambda w: jnp.sum(embedding.bag(rows, ids, w, combiner=combiner) ** 2))(weights)
    assert np.isfinite(gradient).all()
    assert not np.any(gradient[ids < 0])


TABLE, IDS = np.zeros((3, D), np.float32), np.zeros((4, 3), np.int32)
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("sharded_lookup", {"group": None}, "group must be an open jax_ep.Group"),
    ("sharded_lookup", {"ids": [0]}, "ids must be an array, got int"),
    ("sharded_lookup", {"ids": {}}, "ids must hold an array at least for every table, got {}"),
    ("sharded_lookup", {"table": TABLE[None]}, r"table must have shape \[V, D\], got"),
    ("sharded_lookup", {"table": IDS}, "table must be of dtype bfloat16, float16, float32, got"),
    ("sharded_lookup", {"placement": "max"}, "placement must be one of 'ranges', 'mod'; got"),
    ("sharded_lookup", {"capacity": 2.0}, "capacity must be an int of rows or None"),
    ("sharded_lookup", {"on_overflow": "max"}, "on_overflow must be one of"),
    ("sharded_lookup", {"implementation": "max"}, "implementation must be one of"),
    ("rows_needed", {"ids": IDS, "num_rows": 0}, "num_rows must be at least 1"),
    ("shard_table", {"table": TABLE, "ranks": 0}, "ranks must be at least 1, got 0"),
    (
        *("unshard_table", {"table": TABLE, "ranks": 2, "num_rows": 9}),
        "table must have 10 rows, num_rows=9 and padding for 2 ranks, got 3",
    ),
]


@pytest.mark.parametrize(("op", "change", "message"), WRONG)
def test_wrong_arguments(op: str, change: dict[str, Any], message: str, open_group: OpenGroup) -> None:
    group = open_group(2)
    usual = {"sharded_lookup": {"table": TABLE, "ids": IDS, "group": group}, "rows_needed": {"group": group}}
    given = usual.get(op, {}) | change
    with pytest.raises((TypeError, ValueError), match=f"^{op}: {message}"):
        helpers.trace(group, lambda: getattr(embedding, op)(**given))
