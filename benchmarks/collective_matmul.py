"""Products with a collective beside XLA's, and beside the product alone: `python -m jax_ep bench collective_matmul`."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep.lax import ragged_dot

from .in_jit_loop import (
    Loop,
    calls_between,
    check_alike,
    compile_loops,
    describe_pause,
    draw,
    on_ranks,
    take_turns,
)
from .provenance import command_line, heading, open_group, row, select

SEED = 0
CALLS, CPU_CALLS = 40, 4
OURS, XLA, PRODUCT = "jax_ep", "XLA", "product, jax_ep"
COLUMNS = f"op | product | {OURS}, us | {XLA}, us | {PRODUCT}, us | times XLA's speed | of the product"

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


def with_collective(
    op: Op, group: jax_ep.Group, implementation: jax_ep.Implementation, b: jax.Array, a: jax.Array
) -> jax.Array:
    return op(a, b, group=group, implementation=implementation)


def draw_operands(case: Case, group: jax_ep.Group) -> tuple[jax.Array, ...]:
    """What a rank gives the op, the matrix, and the rows of the product that it computes."""
    dtype = jnp.float32 if group.platform == "cpu" else jnp.bfloat16

    def drawn(seed: int, rows: int, columns: int) -> jax.Array:
        return draw(group.mesh, seed, rows * group.size, columns, dtype=dtype)

    rows, b = drawn(SEED, case.rows, case.contracted), drawn(SEED + 1, case.contracted, case.columns)
    gathers = case.op == "all_gather_matmul"
    return drawn(SEED, case.rows // group.size, case.contracted) if gathers else rows, b, rows


def measure(case: Case, group: jax_ep.Group, repeats: int, pause: float) -> dict[str, float]:
    """Microseconds by formulation, which take turns."""
    calls = calls_between(pause, CPU_CALLS if group.platform == "cpu" else CALLS, case.flops)
    given, b, rows = draw_operands(case, group)
    ours, xla = (partial(with_collective, OPS[case.op], group, implementation) for implementation in ("ffi", "xla"))
    mine, theirs = (on_ranks(op, group.mesh)(b, given) for op in (ours, xla))
    check_alike(case.op, mine, theirs, 2 * group.size * float(jnp.finfo(rows.dtype).eps))  # of products and sums
    ops: dict[str, tuple[Op, jax.Array]] = {OURS: (ours, given), XLA: (xla, given), PRODUCT: (by_core, rows)}
    loops = {name: Loop(op, (b,), operand, calls) for name, (op, operand) in ops.items()}
    return take_turns(compile_loops(loops, group.mesh), repeats, pause, hot=not pause and group.platform != "cpu")


def line(case: Case, times: dict[str, float]) -> str:
    """Ours against XLA's and the product alone."""
    ratios = times[XLA] / times[OURS], times[OURS] / times[PRODUCT]
    return row(case.op, case, *(f"{time:,.1f}" for time in times.values()), *(f"{ratio:.2f}" for ratio in ratios))


def main(arguments: list[str]) -> int:
    parser = command_line("collective_matmul", __doc__, "fewer shapes", products=True)
    parser.add_argument("--devices", type=int, help="how many [all]")
    options = parser.parse_args(arguments)

    note = "float32, plain loops" if jax.default_backend() == "cpu" else "bfloat16"
    with open_group(["collective_matmul", *arguments], note, options.devices) as group:
        print(f"- per call inside one jitted loop, median of {options.repeats} loops; shapes are of one rank's product")
        print(f"- {describe_pause(options.pause, group.platform == 'cpu')}\n")
        print(heading(COLUMNS))
        for case in select(CPU_CASES if group.platform == "cpu" else CASES, options):
            print(line(case, measure(case, group, options.repeats, options.pause)), flush=True)
    return 0
