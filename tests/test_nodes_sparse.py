"""sparse_all_reduce over several nodes, which are the first axis of a mesh of one process, against the oracle."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sparse_cases as cases
from helpers import DTYPES
from jax.sharding import PartitionSpec as P
from test_nodes import AXES, MESHES, over

from jax_ep import CapacityError, Group, Implementation, SparseRows, sparse_all_reduce
from jax_ep.embedding import apply_updates, by_rows, sparse_value_and_grad

ROWS, ENTRIES, WIDTH = 200, 24, 5
KINDS = pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])


def program(group: Group, num_rows: int, **options: Any) -> cases.Program:
    """As `cases.program`: ranks are one leading axis."""
    run = cases.program(group, num_rows, **options)
    shape = tuple(group.mesh.devices.shape)

    def flat(ids: np.ndarray, values: np.ndarray) -> SparseRows:
        out = helpers.fetch(run(ids.reshape(*shape, -1), values.reshape(*shape, *values.shape[1:])))
        return jax.tree.map(lambda x: x.reshape(group.size, *x.shape[2:]), out)

    return flat


@pytest.mark.matrix
@KINDS
@pytest.mark.parametrize(("nodes", "ranks"), MESHES)
def test_ids(nodes: int, ranks: int, sharded: bool, implementation: Implementation, rng: np.random.Generator) -> None:
    """Rows, their order, sums and counts are those of one group of all ranks."""
    size = nodes * ranks
    options: dict[str, Any] = {"capacity": size * ENTRIES, "sharded": sharded}
    with over(nodes, ranks) as group:
        run = program(group, ROWS, implementation=implementation, **options)
        for draw in cases.DRAWS:
            print(draw.__name__)
            ids = draw(rng, size, ENTRIES, ROWS)
            values = cases.draw_values(rng, ids, WIDTH)
            wanted = cases.expected(ids, values, num_rows=ROWS, **options)
            cases.assert_reduced(run(ids, values), wanted, np.float32)


@pytest.mark.matrix
@KINDS
@pytest.mark.parametrize(("op", "dtype"), [*zip(cases.OPS, DTYPES, strict=True), ("mean_by_count", DTYPES[0])], ids=str)
def test_ops_and_dtypes(
    op: str, dtype: Any, sharded: bool, implementation: Implementation, rng: np.random.Generator
) -> None:
    """Rounded once, as in one node: sums between nodes are float32. The capacity is no multiple of the ranks."""
    ids = np.concatenate([cases.zipf(rng, 4, 40, ROWS), cases.out_of_range(rng, 4, 20, ROWS)], axis=1)
    values = cases.draw_values(rng, ids, WIDTH, dtype)
    options: dict[str, Any] = {"op": op, "capacity": 131, "sharded": sharded}
    with over(2, 2) as group:
        actual = program(group, ROWS, implementation=implementation, **options)(ids, values)
    cases.assert_reduced(actual, cases.expected(ids, values, num_rows=ROWS, **options), dtype)


@KINDS
@pytest.mark.parametrize("num_rows", [1, 33])
def test_heights_of_the_table(num_rows: int, sharded: bool, native: None, rng: np.random.Generator) -> None:
    """Ranges of ranks that do not come out even, or are empty; far more room than rows."""
    ids = cases.uniform(rng, 8, 9, num_rows)
    values = cases.draw_values(rng, ids, WIDTH)
    options: dict[str, Any] = {"capacity": 100, "sharded": sharded}
    with over(2, 4) as group:
        actual = program(group, num_rows, **options)(ids, values)
    cases.assert_reduced(actual, cases.expected(ids, values, num_rows=num_rows, **options), np.float32)


@KINDS
def test_overflow(sharded: bool, implementation: Implementation, rng: np.random.Generator) -> None:
    capacity = 7
    ids = np.where(np.arange(30) < 14, cases.uniform(rng, 4, 30, ROWS), cases.identical(rng, 4, 30, 50))
    values = cases.draw_values(rng, ids, WIDTH)
    options: dict[str, Any] = {"capacity": capacity, "sharded": sharded}
    wanted = cases.expected(ids, values, num_rows=ROWS, **options)
    assert wanted.dropped.any()
    with over(2, 2) as group:
        dropping = program(group, ROWS, on_overflow="drop", implementation=implementation, **options)
        cases.assert_reduced(dropping(ids, values), wanted, np.float32)
        group.check()
        raising = program(group, ROWS, implementation=implementation, **options)
        assert np.isnan(raising(ids, values).values).all()
        rank = int(np.argmax(wanted.needed > capacity))
        why = f"sparse_all_reduce: rank {rank} needs {wanted.needed[rank]} rows but capacity is {capacity}"
        with pytest.raises(CapacityError, match=why):
            group.check()
        few = np.where(np.arange(30) < 1, ids % 3, -1)  # the group goes on
        wanted = cases.expected(few, values, num_rows=ROWS, **options)
        cases.assert_reduced(raising(few, values), wanted, np.float32)
        group.check()


@pytest.mark.optimized
@KINDS
def test_the_same_bits(sharded: bool, native: None, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """On every rank and in every run, by either method, though buffers begin as NaN."""
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    ids = cases.zipf(rng, 8, 60, ROWS)
    values = cases.draw_values(rng, ids, 33)
    seen = set()
    wanted = cases.expected(ids, values, num_rows=ROWS, capacity=160, sharded=sharded)
    with over(2, 4) as group:
        for method in ("bitmap", "match"):
            run = program(group, ROWS, capacity=160, sharded=sharded, method=method, implementation="ffi")
            for _ in range(10):
                out = run(ids, values)
                cases.assert_reduced(out, wanted, np.float32)
                seen.update(helpers.bits([out.values] if sharded else list(out.values)))
    assert len(seen) == 1


@KINDS
def test_no_entries(sharded: bool, native: None) -> None:
    ids, values = np.zeros((4, 0), np.int32), np.zeros((4, 0, WIDTH), np.float32)
    options: dict[str, Any] = {"capacity": 5, "sharded": sharded}
    with over(2, 2) as group:
        actual = program(group, ROWS, **options)(ids, values)
    cases.assert_reduced(actual, cases.expected(ids, values, num_rows=ROWS, **options), np.float32)


@pytest.mark.matrix
@KINDS
@pytest.mark.parametrize(("op", "check_vma"), [("sum", False), ("mean", True), ("mean_by_count", True)])
def test_gradient(
    op: str, sharded: bool, check_vma: bool, implementation: Implementation, rng: np.random.Generator
) -> None:
    """Every entry takes the cotangent of its row. `out_specs=P()` is accepted for a replicated result."""
    ids = np.concatenate([cases.zipf(rng, 4, 20, ROWS), cases.out_of_range(rng, 4, 4, ROWS)], axis=1)
    values = cases.draw_values(rng, ids, WIDTH)
    weights = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    with over(2, 2) as group:
        run = cases.reduced(group, ROWS, op=op, sharded=sharded, capacity=96, implementation=implementation)

        def rows(ids: jax.Array, values: jax.Array) -> Any:
            out = run(ids, values)
            return out.indices, out.values

        spec = P(AXES) if sharded else P()
        mapped = jax.shard_map(rows, mesh=group.mesh, in_specs=P(AXES), out_specs=(spec, spec), check_vma=check_vma)

        def loss(values: jax.Array, ids: jax.Array) -> jax.Array:
            indices, summed = mapped(ids, values)
            return jnp.sum(jnp.asarray(weights).at[indices].get(mode="fill", fill_value=0) * summed)

        actual = helpers.fetch(jax.jit(jax.grad(loss))(values.reshape(-1, WIDTH), ids.reshape(-1)))
    wanted = cases.gradient(ids, weights, op)
    np.testing.assert_allclose(actual.reshape(values.shape), wanted, rtol=1e-5, atol=1e-6)


def test_beside_another_axis(implementation: Implementation, rng: np.random.Generator) -> None:
    """Each line of the mesh adds up its own rows."""
    mesh = helpers.mesh_of(dp=2, node=2, ep=2)
    ids = np.stack([cases.zipf(rng, 4, 20, ROWS) for _ in range(2)])
    values = cases.draw_values(rng, ids, WIDTH)
    with Group(mesh, AXES, across_nodes=True, timeout=30) as group:
        run = cases.program(group, ROWS, capacity=80, implementation=implementation)
        out = helpers.fetch(run(ids.reshape(2, 2, 2, -1), values.reshape(2, 2, 2, -1, WIDTH)))
    for line in range(2):
        wanted = cases.expected(ids[line], values[line], num_rows=ROWS, capacity=80)
        of_line = jax.tree.map(lambda x, line=line: x[line].reshape(4, *x.shape[3:]), out)
        cases.assert_reduced(of_line, wanted, np.float32)


def test_a_step_of_an_embedding(implementation: Implementation, rng: np.random.Generator) -> None:
    """The sparse gradient of a loss of looked up rows moves all ranks' copies of the table alike."""
    ids = cases.zipf(rng, 4, ENTRIES, ROWS)
    table = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    with over(2, 2) as group:

        def step(table: jax.Array, ids: jax.Array) -> jax.Array:
            _, gradient = sparse_value_and_grad(lambda rows: jnp.sum(rows**2) / 2)(table, ids)
            gradient = sparse_all_reduce(gradient, group=group, capacity=96, op="mean", implementation=implementation)
            optimizer = by_rows(optax.sgd(0.5))
            return apply_updates(table, optimizer.update(gradient, optimizer.init(table))[0])

        mapped = jax.shard_map(step, mesh=group.mesh, in_specs=(P(), P(AXES)), out_specs=P())
        moved = helpers.fetch(jax.jit(mapped)(table, ids.reshape(-1)))
    counts = np.bincount(ids.reshape(-1), minlength=ROWS)[:, None]
    np.testing.assert_allclose(moved, table * (1 - 0.5 * counts / 4), rtol=1e-5, atol=1e-5)
