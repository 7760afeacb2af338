"""Routers beside the same in XLA: `python -m jax_ep bench routers`."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import nn

from .in_jit_loop import Loop, check_alike
from .runner import Bench, Row, Run

SEED, TOP_K, UNROLL = 0, 8, 10


@dataclasses.dataclass(frozen=True)
class Case:
    """Softmax, or as in DeepSeek-V3: sigmoid with a bias, four of eight groups."""

    tokens: int
    experts: int
    grouped: bool = False

    def __str__(self) -> str:
        how = "sigmoid, bias, 4 of 8 groups" if self.grouped else "softmax"
        return f"{how}, [{self.tokens:,}, {self.experts}] float32, top-{TOP_K}"

    def ours(self, bias: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.grouped:
            return nn.sigmoid_top_k(logits, TOP_K, bias=bias, groups=8, top_groups=4)
        return nn.softmax_top_k(logits, TOP_K)

    def by_xla(self, bias: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jax.nn.sigmoid(logits) if self.grouped else jax.nn.softmax(logits)
        chosen_by = scores
        if self.grouped:
            by_group = (scores + bias).reshape(self.tokens, 8, -1)
            best = jax.lax.top_k(jax.lax.top_k(by_group, 2)[0].sum(axis=2), 4)[1]
            kept = (best[:, :, None] == jnp.arange(8)).any(axis=1)
            chosen_by = jnp.where(kept[:, :, None], by_group, -jnp.inf).reshape(scores.shape)
        ids = jax.lax.top_k(chosen_by, TOP_K)[1]
        weights = jnp.take_along_axis(scores, ids, axis=1)
        return ids, weights / weights.sum(axis=1, keepdims=True)


CPU_CASES = [Case(64, 16), Case(64, 16, grouped=True)]
GPU_CASES = [Case(32_768, 256), Case(8_192, 64), Case(128, 256), Case(32_768, 256, grouped=True)]


def rows(case: Case, run: Run) -> Iterator[Row]:
    """Checks both against each other, and times them in turns."""
    keys = jax.random.split(jax.random.key(SEED))
    operands = jax.random.normal(keys[0], (case.experts,)), jax.random.normal(keys[1], (case.tokens, case.experts))
    ways = {"jax_ep": case.ours, "XLA": case.by_xla}
    (ids, mine), (wanted_ids, wanted) = (jax.jit(way)(*operands) for way in ways.values())
    differ = int(np.sum(np.any(np.asarray(ids) != np.asarray(wanted_ids), axis=1)))
    if differ > 1e-3 * case.tokens:  # scores that are equal but for rounding
        raise AssertionError(f"{case}: the experts of {differ} tokens differ")
    check_alike(str(case), mine, wanted, 1e-3)
    calls = UNROLL * (1 if run.on_cpu else 10)
    loops = {name: Loop(way, operands[:-1], operands[-1], calls, UNROLL) for name, way in ways.items()}
    times = run.time(loops, hot=True)
    yield {
        "router": case,
        **{f"{name}, us": f"{time:,.1f}" for name, time in times.items()},
        "of XLA": f"{times['jax_ep'] / times['XLA']:.2f}",
    }


BENCH = Bench(__doc__, lambda run: CPU_CASES if run.on_cpu else GPU_CASES, rows, open=lambda _: None)
