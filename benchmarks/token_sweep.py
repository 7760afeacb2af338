"""`bench moe --sweep`: the ops of a layer by the number of tokens, from one to many; those of decoding by --quick."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

import jax_ep

from .formulations import result_and_gradients
from .in_jit_loop import Loop, compile_loops, take_turns
from .moe_cases import Case, Model, Shape, draw_matrices, make_ids, make_inputs
from .provenance import heading, row

DECODED = (1, 8, 32, 128)
TOKENS = (*DECODED, 256, 512, 513, 1024, 2048, 8192, 32768)
HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
CPU_TOKENS, CPU_HIDDEN, CPU_INNER, CPU_EXPERTS = (*DECODED, 512, 513), 128, 64, 16
CALLS, FEW_CALLS, MANY_TOKENS = 50, 10, 2048
DECODING = ("dispatch, combine", "layer", "layer, shared tokens")

Op = Callable[..., Any]


def ops(group: jax_ep.Group, experts: int, quick: bool) -> dict[str, Op]:
    """Each of tokens, expert ids, weights and a rank's own experts. `quick`: those of DECODING."""

    def dispatch(tokens: jax.Array, ids: jax.Array, weights: jax.Array, _: Any, expand: bool = True) -> Any:
        return jax_ep.dispatch(tokens, ids, weights, group=group, num_experts=experts, expand=expand)

    def exchange(*operands: Any) -> jax.Array:
        rows, _, routing = dispatch(*operands)
        return jax_ep.combine(rows, routing, group=group)

    def layer(*operands: Any, shared_tokens: bool = False) -> jax.Array:
        return jax_ep.moe_mlp(*operands, group=group, shared_tokens=shared_tokens)[0]

    def step(tokens: jax.Array, ids: jax.Array, weights: jax.Array, own: jax_ep.Experts) -> Any:
        return result_and_gradients(lambda t, w, e: layer(t, ids, w, e), tokens, tokens, weights, own)

    def both_gradients(tokens: jax.Array, ids: jax.Array, weights: jax.Array, own: Any) -> Any:
        return jax.vjp(lambda t, w: exchange(t, ids, w, own), tokens, weights)[1](tokens)

    each = {
        "dispatch": dispatch,
        "not expanded": partial(dispatch, expand=False),
        "dispatch, combine": exchange,
        "and their gradients": both_gradients,
        "layer": layer,
        # As if all ranks had these tokens: each computes other sums, in the same time.
        "layer, shared tokens": partial(layer, shared_tokens=True),
        "training step": step,
    }
    return {name: op for name, op in each.items() if name in DECODING} if quick else each


def run(group: jax_ep.Group, repeats: int, quick: bool) -> None:
    """Prints a line for each number of tokens a rank (shared tokens: of all ranks): microseconds."""
    on_cpu, mesh = group.platform == "cpu", group.mesh
    hidden, inner, experts = (CPU_HIDDEN, CPU_INNER, CPU_EXPERTS) if on_cpu else (HIDDEN, INNER, EXPERTS)
    each = ops(group, experts, quick)
    names = " | ".join(f"{name}, us" for name in each)
    print(heading(f"tokens a rank, H={hidden}, F={inner}, E={experts}, top-{TOP_K} | {names}"), flush=True)
    shape = Shape(0, hidden, TOP_K, experts, "bfloat16")
    own = jax_ep.Experts(*draw_matrices(Model("any", shape, inner), mesh))
    for tokens in DECODED if quick else CPU_TOKENS if on_cpu else TOKENS:
        case = Case(dataclasses.replace(shape, tokens=tokens))
        operands = make_inputs(case.shape, make_ids(case, group.size), mesh)
        calls = FEW_CALLS if on_cpu or tokens > MANY_TOKENS else CALLS
        loops = {name: Loop(op, operands, own, calls) for name, op in each.items()}
        times = take_turns(compile_loops(loops, mesh), repeats)
        print(row(f"{tokens:,}", *(f"{time:,.1f}" for time in times.values())), flush=True)
    group.check()
