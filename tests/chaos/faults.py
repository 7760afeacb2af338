"""SIGKILL and SIGSTOP of a process in every phase of every op, of groups over several processes.

    python -m tests.chaos.faults --configurations 200 --seed 1

A configuration is one fault. It strikes when the victim enters that phase, among those of its ops, that was struck
least so far; a table counts them. A stop shorter than the timeout may cost nothing. After a longer one, and after a
kill, every other process must get a typed error in time, close its group, open another among those that are left, and
go on with right numbers; so must the stopped one, when it is continued.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .lineup import Lineup, NoAnswerError, Process
from .report import Report, parser

TIMEOUT = 1.5  # seconds, of the groups
OPEN_SECONDS = 60.0
FAULTS_OF_A_LINEUP = 6
FOREVER = 1_000_000  # rounds
KINDS = ("stop shortly", "stop", "kill")


class Fault(NamedTuple):
    """What is done to whom."""

    kind: str
    victim: int
    pause: float  # until a stopped process is continued

    @classmethod
    def draw(cls, rng: np.random.Generator, members: list[int]) -> "Fault":
        kind = KINDS[rng.choice(3, p=(0.4, 0.25, 0.35))]
        pause = float(rng.uniform(0.01, 0.4) * TIMEOUT if kind == "stop shortly" else rng.uniform(1.3, 3) * TIMEOUT)
        return cls(kind, int(rng.choice(members)), pause)

    def __str__(self) -> str:
        return f"{self.kind} process {self.victim} for {self.pause:.2f} s"


class Trial:
    """One lineup, and the faults that befall it one after another."""

    def __init__(self, report: Report, index: int, gpus: int | None):
        self.report, self.gpus = report, gpus
        self.rng = np.random.default_rng([report.seed, index])
        self.count = 0
        self.doing = "start"

    def run(self, faults: int) -> None:
        members, devices = int(self.rng.integers(2, 4)), 1 if self.gpus else int(self.rng.integers(1, 3))
        self.doing = f"start {members} processes of {devices} devices"
        with Lineup(members, devices, self.gpus) as lineup:
            lineup.await_start()
            self.open(lineup)
            while self.count < faults:
                fault = Fault.draw(self.rng, list(lineup.members))
                self.doing = str(fault)
                self.count += 1
                if fault.kind == "stop shortly":
                    self.stop_shortly(lineup, fault)
                else:
                    self.lose(lineup, fault)
                self.report.configurations += 1
                self.report.faults += 1
                if len(lineup.members) < 2:
                    return

    def open(self, lineup: Lineup) -> None:
        """A group over all members, and some rounds of its ops."""
        self.doing += "; open a group"
        seed, poison = self.draw_seed(), bool(self.rng.integers(2))
        members = list(lineup.members)
        lineup.ask(OPEN_SECONDS, "open", members=members, seed=seed, timeout=TIMEOUT, poison=poison)
        self.go_on(lineup)

    def go_on(self, lineup: Lineup) -> None:
        for index, answer in lineup.ask(4 * TIMEOUT, "rounds", seed=self.draw_seed(), count=5).items():
            self.assert_error(index, answer, None)

    def draw_seed(self) -> list[int]:
        return self.rng.integers(2**31, size=2).tolist()

    def run_and_strike(self, lineup: Lineup, fault: Fault, number: signal.Signals, count: int) -> dict[str, Any] | None:
        """All run so many rounds; returns when the victim has got the signal, with its answer if that came before."""
        victim, seed = lineup.members[fault.victim], self.draw_seed()
        for process in lineup.members.values():
            strike = {"number": number, "struck": self.report.struck} if process is victim else None
            process.send("rounds", seed=seed, count=count, strike=strike)
        early = None
        while "struck" not in (answer := victim.answer(10 * TIMEOUT)):
            early = answer
        self.report.struck[answer["struck"]] += 1
        self.doing += f" in {answer['struck']}"
        return early

    def stop_shortly(self, lineup: Lineup, fault: Fault) -> None:
        early = self.run_and_strike(lineup, fault, signal.SIGSTOP, count=100)
        time.sleep(fault.pause)
        victim = lineup.members[fault.victim]
        victim.signal(signal.SIGCONT)
        for index, process in lineup.members.items():
            answer = early if early and process is victim else process.answer(10 * TIMEOUT)
            self.assert_error(index, answer, None)

    def lose(self, lineup: Lineup, fault: Fault) -> None:
        """Stops or kills the victim; the others must notice, and go on without it."""
        victim = lineup.members[fault.victim]
        self.run_and_strike(lineup, fault, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP, FOREVER)
        began = time.monotonic()
        del lineup.members[fault.victim]
        allowed = 2.0 if fault.kind == "kill" else TIMEOUT + 1
        try:
            self.assert_noticed(lineup, fault, began, allowed)
            lineup.ask(10.0, "close")
            if fault.kind == "stop":
                time.sleep(max(0.0, began + fault.pause - time.monotonic()))
                victim.signal(signal.SIGCONT)
            if len(lineup.members) >= 2:
                self.open(lineup)
            if fault.kind == "stop":
                self.come_back(lineup, victim)
        finally:
            if fault.victim not in lineup.members:
                victim.kill()

    def assert_noticed(self, lineup: Lineup, fault: Fault, began: float, allowed: float) -> None:
        expected = ("PeerLostError",) if fault.kind == "kill" else ("PeerTimeoutError", "PeerLostError")
        answers = {i: process.answer(allowed + 20) for i, process in lineup.members.items()}
        for index, answer in answers.items():
            took = answer["at"] - began
            self.report.longest_seconds = max(self.report.longest_seconds, took)
            self.assert_error(index, answer, *expected)
            if took > allowed:
                raise NoAnswerError(f"process {index} noticed after {took:.2f} s, {allowed:.2f} are allowed: {answer}")

    def come_back(self, lineup: Lineup, victim: Process) -> None:
        """Who was stopped gets a typed error too; then all open a group together."""
        self.assert_error(victim.index, victim.answer(3 * TIMEOUT + 5), "PeerTimeoutError", "PeerLostError")
        victim.send("close")
        victim.answer(10.0)
        if len(lineup.members) >= 2:
            self.go_on(lineup)  # what the other does now may not change their numbers
            lineup.ask(10.0, "close")
        lineup.members = dict(sorted([*lineup.members.items(), (victim.index, victim)]))
        self.open(lineup)

    def assert_error(self, index: int, answer: dict[str, Any], *expected: str | None) -> None:
        """One of these; None: nothing may be lost. No value is wrong in any case."""
        assert not answer["wrong"], f"process {index}: {answer}"
        if answer["error"] not in expected:
            raise NoAnswerError(f"process {index} got {answer} instead of {expected}")


def count_gpus() -> int | None:
    """Without a backend in this process, which would hold their memory; None where there are none."""
    code = "import jax; print(len(jax.devices()) if jax.default_backend() != 'cpu' else 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(result.stdout) or None


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, 200)
    options.add_argument("--lineup", type=int, help="the faults of this lineup alone")
    given = options.parse_args(arguments)
    gpus = count_gpus()
    report = Report("faults", given.seed, f"{gpus} GPUs" if gpus else "CPU processes")
    for index in report.indices(given, given.lineup):
        trial = Trial(report, index, gpus)
        report.programs += 1
        try:
            trial.run(min(FAULTS_OF_A_LINEUP, given.configurations - report.configurations))
        except (AssertionError, NoAnswerError) as error:
            report.configurations += 1
            report.faults += 1
            report.failed(error, f"fault {trial.count}: {trial.doing}", f"--lineup {index}")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
