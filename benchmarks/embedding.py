"""Training steps of an embedding table by bags of ids, on one device: `python -m jax_ep bench embedding`.

A step is the gradient of a loss of bags, the sums of the gradients of a row, and the update of the table and the
states. torch's `EmbeddingBag(sparse=True)` with `SparseAdam` runs in the same turns, where torch is installed.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_ep import SparseRows, embedding

from .in_jit_loop import HEAT_SECONDS, DonatingProgram, Loop, check_alike, compile_loops
from .peers.run import PATIENCE, Child, environment
from .peers.torch_embedding import LEARNING_RATE, SCRAMBLE
from .runner import Bench, Row, Run
from .sparse import KINDS, SEED, Shape, draw_ids

PEER = "torch_embedding"
OPTIMIZERS: dict[str, Callable[[], embedding.RowOptimizer]] = {
    "rowwise Adagrad": lambda: embedding.rowwise_adagrad(LEARNING_RATE),
    "Adam": lambda: embedding.by_rows(optax.adam(LEARNING_RATE)),
}

Carry = tuple[jax.Array, Any]  # a table and its state
Step = Callable[..., Carry]  # of ids, weights, targets and the carry


@dataclasses.dataclass(frozen=True)
class Case:
    optimizer: str
    kind: str
    num_rows: int
    width: int
    bags: int
    size: int  # of a bag
    quick: bool = True

    def __str__(self) -> str:
        table = f"{self.num_rows:,} x {self.width} float32"
        return f"{self.optimizer}, {table}, {self.bags:,} bags of {self.size}, {self.kind} ids"

    def draw(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids [bags, size], weights [width], targets [bags]."""
        rng = np.random.default_rng(SEED)
        ids = draw_ids(self.kind, Shape(self.num_rows, self.width, self.bags * self.size), 1)
        weights, targets = (rng.standard_normal(count, np.float32) for count in (self.width, self.bags))
        return ids.reshape(self.bags, self.size), weights, targets

    @functools.partial(jax.jit, static_argnums=0)
    def table(self) -> jax.Array:
        """Numbers that torch draws, too."""
        number = jax.lax.iota(jnp.uint32, self.num_rows * self.width).reshape(self.num_rows, self.width)
        return ((number * SCRAMBLE) & 0xFFFF).astype(jnp.float32) / 2**16 - 0.5


def loss(rows: jax.Array, ids: jax.Array, weights: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.sum((embedding.bag(rows, ids) @ weights - targets) ** 2)


def gradient_of(table: jax.Array, ids: jax.Array, weights: jax.Array, targets: jax.Array) -> SparseRows:
    return embedding.sparse_value_and_grad(loss)(table, ids, ids, weights, targets)[1]


def by_step(optimizer: embedding.RowOptimizer, *operands: Any) -> Carry:
    *given, (table, state) = operands
    return optimizer.step(table, state, gradient_of(table, *given))


def by_updates(optimizer: embedding.RowOptimizer, *operands: Any) -> Carry:
    *given, (table, state) = operands
    updates, state = optimizer.update(gradient_of(table, *given), state, table)
    return embedding.apply_updates(table, updates), state


def program(step: Step, operands: tuple[jax.Array, ...], carry: Carry, calls: int) -> DonatingProgram:
    """A loop of steps."""

    def loop(*arguments: Any) -> tuple[Carry, jax.Array]:
        *given, carry = arguments
        carry = jax.lax.fori_loop(0, calls, lambda _, carry: step(*given, carry), carry)
        return carry, carry[0][:1, :1]

    compiled = jax.jit(loop, donate_argnums=len(operands)).lower(*operands, carry).compile()
    return DonatingProgram(compiled, operands, calls, [carry])


CPU_CASES = [Case(optimizer, "Zipf", 2_000, 16, 64, 5) for optimizer in OPTIMIZERS]
GPU_CASES = [Case(optimizer, kind, 10_000_000, 64, 65_536, 20) for optimizer in OPTIMIZERS for kind in KINDS]


def rows(case: Case, run: Run) -> Iterator[Row]:
    """Checks the ways against each other, and times them in turns."""
    optimizer, drawn = OPTIMIZERS[case.optimizer](), case.draw()
    operands, calls = tuple(map(jnp.asarray, drawn)), 3 if run.on_cpu else 20
    ways: dict[str, Step] = {
        "update, apply_updates": functools.partial(by_updates, optimizer),
        "step": functools.partial(by_step, optimizer),
    }

    def start() -> Carry:
        table = case.table()
        return table, optimizer.init(table)

    after = [jax.jit(one, donate_argnums=3)(*operands, start())[0] for one in ways.values()]
    check_alike(str(case), after[1], after[0], 1e-5)
    some = np.unique(drawn[0])[:256]
    wanted = np.asarray(after[0][some])
    del after
    gradient = Loop(lambda *each: gradient_of(each[-1], *each[:-1]).values, operands, case.table(), calls)
    programs: dict[str, Any] = {"gradient alone": compile_loops({"": gradient}, run.mesh)[""]}
    programs |= {name: program(one, operands, start(), calls) for name, one in ways.items()}
    times = run.turns(programs, hot=True)
    torch = by_torch(case, drawn, some, wanted, run) if case.optimizer == "Adam" else None
    yield {
        "embedding step": case,
        **{f"{name}, us": f"{time:,.0f}" for name, time in times.items()},
        "of update, apply_updates": f"{times['step'] / times['update, apply_updates']:.2f}",
        "torch, us": "-" if torch is None else f"{torch:,.0f}",
    }


def by_torch(case: Case, drawn: tuple[np.ndarray, ...], some: np.ndarray, wanted: np.ndarray, run: Run) -> float | None:
    """Microseconds of torch's step, whose first one must give the `wanted` rows of the table; None without torch."""
    if importlib.util.find_spec("torch") is None:
        run.note("torch is not installed")
        return None
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        child = Child(PEER, environment(PEER, folder), folder / "log")
        stack.callback(child.close)
        files = {"operands": str(folder / "operands.npz"), "expected": str(folder / "expected.npz")}
        ids, weights, targets = drawn
        sizes = {"num_rows": np.array(case.num_rows), "checked": some}
        np.savez(files["operands"], allow_pickle=False, ids=ids, weights=weights, targets=targets, **sizes)
        np.savez(files["expected"], allow_pickle=False, rows=wanted)
        prepared = child.ask(PATIENCE, shape=str(case), **files)
        if not prepared.get("error", 1) <= 1e-3:
            run.note(f"torch failed at {case}: {prepared}")
            return None
        heat = 0 if run.on_cpu else HEAT_SECONDS
        asked = [child.ask(PATIENCE, quantity="step", heat=heat)["step"] for _ in range(run.options.repeats)]
        return statistics.median(asked)


NOTES = (
    "table and states are donated",
    "gradient alone: with a row for each id, which `step` on a GPU does not compute",
    "torch: EmbeddingBag(sparse=True) and SparseAdam, by the host's clock, after the others",
)
BENCH = Bench(
    __doc__,
    lambda run: CPU_CASES if run.on_cpu else GPU_CASES,
    rows,
    lambda run: NOTES,
    quick="fewer shapes",
    open=lambda _: None,
    packages=("optax", "torch"),
)
