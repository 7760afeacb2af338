"""The benchmarks of products run, and what they derive and draw follows from what they measured."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import jax
import pytest

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


def test_matmul(benchmark: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "bars.png"
    assert benchmark("matmul").main(["--repeats", "1", "--quick", "--plot", str(image)]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row["product"] for row in rows] == ["[256, 128] x [1, 128, 256]", "[256, 128] x [8, 128, 64], equal"]
    flops = 2 * 256 * 128 * 256
    assert float(rows[0]["jax_ep, TFLOP/s"]) == pytest.approx(1e-6 * flops / float(rows[0]["jax_ep, us"]), abs=0.01)
    assert image.read_bytes().startswith(PNG)


def test_phases(benchmark: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark("phases").main(["--ops", "moe"]) == 0
    tables = capsys.readouterr().out.split("\n\n")[1:]
    assert [table.split(",")[0] for table in tables] == ["| dispatch"] * 3 + ["| combine"]
    for table in tables:
        for row in rows_of(table):
            begin, half, last = (
                number(row[f"{name}, us"]) for name in ("first begins", "half have ended", "last ends")
            )
            assert 0 <= begin <= half <= last
