"""The parent: a process for each peer, all in turns, and tables of what they took."""

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
from ..provenance import header, heading, row
from .shapes import SHAPES, TINY, draw, expected

OURS = "jax_ep"
PACKAGES = {
    OURS: (),
    "sonic": ("torch", "triton", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl-libs-cu13"),
    "torch_grouped_mm": ("torch",),
    "dense": ("torch",),
}
PASSES = {"forward": 1, "step": 3}  # products, in those of a forward pass
TITLES = {quantity: f"{quantity}, us (TFLOP/s)" for quantity in PASSES} | {
    "kept": "kept by a training forward beside operands and output, MiB",
    "peak": "peak of a step beside operands, results included, MiB",
}
TOLERANCE = 3e-2  # of the largest value: several roundings to bfloat16
PATIENCE = 300  # seconds, after which a child hangs
PREALLOCATE, FRACTION = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"

Results = dict[str, dict[str, dict[str, list[float]]]]  # by shape, quantity and peer; of each round


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
    def __init__(self, children: dict[str, Child], deadline: float):
        self._children, self._deadline = children, deadline
        self.results: Results = {}

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def prepare(self, name: str, folder: Path) -> list[str]:
        """The peers that yield what is expected."""
        files = {"operands": str(folder / "operands.npz"), "expected": str(folder / "expected.npz")}
        operands = draw(SHAPES[name])
        np.savez(files["operands"], allow_pickle=False, **operands)
        np.savez(files["expected"], allow_pickle=False, **expected(SHAPES[name], operands))
        return [peer for peer in list(self._children) if self._ask(peer, name, shape=name, **files)]

    def time(self, name: str, peers: list[str], rounds: int, heat: float) -> None:
        """In turns. Who begins changes from round to round.

        A run of each before the first round does not count: the first timing of a shape is up to 17 % slower.
        """
        if rounds:
            peers = [peer for peer in peers if self._ask(peer, name, False, quantity="forward", heat=heat)]
        for _ in range(rounds):
            for quantity in PASSES:
                peers = [peer for peer in peers if self._ask(peer, name, quantity=quantity, heat=heat)]
            peers = peers[1:] + peers[:1]

    def _ask(self, peer: str, name: str, counts: bool = True, /, **question: Any) -> bool:
        """False if it failed, of which a line tells. A child that ended or hangs is closed."""
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
        print(f"{name}, {peer}: {known}", file=sys.stderr, flush=True)
        for quantity, value in known.items() if counts else ():
            self.results.setdefault(name, {}).setdefault(quantity, {}).setdefault(peer, []).append(value)
        if not known.get("error", 0) <= TOLERANCE:
            answer = {"failed": f"off by {known['error']:.1e} of the largest value"}
        if "failed" in answer:
            print(f"- {peer} failed at {name}, {question.get('quantity', 'prepare')}: {answer['failed']}", flush=True)
        return "failed" not in answer


def table(quantity: str, results: Results, peers: list[str]) -> Iterator[str]:
    """Medians of each peer, and of ours over it in each round, which stand in brackets."""
    others = [peer for peer in peers if peer != OURS and OURS in peers]
    columns = ["shape", *peers, *(f"{OURS} / {peer}" for peer in others)]
    yield f"\n{TITLES[quantity]}\n\n{heading(' | '.join(columns))}"
    for name, quantities in results.items():
        values = quantities.get(quantity, {})
        cells = [cell(quantity, name, values[peer]) if peer in values else "-" for peer in peers]
        cells += [ratio(values[OURS], values[peer]) if {OURS, peer} <= values.keys() else "-" for peer in others]
        yield row(name, *cells)


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


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep bench peers", description=__doc__)
    parser.add_argument("--peers", nargs="+", choices=PACKAGES, default=list(PACKAGES), help="[all]")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help=f"[all but {TINY}; on a CPU {TINY}]")
    parser.add_argument("--rounds", type=int, default=3, help="of turns [%(default)s]")
    parser.add_argument("--seconds", type=float, default=550, help="then prints what it has [%(default)g]")
    parser.add_argument("--tune", action="store_true", help="only prepares the shapes, which fills the cache")
    parser.add_argument("--site", type=Path, help="folder of SonicMoE's packages")
    cache = Path(tempfile.gettempdir()) / "jax_ep_peers"
    parser.add_argument("--cache", type=Path, default=cache, help="of compiled and tuned kernels [%(default)s]")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds

    os.environ[PREALLOCATE] = "false"  # the children need the memory
    on_cpu = jax.default_backend() == "cpu"
    if options.site:  # the DSL names its folder in a .pth, which counts in Python's own folders alone
        sys.path[:0] = [str(options.site.resolve() / each) for each in ("", "nvidia_cutlass_dsl/python_packages")]
    packages = list(dict.fromkeys(each for peer in options.peers for each in PACKAGES[peer]))
    print(header(jax.devices()[:1], "one rank", ["peers", *arguments], packages))
    when = "cold, on a CPU" if on_cpu else f"after {HEAT_SECONDS:g} s of the same"
    print(f"- bfloat16; a process for each peer, all in turns, each {when}")
    print(f"- median of at most {options.rounds} rounds; in brackets every round's ratio")
    print("- all have the same random operands and cotangents; dense: the products alone, of equal groups", flush=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children = {peer: Child(peer, environment(peer, options.cache), folder / peer) for peer in options.peers}
        for child in children.values():
            stack.callback(child.close)
        comparison = Comparison(children, deadline)
        for name in options.shapes or [name for name in SHAPES if (name == TINY) == on_cpu]:
            if comparison.seconds_left > 0:
                ready = comparison.prepare(name, folder)
                comparison.time(name, ready, 0 if options.tune else options.rounds, 0 if on_cpu else HEAT_SECONDS)
    if comparison.seconds_left <= 0:
        print(f"- stopped after {options.seconds:g} s")
    for quantity in () if options.tune else TITLES:
        print("\n".join(table(quantity, comparison.results, options.peers)))
    return 0
