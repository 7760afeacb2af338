"""The benchmarks of products run, and what they derive and draw follows from what they measured."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup
from jax.profiler import ProfileData

from jax_ep.__main__ import load

PNG = b"\x89PNG"

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU the shapes are large"),
]


@pytest.fixture
def benchmark() -> Callable[[str], ModuleType]:
    return partial(load, "benchmarks")


def rows_of(table: str) -> list[dict[str, str]]:
    """Every row of a markdown table by the names of its columns."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    names, _, *rows = cells
    return [dict(zip(names, row, strict=True)) for row in rows]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def test_collective_matmul(
    benchmark: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "bars.png"
    assert benchmark("collective_matmul").main(["--repeats", "1", "--devices", "2", "--plot", str(image)]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row["op"] for row in rows] == ["matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"]
    for row in rows:
        ours, product = (number(row[name]) for name in ("jax_ep, us", "product, jax_ep, us"))
        assert number(row["exposed, us"]) == pytest.approx(ours - product, abs=0.2)
        assert float(row["jax_ep, TFLOP/s"]) == pytest.approx(2e-6 * 64**3 / ours, abs=0.01)
    assert image.read_bytes().startswith(PNG)


def test_layer(benchmark: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "bars.png"
    arguments = ["--repeats", "1", "--quick", "--shapes", "wide", "--tokens", "16", "--plot", str(image)]
    assert benchmark("layer").main(arguments) == 0
    rows = rows_of(capsys.readouterr().out)
    assert {row["layer"] for row in rows} == {"wide, T=16, H=64, F=128, top-2 of 8, uniform"}
    assert [row["of it"] for row in rows] == list(benchmark("layer").PARTS)
    products = rows[2]
    assert number(products["step, us"]) == pytest.approx(3 * number(products["forward, us"]), abs=0.2)
    for total, exposed in (("forward, us", "exposed, us"), ("step, us", "step exposed, us")):
        for row in rows[2:] if total == "forward, us" else rows[2:-1]:  # quick: no step of the last
            assert number(row[exposed]) == pytest.approx(number(row[total]) - number(products[total]), abs=0.2)
    assert image.read_bytes().startswith(PNG)


def test_layer_counts_operations_and_bytes(benchmark: Callable[[str], ModuleType], open_group: OpenGroup) -> None:
    layer, cases, group = benchmark("layer"), benchmark("moe_cases"), open_group(2)
    shape = cases.Shape(tokens=32, hidden=64, top_k=2, experts=8, dtype="bfloat16")
    result = layer.measure(layer.Model("any", shape, 48), "Zipf", group, "ffi", repeats=1, quick=True)
    busiest = np.bincount(cases.make_ids(cases.Case(shape, "Zipf"), 2).ravel() // 4).max()
    matrices = 2 * 3 * 4 * 64 * 48  # bytes of a rank's four experts, and of their gradients
    assert result.flops == 2 * 3 * busiest * 64 * 48
    assert result.operand_bytes == matrices + 32 * (2 * 64 + 2 * (4 + 4))
    assert result.held[layer.DISPATCH, layer.FORWARD] == 2 * 64 * 128 * -(-busiest // 128)
    assert result.held[layer.OURS, layer.FORWARD] > result.held[layer.DISPATCH, layer.FORWARD]
    assert result.held[layer.OURS, layer.STEP] > result.held[layer.OURS, layer.FORWARD] > 0
    assert result.held[layer.OURS, layer.STEP] > matrices

    alone = 1e-6 * result.flops / 400  # us at 400 TFLOP/s
    result.times.update({(layer.PRODUCTS, layer.FORWARD): alone, (layer.OURS, layer.STEP): 4 * 3 * alone})
    assert layer.half(result, layer.OURS, layer.STEP)[2:] == ["4.000", "100"]
    assert layer.half(result, layer.PRODUCTS, layer.STEP)[1:] == ["0.0", "1.000", "400"]


@pytest.mark.parametrize("formulation", ["ours", "unfused", "padded"])
def test_layer_trains_alike(
    benchmark: Callable[[str], ModuleType], open_group: OpenGroup, rng: np.random.Generator, formulation: str
) -> None:
    """The step of each formulation against every expert computed for every token, differentiated by JAX."""
    layer, forms, group = benchmark("layer"), benchmark("moe_formulations"), open_group(2)
    tokens, experts, hidden, width = 16, 4, 8, 12
    ids = np.argsort(rng.random((2 * tokens, experts)), axis=1)[:, :2].astype(np.int32)
    sides = ((2 * tokens, 2), (experts, hidden, width), (experts, hidden, width), (experts, width, hidden))
    others = [jnp.asarray(rng.standard_normal(side), jnp.float32) for side in (*sides, (2 * tokens, hidden))]

    def dense(weights: Any, gate: Any, up: Any, down: Any, rows: Any) -> Any:
        inner = jax.nn.silu(jnp.einsum("th,ehf->etf", rows, gate)) * jnp.einsum("th,ehf->etf", rows, up)
        outputs = jnp.einsum("etf,efh->eth", inner, down)
        return jnp.einsum("tke,tk,eth->th", jax.nn.one_hot(ids, experts), weights, outputs)

    one = {
        "ours": layer.ours(group, 4 * tokens, "ffi", "auto"),
        "unfused": layer.ours(group, 4 * tokens, "ffi", False),
        "padded": layer.by_exchange(forms.padded_all_to_all(experts, 2 * tokens)),
    }[formulation]
    actual = layer.on_ranks(layer.training_step(one), group.mesh)(ids, *others)
    out, backward = jax.vjp(dense, *others)
    for mine, expected in zip(jax.tree.leaves(actual), (out, *backward(others[-1])), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5 * float(np.abs(expected).max()))


def test_matmul(benchmark: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "bars.png"
    assert benchmark("matmul").main(["--repeats", "1", "--quick", "--plot", str(image)]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row["product"] for row in rows] == ["[256, 128] x [1, 128, 256]", "[256, 128] x [8, 128, 64], equal"]
    flops = 2 * 256 * 128 * 256
    rate, time = (number(rows[0][f"jax_ep, {unit}"]) for unit in ("TFLOP/s", "us"))
    assert rate == pytest.approx(1e-6 * flops / time, abs=0.01)
    assert image.read_bytes().startswith(PNG)


def test_float8(benchmark: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    float8 = benchmark("matmul_float8")
    assert float8.main(["--repeats", "1", "--quick"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row["product"] for row in rows] == ["[256, 128] x [1, 128, 256]", "[256, 256] x [8, 256, 128], drawn"]
    for row, columns in zip(rows, (128 * 256, 256 * 128), strict=True):
        assert float(row["jax_ep, TFLOP/s"]) == pytest.approx(
            2e-6 * 256 * columns / number(row["jax_ep, us"]), abs=0.01
        )
    times = {float8.OURS: 2.0, float8.BFLOAT16: 3.0, float8.DENSE: 1.0}
    assert float8.line(float8.CPU_CASES[0], times).split("|")[-2] == " 1.50 "


def test_layer_in_float8(benchmark: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark("layer_float8").main(["--repeats", "1"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row["of it"] for row in rows] == list(benchmark("layer_float8").PARTS)
    layer, products = (number(row["bfloat16, us"]) / number(row["float8, us"]) for row in rows)
    assert [float(row["times as fast"]) for row in rows] == pytest.approx([layer, products], abs=0.01)


def test_overlap(benchmark: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark("overlap").main(["--repeats", "1", "--quick", "--shapes", "narrow"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert len(rows) == 4
    for row in rows:
        names = ("exchange alone, us", "in order, us", "asynchronous, us")
        exchange, in_order, apart = (number(row[name]) for name in names)
        assert number(row["hidden"][:-2]) == pytest.approx(100 * (in_order - apart) / exchange, abs=1, rel=0.01)


def test_stream_trace(benchmark: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """Two streams of a GPU: one is busy for 6 us, 2 of them beside the other. A second GPU is not looked at."""
    line = 'lines { name: "Stream #%d" timestamp_ns: 5000 events { metadata_id: 1 offset_ps: %d duration_ps: %d } }'
    lines = [line % each for each in ((1, 0, 4 * 10**6), (1, 4 * 10**6, 2 * 10**6), (2, 3 * 10**6, 2 * 10**6))]
    meta = 'event_metadata { key: 1 value { id: 1 name: "gemm" } }'
    planes = [f'planes {{ name: "/device:GPU:{i}" {" ".join(lines)} {meta} }}' for i in range(2)]
    (tmp_path / "a.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(" ".join(planes)))
    streams = benchmark("stream_trace")
    found = streams.read(tmp_path)
    assert found == [("Stream #1", "gemm", 0, 4), ("Stream #2", "gemm", 3, 5), ("Stream #1", "gemm", 4, 6)]
    text = "\n".join(streams.table(found))
    assert [row["start, us"] for row in rows_of(text.split("\n\n")[0])] == ["0.0", "3.0", "4.0"]
    assert "- Stream #1: 6.0 us, 33 % of it beside another stream's kernels" in text
    assert [kernel.stream for kernel in streams.read(tmp_path, gpus=2)[:2]] == ["GPU 0, Stream #1", "GPU 1, Stream #1"]
    streams.draw(found, "two streams", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_phases(benchmark: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark("phases").main(["--ops", "moe"]) == 0
    tables = capsys.readouterr().out.split("\n\n")[1:]
    assert [table.split(",")[0] for table in tables] == ["| dispatch"] * 5 + ["| combine"]
    for table in tables:
        for row in rows_of(table):
            begin, half, last = (
                number(row[f"{name}, us"]) for name in ("first begins", "half have ended", "last ends")
            )
            assert 0 <= begin <= half <= last
