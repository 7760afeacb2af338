"""docs/performance.md and its pictures are those that the files of results make; a benchmark keeps what it printed."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from jax_ep.__main__ import load

part = partial(load, "benchmarks")
LAYER = {"layer": "V3, T=4096, H=7168, F=2048, top-8 of 256", "of it": "jax_ep"}
SECONDS = ("forward, us", "step, us")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, with a folder of results of its own."""
    module = part("report")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    module.results.cache_clear()
    yield module
    module.results.cache_clear()


def kept(report: Any, name: str, commit: str, *times: str) -> None:
    table = {"title": "", "columns": [*LAYER, *SECONDS], "rows": [[*LAYER.values(), *times]]}
    (report.RESULTS / name).write_text(json.dumps({"commit": commit, "tables": [table]}))


def test_the_page_and_its_pictures_are_those_of_the_results() -> None:
    report, pictures = part("report"), part("pictures")
    if not report.PAGE.exists():
        pytest.skip("an sdist has no docs")
    page = report.PAGE.read_text()
    assert report.filled(page)[0] == page  # bench report --write
    for name, draw in pictures.PICTURES.items():
        assert (pictures.FOLDER / f"{name}.svg").read_text() == draw(report.find)


def test_the_newest_file_of_these_gpus_counts(report: Any) -> None:
    text = "- date: 2026-01-02\n\n| layer | of it | forward, us | step, us |\n|---|---|---|---|\n"
    text += f"| {' | '.join(LAYER.values())} | 3.0 | 4.0 |\n"
    (report.RESULTS / "2026-01-02-h200x2-layer.txt").write_text(text)
    assert report.find("2 H200", LAYER, SECONDS)[1] == ["3.0", "4.0"]
    kept(report, "2026-01-03-h200x2-layer.json", "", "1.0", "2.0")
    kept(report, "2026-01-04-h100x2-layer.json", "", "5.0", "6.0")
    report.results.cache_clear()
    page = "| layer | of it | GPUs | step, us | file |\n|---|---|---|---|---|\n"
    page += f"| {' | '.join(LAYER.values())} | 2 H200 | 7 | - |\n\nwords\n"
    filled, (used,) = report.filled(page)
    assert filled == page.replace("7 | -", "2.0 | `2026-01-03-h200x2-layer.json`")
    assert used.path.name == "2026-01-03-h200x2-layer.json"
    with pytest.raises(LookupError, match="no result of 8 H200 has step, us of V3"):
        report.find("8 H200", LAYER, ["step, us"])


def test_results_before_a_change_of_their_sources_are_old(report: Any) -> None:
    first = part("provenance").git("rev-list", "--max-parents=0", "HEAD")
    if not first:
        pytest.skip("there is no git")
    kept(report, "2020-01-01-h200x2-layer.json", "", "1", "2")
    kept(report, "2020-01-02-h200x2-layer.json", "HEAD", "1", "2")
    kept(report, "2020-01-03-h200x2-layer.json", f"{first.split()[0]}+", "1", "2")
    kept(report, "2999-01-01-h200x2-layer.json", "not a commit", "1", "2")
    later, of_first, of_head, earlier = report.results()
    assert not later.change_since()
    assert not of_head.change_since()
    assert earlier.change_since() == of_first.change_since() != ""


@pytest.mark.parametrize("commit", [[], ["--commit", "1234567890"]])
def test_a_benchmark_keeps_what_it_printed(
    commit: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    provenance = part("provenance")

    def main(arguments: list[str]) -> int:
        print(provenance.header(jax.devices("cpu")[:2], "none", ["some_thing", *arguments]))
        print("- hot\n\nfour rows\n\n| row | us |\n|---|---|\n| a, b | 1,000.5 |\n| c | - |")
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "--first --second")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    assert provenance.run("some_thing", main, ["--quick", "--json", *commit]) == 0
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert path.name == f"{result['date']}-cpu-some-thing.json"
    assert result["command"] == "`XLA_FLAGS='--first --second' python -m jax_ep bench some_thing --quick`"
    assert result["notes"] == ["hot"]
    assert result["tables"] == [
        {"title": "four rows", "columns": ["row", "us"], "rows": [["a, b", "1,000.5"], ["c", "-"]]}
    ]
    assert {"hardware", "versions"} <= result.keys()
    assert not commit or result["commit"] == commit[1]
    assert capsys.readouterr().out.endswith(f"| c | - |\n\nwrote {path.name}\n")
