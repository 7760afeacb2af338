"""jax_ep.moe_mlp on one device."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_ep

from ..in_jit_loop import AXIS, Loop, Program, compile_all, on_ranks, take_turns
from ..layer import calls, ours, step
from .shapes import CHECKED, SHAPES


class Layer:
    """What `child` asks."""

    def __init__(self) -> None:
        self._mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,))
        self._group = jax_ep.Group(self._mesh, AXIS)
        self._timed: dict[str, Program] = {}

    def prepare(self, shape: str, operands: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, float]]:
        self._timed.clear()  # it holds the last shape's operands
        jax.clear_caches()
        model, mesh = SHAPES[shape], self._mesh
        rows = model.shape.tokens * model.shape.top_k
        layer = ours(self._group, rows)

        def training(ids: jax.Array, *others: jax.Array) -> Any:
            out, pull = jax.vjp(partial(layer, ids), *others)
            return out, _kept(pull, (ids, *others, out))

        tokens, cotangent = (jnp.asarray(operands[name].view(jnp.bfloat16)) for name in ("tokens", "cotangent"))
        matrices = (_matrices(operands, name, model.width) for name in ("gate", "up", "down"))
        first = (jnp.asarray(operands["ids"]), jnp.asarray(operands["weights"]), *matrices)
        on_cpu = self._group.platform == "cpu"
        forward_calls, step_calls = (2 if on_cpu else calls(model, rows, 1, passes) for passes in (1, 3))
        step_of_layer = partial(step, layer)
        loops = {
            "forward": Loop(layer, first, tokens, forward_calls),
            "step": Loop(step_of_layer, (cotangent, *first), tokens, step_calls),
        }
        once = [
            on_ranks(layer, mesh).lower(*first, tokens),
            on_ranks(step_of_layer, mesh).lower(cotangent, *first, tokens),
        ]
        forward_once, step_once, *timed = compile_all([*once, *(loop.lower(mesh) for loop in loops.values())])
        for (name, loop), program in zip(loops.items(), timed, strict=True):
            self._timed[name] = Program(program, loop.arguments, loop.calls)

        out, (_, gradients) = forward_once(*first, tokens), step_once(cotangent, *first, tokens)
        self._group.check()
        if not all(bool(_is_finite(each)) for each in gradients):
            raise FloatingPointError("a gradient is not finite")
        results = {"out": out, "d_tokens": gradients[-1], "d_weights": gradients[0]}
        kept = on_ranks(training, mesh).eval_shape(*first, tokens)[1]
        memory = {"kept": sum(each.size * each.dtype.itemsize for each in kept) / 2**20}
        if peak := step_once.memory_analysis():
            memory["peak"] = (peak.temp_size_in_bytes + peak.output_size_in_bytes) / 2**20
        return {name: np.asarray(each[:CHECKED], np.float32) for name, each in results.items()}, memory

    def microseconds(self, quantity: str, heat: float) -> float:
        return take_turns({quantity: self._timed[quantity]}, repeats=1, hot=heat > 0)[quantity]


@jax.jit
def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def _kept(pull: Any, others: tuple[jax.Array, ...]) -> list[jax.Array]:
    """What `pull` holds, each array once and flat, without those that exist beside it."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(pull)}
    return [leaf.ravel() for key, leaf in leaves.items() if key not in map(id, others)]


def _matrices(operands: dict[str, np.ndarray], name: str, width: int) -> jax.Array:
    """[E, H, F], or of down [E, F, H]."""
    hidden = operands["tokens"].shape[1]
    sides = (width, hidden) if name == "down" else (hidden, width)

    @jax.jit
    @partial(jax.vmap, in_axes=(None, 0))
    def windows(numbers: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(numbers, start, hidden * width).reshape(sides)

    return windows(operands[name].view(jnp.bfloat16), operands["starts"])
