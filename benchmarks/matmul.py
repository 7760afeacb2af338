"""ragged_dot beside jax.lax's, and a dense product of XLA's: `python -m jax_ep bench matmul`."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import float8
from jax_ep._kit import gemm
from jax_ep.lax import ragged_dot

from .in_jit_loop import Loop, check_alike, teraflops
from .runner import Bench, Row, Run

SEED = 0
OURS, PALLAS, BFLOAT16 = "jax_ep", "by Pallas", "jax_ep, bfloat16"
LAX, DENSE = "jax.lax.ragged_dot", "dense XLA"
CALLS, LAX_CALLS = 20, 2  # jax.lax's is slow


@dataclasses.dataclass(frozen=True)
class Case:
    """lhs [rows, contracted] times rhs [groups, contracted, columns]."""

    rows: int
    contracted: int
    columns: int
    groups: int = 1
    sizes: str = "equal"  # or "drawn" of a uniform routing, "Zipf"
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
FLOAT8_CASES = [
    Case(8192, 8192, 8192, quick=True),
    Case(32768, 7168, 4096, 64),
    Case(32768, 7168, 4096, 64, "drawn", quick=True),
    Case(32768, 7168, 4096, 64, "Zipf"),
    Case(32768, 2048, 7168, 64, "drawn", quick=True),
]
CPU_CASES = [Case(256, 128, 256, quick=True), Case(256, 256, 128, 8, quick=True), Case(256, 256, 128, 8, "Zipf")]


def group_sizes(case: Case) -> np.ndarray:
    """Rows of each group, all rows in some group."""
    rng = np.random.default_rng(SEED)
    if case.sizes == "drawn":
        return rng.multinomial(case.rows, np.full(case.groups, 1 / case.groups)).astype(np.int32)
    popularity = np.ones(case.groups)
    if case.sizes == "Zipf":
        popularity = 1 / rng.permutation(np.arange(1, case.groups + 1))
    ends = np.round(np.cumsum(popularity) / popularity.sum() * case.rows)
    return np.diff(ends, prepend=0).astype(np.int32)


def make_operands(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """lhs, rhs, or in its place a cotangent [rows, columns], and group sizes."""
    keys = jax.random.split(jax.random.key(SEED))
    lhs = jax.random.normal(keys[0], (case.rows, case.contracted), jnp.bfloat16)
    shape = (case.rows, case.columns) if case.outer else (case.groups, case.contracted, case.columns)
    rhs = jax.random.normal(keys[1], shape, jnp.bfloat16)
    return lhs, rhs, jnp.asarray(group_sizes(case))


def dense(rhs: Any, sizes: jax.Array, lhs: Any) -> jax.Array:
    """One product with as many rows, in float8 without scales: what the machine can do."""
    del sizes
    if isinstance(lhs, float8.Float8Rows):
        axes = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(lhs.values, rhs.values[0], axes, preferred_element_type=jnp.bfloat16)
    return lhs.T @ rhs if rhs.ndim == 2 else lhs @ rhs[0]


def gradient(product: Callable[..., jax.Array], lhs: jax.Array, cotangent: jax.Array, sizes: jax.Array) -> jax.Array:
    """Of the matrices, which it does not depend on."""
    rhs = jnp.zeros((sizes.shape[0], lhs.shape[1], cotangent.shape[1]), lhs.dtype)
    return jax.vjp(lambda rhs: product(lhs, rhs, sizes), rhs)[1](cotangent)[0]


def grouped(product: Callable[..., jax.Array], rhs: Any, sizes: jax.Array, lhs: Any) -> jax.Array:
    return product(lhs, rhs, sizes)


def in_bfloat16(lhs: float8.Float8Rows, rhs: float8.Float8Weights, sizes: jax.Array) -> jax.Array:
    """The product of the same values."""
    return ragged_dot(float8.dequantize(lhs), float8.dequantize(rhs), sizes)


def check_products(mine: Any, others: Any, *operands: Any) -> None:
    """Raises unless both are equal up to the rounding of bfloat16, or of the sums of float8."""
    most = 2.0**-6 if isinstance(operands[0], float8.Float8Rows) else 2.0**-8
    check_alike("products", jax.jit(mine)(*operands), jax.jit(others)(*operands), most)


def ways(case: Case, by: str) -> tuple[dict[str, tuple[Any, Any, Any]], jax.Array]:
    """By formulation its product of (rhs, sizes, lhs), lhs and rhs, the first that of `by`; and group sizes.

    Checks it against jax.lax's, that of Pallas against ours, and that of float8 against bfloat16.
    """
    lhs, rhs, sizes = make_operands(case)
    ours, by_pallas = ragged_dot, partial(ragged_dot, implementation="pallas")
    if by == "float8":
        narrow = jax.jit(float8.quantize_rows)(lhs), jax.jit(float8.quantize_weights)(rhs)
        check_products(float8.ragged_dot, in_bfloat16, *narrow, sizes)
        ours = partial(grouped, float8.ragged_dot)
        return {OURS: (ours, *narrow), BFLOAT16: (ours, lhs, rhs), DENSE: (dense, *narrow)}, sizes
    if case.outer:
        ours, by_pallas = partial(gradient, ours), partial(gradient, by_pallas)
    check_products(*((by_pallas, ours) if by == "pallas" else (ours, jax.lax.ragged_dot)), lhs, rhs, sizes)
    products = {OURS: partial(grouped, ours), DENSE: dense}
    if by == "pallas":
        products = {PALLAS: partial(grouped, by_pallas)} | products
    return {name: (one, lhs, rhs) for name, one in products.items()}, sizes


def rows(case: Case, run: Run) -> Iterator[Row]:
    """TFLOP/s of each formulation, and the first as a part of the dense product's.

    All but jax.lax's take turns. A GPU that has rested in that one's slow kernels would favour whoever comes next.
    """
    found, sizes = ways(case, run.options.by)
    times = run.time({name: Loop(op, (rhs, sizes), lhs, CALLS) for name, (op, lhs, rhs) in found.items()}, hot=True)
    if run.options.by == "core":
        _, lhs, rhs = found[OURS]
        times |= run.time({LAX: Loop(partial(grouped, jax.lax.ragged_dot), (rhs, sizes), lhs, LAX_CALLS)}, most=2)
    first, mine = next(iter(times.items()))
    yield {
        "product": case,
        f"{first}, us": f"{mine:,.1f}",
        **{f"{name}, TFLOP/s": teraflops(case.flops, time) for name, time in times.items()},
        "of dense": f"{times[DENSE] / mine:.2f}",
    }


def cases(run: Run) -> list[Case]:
    return CPU_CASES if run.on_cpu else {"core": CASES, "pallas": PALLAS_CASES, "float8": FLOAT8_CASES}[run.options.by]


def notes(run: Run) -> Iterator[str]:
    by = run.options.by
    core = "by CUDA kernels" if not run.on_cpu and gemm.has_gemm() else "no kernels for products here: XLA multiplies"
    yield f"{core}; results in bfloat16"
    yield f"{DENSE}: one product of as many rows{', in float8 without scales' if by == 'float8' else ''}"
    if by == "core":
        yield f"{LAX} has turns of its own, in which the GPU rests"


def arguments(parser: argparse.ArgumentParser) -> None:
    beside = "pallas: Pallas kernels beside ours; float8: operands in float8 beside bfloat16 [%(default)s]"
    parser.add_argument("--by", choices=("core", "pallas", "float8"), default="core", help=beside)


BENCH = Bench(__doc__, cases, rows, notes, arguments, quick="fewer shapes", open=lambda _: None)
