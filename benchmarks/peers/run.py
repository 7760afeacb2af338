"""The parent: a process for each peer, all in turns."""

import argparse
import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..in_jit_loop import HEAT_SECONDS, teraflops
from ..runner import Bench, Row, Run, log
from . import __doc__ as about
from .shapes import SHAPES, TINY, draw, expected

OURS = "jax_ep"
PEERS = (OURS, "sonic", "torch_grouped_mm", "dense")
PACKAGES = ("torch", "triton", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl-libs-cu13")
PASSES = {"forward": 1, "step": 3}  # products, in those of a forward pass
TITLES = {quantity: f"{quantity}, us (TFLOP/s)" for quantity in PASSES} | {"kept": "kept, MiB", "peak": "peak, MiB"}
TOLERANCE = 3e-2  # of the largest value: several roundings to bfloat16
PATIENCE = 300  # seconds, after which a child hangs
PREALLOCATE, FRACTION = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"

Results = dict[str, dict[str, list[float]]]  # by quantity and peer; of each round


class Child:
    """The process of a peer."""

    def __init__(self, peer: str, environment: dict[str, str], log: Path):
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.child", peer],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env=environment,
                start_new_session=True,
            )

    def ask(self, seconds: float, **question: Any) -> dict[str, Any]:
        """Raises TimeoutError or EOFError: ask no more."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{json.dumps(question)}\n".encode())
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise TimeoutError(f"no answer in {seconds:.0f} s")
        if line := self._process.stdout.readline():
            return json.loads(line)
        last_words = " ".join(self._log.read_text(errors="replace").split())[-200:]
        raise EOFError(f"exit status {self._process.wait()} {last_words}".strip())

    def close(self) -> None:
        """Ends the process, and the compilers that it started."""
        with self._process, contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Comparison:
    def __init__(self, children: dict[str, Child], run: Run):
        self._children, self._run = children, run
        self._deadline = time.monotonic() + run.options.seconds
        self._results: Results = {}

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def measure(self, name: str, folder: Path, rounds: int, heat: float) -> Results:
        """In turns. Who begins changes from round to round. Peers that do not yield what is expected are left out.

        A run of each before the first round does not count: the first timing of a shape is up to 17 % slower.
        """
        self._results = {}
        files = {"operands": str(folder / "operands.npz"), "expected": str(folder / "expected.npz")}
        operands = draw(SHAPES[name])
        np.savez(files["operands"], allow_pickle=False, **operands)
        np.savez(files["expected"], allow_pickle=False, **expected(SHAPES[name], operands))
        peers = [peer for peer in list(self._children) if self._ask(peer, name, shape=name, **files)]
        if rounds:
            peers = [peer for peer in peers if self._ask(peer, name, False, quantity="forward", heat=heat)]
        for _ in range(rounds):
            for quantity in PASSES:
                peers = [peer for peer in peers if self._ask(peer, name, quantity=quantity, heat=heat)]
            peers = peers[1:] + peers[:1]
        return self._results

    def _ask(self, peer: str, name: str, counts: bool = True, /, **question: Any) -> bool:
        """False if it failed, which is noted. A child that ended or hangs is closed."""
        if self.seconds_left <= 0:
            return False
        try:
            answer = self._children[peer].ask(min(PATIENCE, self.seconds_left), **question)
        except (TimeoutError, EOFError) as lost:
            if self.seconds_left <= 0:
                return False
            self._children.pop(peer).close()
            answer = {"failed": f"{lost}; it is left out from here on"}
        known = {quantity: value for quantity, value in answer.items() if isinstance(value, float)}
        log(f"{name}, {peer}: {known}")
        for quantity, value in known.items() if counts else ():
            self._results.setdefault(quantity, {}).setdefault(peer, []).append(value)
        if not known.get("error", 0) <= TOLERANCE:
            answer = {"failed": f"off by {known['error']:.1e} of the largest value"}
        if "failed" in answer:
            self._run.note(f"{peer} failed at {name}, {question.get('quantity', 'prepare')}: {answer['failed']}")
        return "failed" not in answer


def rows(shapes: list[str], run: Run) -> Iterator[Row]:
    """Medians of each peer, and of ours over it in each round, which stand in brackets."""
    options = run.options
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children = {peer: Child(peer, environment(peer, options.cache), folder / peer) for peer in options.peers}
        for child in children.values():
            stack.callback(child.close)
        comparison = Comparison(children, run)
        for name in shapes:
            results = {}
            if comparison.seconds_left > 0:
                rounds, heat = 0 if options.tune else options.repeats, 0 if run.on_cpu else HEAT_SECONDS
                results = comparison.measure(name, folder, rounds, heat)
            for quantity in TITLES if results else ():
                yield row(name, quantity, results.get(quantity, {}), options.peers)
        if comparison.seconds_left <= 0:
            run.note(f"stopped after {options.seconds:g} s")


def row(name: str, quantity: str, values: dict[str, list[float]], peers: list[str]) -> Row:
    others = [peer for peer in peers if peer != OURS and OURS in peers]
    return {
        "shape": name,
        "quantity": TITLES[quantity],
        **{peer: cell(quantity, name, values[peer]) if peer in values else "-" for peer in peers},
        **{
            f"{OURS} / {peer}": ratio(values[OURS], values[peer]) if {OURS, peer} <= values.keys() else "-"
            for peer in others
        },
    }


def cell(quantity: str, name: str, values: list[float]) -> str:
    value, model = statistics.median(values), SHAPES[name]
    flops = PASSES.get(quantity, 0) * model.shape.tokens * model.shape.top_k * model.flops_per_row
    return f"{value:,.1f}" + (f" ({teraflops(flops, value)})" if flops else "")


def ratio(ours: list[float], others: list[float]) -> str:
    """Of rounds that both ended."""
    ratios = [mine / other for mine, other in zip(ours, others, strict=False)]
    every = f" ({' '.join(f'{each:.3f}' for each in ratios)})" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.3f}{every}"


def environment(peer: str, cache: Path) -> dict[str, str]:
    """A child, and a compiler that it starts, imports from where this process does."""
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if jax.default_backend() == "cpu":
        found["JAX_PLATFORMS"] = "cpu"
    if peer == OURS:
        return {FRACTION: "0.33"} | found | {PREALLOCATE: "true"}
    return found | {f"{of}_CACHE_DIR": str(cache.resolve() / of) for of in ("QUACK", "TRITON", "TORCHINDUCTOR")}


def open_none(options: argparse.Namespace) -> None:
    """The children need the GPU's memory."""
    os.environ[PREALLOCATE] = "false"
    if options.site:  # the DSL names its folder in a .pth, which counts in Python's own folders alone
        sys.path[:0] = [str(options.site.resolve() / each) for each in ("", "nvidia_cutlass_dsl/python_packages")]


def cases(run: Run) -> list[list[str]]:
    """One, for the children live as long as it does."""
    return [run.options.shapes or [name for name in SHAPES if (name == TINY) == run.on_cpu]]


def notes(run: Run) -> Iterator[str]:
    when = "cold, on a CPU" if run.on_cpu else f"after {HEAT_SECONDS:g} s of the same"
    yield f"bfloat16; a process for each peer, all in turns, each {when}"
    yield f"median of at most {run.options.repeats} rounds; in brackets every round's ratio"
    yield "all have the same random operands and cotangents; dense: the products alone, of equal groups"
    yield "kept: by a training forward beside operands and output; peak: of a step beside operands, results included"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="[all]")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help=f"[all but {TINY}; on a CPU {TINY}]")
    parser.add_argument("--seconds", type=float, default=550, help="then prints what it has [%(default)g]")
    parser.add_argument("--tune", action="store_true", help="only prepares the shapes, which fills the cache")
    parser.add_argument("--site", type=Path, help="folder of SonicMoE's packages")
    cache = Path(tempfile.gettempdir()) / "jax_ep_peers"
    parser.add_argument("--cache", type=Path, default=cache, help="of compiled and tuned kernels [%(default)s]")


BENCH = Bench(about, cases, rows, notes, arguments, repeats=3, open=open_none, packages=PACKAGES)
