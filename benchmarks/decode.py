"""A whole model that generates: prefill and decoding, beside the time that reading its bytes takes.

    python -m jax_ep bench decode

The model is Qwen3-30B-A3B with random weights in bfloat16. A step of decoding reads the dense weights, the experts that
its tokens choose and the cache. The bound is the time that these bytes take at the speed of memory that NVIDIA states.
"""

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .model import QWEN3_30B, SMALL, in_turns, layers, model, open_all, parts_of
from .runner import Bench, Row, Run

SEED = 0
BYTES_PER_SECOND = {"H100": 3.35e12, "H200": 4.8e12}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the prompts of one sequence, and the batches that decode behind `context` tokens."""

    name: str
    config: Any
    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    context: int
    steps: int

    def __str__(self) -> str:
        return self.name


def step_bytes(config: Any, batch: int, context: int, ranks: int) -> float:
    """That a GPU reads in a step: the dense weights, its share of the experts that uniform routing chooses, and its
    share of the cache, or the whole cache if the number of GPUs does not divide the batch."""
    leaves = jax.tree.leaves(config.layout())
    experts = 2 * sum(math.prod(one.shape) for one in leaves if one.experts)
    dense = 2 * sum(math.prod(one.shape) for one in leaves if not one.experts and "embed" not in one.name)
    chosen = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** batch
    cache = 2 * config.num_hidden_layers * batch * context * sum(math.prod(shape) for shape in config.cache_shapes)
    return dense + experts * chosen / ranks + cache / (ranks if batch % ranks == 0 else 1)


def filled(empty: Any, position: int, sharding: NamedSharding) -> Any:
    """A cache of random numbers."""

    leaves, tree = jax.tree.flatten(empty.kept)
    keys = jax.random.split(jax.random.key(SEED), len(leaves))
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=sharding)
    kept = [draw(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
    return layers.Cache(jax.tree.unflatten(tree, kept), jnp.int32(position))


def rows(case: Case, run: Run) -> Iterator[Row]:
    group, config = run.group, case.config
    how = layers.Run(group, dtype=jnp.float32 if run.on_cpu else jnp.bfloat16)
    params = model.for_generation(model.init(jax.random.key(SEED), config, group, how.dtype), config, how)
    key = jax.random.key(SEED)
    rng = np.random.default_rng(SEED)
    kind = group.mesh.devices.flat[0].device_kind
    speed = next((speed for word, speed in BYTES_PER_SECOND.items() if word in kind), None)

    def row(what: str, tokens: int, ms: float, bound: float | None) -> Row:
        return {
            "model": case,
            "what": what,
            "ms": f"{ms:,.2f}",
            "tokens/s": f"{tokens / ms * 1e3:,.0f}",
            "of the bound by bytes": f"{bound / ms:.2f}" if bound else "-",
        }

    for length in case.prompts:
        prefill, _ = model.decoder(config, how, length)
        ids = jnp.asarray(rng.integers(config.vocab_size, size=(1, length)), jnp.int32)
        times = in_turns({"": lambda call=prefill, ids=ids: call(params, ids, key)[0]}, run.options.repeats, 1)
        yield row(f"prefill, 1 x {length:,}", length, times[""], None)

    def lowered(batch: int) -> tuple[Any, Any]:
        """A step, lowered, and the shapes of its cache, which has room for the two steps that are traced."""
        length = case.context + case.steps + 2
        empty = jax.eval_shape(lambda: model.empty_cache(config, how, batch, length))
        step = model.decoder(config, how, length).step
        return step.lower(params, jax.ShapeDtypeStruct((batch,), jnp.int32), empty, key), empty

    lowered_steps, empty_caches = zip(*map(lowered, case.batches), strict=True)
    # XLA times tilings on buffers of its own: one program after the other, and before a cache is allocated.
    steps = [one.compile() for one in lowered_steps]
    for batch, step, empty in zip(case.batches, steps, empty_caches, strict=True):
        sharding = NamedSharding(group.mesh, how.rows(batch, 1))
        tokens, cache = jnp.zeros(batch, jnp.int32), filled(empty, case.context, sharding)
        steps_ms: list[float] = []

        def once(step: Any = step) -> jax.Array:
            nonlocal tokens, cache
            tokens, cache = step(params, tokens, cache, key)
            return tokens

        for _ in range(case.steps):
            start, last = time.perf_counter(), tokens
            once()
            np.asarray(last)  # all that the host reads
            steps_ms.append((time.perf_counter() - start) * 1e3)
        name = f"decode, batch {batch} behind {case.context:,}"
        if not run.on_cpu:
            run.note(f"{name}: {parts_of(once, step.as_text() or '')}")
        del cache
        bound = speed and step_bytes(config, batch, case.context, group.size) / speed * 1e3
        yield row(name, batch, statistics.median(steps_ms[2:]), bound)


def cases(run: Run) -> list[Case]:
    if run.on_cpu:
        return [Case("small", dataclasses.replace(SMALL, num_hidden_layers=2), (16,), (1, 8), 16, 4)]
    whole = dataclasses.replace(QWEN3_30B, num_hidden_layers=run.options.layers)
    name = f"Qwen3-30B, {run.options.layers} layers"
    return [Case(name, whole, (4096, 32_768), (1, 8, 32, 128), 4096, 32)]


def notes(run: Run) -> Iterator[str]:
    yield "a step: median of consecutive steps of one run; the host reads the tokens of one while the next runs"
    yield "the bound takes even routing; routers of random weights may choose fewer experts"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=48, help="[%(default)s]")


BENCH = Bench(__doc__, cases, rows, notes, arguments, repeats=3, open=open_all)
