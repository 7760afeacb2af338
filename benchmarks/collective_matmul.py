"""Products with a collective beside XLA's, and how much they hide: `python -m jax_ep bench collective_matmul`.

Hidden is the part of the shorter of product and collective that takes no time of its own. Exposed is how much longer
the op takes than its product.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep.lax import ragged_dot

from .in_jit_loop import AXIS, Loop, check_alike, draw, on_ranks, teraflops
from .runner import Bench, Row, Run

SEED = 0
CALLS, CPU_CALLS = 40, 4
OURS, XLA, PRODUCT, XLA_PRODUCT, MOVING = "jax_ep", "XLA", "product, jax_ep", "product, XLA", "collective, XLA"

Op = Callable[..., jax.Array]
OPS: dict[str, Op] = {
    "matmul_all_reduce": jax_ep.matmul_all_reduce,
    "matmul_reduce_scatter": jax_ep.matmul_reduce_scatter,
    "all_gather_matmul": jax_ep.all_gather_matmul,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """An op, and the product that every rank computes: [rows, contracted] x [contracted, columns]."""

    op: str
    rows: int
    contracted: int
    columns: int
    quick: bool

    def __str__(self) -> str:
        return f"[{self.rows}, {self.contracted}] x [{self.contracted}, {self.columns}]"

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.contracted * self.columns


def cases_of(rows: int, contracted: int, columns: int, quick: bool = False, swap: bool = True) -> list[Case]:
    """A gather's product, and with `swap` as reductions the second product of a layer whose first is the gather's."""
    inner, outer = (columns, contracted) if swap else (contracted, columns)
    return [
        *(Case(op, rows, inner, outer, quick) for op in ("matmul_all_reduce", "matmul_reduce_scatter")),
        Case("all_gather_matmul", rows, contracted, columns, quick),
    ]


CASES = [
    *cases_of(5416, 6144, 1408, quick=True, swap=False),
    *cases_of(64, 7168, 18432),
    *cases_of(512, 4096, 12288),
    *cases_of(2048, 2880, 2880),
    *cases_of(4096, 4096, 4096, quick=True),
    *cases_of(8192, 4096, 14336),
    *cases_of(8192, 8192, 29568),
]
CPU_CASES = cases_of(64, 64, 64, quick=True)


def by_core(b: jax.Array, a: jax.Array) -> jax.Array:
    return ragged_dot(a, b[None], jnp.array([a.shape[0]], jnp.int32))


def by_xla(b: jax.Array, a: jax.Array) -> jax.Array:
    return a @ b


def collective(name: str, b: jax.Array, moved: jax.Array) -> jax.Array:
    del b
    if name == "all_gather_matmul":
        return jax.lax.all_gather(moved, AXIS, tiled=True)
    return jax.lax.psum(moved, AXIS) if name == "matmul_all_reduce" else jax.lax.psum_scatter(moved, AXIS, tiled=True)


def draw_operands(case: Case, group: jax_ep.Group) -> tuple[jax.Array, ...]:
    """What a rank gives the op, the matrix, the rows of the product that it computes, and what the collective moves."""
    dtype = jnp.float32 if group.platform == "cpu" else jnp.bfloat16

    def drawn(seed: int, rows: int, columns: int) -> jax.Array:
        return draw(group.mesh, seed, rows * group.size, columns, dtype=dtype)

    rows, b = drawn(SEED, case.rows, case.contracted), drawn(SEED + 1, case.contracted, case.columns)
    if case.op == "all_gather_matmul":
        own = drawn(SEED, case.rows // group.size, case.contracted)
        return own, b, rows, own
    return rows, b, rows, drawn(SEED + 2, case.rows, case.columns)


def rows(case: Case, run: Run) -> Iterator[Row]:
    group, calls = run.group, CPU_CALLS if run.on_cpu else CALLS
    own, b, multiplied, moved = draw_operands(case, group)
    ours, xla = (lambda b, a, how=how: OPS[case.op](a, b, group=group, implementation=how) for how in ("auto", "xla"))
    mine, theirs = (on_ranks(op, group.mesh)(b, own) for op in (ours, xla))
    check_alike(case.op, mine, theirs, 2 * group.size * float(jnp.finfo(own.dtype).eps))  # of products and sums
    ops: dict[str, tuple[Op, jax.Array]] = {
        OURS: (ours, own),
        XLA: (xla, own),
        PRODUCT: (by_core, multiplied),
        XLA_PRODUCT: (by_xla, multiplied),
        MOVING: (partial(collective, case.op), moved),
    }
    times = run.time({name: Loop(op, (b,), operand, calls) for name, (op, operand) in ops.items()}, hot=True)
    hidden = times[PRODUCT] + times[MOVING] - times[OURS]
    yield {
        "op": case.op,
        "product": case,
        **{f"{name}, us": f"{time:,.1f}" for name, time in times.items()},
        "times XLA's speed": f"{times[XLA] / times[OURS]:.2f}",
        "of the product": f"{times[OURS] / times[PRODUCT]:.2f}",
        "hidden": f"{100 * hidden / min(times[PRODUCT], times[MOVING]):.0f} %",
        "exposed, us": f"{times[OURS] - times[PRODUCT]:,.1f}",
        "jax_ep, TFLOP/s": teraflops(case.flops, times[OURS]),
    }


BENCH = Bench(
    __doc__,
    lambda run: CPU_CASES if run.on_cpu else CASES,
    rows,
    lambda run: [f"{'float32, plain loops' if run.on_cpu else 'bfloat16'}; shapes are of one rank's product"],
    lambda parser: parser.add_argument("--devices", type=int, help="how many [all]"),
    quick="fewer shapes",
)
