"""sparse_all_reduce against the oracle: kinds of ids, sizes of groups, dtypes, ops, methods, capacities."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_cases as cases
from conftest import OpenGroup
from helpers import DTYPES
from jax.sharding import PartitionSpec as P

from jax_ep import CapacityError, SparseRows, coalesce, sparse_all_reduce

ROWS = 1000
METHODS = [("ffi", "bitmap"), ("ffi", "match"), ("xla", "auto")]


@pytest.fixture(params=METHODS, ids=lambda pair: "-".join(pair))
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every implementation and method."""
    if request.param[0] == "ffi":
        request.getfixturevalue("native")
    return dict(zip(("implementation", "method"), request.param, strict=True))


@pytest.mark.matrix
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("size", helpers.SIZES)
def test_ids(size: int, sharded: bool, way: dict[str, Any], open_group: OpenGroup, rng: np.random.Generator) -> None:
    entries = 60
    options: dict[str, Any] = {"capacity": size * entries, "sharded": sharded}
    program = cases.program(open_group(size), ROWS, **options, **way)
    for draw in cases.DRAWS:
        print(draw.__name__)
        ids = draw(rng, size, entries, ROWS)
        values = cases.draw_values(rng, ids, 7)
        wanted = cases.expected(ids, values, num_rows=ROWS, **options)
        cases.assert_reduced(helpers.fetch(program(ids, values)), wanted, np.float32)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 2048])
def test_widths_and_dtypes(
    width: int, dtype: Any, way: dict[str, Any], open_group: OpenGroup, rng: np.random.Generator
) -> None:
    ids = np.concatenate([cases.zipf(rng, 4, 40, ROWS), cases.identical(rng, 4, 20, ROWS)], axis=1)
    values = cases.draw_values(rng, ids, width, dtype)
    actual = helpers.fetch(cases.program(open_group(4), ROWS, capacity=180, **way)(ids, values))
    cases.assert_reduced(actual, cases.expected(ids, values, num_rows=ROWS, capacity=180), dtype)


@pytest.mark.matrix
@pytest.mark.parametrize("op", ["mean", "mean_by_count"])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_means(op: str, sharded: bool, way: dict[str, Any], open_group: OpenGroup, rng: np.random.Generator) -> None:
    ids = np.concatenate([cases.zipf(rng, 4, 40, ROWS), cases.out_of_range(rng, 4, 20, ROWS)], axis=1)
    values = cases.draw_values(rng, ids, 12)
    options: dict[str, Any] = {"op": op, "sharded": sharded, "capacity": 200}
    actual = helpers.fetch(cases.program(open_group(4), ROWS, **options, **way)(ids, values))
    cases.assert_reduced(actual, cases.expected(ids, values, num_rows=ROWS, **options), np.float32)


@pytest.mark.matrix
@pytest.mark.parametrize("num_rows", [1, 5, 32, 33, 999])
def test_heights_of_the_table(
    num_rows: int, way: dict[str, Any], open_group: OpenGroup, rng: np.random.Generator
) -> None:
    """Words of the bitmap and ranges of the ranks that do not come out even, or are empty."""
    size = helpers.largest_size()
    group, ids = open_group(size), cases.uniform(rng, size, 9, num_rows)
    values = cases.draw_values(rng, ids, 4)
    for sharded in (False, True):
        options: dict[str, Any] = {"sharded": sharded, "capacity": 72}
        actual = helpers.fetch(cases.program(group, num_rows, **options, **way)(ids, values))
        cases.assert_reduced(actual, cases.expected(ids, values, num_rows=num_rows, **options), np.float32)


def test_many_entries_of_few_rows(way: dict[str, Any], open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Runs long enough to be summed by all coops together, beside short ones and single entries."""
    ids = rng.choice(np.array([3, 3, 3, 3, 500, 500, 777, 2, 9], np.int32), (4, 1500))
    ids[0, :40] = np.arange(40)
    values = cases.draw_values(rng, ids, 200)
    actual = helpers.fetch(cases.program(open_group(4), ROWS, capacity=64, **way)(ids, values))
    cases.assert_reduced(actual, cases.expected(ids, values, num_rows=ROWS, capacity=64), np.float32)


def test_runs_of_all_lengths(way: dict[str, Any], open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Wide rows have equal bits on every run: chains and scans, whole runs and runs in parts, side by side."""
    lengths = [1, 2, 3, 5, 16, 31, 32, 33, 63, 64, 65, 100, 1, 2, 2, 47, 2500]
    runs = np.repeat(rng.choice(ROWS, len(lengths), replace=False), lengths).astype(np.int32)
    ids = np.stack([rng.permutation(runs) for _ in range(2)])
    values = cases.draw_values(rng, ids, 1100)
    program = cases.program(open_group(2), ROWS, capacity=20, **way)
    first = helpers.fetch(program(ids, values))
    cases.assert_reduced(first, cases.expected(ids, values, num_rows=ROWS, capacity=20), np.float32)
    if way["implementation"] == "ffi":
        for _ in range(5):
            assert helpers.bits(helpers.fetch(program(ids, values))) == helpers.bits(first)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_overflow(sharded: bool, way: dict[str, Any], open_group: OpenGroup, rng: np.random.Generator) -> None:
    group, capacity = open_group(4), 11
    ids = np.where(np.arange(30) < 14, cases.uniform(rng, 4, 30, ROWS), cases.identical(rng, 4, 30, 250))
    values = cases.draw_values(rng, ids, 6)
    options: dict[str, Any] = {"capacity": capacity, "sharded": sharded}
    wanted = cases.expected(ids, values, num_rows=ROWS, **options)
    assert wanted.dropped.any()

    dropping = cases.program(group, ROWS, **options, **way, on_overflow="drop")
    cases.assert_reduced(helpers.fetch(dropping(ids, values)), wanted, np.float32)
    raising = cases.program(group, ROWS, **options, **way)
    rank = int(np.argmax(wanted.needed > capacity))
    why = f"sparse_all_reduce: rank {rank} needs {wanted.needed[rank]} rows but capacity is {capacity}"
    with helpers.expect_failure(group, CapacityError, why, way["implementation"]):
        assert np.isnan(helpers.fetch(raising(ids, values)).values).all()
    few = np.where(np.arange(30) < 5, ids, -1)  # the group goes on
    wanted = cases.expected(few, values, num_rows=ROWS, **options)
    cases.assert_reduced(helpers.fetch(dropping(few, values)), wanted, np.float32)
    group.check()


def test_an_overflow_is_reported_once(native: None, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Whoever awaits one device hears of it before the others have reported it: for them it is the same error."""
    size = helpers.largest_size()
    group, ids = open_group(size), cases.uniform(rng, size, 20, ROWS)
    run = cases.reduced(group, ROWS, capacity=3)
    program = jax.jit(jax.shard_map(run, mesh=group.mesh, in_specs=P("ep"), out_specs=P()))
    why = r"sparse_all_reduce: rank 0 needs \d+ rows but capacity is 3"
    for _ in range(20):
        out = program(ids.reshape(-1), cases.draw_values(rng, ids, 6).reshape(-1, 6))
        shards = [shard.data for shard in out.values.addressable_shards]
        with helpers.awaiting_failure(group, why):
            helpers.fetch(shards[0])
        with pytest.raises(CapacityError, match=why):
            group.check()
        for shard in shards[1:]:
            with helpers.awaiting_failure(group, why):
                helpers.fetch(shard)
        group.check()


def test_result_does_not_vary(way: dict[str, Any], open_group: OpenGroup, rng: np.random.Generator) -> None:
    """`out_specs=P()` is accepted with `check_vma=True`, for the whole pytree."""
    group, ids = open_group(4), cases.zipf(rng, 4, 20, ROWS)
    values = cases.draw_values(rng, ids, 8)
    run = cases.reduced(group, ROWS, capacity=80, **way)
    mapped = jax.shard_map(run, mesh=group.mesh, in_specs=P("ep"), out_specs=P(), check_vma=True)
    out = helpers.fetch(jax.jit(mapped)(ids.reshape(-1), values.reshape(-1, 8)))
    wanted = cases.expected(ids, values, num_rows=ROWS, capacity=80)
    cases.assert_reduced(jax.tree.map(lambda x: np.stack([x] * 4), out), wanted, np.float32)


def test_as_an_update_of_a_table(way: dict[str, Any], open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Padding falls out of the table; a sharded result updates a rank's own rows."""
    group, height = open_group(4), 50
    ids = cases.uniform(rng, 4, 20, height)
    values = cases.draw_values(rng, ids, 8)
    dense = np.zeros((height, 8))
    np.add.at(dense, ids.reshape(-1), values.reshape(-1, 8))
    whole = helpers.fetch(cases.program(group, height, capacity=64, **way)(ids, values))
    table = jnp.zeros((height, 8)).at[whole.indices[1]].add(whole.values[1], mode="drop")
    np.testing.assert_allclose(table, dense, atol=1e-5)
    np.testing.assert_allclose(jax.tree.map(lambda x: x[1], whole).todense(), dense, atol=1e-5)
    parts = helpers.fetch(cases.program(group, height, capacity=13, sharded=True, **way)(ids, values))
    together = sum(np.asarray(jax.tree.map(lambda x, rank=rank: x[rank], parts).todense()) for rank in range(4))
    np.testing.assert_allclose(together, dense, atol=1e-5)


def test_scan(way: dict[str, Any], open_group: OpenGroup, rng: np.random.Generator) -> None:
    group, steps = open_group(4), 6
    ids = np.stack([cases.zipf(rng, 4, 25, ROWS) for _ in range(steps)], axis=1)
    values = cases.draw_values(rng, ids, 5)
    run = cases.reduced(group, ROWS, capacity=100, **way)

    def body(ids: jax.Array, values: jax.Array) -> SparseRows:
        return jax.lax.scan(lambda carry, entries: (carry, run(*entries)), None, (ids, values))[1]

    out = helpers.fetch(helpers.per_rank(body, group.mesh)(ids, values))
    for step in range(steps):
        wanted = cases.expected(ids[:, step], values[:, step], num_rows=ROWS, capacity=100)
        cases.assert_reduced(jax.tree.map(lambda x, step=step: x[:, step], out), wanted, np.float32)


@pytest.mark.optimized
def test_the_same_bits(native: None, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """On every rank, in a hundred runs, and by both methods."""
    size = helpers.largest_size()
    group, ids = open_group(size), cases.zipf(rng, size, 60, ROWS)
    values = cases.draw_values(rng, ids, 33)
    seen = set()
    for method, runs in (("bitmap", 60), ("match", 40)):
        run = cases.program(group, ROWS, capacity=300, method=method)
        for _ in range(runs):
            out = helpers.fetch(run(ids, values))
            seen.update(helpers.bits([out.values[rank] for rank in range(size)]))
    assert len(seen) == 1


def test_two_branches(native: None, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Two reductions that do not depend on each other do not disturb each other."""
    size = helpers.largest_size()
    group, ids, other = open_group(size), cases.uniform(rng, size, 30, ROWS), cases.zipf(rng, size, 30, ROWS)
    values = cases.draw_values(rng, ids, 16)
    run = cases.reduced(group, ROWS, capacity=240)
    both = helpers.per_rank(lambda a, b, v: (run(a, v), run(b, 2 * v)), group.mesh)
    first, second = helpers.fetch(both(ids, other, values))
    cases.assert_reduced(first, cases.expected(ids, values, num_rows=ROWS, capacity=240), np.float32)
    cases.assert_reduced(second, cases.expected(other, 2 * values, num_rows=ROWS, capacity=240), np.float32)


def test_counts_of_what_came_before(way: dict[str, Any], open_group: OpenGroup) -> None:
    """Coalesced rows keep their counts; their padding is not counted again."""
    group = open_group(4)

    def body(ids: jax.Array, values: jax.Array) -> SparseRows:
        rows = coalesce(SparseRows.from_entries(ids, values, num_rows=10), capacity=2)
        return sparse_all_reduce(rows, group=group, capacity=2, on_overflow="drop", **way)

    ids = np.tile(np.array([-1, 3, 3, 7, 8, 12], np.int32), (4, 1))
    out = helpers.fetch(helpers.per_rank(body, group.mesh)(ids, np.ones((4, 6, 2), np.float32)))
    np.testing.assert_array_equal(out.ignored, np.full(4, 8))  # two on each rank
    np.testing.assert_array_equal(out.dropped, np.full(4, 4))  # one on each rank
    np.testing.assert_array_equal(out.indices, np.tile([3, 7], (4, 1)))
    np.testing.assert_array_equal(out.values[..., 0], np.tile([8, 4], (4, 1)))


def test_one_axis_of_a_mesh(way: dict[str, Any], open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Each line of the mesh along the group's axis adds up its own rows."""
    group = open_group(mesh=helpers.mesh_of(dp=2, ep=2))
    ids = np.stack([cases.zipf(rng, 2, 20, ROWS) for _ in range(2)])
    values = cases.draw_values(rng, ids, 6)
    out = helpers.fetch(cases.program(group, ROWS, capacity=40, **way)(ids, values))
    for line in range(2):
        wanted = cases.expected(ids[line], values[line], num_rows=ROWS, capacity=40)
        cases.assert_reduced(jax.tree.map(lambda x, line=line: x[line], out), wanted, np.float32)


def test_no_entries(way: dict[str, Any], open_group: OpenGroup) -> None:
    ids, values = np.zeros((4, 0), np.int32), np.zeros((4, 0, 6), np.float32)
    for sharded in (False, True):
        options: dict[str, Any] = {"capacity": 5, "sharded": sharded}
        actual = helpers.fetch(cases.program(open_group(4), ROWS, **options, **way)(ids, values))
        cases.assert_reduced(actual, cases.expected(ids, values, num_rows=ROWS, **options), np.float32)
