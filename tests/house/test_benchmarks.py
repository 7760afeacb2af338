"""The benchmarks run on CPU devices; pages are what results make of them; bytes that cross nodes are the model's."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest
from helpers import ROOT, Rng
from nodes_cases import over

from jax_ep import Group, NodeOptions, SparseRows, sparse_all_reduce
from jax_ep.__main__ import load, main
from jax_ep.node_options import plan_of

benchmark = partial(load, "benchmarks")  # by its name

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU the shapes are large"),
]
NODE_TIMES = {"dispatch, us", "combine, us", "layer, us", "step, us"}


def rows_of(table: str) -> list[dict[str, str]]:
    """Every row of the one markdown table in a text, by the names of its columns."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    names, _, *rows = cells
    return [dict(zip(names, row, strict=True)) for row in rows]


def options(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(repeats=1, quick=True, **values)


@pytest.mark.parametrize(
    ("command", "columns"),
    [
        ("collective_matmul --devices 2", {"collective, XLA, us", "hidden", "exposed, us", "jax_ep, TFLOP/s"}),
        ("layer --quick --shapes wide --tokens 16 --round-tokens --float8 --biases", {"of it", "exposed of step, us"}),
        ("peers --peers jax_ep", {"quantity", "jax_ep"}),
        ("matmul --quick", {"of dense"}),
        ("sums", {"sums", "of XLA"}),
        ("decode", {"what", "tokens/s", "of the bound by bytes"}),
        ("model --quick", {"gradient, ms", "tokens/s a GPU", "TF/s a GPU"}),
        ("routers", {"router", "of XLA"}),
        ("moe --quick", {"shape", "op", "remote GB/s", "ratio to the best XLA"}),
        ("sparse --shapes zeros", {"ids", "formulation", "GB/s"}),
        ("embedding", {"embedding step", "step, us", "of update, apply_updates"}),
        pytest.param("matmul --by float8 --quick", {"of dense"}, marks=pytest.mark.nightly),
        pytest.param("model", {"dropped"}, marks=pytest.mark.nightly),
        pytest.param("nodes --quick --nodes 2", NODE_TIMES, marks=pytest.mark.nightly),
    ],
)
def test_a_benchmark_keeps_what_it_prints(
    command: str, columns: set[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert main(["bench", *command.split(), "--repeats", "1", "--json", "--commit", "1234567"]) == 0
    (path,) = tmp_path.iterdir()
    assert path.name == f"cpu-{command.split()[0].replace('_', '-')}.json"
    result = json.loads(path.read_text())
    assert result["commit"] == "1234567"
    assert f"NCCL_NVLS_ENABLE=0 python -m jax_ep bench {command}" in result["command"]
    assert {"date", "hardware", "versions", "notes"} <= result.keys()
    assert columns <= {*result["columns"]}
    assert not [note for note in result["notes"] if "failed" in note]
    printed = rows_of(capsys.readouterr().out)
    assert printed == [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]] != []
    if "--biases" in command:
        layer = benchmark("layer")
        of_it = [layer.PRODUCTS, layer.OURS, layer.FLOAT8, layer.BIASES, layer.GPT_OSS, layer.ROUNDED, layer.PADDED]
        assert [row["of it"] for row in printed] == of_it
    if command.startswith("nodes"):
        assert [(row["way"], row["formulas say, B"]) for row in printed] == [
            ("dense", "the same"),
            ("by capacity", "the same"),
        ]
        assert min(float(row[f"{op}, of the least"]) for row in printed for op in ("dispatch", "combine")) >= 1
        assert all(np.isfinite(number(row[name])) for row in printed for name in NODE_TIMES)


def test_decoding_is_part_of_the_sweep(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens. The ranks draw tokens of their own, also for the layer of shared tokens, which takes as long."""
    monkeypatch.setenv("JAX_EP_DEBUG_CHECKS", "0")
    sweep, runner = benchmark("token_sweep"), benchmark("runner")
    run = runner.Run(options(), group.mesh, group)
    assert [int(case) for case in sweep.cases(run) if case.quick] == [*sweep.DECODED]
    row = sweep.row(1, run)
    assert [*row] == ["tokens a rank", "layer", "dispatch, combine, us", "layer, us", "layer, shared tokens, us"]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("formulation", ["ours", "padded"])
def test_layer_trains_alike(group: Group, rng: Rng, formulation: str, biased: bool) -> None:
    layer, forms = benchmark("layer"), benchmark("formulations")
    tokens, experts, hidden, width = 16, 4, 8, 12
    ids = np.argsort(rng.random((2 * tokens, experts)), axis=1)[:, :2].astype(np.int32)
    rows = rng.standard_normal((1, 2 * tokens, hidden)).astype(np.float32)
    weights = rng.uniform(0.1, 1, (1, 2 * tokens, 2)).astype(np.float32)
    model = moe_oracle.draw_layer(rng, rows, weights, experts, width)
    sides = (width, width, hidden) if biased else ()
    biases: Any = tuple(rng.standard_normal((1, experts, side)).astype(np.float32) for side in sides)
    one = {
        "ours": layer.ours(group, 4 * tokens),
        "padded": layer.by_exchange(forms.padded_all_to_all(experts, 2 * tokens)),
    }[formulation]
    others = [jnp.asarray(x[0]) for x in (*model[1:], *biases, model.tokens)]
    out, gradients = layer.on_ranks(layer.training_step(one), group.mesh)(ids, *others)
    exactly = moe_oracle.gated_experts(model, ids[None], rows, biases or (None, None, None))  # tokens are the cotangent
    sums, wanted, *of_biases = exactly
    expected = (sums, *wanted[1:], *(each for them in of_biases for each in them), wanted.tokens)
    for mine, exact in zip((out, *gradients), expected, strict=True):
        np.testing.assert_allclose(mine, exact[0], rtol=1e-4, atol=1e-5 * float(np.abs(exact).max()))


@pytest.mark.parametrize(
    "options", ["--repeats 0", "--json none/x.json", "--json read-only/x.json", "--json", "--json /tmp"]
)
def test_what_is_refused_before_it_measures(
    options: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bare --json writes here. os.access says what is read-only, because root may write anywhere."""
    writable = os.access
    read_only = tmp_path if options == "--json" else tmp_path / "read-only"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != read_only and writable(path, mode))
    monkeypatch.setattr(benchmark("runner"), "provenance", lambda *_: pytest.fail("it measures"))
    with pytest.raises(SystemExit):
        main(["bench", "moe", "--quick", *options.split()])
    assert f"{options.split()[0]} must be " in capsys.readouterr().err


def test_what_numpy_expects_of_deep_ep() -> None:
    """Two ranks of two tokens, four experts: who gets which token, how often, and the table's row."""
    deep_ep, ids = benchmark("deep_ep"), np.array([[0, 1], [3, 2], [1, 3], [2, 0]])
    assert deep_ep.first_of_each_rank(ids, 4, 2).tolist() == [[0, -1], [3, -1], [1, 3], [2, 0]]
    expected = [{name: each.tolist() for name, each in rank.items()} for rank in deep_ep.what_comes(ids, 4, 2)]
    assert expected == [
        {"tokens": [3], "by_expert": [2, 2], "visits": [1, 1]},
        {"tokens": [3], "by_expert": [2, 2], "visits": [2, 2]},
    ]
    times = {"dispatch, 24": [3.0, 1.0, 2.0], "DeepEP dispatch, 24": [4.0, 4.0, 4.0]}
    (row,) = deep_ep.rows_of("a shape", {"dispatch, 24": "dispatch, 24"}, times)
    assert [*row.values()] == ["a shape", "dispatch", "24", "2.0", "4.0", "0.50", "-"]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The module, with a folder of results of its own."""
    module = benchmark("report")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    module.results.cache_clear()
    yield module
    module.results.cache_clear()


def test_performance_page_and_pictures_are_those_of_the_results() -> None:
    """`python -m jax_ep bench report --write` makes them so."""
    report, pictures = benchmark("report"), benchmark("pictures")
    if not report.PAGE.exists():
        pytest.skip("an sdist has no docs")
    page = report.PAGE.read_text()
    assert report.filled(page) == page
    for name, draw in pictures.PICTURES.items():
        assert (pictures.FOLDER / f"{name}.svg").read_text() == draw(report.find)


def test_the_newest_result_of_these_gpus_counts(report: Any) -> None:
    dumps = benchmark("runner").dumps
    columns = ["layer", "of it", "forward, us", "step, us"]
    for name, date, *times in (
        ("h200x2-layer", "2026-01-03", "1.0", "2.0"),
        ("h200x2-layer-float8", "2026-01-02", "3.0", "4.0"),
        ("h100x2-layer", "2026-01-04", "5.0", "6.0"),
    ):
        result = {"commit": "", "date": date, "columns": columns, "rows": [["V3", "jax_ep", *times]]}
        (report.RESULTS / f"{name}.json").write_text(dumps(result))
    page = "words\n\n| layer | of it | GPUs | step, us |\n|---|---|---|---|\n| V3 | jax_ep | 2 H200 | 7 |\n"
    page += "| V3 | jax_ep | 2 H200 float8 | - |\n\n| other | table |\n|---|---|\n| 1 | 2 |\n"
    assert report.filled(page) == page.replace("| 7 |", "| 2.0 |").replace("| - |", "| 4.0 |")
    with pytest.raises(LookupError, match="no result of 8 H200 has step, us of V3"):
        report.find("8 H200", {"layer": "V3"}, ["step, us"])


def test_results_have_one_form() -> None:
    """Each is what `dumps` writes, named by the GPUs that it is of, and every row has all columns."""
    runner = benchmark("runner")
    files = [path for path in benchmark("report").RESULTS.glob("*.json") if path.name != "gpu_tests.json"]
    assert files
    for path in files:
        result = json.loads(path.read_text())
        assert path.read_text() == runner.dumps(result)
        assert re.match(runner.machine(result["hardware"]) + r"-[a-z0-9-]+\.json", path.name)
        assert all(len(row) == len(result["columns"]) for row in result["rows"])


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def exchange_of(nodes: int, ranks: int, **options: Any) -> Any:
    """float32: XLA on a CPU sends narrower values as float32."""
    shape = benchmark("moe_cases").Shape(options.pop("tokens", 24), 128, options.pop("top_k", 3), 16, "float32")
    return benchmark("node_model").Exchange(nodes, ranks, shape, **options)


def operands_of(exchange: Any, group: Group) -> tuple[jax.Array, ...]:
    """ids, weights, gate, up, down, tokens of all ranks."""
    cases, shape = benchmark("moe_cases"), exchange.shape
    ids = benchmark("nodes").draw_ids(shape, exchange.nodes, exchange.ranks, exchange.top_nodes)
    return cases.make_operands(cases.Model("any", shape, 8), ids, group.mesh)


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
        ids, weights, *_, tokens = given = operands_of(exchange, group)
        state = jax.eval_shape(benchmark("nodes").on_ranks(way.dispatch, group.mesh), ids, weights, tokens)
        counted = benchmark("nodes").count_bytes(way, given, state)
    assert counted == {"dispatch": exchange.dispatch, "combine": exchange.combine, "step": exchange.step}
    kept = (state.routing.row_of, state.routing.weights, state.routing.targets)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in kept) == group.size * exchange.routing


@pytest.mark.parametrize(("nodes", "ranks", "top_nodes"), [(2, 4, None), (4, 2, 2)])
def test_rows_are_as_many_as_drawn_alike(nodes: int, ranks: int, top_nodes: int | None) -> None:
    """Within a twentieth: tokens that need a node, and rows that ranks of a node receive, by the group's report."""
    exchange = exchange_of(nodes, ranks, tokens=512, top_nodes=top_nodes)
    bench = benchmark("nodes")
    with over(nodes, ranks) as group:
        way = bench.Way(exchange, 4096, group, "kernels")
        ids, weights, *_, tokens = operands_of(exchange, group)
        wanted = bench.tokens_for_nodes(np.asarray(ids), exchange.shape.experts, nodes, ranks)
        assert bench.rows_for_others(wanted) == pytest.approx(exchange.rows_needed, rel=0.05)
        jax.block_until_ready(bench.on_ranks(way.dispatch, group.mesh)(ids, weights, tokens))
        received = [sum(report.received_bytes) for report in group.report()]
    assert np.mean(received) == pytest.approx(exchange.rows_inside * exchange.sent_row, rel=0.05)


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
    page = (ROOT / "docs" / "scaling.md").read_text()
    kept = rows_of(page[page.index("| hosts |") : page.index("`NodeOptions(chunks=n)`")])
    anywhere, limited = (list(nodes.model_rows(nodes.V3.shape, 8, float8=False, top_nodes=n)) for n in (None, 4))
    for row, free, few in zip(kept, anywhere, limited, strict=True):
        assert row == {
            "hosts": str(free["hosts"]),
            "tokens that need a given host": free["tokens that need a host"].replace("%", " %"),
            "dense": rounded(free["dense, KB"]),
            "by capacity": rounded(free["by B, KB"]),
            "by capacity, at most 4 hosts a token": rounded(few["by B, KB"]),
            "inside a host": rounded(free["inside, KB"]),
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
