"""The command line of the scripts, and the table they end with."""

import argparse
import collections
import dataclasses
import itertools
import os
import time
import traceback
from collections.abc import Iterator

import jax


def parser(what: str | None, configurations: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, default=configurations, help="how many to try at most")
    parser.add_argument("--seed", type=int, default=20260701)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after so long")
    return parser


def prepare_devices() -> None:
    """Before the backend starts: 8 CPU devices, where there are no GPUs, and products in full float32.

    GPUs are shared with other processes, and a variable that the C library reads exists before there are threads.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("JAX_EP_DEBUG_POISON", "0")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_default_matmul_precision", "highest")


@dataclasses.dataclass
class Report:
    """What a run has found; `repeat` is the command that repeats one configuration."""

    script: str
    seed: int
    where: str
    verbose: bool = False
    of: str = "all"
    configurations: int = 0
    programs: int = 0
    faults: int = 0
    longest_seconds: float = 0.0  # from a fault to the error that it must give
    wrong: int = 0
    lost: int = 0  # results, groups or processes that a fault may not cost
    struck: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # faults by op and phase
    began: float = dataclasses.field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        print(f"{self.script}: seed {self.seed}, {self.where}", flush=True)

    def trying(self, what: str) -> None:
        if self.verbose:
            print(f"{self.seconds():.1f} s: {what}", flush=True)

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def indices(self, given: argparse.Namespace, alone: int | None) -> Iterator[int]:
        """Of what to try: the one that is to be repeated, or one after the other, as many as `given` asks for."""
        for index in itertools.count() if alone is None else [alone]:
            if self.configurations >= given.configurations or self.seconds() >= given.seconds:
                return
            yield index

    def failed(self, error: BaseException, what: str, repeat: str) -> None:
        """Counts a failure: an AssertionError is a wrong value, everything else a result that was lost."""
        if isinstance(error, AssertionError):
            self.wrong += 1
        else:
            self.lost += 1
        print(f"\nFAILED {what}\n  repeat: python -m tests.chaos.{self.script} --seed {self.seed} {repeat}", flush=True)
        print("".join(traceback.format_exception(error))[-3000:], flush=True)

    def finish(self) -> int:
        """Prints the table; the exit code."""
        for phase, count in sorted(self.struck.items()):
            print(f"struck in {phase}: {count}")
        columns = {name: getattr(self, name) for name in ("script", "of", "seed", "configurations", "programs")}
        columns |= {"faults injected": self.faults, "phases struck": len(self.struck)}
        columns |= {"longest s to the error": f"{self.longest_seconds:.2f}", "wrong values": self.wrong}
        columns |= {"lost": self.lost, "seconds": f"{self.seconds():.0f}"}
        widths = [max(len(name), len(str(value))) for name, value in columns.items()]
        for row in (columns.keys(), columns.values()):
            print(" | ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)))
        return 1 if self.wrong or self.lost else 0


def devices_here() -> str:
    return f"{jax.device_count()} {jax.default_backend()} devices"
