"""dispatch and combine beside XLA's all_to_all: `python -m jax_ep bench moe`."""

import argparse
import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep.pallas_kernels import BLOCK

from . import formulations as forms, token_sweep
from .formulations import Formulation
from .in_jit_loop import AXIS, Loop, on_ranks, relative_error
from .moe_cases import AS_ON_EIGHT, CASES, CPU_CASES, Case, Inputs, Load, Shape, capacity, load, make_ids, make_inputs
from .runner import Bench, Row, Run

FLOAT8 = "dispatch, float8"  # on the wire only
FLOAT8_ROWS = "dispatch, float8 rows"  # left as they came
NOT_EXPANDED = "not expanded"  # each token once per rank, and indices
FEW_TOKENS = 512  # kFewTokens of ffi/kernels/moe/layout.h: up to these a call is short, and a loop makes many


def rows(case: Case | int, run: Run) -> Iterator[Row]:
    """Checks the formulations against each other, and times them. A number: of tokens, in a sweep."""
    if isinstance(case, int):
        yield token_sweep.row(case, run)
        return
    shape, group, ids = case.shape, run.group, make_ids(case, run.group.size)
    needed = load(ids, shape.experts, group.size)
    room, padded = capacity(case, needed), padded_for(case, needed, group)
    inputs = make_inputs(shape, ids, group.mesh)
    ours_state, padded_state = prepare(case, room, padded, group, inputs)

    with contextlib.ExitStack() as stack:
        groups = {"": group}
        for sms in case.few_sms:
            groups[f", {sms} SMs"] = stack.enter_context(jax_ep.Group(group.mesh, AXIS, max_sms=sms))
        ours = {
            op + how: loop
            for how, one in groups.items()
            for op, loop in our_loops(shape, room, one, inputs, ours_state).items()
        }
        others = {
            "padded dispatch": Loop(padded.dispatch, inputs[:2], inputs[2], calls=20),
            "padded combine": Loop(padded.combine, (padded_state,), inputs[2], calls=20),
        }
        times = run.time(ours | others)
        for one in groups.values():
            one.check()
    for op in ours:  # XLA's has no other wire and no budget of SMs: it competes as it is
        other = times["padded dispatch" if op.startswith("dispatch") else "padded combine"]
        yield {
            "shape": case,
            "op": op,
            "jax_ep, us": f"{times[op]:,.1f}",
            "remote GB/s": f"{needed.remote_rows * row_bytes(op, shape) / times[op] / 1e3:,.1f}",
            "padded all_to_all, us": f"{other:,.1f}",
            "ratio to the best XLA": f"{other / times[op]:.2f}",
        }


def row_bytes(op: str, shape: Shape) -> int:
    if op.startswith(FLOAT8):
        return shape.hidden + 4 * shape.hidden // BLOCK
    return shape.hidden * jnp.dtype(shape.dtype).itemsize


def padded_for(case: Case, needed: Load, group: jax_ep.Group) -> Formulation:
    """XLA's formulation, with just the room that this routing asks for; if it is uniform, 5% and 64 rows of slack."""
    mean = case.shape.tokens * case.shape.top_k / group.size
    block = math.ceil(1.05 * mean + 64) if case.routing == "uniform" else 0
    return forms.padded_all_to_all(case.shape.experts, -(-max(block, needed.pair_rows) // 8) * 8)


def our_loops(
    shape: Shape, room: int, group: jax_ep.Group, inputs: Inputs, state: jax_ep.Dispatched
) -> dict[str, Loop]:
    """By op: dispatch, in float8 too where the rows divide into its blocks, and combine."""
    unroll = 10  # of the kernels of the loop itself, a call bears a tenth
    calls = 2 * unroll if group.platform == "cpu" else 500 if shape.tokens <= FEW_TOKENS else 50

    def dispatch(**options: Any) -> Loop:
        ours = forms.jax_ep_ops(group, shape.experts, room, **options)

        def op(*operands: jax.Array) -> jax.Array:  # the kernel writes this small result itself
            return ours.dispatch(*operands).routing.dropped

        return Loop(op, inputs[:2], inputs[2], calls, unroll)

    def combine(rows: jax.Array, routing: jax_ep.Routing, weights: jax.Array) -> jax.Array:
        routing = dataclasses.replace(routing, weights=weights)
        return jax_ep.combine(rows, routing, group=group)

    loops = {"dispatch": dispatch(), f"dispatch, {NOT_EXPANDED}": dispatch(expand=False)}
    if shape.hidden % BLOCK == 0:
        loops[FLOAT8] = dispatch(wire="float8")
        loops[FLOAT8_ROWS] = dispatch(wire="float8_rows")
        loops[f"{FLOAT8_ROWS}, {NOT_EXPANDED}"] = dispatch(wire="float8_rows", expand=False)
    loops["combine"] = Loop(combine, (state.rows, state.routing), state.routing.weights, calls, unroll)
    return loops


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


def cases(run: Run) -> list[Any]:
    if run.options.sweep:
        return token_sweep.cases(run)
    if run.on_cpu:
        return CPU_CASES
    return CASES + AS_ON_EIGHT if run.group.size == 2 else CASES


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sweep", action="store_true", help="ops and layer by the number of tokens, from one to many")


BENCH = Bench(
    __doc__,
    cases,
    rows,
    lambda run: [] if run.options.sweep else ["remote bytes: deduplicated, of the busiest rank"],
    arguments,
    quick="uniform T=128 and T=4096; of the sweep, the tokens and ops of decoding",
)
