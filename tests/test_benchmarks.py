"""The benchmarks of products run, and what they derive and draw follows from what they measured."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest
from conftest import OpenGroup

from jax_ep import Group
from jax_ep.__main__ import load

benchmark = partial(load, "benchmarks")  # by its name

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU the shapes are large"),
]


def rows_of(table: str) -> list[dict[str, str]]:
    """Every row of a markdown table by the names of its columns."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    names, _, *rows = cells
    return [dict(zip(names, row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    "command",
    [
        "collective_matmul --repeats 1 --devices 2",
        "layer --repeats 1 --quick --shapes wide --tokens 16 --round-tokens --float8",
        "peers --peers jax_ep --rounds 1",
        "matmul --repeats 1 --quick",
        pytest.param("matmul --by float8 --repeats 1 --quick", marks=pytest.mark.nightly),
    ],
)
def test_a_benchmark_prints_a_table(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *arguments = command.split()
    assert benchmark(name).main(arguments) == 0
    tables = re.findall(r"(?:^\|.*\n)+", capsys.readouterr().out, re.MULTILINE)
    assert tables
    assert all(rows_of(table) for table in tables)


def test_decoding_is_part_of_the_sweep(
    open_group: OpenGroup, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sweep's own rows and columns: few tokens, the layers and what they are compared with."""
    sweep = benchmark("token_sweep")
    monkeypatch.setattr(sweep, "DECODED", sweep.DECODED[:1])
    sweep.run(open_group(1), 1, True)
    rows = rows_of(capsys.readouterr().out)
    assert [next(iter(row.values())) for row in rows] == ["1"]
    assert [*rows[0]][1:] == ["dispatch, combine, us", "layer, us", "layer, shared tokens, us"]


def test_layer_counts_products_and_bytes(group: Group) -> None:
    layer, cases = benchmark("layer"), benchmark("moe_cases")
    shape = cases.Shape(tokens=32, hidden=64, top_k=2, experts=8, dtype="bfloat16")
    result = layer.measure(cases.Model("any", shape, 48), "Zipf", group, quick=True)
    matrices = 2 * 3 * 4 * 64 * 48  # bytes of the gradients of a rank's four experts
    assert result.held[layer.OURS] > matrices
    result.times.update({(layer.PRODUCTS, layer.FORWARD): 2.0, (layer.OURS, layer.STEP): 24.0})
    assert layer.half(result, layer.OURS, layer.STEP) == ["24.0", "4.000"]
    assert layer.half(result, layer.PRODUCTS, layer.STEP) == ["6.0", "1.000"]


@pytest.mark.parametrize("formulation", ["ours", "padded"])
def test_layer_trains_alike(group: Group, rng: np.random.Generator, formulation: str) -> None:
    """The step of each formulation against the oracle."""
    layer, forms = benchmark("layer"), benchmark("formulations")
    tokens, experts, hidden, width = 16, 4, 8, 12
    ids = np.argsort(rng.random((2 * tokens, experts)), axis=1)[:, :2].astype(np.int32)
    rows = rng.standard_normal((1, 2 * tokens, hidden)).astype(np.float32)
    weights = rng.uniform(0.1, 1, (1, 2 * tokens, 2)).astype(np.float32)
    model = moe_oracle.draw_layer(rng, rows, weights, experts, width)
    one = {
        "ours": layer.ours(group, 4 * tokens),
        "padded": layer.by_exchange(forms.padded_all_to_all(experts, 2 * tokens)),
    }[formulation]
    others = [jnp.asarray(x[0]) for x in (*model[1:], model.tokens)]
    out, gradients = layer.on_ranks(layer.training_step(one), group.mesh)(ids, *others)
    sums, wanted = moe_oracle.gated_experts(model, ids[None], rows)  # tokens serve as cotangent
    for mine, exact in zip((out, *gradients), (sums, *wanted[1:], wanted.tokens), strict=True):
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
    assert list(deep_ep.rows_of(8, {"dispatch, 24": "dispatch, 24"}, times)) == [
        "| 8 | dispatch | 24 | 2.0 | 4.0 | 0.50 | - |"
    ]
