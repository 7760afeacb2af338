"""dispatch and combine beside DeepEP's on the GPUs of one host: `python -m jax_ep bench deep_ep --source DIR`.

`bash benchmarks/peers/deep_ep.sh DIR` builds DeepEP. Its ranks are processes, in turns with ours on the same GPUs and
ids, after the same warm-up. The host's part does not count: our calls are in jitted loops, and DeepEP's are enqueued
before the first ends. Its low-latency ops take the least of that time and of their kernels' durations, which its own
test reports.

- DeepEP's dispatch stores a token once per rank, as ours with expand=False. By default ours has a row for each expert.
- DeepEP's dispatch takes float8 tokens. Ours quantizes them.
- "DeepEP" includes all that ours does: the layout, the exchange of counts, ids and weights. The host does not wait,
  because num_worst_tokens is given. "with a handle" leaves out all but the tokens, as its own test does.
- DeepEP's combine adds one row per rank, unweighted; what sums the experts' rows before is not timed. Ours weighs and
  sums them. "one row a rank" is ours where a token has one expert on each of its ranks: like with like.
- The low-latency ops of few tokens have a row for each expert and weights, as ours, but T * R rows of room for each.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep

from . import formulations as forms
from .in_jit_loop import AXIS, HEAT_SECONDS, Loop, Program, compile_loops, on_ranks, relative_error, take_turns
from .moe import FLOAT8_ROWS, NOT_EXPANDED, our_loops
from .moe_cases import AS_ON_EIGHT, Case, Shape, capacity, load, make_ids, make_inputs
from .peers.child import HANDLE
from .peers.run import FRACTION, Child, environment
from .runner import Bench, Row, Run, log, open_all

ONE_ROW = "combine, one row a rank"
NORMAL = {  # by our op, DeepEP's
    "dispatch": "dispatch",
    f"dispatch, {NOT_EXPANDED}": "dispatch",
    FLOAT8_ROWS: "dispatch, float8",
    f"{FLOAT8_ROWS}, {NOT_EXPANDED}": "dispatch, float8",
    "combine": "combine",
    ONE_ROW: "combine",
}
LOW_LATENCY = {op: NORMAL[op] for op in ("dispatch", FLOAT8_ROWS, "combine")}
FEW_TOKENS, FEW_SMS = 128, 24  # up to so many tokens, DeepEP's low-latency ops
PATIENCE, STARTS = 60, 3  # seconds, after which DeepEP hangs; of its processes

Times = dict[str, list[float | None]]  # us of each round, by op and SMs; None where it failed


def first_of_each_rank(ids: np.ndarray, experts: int, ranks: int) -> np.ndarray:
    """The ids [T, K], with -1 for all but the first expert of a token on a rank."""
    owners = ids // (experts // ranks)
    earlier = (owners[:, :, None] == owners[:, None, :]) & np.tri(ids.shape[1], k=-1, dtype=bool)
    return np.where(earlier.any(axis=2), -1, ids)


def what_comes(ids: np.ndarray, experts: int, ranks: int) -> list[dict[str, np.ndarray]]:
    """For each rank, of the ids [R * T, K] of all: the tokens [1] and the rows of its experts [E / R] that it receives,
    and the number of ranks that receive each of its own tokens [T].
    """
    first, local = first_of_each_rank(ids, experts, ranks), experts // ranks
    tokens = np.bincount(first[first >= 0] // local, minlength=ranks)
    by_expert = np.bincount(ids.ravel(), minlength=experts)
    visits = np.count_nonzero(first >= 0, axis=1)
    each = zip(tokens, by_expert.reshape(ranks, local), visits.reshape(ranks, -1), strict=True)
    return [{"tokens": np.array([t]), "by_expert": e, "visits": v} for t, e, v in each]


class DeepEP:
    """Its ranks, each a process. A failure ends them all, and a note says why; the next op starts them anew."""

    def __init__(self, run: Run, case: Case, ids: np.ndarray, low_latency: bool, folder: Path):
        settings = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_IB": "1", "NVSHMEM_DISABLE_NVLS": "1"}
        self._variables = environment("deep_ep", folder) | settings | {"GLOO_SOCKET_IFNAME": "lo"}
        self._variables["PYTHONPATH"] = os.pathsep.join(
            (str(run.options.source.resolve()), self._variables["PYTHONPATH"])
        )
        self._note, self._folder, self._children, self._starts = run.note, folder, [], 0
        self._failed: set[str] = set()
        ranks = run.group.size
        self._shape = {"ranks": ranks, "low_latency": low_latency}
        self._shape |= {"hidden": case.shape.hidden, "experts": case.shape.experts}
        for rank, expected in enumerate(what_comes(ids, case.shape.experts, ranks)):
            own = np.split(ids, ranks)[rank]
            weights = np.random.default_rng(rank).random(own.shape, np.float32)
            np.savez(folder / f"{rank}.npz", allow_pickle=False, ids=own, weights=weights, **expected)

    def microseconds(self, op: str, heat: float) -> float | None:
        """Of the slowest rank; None if it failed."""
        if op in self._failed or not (self._children or self._start()):
            return None
        return max(
            (answer[op] for answer in self._ask([{"quantity": op, "heat": heat}] * len(self._children))), default=None
        )

    def _start(self) -> bool:
        if self._starts == STARTS:
            return False
        self._starts += 1
        shape, ranks = self._shape | {"store": str(self._folder / f"store{self._starts}")}, range(self._shape["ranks"])
        self._children = [Child("deep_ep", self._variables, self._folder / f"{rank}.log") for rank in ranks]
        files = [str(self._folder / f"{rank}.npz") for rank in ranks]
        answers = self._ask(
            [{"shape": shape | {"rank": rank}, "operands": file, "expected": file} for rank, file in enumerate(files)]
        )
        for op, (time, sms, chunk) in answers[0]["chosen"].items() if answers else ():
            self._note(f"DeepEP's {op}: {sms} SMs, {chunk} rows at a time, {time:.1f} us when it was tuned")
        return bool(answers)

    def _ask(self, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers of all ranks. Empty after a failure, which ends ranks that hang, too."""
        with ThreadPoolExecutor(len(questions)) as pool:
            asked = [pool.submit(answer_of, *both) for both in zip(self._children, questions, strict=True)]
            failed = next((each.result()["failed"] for each in as_completed(asked) if "failed" in each.result()), None)
            if failed is not None:
                self.close()
        if failed is None:
            log(f"DeepEP: {asked[0].result()}")
            return [each.result() for each in asked]
        op = questions[0].get("quantity", "prepare")
        self._failed.add(op)
        self._note(f"DeepEP failed at {op}: {failed}")
        for each in self._folder.glob("*.log"):
            log(f"{each.name}: {each.read_text(errors='replace')[-2000:]}")
        return []

    def close(self) -> None:
        while self._children:
            self._children.pop().close()


def answer_of(child: Child, question: dict[str, Any]) -> dict[str, Any]:
    try:
        return child.ask(PATIENCE, **question)
    except (TimeoutError, EOFError, OSError, ValueError) as lost:  # the last two: it was closed meanwhile
        return {"failed": str(lost)}


def checked_loops(case: Case, ids: np.ndarray, groups: dict[str, jax_ep.Group]) -> dict[str, Loop]:
    """By our op and its SMs, after a check that the rows arrive that numpy counts, and that weighted sums return.

    `groups`: by SMs, among them "all".
    """
    shape, group = case.shape, groups["all"]
    room, inputs = capacity(case, load(ids, shape.experts, group.size)), make_inputs(shape, ids, group.mesh)
    one_row = make_inputs(shape, first_of_each_rank(ids, shape.experts, group.size), group.mesh)
    ours = forms.jax_ep_ops(group, shape.experts, room)

    def both(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax_ep.Dispatched, jax.Array]:
        state = ours.dispatch(tokens, ids, weights)
        wanted = tokens.astype(jnp.float32) * jnp.where(ids >= 0, weights, 0).sum(axis=1, keepdims=True)
        return state, relative_error(wanted, ours.combine(state, weights))[None]

    states = []
    for operands in (inputs, one_row):
        state, errors = on_ranks(both, group.mesh)(*operands)
        of_all = np.asarray(operands[1])
        arrived, wanted = np.asarray(state.group_sizes), np.bincount(of_all[of_all >= 0], minlength=shape.experts)
        if not np.all(np.asarray(errors) < 2**-7) or np.any(arrived != wanted):
            raise AssertionError(f"{case}: sums are off by {errors}, rows by {arrived - wanted}")
        states.append(state)
    found = {}
    for sms, one in groups.items():
        loops = our_loops(shape, room, one, inputs, states[0])
        loops[ONE_ROW] = our_loops(shape, room, one, one_row, states[1])["combine"]
        found |= {f"{op}, {sms}": loop for op, loop in loops.items()}
    return found


def rows(case: Case, run: Run) -> Iterator[Row]:
    group, low_latency = run.group, case.shape.tokens <= FEW_TOKENS
    ids = make_ids(case, group.size)
    ops, heat = LOW_LATENCY if low_latency else NORMAL, 0 if run.on_cpu else HEAT_SECONDS
    times: Times = {}
    with contextlib.ExitStack() as stack:
        groups = {"all": group}
        if not low_latency:
            few = stack.enter_context(jax_ep.Group(group.mesh, AXIS, max_sms=FEW_SMS))
            groups = {str(FEW_SMS): few, "all": group}
        wanted = {f"{op}, {sms}": f"{theirs}, {sms}" for op, theirs in ops.items() for sms in groups}
        ours = {name: loop for name, loop in checked_loops(case, ids, groups).items() if name in wanted}
        programs = compile_loops(ours, group.mesh)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        deep_ep = stack.enter_context(contextlib.closing(DeepEP(run, case, ids, low_latency, folder)))
        turns: dict[str, Callable[[], float | None]] = {}  # each of DeepEP's once
        for name, other in wanted.items():
            turns[name] = partial(our_microseconds, programs[name], heat > 0)
            for theirs in (other, HANDLE + other) if other.startswith("dispatch") and not low_latency else (other,):
                turns.setdefault(f"DeepEP {theirs}", partial(deep_ep.microseconds, theirs, heat))
        for _ in range(run.options.repeats):
            for name, take in turns.items():
                times.setdefault(name, []).append(time := take())
                log(f"{name}: {time} us")
        for one in groups.values():
            one.check()
    yield from rows_of(case, wanted, times)


def our_microseconds(program: Program, hot: bool) -> float:
    return take_turns({"": program}, repeats=1, hot=hot)[""]


def rows_of(case: Case, wanted: dict[str, str], times: Times) -> Iterator[Row]:
    """Medians, and the median of the ratios of the rounds. `wanted`: DeepEP's op by ours, each with its SMs."""
    for name, other in wanted.items():
        mine, theirs, handle = (times.get(each, []) for each in (name, f"DeepEP {other}", f"DeepEP {HANDLE}{other}"))
        ratios = [a / b for a, b in zip(mine, theirs, strict=True) if a and b]
        known = [[time for time in each if time] for each in (mine, theirs, handle)]
        ours, others, handles = (f"{statistics.median(each):,.1f}" if each else "-" for each in known)
        op, _, sms = name.rpartition(", ")
        yield {
            "shape": case,
            "op": op,
            "SMs": sms,
            "jax_ep, us": ours,
            "DeepEP, us": others,
            "jax_ep / DeepEP": f"{statistics.median(ratios):.2f}" if ratios else "-",
            "DeepEP with a handle, us": handles,
        }


def open_beside(options: argparse.Namespace) -> jax_ep.Group:
    if not list(options.source.glob("deep_ep_cpp*.so")):
        raise SystemExit(
            f"no deep_ep_cpp*.so in {options.source}: `bash benchmarks/peers/deep_ep.sh {options.source}` first"
        )
    os.environ.setdefault(FRACTION, "0.5")  # DeepEP's processes need the rest
    return open_all(options)


def notes(run: Run) -> list[str]:
    return [
        "DeepEP V1; all: ours on as many SMs as it likes, DeepEP on the best of several numbers",
        f"median of {run.options.repeats} rounds of turns, each after {HEAT_SECONDS:g} s of the same",
    ]


def cases(run: Run) -> list[Case]:
    counts = dict.fromkeys((run.options.tokens, FEW_TOKENS))  # once each
    v3 = [Case(Shape(tokens, 7168, 8, 256), quick=True) for tokens in counts]
    return v3 + (AS_ON_EIGHT if run.group.size == 2 else [])


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, required=True, metavar="DIR", help="where DeepEP was built")
    parser.add_argument("--ranks", dest="devices", type=int, help="the first so many GPUs [all]")
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank, of DeepSeek-V3's shape [%(default)s]")


BENCH = Bench(
    __doc__,
    cases,
    rows,
    notes,
    arguments,
    quick="the shape of DeepSeek-V3 alone",
    repeats=3,
    open=open_beside,
    packages=("torch", "nvidia-nvshmem-cu13"),
)
