"""ragged_dot beside jax.lax's and torch's, and a dense product beside XLA's: `python -m jax_ep bench matmul`."""

import argparse
import dataclasses
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep._kit import gemm
from jax_ep.lax import ragged_dot

from .in_jit_loop import (
    Loop,
    add_pause,
    calls_between,
    compile_loops,
    describe_pause,
    in_digits,
    median_microseconds,
    microseconds,
    teraflops,
)
from .plots import Panel, add_plot, grouped_bars, write_plot
from .provenance import header

SEED = 0
OURS, PALLAS, LAX, DENSE, TORCH = "jax_ep", "by Pallas", "jax.lax.ragged_dot", "dense XLA", "torch._grouped_mm"
CALLS, LAX_CALLS = 20, 2  # jax.lax's is slow


@dataclasses.dataclass(frozen=True)
class Case:
    """lhs [rows, contracted] times rhs [groups, contracted, columns]."""

    rows: int
    contracted: int
    columns: int
    groups: int = 1
    sizes: str = "equal"  # or "drawn" of a uniform routing, "Zipf", "half empty"
    quick: bool = False
    outer: bool = False  # the gradient of rhs instead

    def __str__(self) -> str:
        shape = f"[{self.rows}, {self.contracted}] x [{self.groups}, {self.contracted}, {self.columns}]"
        of_rhs = ", gradient of rhs" if self.outer else ""
        return f"{shape}, {self.sizes}{of_rhs}" if self.groups > 1 else shape

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.contracted * self.columns


CASES = [
    Case(8192, 8192, 8192, quick=True),
    Case(4096, 2048, 7168),
    Case(5416, 6144, 1408),
    Case(32768, 7168, 4096, 64, quick=True),
    Case(32768, 7168, 4096, 64, "drawn", quick=True),
    Case(32768, 7168, 4096, 64, "Zipf", quick=True),
    Case(32768, 7168, 4096, 64, "half empty"),
    Case(32768, 4096, 7168, 64),
    Case(32768, 7168, 2048, 128, "drawn"),
    Case(32768, 2048, 7168, 128, "drawn"),
    Case(8192, 4096, 7168, 8, quick=True),
    Case(8192, 4096, 7168, 8, "Zipf"),
]
# Of the layers that `bench layer` has.
LAYER_SHAPES = [
    (65536, 2048, 768, 64),
    (32768, 7168, 2048, 128),
    (32768, 2048, 7168, 128),
    (32768, 2880, 2880, 64),
    (16384, 4096, 14336, 8),
]
PALLAS_CASES = [Case(*shape, "drawn", quick=True, outer=outer) for outer in (False, True) for shape in LAYER_SHAPES]
CPU_CASES = [Case(256, 128, 256, quick=True), Case(256, 128, 64, 8, quick=True), Case(256, 128, 64, 8, "half empty")]


def group_sizes(case: Case) -> np.ndarray:
    """Rows of each group, all rows in some group."""
    rng = np.random.default_rng(SEED)
    if case.sizes == "drawn":
        return rng.multinomial(case.rows, np.full(case.groups, 1 / case.groups)).astype(np.int32)
    popularity = np.ones(case.groups)
    if case.sizes == "Zipf":
        popularity = 1 / rng.permutation(np.arange(1, case.groups + 1))
    if case.sizes == "half empty":
        popularity[rng.permutation(case.groups)[: case.groups // 2]] = 0
    ends = np.round(np.cumsum(popularity) / popularity.sum() * case.rows)
    return np.diff(ends, prepend=0).astype(np.int32)


def make_operands(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """lhs, rhs, or in its place a cotangent [rows, columns], and group sizes."""
    keys = jax.random.split(jax.random.key(SEED))
    lhs = jax.random.normal(keys[0], (case.rows, case.contracted), jnp.bfloat16)
    shape = (case.rows, case.columns) if case.outer else (case.groups, case.contracted, case.columns)
    rhs = jax.random.normal(keys[1], shape, jnp.bfloat16)
    return lhs, rhs, jnp.asarray(group_sizes(case))


def dense(rhs: jax.Array, sizes: jax.Array, lhs: jax.Array) -> jax.Array:
    """One product with as many rows: what the machine can do."""
    del sizes
    return lhs.T @ rhs if rhs.ndim == 2 else lhs @ rhs[0]


def gradient(product: Callable[..., jax.Array], lhs: jax.Array, cotangent: jax.Array, sizes: jax.Array) -> jax.Array:
    """Of the matrices, which it does not depend on."""
    rhs = jnp.zeros((sizes.shape[0], lhs.shape[1], cotangent.shape[1]), lhs.dtype)
    return jax.vjp(lambda rhs: product(lhs, rhs, sizes), rhs)[1](cotangent)[0]


def grouped(product: Callable[..., jax.Array], rhs: jax.Array, sizes: jax.Array, lhs: jax.Array) -> jax.Array:
    return product(lhs, rhs, sizes)


def check_alike(ours: Any, others: Any, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> None:
    """Raises unless ours and the other are equal up to the rounding of bfloat16 and of float32 sums."""
    mine, other = (jax.jit(product)(lhs, rhs, sizes).astype(jnp.float32) for product in (ours, others))
    worst = float(jnp.max(jnp.abs(mine - other) - 2.0**-7 * jnp.abs(other)))
    if not worst <= 2.0**-10 * (sizes.max() if rhs.ndim == 2 else lhs.shape[1]) ** 0.5:
        raise AssertionError(f"the product differs from the other by {worst} beyond the rounding of the result")


@dataclasses.dataclass(frozen=True)
class TorchResult:
    """What `jax.block_until_ready` can wait for."""

    event: Any

    def block_until_ready(self) -> None:
        self.event.synchronize()


def torch_program(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, calls: int) -> Callable[[], TorchResult]:
    """So many calls of torch's grouped product of the same operands."""
    import torch  # pyright: ignore[reportMissingImports]

    a, b = (torch.from_dlpack(x) for x in (lhs, rhs))
    ends = torch.cumsum(torch.from_dlpack(sizes), 0, dtype=torch.int32)

    def run() -> TorchResult:
        for _ in range(calls):
            torch._grouped_mm(a, b, offs=ends)
        return TorchResult(torch.cuda.current_stream().record_event())

    return run


def measure(
    case: Case, mesh: Mesh, repeats: int, pause: float, with_torch: bool, with_pallas: bool
) -> dict[str, float]:
    """Checks ours against jax.lax's, or Pallas' against ours, then microseconds by formulation.

    All but jax.lax's take turns. A GPU that has rested in that one's slow kernels would favour whoever comes next.
    """
    lhs, rhs, sizes = make_operands(case)
    ours, by_pallas = ragged_dot, partial(ragged_dot, implementation="pallas")
    if case.outer:
        ours, by_pallas = partial(gradient, ours), partial(gradient, by_pallas)
    check_alike(*((by_pallas, ours) if with_pallas else (ours, jax.lax.ragged_dot)), lhs, rhs, sizes)
    ops = {OURS: partial(grouped, ours), DENSE: dense}
    if with_pallas:
        ops[PALLAS] = partial(grouped, by_pallas)
    calls, lax_calls = (calls_between(pause, most, case.flops) for most in (CALLS, LAX_CALLS))
    loops = [Loop(op, (rhs, sizes), lhs, calls) for op in ops.values()]
    programs: list[Callable[[], object]] = [*compile_loops(loops, mesh)]
    names = list(ops)
    if with_torch:
        loops.append(loops[0])
        programs.append(torch_program(lhs, rhs, sizes, calls))
        names.append(TORCH)
    times = dict(zip(names, median_microseconds(loops, programs, repeats, pause, hot=not pause), strict=True))
    if with_pallas:
        return times
    slow = Loop(partial(grouped, jax.lax.ragged_dot), (rhs, sizes), lhs, lax_calls)
    times[LAX] = microseconds([slow], mesh, min(repeats, 2), pause)[0]
    return {name: times[name] for name in (OURS, LAX, DENSE, TORCH) if name in times}


def line(case: Case, times: dict[str, float]) -> str:
    """TFLOP/s of each, and ours as a part of the dense product's."""
    rates = [teraflops(case.flops, time) for time in times.values()]
    mine = times.get(PALLAS, times[OURS])
    cells = [str(case), f"{mine:,.1f}", *map(in_digits, rates)]
    return f"| {' | '.join(cells)} | {times[DENSE] / mine:.2f} |"


def plot(results: dict[Case, dict[str, float]], path: Path) -> None:
    names = list(next(iter(results.values())))
    rates = {name: [teraflops(case.flops, times[name]) for case, times in results.items()] for name in names}
    grouped_bars([Panel("matrix products", list(map(str, results)), rates)], "TFLOP/s", path)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep bench matmul", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="timed loops of calls [%(default)s]")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--shapes", default="", metavar="TEXT", help="only shapes whose name has TEXT")
    parser.add_argument(
        "--implementation", choices=("auto", "pallas"), default="auto", help="pallas: Pallas kernels beside ours"
    )
    add_pause(parser)
    add_plot(parser, "matmul")
    options = parser.parse_args(arguments)

    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    with_pallas = options.implementation == "pallas"
    with_torch = not (on_cpu or with_pallas) and importlib.util.find_spec("torch") is not None
    core = "GEMM core" if not on_cpu and gemm.has_gemm() else "no GEMM core here: ragged_dot is jax.lax's"
    print(header([device], core, ["matmul", *arguments], ["torch"] if with_torch else []))
    print(f"- bfloat16; per call inside one jitted loop, median of {options.repeats} loops")
    print(f"- {describe_pause(options.pause)}")
    print(f"- {DENSE}: one product of as many rows; all but {LAX}, in which the GPU rests, take turns\n")
    others = [OURS, DENSE, PALLAS] if with_pallas else [OURS, LAX, DENSE, *([TORCH] if with_torch else [])]
    names = [f"{name}, TFLOP/s" for name in others]
    names = ["product", f"{PALLAS if with_pallas else OURS}, us", *names, "of dense"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)
    results: dict[Case, dict[str, float]] = {}
    for case in CPU_CASES if on_cpu else PALLAS_CASES if with_pallas else CASES:
        if options.shapes in str(case) and (case.quick or not options.quick):
            mesh = Mesh(np.array([device]), ("one",))
            results[case] = measure(case, mesh, options.repeats, options.pause, with_torch, with_pallas)
            print(line(case, results[case]), flush=True)
    write_plot(options.plot, partial(plot, results))
    return 0
