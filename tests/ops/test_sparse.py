"""sparse_all_reduce against the oracle, in a node and over several: ids, sizes, dtypes, ops, methods, capacities."""

from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_cases as cases
from conftest import OpenGroup
from helpers import DTYPES, Rng
from jax.sharding import PartitionSpec as P
from nodes_cases import over
from test_pallas_kernels import INTERPRET, lowered_for_h200
from test_sums import assert_bits, in_parts

from jax_ep import CapacityError, Group, Implementation, SparseRows
from jax_ep.ops.sparse import pallas, xla
from jax_ep.ops.sparse.types import SparseConfig
from jax_ep.pallas_kernels import Cut, SumTiling, sums

ROWS = 1000
SHARDED = pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])


class Way(NamedTuple):
    """An implementation and method; over `nodes`, which are the first axis of a mesh of one process."""

    implementation: Implementation
    method: Any
    nodes: int = 1

    def __str__(self) -> str:
        return f"{self.implementation}-{self.method}-{self.nodes}"

    def open(self, size: int) -> Group:
        if size % self.nodes:
            pytest.skip("as many ranks on every node")
        return Group(helpers.mesh_of(ep=size), "ep") if self.nodes == 1 else over(self.nodes, size // self.nodes)

    def program(self, group: Group, num_rows: int = ROWS, **options: Any) -> Callable[..., SparseRows]:
        """As `cases.program`, and awaited: ranks are one leading axis."""
        run = cases.program(group, num_rows, implementation=self.implementation, method=self.method, **options)

        return lambda *operands: helpers.by_rank(group.mesh, helpers.fetch(run(*helpers.on_mesh(group.mesh, operands))))

    def check(self, ids: np.ndarray, values: np.ndarray, num_rows: int = ROWS, **options: Any) -> None:
        with self.open(len(ids)) as group:
            actual = self.program(group, num_rows, **options)(ids, values)
        cases.assert_reduced(actual, cases.expected(ids, values, num_rows=num_rows, **options), values.dtype)


INSIDE = [Way("kernels", "bitmap"), Way("kernels", "match"), Way("xla", "auto")]
WAYS = [*INSIDE, *(way._replace(nodes=2) for way in INSIDE), Way("kernels", "auto", 4)]
inside_a_node = pytest.mark.parametrize("way", INSIDE, indirect=True, ids=str)


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    if request.param.implementation == "kernels":
        request.getfixturevalue("native")
    return request.param


@pytest.mark.matrix
@SHARDED
@pytest.mark.parametrize("size", helpers.SIZES)
def test_ids(size: int, sharded: bool, way: Way, rng: Rng) -> None:
    """Rows, their order, sums and counts, which over nodes are those of one group of all ranks."""
    entries = 60
    options: dict[str, Any] = {"capacity": size * entries, "sharded": sharded}
    with way.open(size) as group:
        program = way.program(group, **options)
        for name, draw in cases.DRAWS.items():
            print(name)
            ids = draw(rng, size, entries, ROWS)
            values = cases.draw_values(rng, ids, 7)
            wanted = cases.expected(ids, values, num_rows=ROWS, **options)
            cases.assert_reduced(program(ids, values), wanted, np.float32)


@pytest.mark.matrix(1)
@SHARDED
@pytest.mark.parametrize("width", [1, 7, 64, 2048])
@pytest.mark.parametrize(("op", "dtype"), [*zip(cases.OPS, DTYPES, strict=True), ("mean_by_count", DTYPES[0])], ids=str)
@pytest.mark.parametrize(("size", "part", "num_rows"), [(4, 20, ROWS), (8, 3, 1), (8, 3, 33), (4, 0, ROWS)])
def test_ops(
    size: int, part: int, num_rows: int, op: str, dtype: Any, width: int, sharded: bool, way: Way, rng: Rng
) -> None:
    """Rounded once, over nodes too: sums between nodes are float32. The capacity is no multiple of the ranks, and may
    be far more than the rows. Ranges of ranks do not come out even, or are empty; or there are no entries at all."""
    draws = cases.zipf, cases.DRAWS["identical in pairs"], cases.out_of_range
    ids = np.concatenate([draw(rng, size, part, num_rows) for draw in draws], axis=1)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        way.check(ids, cases.draw_values(rng, ids, width, dtype), num_rows, capacity=181, op=op, sharded=sharded)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU compiles them faster."""
    if INTERPRET:
        monkeypatch.setattr(sums, "sum_tiling", lambda *_: SumTiling(Cut(2, 64, 2), Cut(2, 64, 2), Cut(2, 64, 2)))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("op", "sharded", "dtype"),
    [("sum", False, DTYPES[2]), ("mean", True, DTYPES[0]), ("mean_by_count", True, DTYPES[2])],
    ids=str,
)
def test_by_pallas(op: str, sharded: bool, dtype: Any, open_group: OpenGroup, rng: Rng) -> None:
    """The bits of sums: a rank's entries of a row in parts of 32, then ranks in order. And their gradient."""
    size, num_rows = 2, 60
    ids = np.concatenate([cases.zipf(rng, size, 200, num_rows), cases.out_of_range(rng, size, 9, num_rows)], axis=1)
    values, by = cases.draw_values(rng, ids, 5, dtype), rng.standard_normal((num_rows + 1, 5)).astype(np.float32)
    options: dict[str, Any] = {"capacity": 64, "op": op, "sharded": sharded}
    run = cases.reduced(open_group(size), num_rows, implementation="pallas", **options)

    def body(ids: jax.Array, values: jax.Array) -> Any:
        def total(values: jax.Array) -> tuple[jax.Array, SparseRows]:
            out = run(ids, values)
            weights = jnp.asarray(by)[out.indices] / (1 if sharded else size)  # every rank has the same result
            return jnp.sum(out.values.astype(jnp.float32) * weights), out

        return jax.grad(total, has_aux=True)(values)

    by_values, found = helpers.fetch(helpers.per_rank(body, open_group(size).mesh, check_vma=False)(ids, values))
    cases.assert_reduced(found, cases.expected(ids, values, num_rows=num_rows, **options), dtype)
    wanted = cases.gradient(ids, by[:-1].astype(np.float64), op)
    np.testing.assert_allclose(helpers.wide(by_values), wanted, rtol=float(jnp.finfo(dtype).eps), atol=1e-6)
    if op != "mean_by_count":
        for indices, rows in zip(found.indices, found.values, strict=True):
            for index, row in zip(indices[indices < num_rows], rows, strict=False):
                each = [in_parts(values[rank][ids[rank] == index]) for rank in range(size)]
                assert_bits(row, ((each[0] + each[1]) / (size if op == "mean" else 1)).astype(dtype))


@pytest.mark.parametrize("sharded", [False, True])
def test_pallas_lowers_for_gpus_inside_shard_map(sharded: bool) -> None:
    """A result that is not sharded varies over no axis."""
    config = SparseConfig(4, 1000, 300, "mean_by_count", sharded, drop=True)

    def body(ids: jax.Array, values: jax.Array) -> jax.Array:
        found = xla.match(config, "ep", ids, ids[:2] * 0)
        return pallas.reduce(config, "ep", values, *found, jnp.float32(1), interpret=False)

    operands = jax.ShapeDtypeStruct((400,), np.int32), jax.ShapeDtypeStruct((400, 33), jnp.bfloat16)
    assert "sum_groups" in lowered_for_h200(body, operands, out_specs=P("ep") if sharded else P())


@inside_a_node
def test_runs_of_all_lengths(way: Way, rng: Rng) -> None:
    """Wide rows have equal bits on every run: chains and scans, whole runs and runs in parts, side by side."""
    lengths = [1, 2, 3, 5, 16, 31, 32, 33, 63, 64, 65, 100, 1, 2, 2, 47, 2500]
    runs = np.repeat(rng.choice(ROWS, len(lengths), replace=False), lengths).astype(np.int32)
    ids = np.stack([rng.permutation(runs) for _ in range(2)])
    values = cases.draw_values(rng, ids, 1100)
    with way.open(2) as group:
        program = way.program(group, capacity=20)
        first = helpers.assert_same_bits_again(program, (ids, values), 5 if way.implementation == "kernels" else 0)
        cases.assert_reduced(first, cases.expected(ids, values, num_rows=ROWS, capacity=20), np.float32)


@pytest.mark.matrix(1)
@SHARDED
def test_overflow(sharded: bool, way: Way, rng: Rng) -> None:
    capacity = 11
    ids = np.where(np.arange(30) < 14, cases.uniform(rng, 4, 30, ROWS), cases.identical(rng, 4, 30, 250))
    values = cases.draw_values(rng, ids, 6)
    options: dict[str, Any] = {"capacity": capacity, "sharded": sharded}
    wanted = cases.expected(ids, values, num_rows=ROWS, **options)
    assert wanted.dropped.any()
    with way.open(4) as group:
        dropping = way.program(group, **options, on_overflow="drop")
        cases.assert_reduced(dropping(ids, values), wanted, np.float32)
        group.check()
        rank = int(np.argmax(wanted.needed > capacity))
        why = f"sparse_all_reduce: rank {rank} needs {wanted.needed[rank]} rows but capacity is {capacity}"
        with helpers.expect_failure(group, CapacityError, why, way.implementation if way.nodes == 1 else "xla"):
            assert np.isnan(way.program(group, **options)(ids, values).values).all()
        few = np.where(np.arange(30) < 5, ids, -1)  # the group goes on
        cases.assert_reduced(dropping(few, values), cases.expected(few, values, num_rows=ROWS, **options), np.float32)
        group.check()


def test_an_overflow_is_reported_once(native: None, open_group: OpenGroup, rng: Rng) -> None:
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


@pytest.mark.optimized
@pytest.mark.parametrize(("nodes", "sharded", "runs"), [(1, False, 50), (2, False, 10), (2, True, 10)])
def test_the_same_bits(
    nodes: int, sharded: bool, runs: int, native: None, monkeypatch: pytest.MonkeyPatch, rng: Rng
) -> None:
    """On every rank, in all runs, and by both methods, though buffers begin as NaN."""
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    size, seen = helpers.largest_size(), set()
    ids = cases.zipf(rng, size, 60, ROWS)
    values = cases.draw_values(rng, ids, 33)
    with Way("kernels", "auto", nodes).open(size) as group:
        for method in ("bitmap", "match"):
            run = Way("kernels", method, nodes).program(group, capacity=300, sharded=sharded)
            for _ in range(runs):
                out = run(ids, values)
                seen.update(helpers.bits([out.values] if sharded else [*out.values]))
    assert len(seen) == 1


def test_two_branches(native: None, open_group: OpenGroup, rng: Rng) -> None:
    size = helpers.largest_size()
    group, ids, other = open_group(size), cases.uniform(rng, size, 30, ROWS), cases.zipf(rng, size, 30, ROWS)
    values = cases.draw_values(rng, ids, 16)
    run = cases.reduced(group, ROWS, capacity=240)
    first, second = helpers.run(group, lambda a, b, v: (run(a, v), run(b, 2 * v)), ids, other, values)
    cases.assert_reduced(first, cases.expected(ids, values, num_rows=ROWS, capacity=240), np.float32)
    cases.assert_reduced(second, cases.expected(other, 2 * values, num_rows=ROWS, capacity=240), np.float32)


@pytest.mark.parametrize("axes", [("ep",), ("node", "ep")], ids=" ".join)
def test_some_axes_of_a_mesh(axes: Any, implementation: Implementation, rng: Rng) -> None:
    ids = np.stack([cases.zipf(rng, 2 ** len(axes), 20, ROWS) for _ in range(2)])
    values = cases.draw_values(rng, ids, 6)
    mesh = helpers.mesh_of(dp=2, **dict.fromkeys(axes, 2))
    with Group(mesh, axes, across_nodes=len(axes) > 1) as group:
        run = cases.program(group, ROWS, capacity=80, implementation=implementation)
        out = helpers.fetch(run(*(x.reshape(*mesh.devices.shape, *x.shape[2:]) for x in (ids, values))))
    for line in range(2):
        wanted = cases.expected(ids[line], values[line], num_rows=ROWS, capacity=80)
        found = jax.tree.map(lambda x, line=line: x[line].reshape(-1, *x.shape[1 + len(axes) :]), out)
        cases.assert_reduced(found, wanted, np.float32)
