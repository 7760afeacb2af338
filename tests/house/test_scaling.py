"""What the model says that crosses nodes, against the compiled programs, the kernels' counters, and drawn ids."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nodes_cases import over
from test_benchmarks import benchmark, rows_of

from jax_ep import Group, NodeOptions, SparseRows, sparse_all_reduce
from jax_ep.__main__ import main
from jax_ep.node_options import plan_of

cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA compiles for a CPU, and its counts")


def counted_on_a_cpu(test: Any) -> Any:
    return cpu(pytest.mark.usefixtures("native")(test))


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def exchange_of(nodes: int, ranks: int, **options: Any) -> Any:
    """float32: XLA on a CPU sends narrower values as float32."""
    shape = benchmark("moe_cases").Shape(options.pop("tokens", 24), 128, options.pop("top_k", 3), 16, "float32")
    return benchmark("node_model").Exchange(nodes, ranks, shape, **options)


def operands(exchange: Any, group: Group) -> tuple[jax.Array, ...]:
    """ids, weights, gate, up, down, tokens of all ranks."""
    cases, shape = benchmark("moe_cases"), exchange.shape
    ids = benchmark("nodes").draw_ids(shape, exchange.nodes, exchange.ranks, exchange.top_nodes)
    return cases.make_operands(cases.Model("any", shape, 8), ids, group.mesh)


@counted_on_a_cpu
@pytest.mark.parametrize(
    ("nodes", "ranks", "implementation", "chunks", "options"),
    [
        (2, 4, "kernels", 1, {}),
        (4, 2, "xla", 1, {"node_capacity": 20}),
        (4, 1, "kernels", 3, {"float8": True, "top_k": 1, "tokens": 16}),
        (2, 2, "kernels", 2, {"float8": True, "top_k": 2, "tokens": 40, "node_capacity": 22}),
    ],
)
def test_bytes_between_nodes_are_those_of_the_formulas(
    nodes: int, ranks: int, implementation: str, chunks: int, options: dict[str, Any]
) -> None:
    exchange = exchange_of(nodes, ranks, **options)
    capacity = 2 * exchange.shape.tokens * exchange.shape.top_k
    with over(nodes, ranks, nodes=NodeOptions(exchange.node_capacity, chunks)) as group:
        way = benchmark("nodes").Way(exchange, capacity, group, implementation)
        ids, weights, *_, tokens = given = operands(exchange, group)
        state = jax.eval_shape(benchmark("nodes").on_ranks(way.dispatch, group.mesh), ids, weights, tokens)
        counted = benchmark("nodes").count_bytes(way, given, state)
    assert counted == {"dispatch": exchange.dispatch, "combine": exchange.combine, "step": exchange.step}
    kept = (state.routing.row_of, state.routing.weights, state.routing.targets)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in kept) == group.size * exchange.routing


@counted_on_a_cpu
@pytest.mark.parametrize(("nodes", "ranks", "top_nodes"), [(2, 4, None), (4, 2, 2)])
def test_rows_are_as_many_as_drawn_alike(nodes: int, ranks: int, top_nodes: int | None) -> None:
    """Within a twentieth: tokens that need a node, and rows that ranks of a node receive, by the group's report."""
    exchange = exchange_of(nodes, ranks, tokens=512, top_nodes=top_nodes)
    bench = benchmark("nodes")
    with over(nodes, ranks) as group:
        way = bench.Way(exchange, 4096, group, "kernels")
        ids, weights, *_, tokens = operands(exchange, group)
        wanted = bench.tokens_for_nodes(np.asarray(ids), exchange.shape.experts, nodes, ranks)
        assert bench.rows_for_others(wanted) == pytest.approx(exchange.rows_needed, rel=0.05)
        jax.block_until_ready(bench.on_ranks(way.dispatch, group.mesh)(ids, weights, tokens))
        received = [sum(report.received_bytes) for report in group.report()]
    assert np.mean(received) == pytest.approx(exchange.rows_inside * exchange.sent_row, rel=0.05)


@counted_on_a_cpu
@pytest.mark.parametrize("sharded", [False, True])
def test_sparse_rows(sharded: bool) -> None:
    """Ids go to every rank of the other node; sums to the ranks that add them up, and their results to every rank."""
    entries, capacity, width = 10, 64, 16
    bench = benchmark("nodes")
    with over(2, 4) as group:

        def summed(ids: jax.Array, values: jax.Array) -> jax.Array:
            rows = SparseRows.from_entries(ids, values, num_rows=1000)
            return sparse_all_reduce(rows, group=group, capacity=capacity, sharded=sharded).values

        ids, values = jnp.zeros(8 * entries, jnp.int32), jnp.zeros((8 * entries, width))
        compiled = bench.on_ranks(summed, group.mesh).lower(ids, values).compile()
    counted = benchmark("collective_bytes").to_other_nodes(compiled.as_text(), [0] * 4 + [1] * 4)
    places = capacity if sharded else capacity // 8
    assert counted == 2 * 4 * entries * 4 + (1 if sharded else 1 + 4) * places * width * 4


def test_the_table_of_the_page_is_that_of_the_model() -> None:
    """docs/scaling.md: what `bench nodes --model` prints, rounded."""
    nodes = benchmark("nodes")
    page = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text()
    kept = rows_of(page[page.index("| hosts |") : page.index("`NodeOptions(chunks=n)`")])
    anywhere, limited = (list(nodes.model_rows(nodes.V3.shape, 8, float8=False, top_nodes=n)) for n in (None, 4))
    for row, free, few in zip(kept, anywhere, limited, strict=True):
        assert row == {
            "hosts": str(free["hosts"]),
            "tokens that need a host": free["tokens that need a host"].replace("%", " %"),
            "dense": rounded(free["dense, KB"]),
            "by capacity": rounded(free["by B, KB"]),
            "at most 4 hosts a token": rounded(few["by B, KB"]),
            "inside a node": rounded(free["inside, KB"]),
        }


def rounded(cell: str) -> str:
    return cell if cell == "-" else f"{int(number(cell) + 0.5):,}"


HLO = {
    "%a = bf16[8,4]{1,0} all-gather(%x), replica_groups={{0,2},{1,3}}, dimensions={0}": 32,
    "%a = bf16[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}": 32,
    "%a = bf16[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,2]<=[4], dimensions={0}": 0,
    "%a = bf16[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}": 32,
    "%a = f32[8]{0} all-gather(%x), replica_groups=mesh['node'=2,'ep'=2] {'node'}, dimensions={0}": 16,
    "%a = f32[8]{0} all-gather(%x), replica_groups=mesh['node'=2,'ep'=2] {'ep'}, dimensions={0}": 0,
    "%a = f32[8]{0} all-gather(%x), replica_groups=mesh['node'=2,'ep'=2] {'node','ep'}, dimensions={0}": 16,
    "%a = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), replica_groups={{0,2},{1,3}}": 16,
    "%a = ((f32[4]{0}, s8[2]{0}), (f32[8]{0}, s8[4]{0})) all-gather-start(%x, %y), replica_groups={{0,2},{1,3}}": 18,
    "%a = ((f32[2,4]{1,0:T(4,128)}), f32[2,4]{1,0}) all-to-all-start(%x), replica_groups={{0,2},{1,3}}": 16,
    "%a = (f8e4m3fn[1,4], f8e4m3fn[1,4]) all-to-all(%x, %y), replica_groups={{0,2},{1,3}}": 4,
    "%a = f32[6]{0} all-reduce-start(%x), replica_groups={{0,2},{1,3}}, to_apply=%sum": 24,
    "%a = f32[3]{0} reduce-scatter(%x), replica_groups={{0,2},{1,3}}, to_apply=%sum": 12,
    "%a = f32[3]{0} all-gather-done(%x)": 0,
}


@pytest.mark.parametrize("line", HLO)
def test_bytes_of_a_collective(line: str) -> None:
    assert benchmark("collective_bytes").to_other_nodes(line, [0, 0, 1, 1]) == HLO[line]


@pytest.mark.parametrize(
    ("line", "last", "message"),
    [
        ("all-gather(%x), replica_groups={{0,2},{1,3}}", 0, "different amounts"),
        ("all-gather(%x), replica_groups=mesh['node'=4] device_ids=(3,1,2,0) {'node'}", 1, "no replica groups"),
        ("ragged-all-to-all(%x), replica_groups={{0,2},{1,3}}", 1, "not in its shapes"),
    ],
)
def test_bytes_that_cannot_be_counted(line: str, last: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        benchmark("collective_bytes").to_other_nodes(f"%a = f32[4]{{0}} {line}", [0, 0, 1, last])


@counted_on_a_cpu
@pytest.mark.nightly
def test_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nodes", "--quick", "--repeats", "1", "--nodes", "2"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row["way"] for row in rows] == ["dense", "by capacity"]
    for row in rows:
        assert row["formulas say, B"] == "the same"
        assert float(row["dispatch, of the least"]) >= 1
        assert float(row["combine, of the least"]) >= 1
        assert number(row["dispatch, B"]) > number(row["combine, B"])
        assert all(np.isfinite(number(row[f"{name}, us"])) for name in ("dispatch", "combine", "layer", "step"))


def test_the_tables_of_the_formulas() -> None:
    """As many hosts as a table names; a plan never sends less than is needed on average, nor more than all."""
    model, shape = benchmark("node_model"), benchmark("nodes").V3.shape
    for row in model.rows(shape, 8, float8=False, top_nodes=None):
        dense, least = number(row["dense, KB"]), number(row["least, KB"])
        assert least < dense
        assert row["by B, KB"] == "-" or least < number(row["by B, KB"]) < dense
    for nodes in model.NODES:
        one, plan = model.Exchange(nodes, 4, shape), plan_of(nodes, shape.tokens, shape.top_k, shape.experts)
        assert one.share(1) * shape.tokens == pytest.approx(plan.expected)
        assert model.planned(one).node_capacity == plan.capacity
    assert dataclasses.replace(model.Exchange(16, 4, shape), top_nodes=1).share(1) == pytest.approx(1 / 16)
