"""The benchmarks run on CPU devices, and docs/performance.md is what the files of results make of it."""

import json
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
from helpers import Rng

from jax_ep import Group
from jax_ep.__main__ import load, main

benchmark = partial(load, "benchmarks")  # by its name

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU the shapes are large"),
]


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
        ("model", {"gradient, ms", "tokens/s a GPU", "TF/s a GPU"}),
        ("routers", {"router", "of XLA"}),
        ("sparse --shapes zeros", {"ids", "formulation", "GB/s"}),
        ("embedding", {"embedding step", "step, us", "of update, apply_updates"}),
        pytest.param("matmul --by float8 --quick", {"of dense"}, marks=pytest.mark.nightly),
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
    printed = rows_of(capsys.readouterr().out)
    assert printed == [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]] != []
    if "--biases" in command:
        layer = benchmark("layer")
        of_it = [layer.PRODUCTS, layer.OURS, layer.FLOAT8, layer.BIASES, layer.GPT_OSS, layer.ROUNDED, layer.PADDED]
        assert [row["of it"] for row in printed] == of_it


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
    (row,) = deep_ep.rows_of(8, {"dispatch, 24": "dispatch, 24"}, times)
    assert [*row.values()] == [8, "dispatch", "24", "2.0", "4.0", "0.50", "-"]


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
