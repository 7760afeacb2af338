"""ragged_dot of float8 operands beside bfloat16's, XLA's and torch's: `python -m jax_ep bench matmul_float8`."""

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep._kit import gemm
from jax_ep.float8 import Float8Rows, Float8Weights, dequantize, quantize_rows, quantize_weights, ragged_dot

from .in_jit_loop import (
    Loop,
    add_pause,
    calls_between,
    compile_loops,
    describe_pause,
    in_digits,
    median_microseconds,
    teraflops,
)
from .matmul import CALLS, Case, TorchResult, make_operands, plot
from .plots import add_plot, write_plot
from .provenance import header

OURS, BFLOAT16, DENSE, TORCH = "jax_ep", "jax_ep, bfloat16", "dense XLA", "torch"
GATHERED = "jax_ep, gathered"  # rows of a random permutation
CASES = [
    Case(8192, 8192, 8192, quick=True),
    Case(32768, 7168, 4096, 64),
    Case(32768, 7168, 4096, 64, "drawn", quick=True),
    Case(32768, 7168, 4096, 64, "Zipf"),
    Case(32768, 2048, 7168, 64, "drawn", quick=True),
]
CPU_CASES = [Case(256, 128, 256, quick=True), Case(256, 256, 128, 8, "drawn", quick=True)]


def dense(rhs: jax.Array, lhs: jax.Array) -> jax.Array:
    """One product with as many rows and no scales: what the machine can do."""
    return jax.lax.dot_general(lhs, rhs, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def grouped(rhs: Any, sizes: jax.Array, lhs: Any) -> jax.Array:
    return ragged_dot(lhs, rhs, sizes)


def gathered(order: jax.Array, rhs: Any, sizes: jax.Array, lhs: Any) -> jax.Array:
    return ragged_dot(lhs, rhs, sizes, lhs_indices=order)


def check_alike(lhs: Float8Rows, rhs: Float8Weights, sizes: jax.Array) -> None:
    """Raises unless the product is that of the same values in bfloat16, up to rounding."""

    def worst(lhs: Float8Rows, rhs: Float8Weights, sizes: jax.Array) -> jax.Array:
        ours, other = (
            product.astype(jnp.float32)
            for product in (grouped(rhs, sizes, lhs), grouped(dequantize(rhs), sizes, dequantize(lhs)))
        )
        return jnp.max(jnp.abs(ours - other)) / jnp.max(jnp.abs(other))

    found = float(jax.jit(worst)(lhs, rhs, sizes))
    if not found <= 2.0**-6:
        raise AssertionError(f"the product of float8 operands differs by {found} of its largest value")


def torch_program(lhs: Float8Rows, rhs: Float8Weights, sizes: jax.Array, calls: int) -> Callable[[], TorchResult]:
    """So many calls of torch's product of the same values, with a scale per row and one per column."""
    import torch  # pyright: ignore[reportMissingImports]

    def take(bits: jax.Array) -> Any:
        return torch.from_dlpack(bits).view(torch.float8_e4m3fn)

    a, b = take(lhs.bits), take(rhs.bits).transpose(-2, -1)
    of_rows = torch.ones(a.shape[0], device=a.device)
    of_columns = torch.ones(b.shape[0], b.shape[2], device=a.device)
    ends = torch.cumsum(torch.from_dlpack(sizes), 0, dtype=torch.int32)

    def run() -> TorchResult:
        for _ in range(calls):
            if b.shape[0] == 1:
                torch._scaled_mm(a, b[0], of_rows[:, None], of_columns, out_dtype=torch.bfloat16)
            else:
                torch._scaled_grouped_mm(a, b, of_rows, of_columns, offs=ends, out_dtype=torch.bfloat16)
        return TorchResult(torch.cuda.current_stream().record_event())

    return run


def measure(case: Case, mesh: Mesh, repeats: int, pause: float, with_torch: bool) -> dict[str, float]:
    """Checks the product, then microseconds by formulation, all in turns."""
    rows, weights, sizes = make_operands(case)
    lhs, rhs = jax.jit(quantize_rows)(rows), jax.jit(quantize_weights)(weights)
    check_alike(lhs, rhs, sizes)
    order = jax.random.permutation(jax.random.key(0), lhs.bits.shape[0])
    calls = calls_between(pause, CALLS, case.flops)
    loops = {
        OURS: Loop(grouped, (rhs, sizes), lhs, calls),
        GATHERED: Loop(gathered, (order, rhs, sizes), lhs, calls),
        BFLOAT16: Loop(grouped, (weights, sizes), rows, calls),
        DENSE: Loop(dense, (rhs.values[0],), lhs.values, calls),
    }
    programs: list[Callable[[], object]] = [*compile_loops(list(loops.values()), mesh)]
    if with_torch:
        loops[TORCH] = loops[OURS]
        programs.append(torch_program(lhs, rhs, sizes, calls))
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    times = median_microseconds(list(loops.values()), programs, repeats, pause, hot=not (pause or on_cpu))
    return dict(zip(loops, times, strict=True))


def line(case: Case, times: dict[str, float]) -> str:
    """TFLOP/s of each, and how many times as fast as bfloat16 ours is."""
    rates = [teraflops(case.flops, time) for time in times.values()]
    cells = [str(case), f"{times[OURS]:,.1f}", *map(in_digits, rates)]
    return f"| {' | '.join(cells)} | {times[BFLOAT16] / times[OURS]:.2f} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep bench matmul_float8", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="timed loops of calls [%(default)s]")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    add_pause(parser)
    add_plot(parser, "matmul_float8")
    options = parser.parse_args(arguments)

    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    with_torch = not on_cpu and importlib.util.find_spec("torch") is not None
    core = "GEMM core" if not on_cpu and gemm.has_gemm() else "no GEMM core here: multiplied in bfloat16"
    print(header([device], core, ["matmul_float8", *arguments], ["torch"] if with_torch else []))
    print("- float8_e4m3fn, a scale per 128 values of a row and per 128 x 128 weights; results in bfloat16")
    print(f"- per call inside one jitted loop, median of {options.repeats} loops, all in turns")
    print(f"- {'cold, on a CPU' if on_cpu else describe_pause(options.pause)}")
    print(f"- {DENSE}: one product of as many rows in float8, without scales")
    print(f"- {TORCH}: _scaled_grouped_mm, or _scaled_mm, with a scale per row and one per column\n")
    names = [f"{name}, TFLOP/s" for name in (OURS, GATHERED, BFLOAT16, DENSE, *([TORCH] if with_torch else []))]
    print(f"| product | jax_ep, us | {' | '.join(names)} | of bfloat16 |\n|{'---|' * (len(names) + 3)}", flush=True)
    results: dict[Case, dict[str, float]] = {}
    mesh = Mesh(np.array([device]), ("one",))
    for case in CPU_CASES if on_cpu else CASES:
        if case.quick or not options.quick:
            results[case] = measure(case, mesh, options.repeats, options.pause, with_torch)
            print(line(case, results[case]), flush=True)
    write_plot(options.plot, partial(plot, results))
    return 0
