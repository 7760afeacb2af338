"""Runs what needs GPUs, and writes a stamp: which commit, on what, how many tests passed.

    python -m tests.gpu --minutes 20
    python -m tests.gpu --minutes 20 --commit 46c8511      # where there is no .git
    python -m tests.gpu --page                             # runs nothing: puts the stamps into docs/versions.md

The tests take four fifths of the time, random programs the rest; --memcheck gives every kernel an hour under
compute-sanitizer. What is still running when its time is over ends, and the stamp says so. No xdist is needed.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from jax_ep.version import __version__

ROOT = Path(__file__).resolve().parents[1]
STAMPS = ROOT / "benchmarks" / "results" / "gpu_tests.json"  # by what they ran on: the last one of each
PAGE = ROOT / "docs" / "versions.md"

# First what runs on GPUs alone, then the kernels, then all else that time is left for.
FIRST = ("cuda", "ragged_dot", "pallas_kernels", "gated", "dispatch", "combine", "matrix")
ON_HOSTS = ("benchmarks", "guide", "house", "package")  # no kernel of a GPU runs in these


def run_tests(seconds: float, workers: int) -> dict[str, Any]:
    first = [str(path) for name in FIRST for path in ROOT.glob(f"tests/**/test_{name}.py")]
    ignored = [f"--ignore={path}" for name in ON_HOSTS for path in ROOT.glob(f"tests/**/test_{name}.py")]
    xdist = ["-n", str(workers), "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-o", "addopts=", "-p", "no:benchmark", "--continue-on-collection-errors"]
        command = ["pytest", *options, f"--junitxml={report}", *xdist, *ignored, *first, "tests"]
        ended, _ = run(command, seconds)
        if not report.exists():
            return {"ended": ended, "passed": 0, "skipped": 0, "failed": 1}
        suite = ElementTree.parse(report).find("testsuite")
        assert suite is not None
    total, skipped, *faults = (int(suite.attrib[each]) for each in ("tests", "skipped", "failures", "errors"))
    return {"ended": ended, "passed": total - skipped - sum(faults), "skipped": skipped, "failed": sum(faults)}


def run_fuzz(of: str, seconds: float, seed: int) -> dict[str, Any]:
    limits = ("--configurations", "1000000", "--seconds", str(seconds))
    ended, output = run(["tests.chaos.fuzz", "--of", of, *limits, "--seed", str(seed)], seconds + 300)
    names, values = ([cell.strip() for cell in line.split("|")] for line in output.strip().splitlines()[-2:])
    table = dict(zip(names, values, strict=False))
    return {"ended": ended, "seed": seed, "configurations": table.get("configurations"), "failed": ended != 0}


def run_memcheck() -> dict[str, Any]:
    tool = ["compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "no"]
    ranks = [*tool, "--launch-skip", "20", sys.executable, "-m", "jax_ep.launch", "-n", "4", "tests/memcheck.py"]
    ended, output = run(ranks, 3600, module=False, XLA_PYTHON_CLIENT_MEM_FRACTION="0.02")
    errors = sum(int(count) for count in re.findall(r"ERROR SUMMARY: (\d+) error", output))
    return {"ended": ended, "errors": errors, "failed": ended != 0 or errors > 0}


def run(command: Sequence[str], seconds: float, module: bool = True, **variables: str) -> tuple[int | None, str]:
    """The exit code, None when time was over, and what was printed, which is shown as well. Interrupted, pytest still
    writes its report."""
    command = [sys.executable, "-m", *command] if module else list(command)
    print("$", " ".join(command), flush=True)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=output, stderr=output)
        try:
            ended = process.wait(seconds)
        except subprocess.TimeoutExpired:
            ended = None
            process.send_signal(signal.SIGINT)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        output.seek(0)
        text = output.read()
    print(text[-20_000:], flush=True)
    return ended, text


def gpus() -> str:
    """In a process of its own, for this one must not hold their memory."""
    code = "import jax; d = jax.devices(); print(jax.default_backend(), len(d), 'x', d[0].device_kind)"
    backend, found = subprocess.check_output([sys.executable, "-c", code], text=True).strip().split(" ", 1)
    if backend != "gpu":
        sys.exit(f"needs GPUs, JAX found {found}")
    return found


def commit_here() -> str:
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.check_output([*git, "rev-parse", "--short=10", "HEAD"], text=True).strip()
    dirty = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], text=True)
    return commit + ("+" if dirty else "")


def stamps() -> dict[str, Any]:
    return json.loads(STAMPS.read_text()) if STAMPS.exists() else {}


def with_stamps(page: str) -> str:
    """`page`, whose table of tests on GPUs is that of the stamps."""
    rows = ["| GPUs | date | commit | passed | skipped | failed |", "|---|---|---|---|---|---|"]
    for where, stamp in stamps().items():
        tests = stamp["tests"]
        over = "" if tests["ended"] is not None else ", and others not reached in time"
        counts = tests["passed"], f"{tests['skipped']}{over}", tests["failed"]
        rows.append(f"| {' | '.join(map(str, (where, stamp['date'][:10], stamp['commit'], *counts)))} |")
    return re.sub(r"^\| GPUs \|.*\n(?:\|.*\n)+", lambda _: "\n".join(rows) + "\n", page, flags=re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20, help="how long tests and random programs may take")
    parser.add_argument("--workers", type=int, default=4, help="processes, each on all GPUs: 24 fit, 40 do not")
    parser.add_argument("--commit", help="of these sources, where there is no .git")
    parser.add_argument("--out", type=Path, default=STAMPS, help="the file of stamps")
    parser.add_argument("--seed", type=int, default=int(datetime.date.today().strftime("%Y%m%d")), help="of the fuzzer")
    parser.add_argument("--memcheck", action="store_true", help="every kernel under compute-sanitizer too: an hour")
    parser.add_argument("--page", action="store_true", help="run nothing, put the stamps into docs/versions.md")
    options = parser.parse_args(arguments)
    if options.page:
        PAGE.write_text(with_stamps(PAGE.read_text()))
        return 0
    where = gpus()
    stamp: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "commit": options.commit or commit_here(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
        | {"jax_ep": __version__, "python": platform.python_version()},
        "minutes": options.minutes,
        "tests": run_tests(48 * options.minutes, options.workers),
    }
    for of in ("layers", "ops"):
        stamp[f"fuzz of {of}"] = run_fuzz(of, 6 * options.minutes, options.seed)
    if options.memcheck:
        stamp["memcheck"] = run_memcheck()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(name)}: {json.dumps(each)}" for name, each in (stamps() | {where: stamp}).items()]
    options.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(json.dumps(stamp, indent=2))
    return int(any(part["failed"] for part in stamp.values() if isinstance(part, dict) and "failed" in part))


if __name__ == "__main__":
    sys.exit(main())
