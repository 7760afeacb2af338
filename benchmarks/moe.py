"""dispatch and combine beside XLA's all_to_all: `python -m jax_ep bench moe`."""

import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_ep

from . import formulations as forms, token_sweep
from .formulations import AXIS, Formulation
from .in_jit_loop import Loop, compile_loops, median_microseconds, on_ranks
from .moe_cases import (
    FAMILIES,
    TINY_FAMILIES,
    Case,
    Inputs,
    Load,
    Shape,
    capacity,
    load,
    make_ids,
    make_inputs,
    select,
)
from .provenance import command_line, group_header
from .tables import heading, row

NVLINK = 370e9  # bytes a second one way that the GPUs of an H200 host reach among each other at best
FP8_BLOCK = 128  # values that share a float32 scale
FP8 = "dispatch, fp8"  # on the wire only
FP8_ROWS = "dispatch, fp8 rows"  # left as they came
NOT_EXPANDED = "not expanded"  # each token once per rank, and indices
SMALL = 512  # tokens up to which a call is so short that its loop needs many

COLUMNS = "shape | op | jax_ep, us | remote GB/s | of 370 GB/s | padded all_to_all, us | ratio to the best XLA"


@dataclasses.dataclass(frozen=True)
class Result:
    """Microseconds per call, and the bytes the busiest rank must send or receive."""

    case: Case
    op: str
    ours: float
    padded: float  # of XLA's, which has no other wire and no budget of SMs: it competes as it is
    remote_bytes: int


class Candidate(NamedTuple):
    op: str  # "dispatch" or "combine", and how
    loop: Loop


def run(group: jax_ep.Group, repeats: int, quick: bool, name_contains: str) -> None:
    """Measures the families chosen, and prints a table for each as it goes."""
    on_cpu = group.platform == "cpu"
    families = select(TINY_FAMILIES if on_cpu else FAMILIES, quick=quick, name_contains=name_contains)
    if not families:
        raise SystemExit(f"no shape's name has {name_contains!r}")
    print(f"- us: per call inside one jitted loop, median of {repeats} loops")
    print("- remote bytes: deduplicated, of the busiest rank")
    for title, cases in families.items():
        print(f"\n{title}\n\n{heading(COLUMNS)}", flush=True)
        for case in cases:
            for result in measure(case, group, repeats):
                print(line(result), flush=True)


def line(result: Result) -> str:
    rate = result.remote_bytes / result.ours * 1e6
    times = [f"{result.ours:,.1f}", f"{rate / 1e9:,.1f}", f"{rate / NVLINK:.2f}", f"{result.padded:,.1f}"]
    return row(result.case, result.op, *times, f"{result.padded / result.ours:.2f}")


def measure(case: Case, group: jax_ep.Group, repeats: int) -> list[Result]:
    """Checks the formulations against each other, then times them in turns."""
    shape = case.shape
    ids = make_ids(case, group.size)
    needed = load(ids, shape.experts, group.size)
    padded = padded_for(case, needed, group)
    inputs = make_inputs(shape, ids, group.mesh)
    ours_state, padded_state = prepare(case, capacity(case, needed), padded, group, inputs)

    with contextlib.ExitStack() as stack:
        groups = {"": group}
        for sms in case.few_sms:
            groups[f", {sms} SMs"] = stack.enter_context(jax_ep.Group(group.mesh, AXIS, max_sms=sms))
        ours = [
            candidate._replace(op=candidate.op + how)
            for how, one in groups.items()
            for candidate in our_candidates(shape, capacity(case, needed), one, inputs, ours_state)
        ]
        others = {
            "dispatch": Loop(padded.dispatch, inputs[:2], inputs[2], calls=20),
            "combine": Loop(padded.combine, (padded_state,), inputs[2], calls=20),
        }
        loops = [*(candidate.loop for candidate in ours), *others.values()]
        programs = compile_loops(loops, group.mesh)
        times = median_microseconds(loops, programs, repeats)
        for one in groups.values():
            one.check()
    of_padded = dict(zip(others, times[len(ours) :], strict=True))
    return [
        Result(
            case,
            one.op,
            time,
            of_padded["dispatch" if one.op.startswith("dispatch") else "combine"],
            needed.remote_rows * row_bytes(one.op, shape),
        )
        for one, time in zip(ours, times[: len(ours)], strict=True)
    ]


def row_bytes(op: str, shape: Shape) -> int:
    if op.startswith(FP8):
        return shape.hidden + 4 * shape.hidden // FP8_BLOCK
    return shape.hidden * jnp.dtype(shape.dtype).itemsize


def padded_for(case: Case, needed: Load, group: jax_ep.Group) -> Formulation:
    """XLA's formulation, with just the room that this routing asks for."""
    shape = case.shape
    block = forms.block_rows(shape.tokens * shape.top_k / group.size) if case.routing == "uniform" else 0
    return forms.padded_all_to_all(shape.experts, max(block, -(-needed.pair_rows // 8) * 8))


def our_candidates(
    shape: Shape, room: int, group: jax_ep.Group, inputs: Inputs, state: jax_ep.Dispatched
) -> list[Candidate]:
    """Dispatch, in fp8 too where the rows divide into its blocks, and combine."""
    unroll = 10  # of the kernels of the loop itself, a call bears a tenth
    calls = 2 * unroll if group.platform == "cpu" else 500 if shape.tokens <= SMALL else 50

    def dispatch(**options: Any) -> Loop:
        ours = forms.jax_ep_ops(group, shape.experts, room, **options)

        def op(*operands: jax.Array) -> jax.Array:  # the kernel writes this small result itself
            return ours.dispatch(*operands).routing.dropped

        return Loop(op, inputs[:2], inputs[2], calls, unroll)

    def combine(rows: jax.Array, routing: jax_ep.Routing, weights: jax.Array) -> jax.Array:
        routing = dataclasses.replace(routing, weights=weights)
        return jax_ep.combine(rows, routing, group=group)

    loops = {"dispatch": dispatch(), f"dispatch, {NOT_EXPANDED}": dispatch(expand=False)}
    if shape.hidden % FP8_BLOCK == 0:
        loops[FP8] = dispatch(wire="float8")
        loops[FP8_ROWS] = dispatch(wire="float8_rows")
        loops[f"{FP8_ROWS}, {NOT_EXPANDED}"] = dispatch(wire="float8_rows", expand=False)
    loops["combine"] = Loop(combine, (state.rows, state.routing), state.routing.weights, calls, unroll)
    return [Candidate(op, loop) for op, loop in loops.items()]


def prepare(case: Case, room: int, padded: Formulation, group: jax_ep.Group, inputs: Inputs) -> tuple[Any, Any]:
    """Our state after a dispatch, and XLA's; raises unless both deliver the same rows in the same order and sums."""

    def run(one: Formulation) -> tuple[Any, jax.Array]:
        def both(*operands: jax.Array) -> tuple[Any, jax.Array]:
            state = one.dispatch(*operands)
            return state, one.combine(state, operands[2])

        return jax.block_until_ready(on_ranks(both, group.mesh)(*inputs))  # alone: they must not wait for each other

    def compare(a: tuple[Any, jax.Array], b: tuple[Any, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return rows_differ(a[0], b[0])[None], relative_error(a[1], b[1])[None]

    ours, others = run(forms.jax_ep_ops(group, case.shape.experts, room)), run(padded)
    wrong, errors = map(np.asarray, on_ranks(compare, group.mesh)(ours, others))
    if np.any(wrong) or not np.all(errors < 16 * float(jnp.finfo(case.shape.dtype).eps)):
        raise AssertionError(f"{case}: padded all_to_all disagrees with ours: rows {wrong}, sums {errors}")
    return ours[0], others[0]


def rows_differ(a: Any, b: Any) -> jax.Array:
    (rows_a, sizes_a), (rows_b, sizes_b) = a[:2], b[:2]
    shared = min(len(rows_a), len(rows_b))
    used = jnp.arange(shared) < sizes_a.sum()
    return jnp.any(sizes_a != sizes_b) | jnp.any(used[:, None] & (rows_a[:shared] != rows_b[:shared]))


def relative_error(a: jax.Array, b: jax.Array) -> jax.Array:
    """The largest difference, as a part of the largest value."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))


def main(arguments: list[str]) -> int:
    parser = command_line("moe", __doc__, "T=128 and T=4096; of the sweep, decoding")
    parser.add_argument("--sweep", action="store_true", help="ops and layer by the number of tokens, from one to many")
    options = parser.parse_args(arguments)

    with jax_ep.Group(Mesh(np.array(jax.devices()), (AXIS,)), AXIS) as group:
        print(group_header(group, "moe", *arguments), flush=True)
        if options.sweep:
            token_sweep.run(group, options.repeats, options.quick)
        else:
            run(group, options.repeats, options.quick, options.shapes)
    return 0
