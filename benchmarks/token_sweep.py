"""`bench moe --sweep`: the ops of a layer by the number of tokens, from one to many; those of decoding by --quick."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

import jax_ep

from .formulations import result_and_gradients
from .in_jit_loop import Loop
from .moe_cases import MODELS, Case, Model, Shape, draw_matrices, make_ids, make_inputs
from .runner import Row, Run

DECODED = (1, 8, 32, 128)
TOKENS = (*DECODED, 256, 512, 513, 1024, 2048, 8192, 32768)
CPU_TOKENS = (*DECODED, 512, 513)
CPU_MODEL = Model("", Shape(0, 128, 8, 16), 64)
CALLS, FEW_CALLS, MANY_TOKENS = 50, 10, 2048
DECODING = ("dispatch, combine", "layer", "layer, shared tokens")

Op = Callable[..., Any]


class Tokens(int):
    """A case: so many of a rank; shared tokens: of all ranks."""

    @property
    def quick(self) -> bool:
        return self in DECODED


def cases(run: Run) -> list[Tokens]:
    return [Tokens(tokens) for tokens in (CPU_TOKENS if run.on_cpu else TOKENS)]


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


def row(tokens: int, run: Run) -> Row:
    """Microseconds of each op."""
    mesh, model = run.mesh, CPU_MODEL if run.on_cpu else MODELS["Qwen3-30B"]
    shape = dataclasses.replace(model.shape, tokens=int(tokens))
    gate, up, down = draw_matrices(model, mesh)
    own = jax_ep.Experts(gate=gate, up=up, down=down)
    operands = make_inputs(shape, make_ids(Case(shape), run.group.size), mesh)
    calls = FEW_CALLS if run.on_cpu or tokens > MANY_TOKENS else CALLS
    each = ops(run.group, shape.experts, run.options.quick)
    times = run.time({name: Loop(op, operands, own, calls) for name, op in each.items()})
    layer = f"H={shape.hidden}, F={model.width}, E={shape.experts}, top-{shape.top_k}"
    return {"tokens a rank": f"{tokens:,}", "layer": layer} | {
        f"{name}, us": f"{time:,.1f}" for name, time in times.items()
    }
