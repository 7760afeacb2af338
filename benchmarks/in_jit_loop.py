"""Microseconds per call of an op inside one jitted loop, so that the host's part of a call does not count."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

AXIS = "ep"  # of a mesh
MORE_EXECUTIONS = 2  # when a program warms up
MOST_BEFORE, MOST_TIMED = 25, 8
IN_FLIGHT = 2  # executions that a device has before it: it does not wait for the host, nor the host long for it
HEAT_SECONDS = 0.5  # until a GPU at its power limit has found its clocks: too high ones at first, then too low ones

Name = TypeVar("Name")


def on_ranks(function: Callable[..., Any], mesh: Mesh) -> Any:
    """`function` of one rank's arrays, jitted; arrays are sharded over all ranks of the mesh."""
    spec = P(mesh.axis_names)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def draw(mesh: Mesh, seed: int, *sides: int, dtype: Any, scale: float = 1.0) -> jax.Array:
    """Normal numbers, drawn on the devices over which the first axis is sharded."""
    place = NamedSharding(mesh, P(mesh.axis_names))
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), sides, dtype) * scale, out_shardings=place)()


def relative_error(a: jax.Array, b: jax.Array) -> jax.Array:
    """The largest difference, as a part of the largest value."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))


def check_alike(what: str, found: jax.Array, wanted: jax.Array, most: float) -> None:
    """Raises unless the relative error is at most `most`."""
    error = float(jax.jit(relative_error)(found, wanted))
    if not error <= most:
        raise AssertionError(f"{what}: results differ by {error} of the largest value, {most} is allowed")


@dataclasses.dataclass(frozen=True)
class Loop:
    """`calls` of `op(*operands, own)` per execution, `unroll` of them in the body of the loop.

    What `op` returns is kept alive until the body ends: return everything that XLA could leave out otherwise.
    """

    op: Callable[..., Any]
    operands: tuple[Any, ...]
    own: Any
    calls: int
    unroll: int = 1

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        return on_ranks(self._run, mesh).lower(*self.arguments)

    @property
    def arguments(self) -> tuple[Any, ...]:
        # One array under many parameters: XLA cannot tell, so it does not merge the calls of a body into one.
        return self.operands, (self.own,) * self.unroll

    def _run(self, operands: tuple[Any, ...], own: tuple[Any, ...]) -> jax.Array:
        def body(_: jax.Array, seen: jax.Array) -> jax.Array:
            kept, last = [], seen
            for mine in own:
                # The operands of a call appear to depend on the call before: neither hoisted nor reordered.
                held, last = jax.lax.optimization_barrier(((*operands, mine), last))
                kept.append(last)
                last = self.op(*held)
            kept.append(jax.lax.optimization_barrier(last))
            # One value of each result, read by one small kernel per body.
            return _one_of_each(kept)

        assert self.calls % self.unroll == 0
        return jax.lax.fori_loop(0, self.calls // self.unroll, body, jnp.zeros(1))


@dataclasses.dataclass(frozen=True)
class CarryingLoop(Loop):
    """Holds all results in the loop's state: for ops of XLA's own, which it fuses with the reading of one value."""

    def _run(self, operands: tuple[Any, ...], own: tuple[Any, ...]) -> jax.Array:
        def body(_: jax.Array, state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            results, seen = state
            held, results = jax.lax.optimization_barrier(((*operands, *own), results))
            return self.op(*held), seen + _one_of_each(results)

        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(self.op, *operands, *own))
        results, seen = jax.lax.fori_loop(0, self.calls, body, (nothing, jnp.zeros(1)))
        return seen + _one_of_each(results)


def _one_of_each(results: Any) -> jax.Array:
    return sum((leaf.ravel()[:1].astype(jnp.float32) for leaf in jax.tree.leaves(results)), jnp.zeros(1))


@dataclasses.dataclass(frozen=True)
class ChainedLoop(Loop):
    """`own` is the last operand of the first call, and what `op` returns that of the next: written in place."""

    def _run(self, operands: tuple[Any, ...], own: tuple[Any, ...]) -> jax.Array:
        return _one_of_each(jax.lax.fori_loop(0, self.calls, lambda _, last: self.op(*operands, last), own[0]))


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled loop: a call is one execution."""

    compiled: jax.stages.Compiled
    arguments: tuple[Any, ...]
    calls: int  # of the op

    def __call__(self) -> Any:
        return self.compiled(*self.arguments)


@dataclasses.dataclass(frozen=True)
class DonatingProgram(Program):
    """Donates what it holds, as the last argument; returns what it holds from then on, and a value to wait for."""

    held: list[Any]

    def __call__(self) -> Any:
        self.held[0], seen = self.compiled(*self.arguments, self.held[0])
        return seen


def compile_loops(loops: Mapping[Name, Loop], mesh: Mesh) -> dict[Name, Program]:
    compiled = compile_all([loop.lower(mesh) for loop in loops.values()])
    return {
        name: Program(one, loop.arguments, loop.calls)
        for (name, loop), one in zip(loops.items(), compiled, strict=True)
    }


def compile_all(lowered: Sequence[jax.stages.Lowered]) -> list[jax.stages.Compiled]:
    """All at once, each in a thread."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda one: one.compile(), lowered))


def teraflops(flops: float, microseconds: float) -> str:
    rate = 1e-6 * flops / microseconds
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}"


def take_turns(programs: Mapping[Name, Program], repeats: int, hot: bool = False) -> dict[Name, float]:
    """Microseconds per call: medians over `repeats` turns.

    Executions follow others, so what the first takes to start does not count: a millisecond or more. `hot`: a loop has
    run for a while before the calls that count, so that no loop profits from those before it.
    """
    before = {name: _executions_before(program, hot) for name, program in programs.items()}
    times: dict[Name, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            timed = min(before[name], MOST_TIMED)
            times[name].append(1e6 * _seconds(program, before[name], timed) / (timed * program.calls))
    return {name: statistics.median(each) for name, each in times.items()}


def _executions_before(program: Program, hot: bool) -> int:
    """Warms up; returns how many executions go before: those of HEAT_SECONDS in a hot loop, or MOST_BEFORE.

    No fewer than IN_FLIGHT: the first one ends before the host, which launches IN_FLIGHT more, looks at it.
    """
    _seconds(program, IN_FLIGHT, MORE_EXECUTIONS)
    if not hot:
        return IN_FLIGHT
    return max(IN_FLIGHT, min(MOST_BEFORE, math.ceil(HEAT_SECONDS / _seconds(program, IN_FLIGHT, 1))))


def _seconds(program: Program, before: int, timed: int) -> float:
    """The seconds of `timed` executions, with `before` executions before and IN_FLIGHT after. None waits for the host.

    IN_FLIGHT more keep the host busy to the end, so that its time shows if it takes longer than the devices.
    """
    results: list[Any] = []
    ended: list[float] = []
    for index in range(before + timed + IN_FLIGHT):
        results.append(program())
        if index >= IN_FLIGHT:
            jax.block_until_ready(results[index - IN_FLIGHT])
            ended.append(time.perf_counter())
    jax.block_until_ready(results)
    return ended[-1] - ended[before - 1]
