"""Compares a training step of a model that uses jax_ep with one of the same model in plain JAX.

    python -m jax_ep bench model

The model has the widths of Qwen3-30B-A3B, random weights and fewer layers than its 48.
"""

import argparse
import collections
import dataclasses
import glob
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_ep
from jax_ep.__main__ import load

from . import runner
from .in_jit_loop import AXIS
from .moe_cases import draw_ids
from .plain_mixture import CAPACITY_FACTOR, plain_mixture
from .runner import Bench, Row, Run

layers, model, qwen3_moe, training = (
    load("examples", f"models.{name}") for name in ("layers", "model", "qwen3_moe", "training")
)
SEED = 0
OURS, PLAIN = "jax_ep", "plain JAX"
QWEN3_30B = qwen3_moe.Config(
    vocab_size=151_936,
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    rms_norm_eps=1e-6,
    rope=layers.Rope(rope_theta=1e6),
)
SMALL = dataclasses.replace(
    QWEN3_30B,
    vocab_size=256,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=64,
    num_experts=8,
    num_experts_per_tok=2,
)
GROUPS = {  # of kernels: patterns for the kernel's name and its XLA metadata, of which the first match wins
    "optimizer": "optimizer",
    "passes over parameters": "working copies|accumulation|memcpy|memset|loop_broadcast|dynamic_update_slice",
    "experts' products": "jax_ep::gemm",
    "exchange": "jax_ep::",
    "attention": "cudnn|fmha|dot_product_attention|bgmd|bgms",
    "dense products": "nvjet|gemm|cutlass|dot_general",
    "collectives": "nccl",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with `layers` layers. `sequences` counts those of one device and micro-batch. `skewed`: some experts are
    popular, and those of the first device more than others. Experts are drawn, because the routers of random weights
    choose less evenly in each further layer."""

    layers: int
    sequences: int
    length: int
    micro_batches: int = 4
    small: bool = False
    skewed: bool = False
    quick: bool = True

    def __str__(self) -> str:
        name = "small" if self.small else "Qwen3-30B's widths"
        shape = f"{self.layers} layers, {self.micro_batches} x {self.sequences} x {self.length}"
        return f"{name}, {shape}{', skewed' if self.skewed else ''}"

    @property
    def config(self) -> Any:
        return dataclasses.replace(SMALL if self.small else QWEN3_30B, num_hidden_layers=self.layers)

    def flops(self, tokens: int) -> float:
        return tokens * training.flops_per_token(self.config, self.length)


def await_calls(call: Callable[[], Any], calls: int) -> None:
    """Holds the results of one call at a time, because gradients are large."""
    out = None
    for _ in range(calls):
        out = None
        out = call()
    jax.block_until_ready(out)


def in_turns(programs: Mapping[str, Callable[[], Any]], turns: int, calls: int) -> dict[str, float]:
    """Returns the median milliseconds per call. The first turn is a warm-up."""
    found: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(turns + 1):
        for name, call in programs.items():
            start = time.perf_counter()
            await_calls(call, calls)
            if turn:
                found[name].append((time.perf_counter() - start) / calls * 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


def time_by_group(call: Callable[[], Any], text: str, calls: int = 2) -> dict[str, float]:
    """Milliseconds of a call by group of kernels on the first GPU. `text`: the compiled program, whose metadata names
    what a kernel was."""
    named = {name.replace(".", "_"): what for name, what in re.findall(r'%(\S+) = .*op_name="([^"]*)"', text)}
    totals: dict[str, float] = collections.defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            await_calls(call, calls)
        [path] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            lines = [line for line in plane.lines if line.name.startswith("Stream")] if "GPU:0" in plane.name else []
            for event in (event for line in lines for event in line.events):
                what = f"{event.name} {named.get(event.name, '')}"
                group = next((name for name, words in GROUPS.items() if re.search(words, what, re.I)), "the rest")
                totals[group] += event.duration_ns / 1e6 / calls
    return totals


def parts_of(call: Callable[[], Any], text: str) -> str:
    """The milliseconds of each group of kernels, longest first."""
    parts = sorted(time_by_group(call, text).items(), key=lambda part: -part[1])
    return ", ".join(f"{part} {ms:.1f} ms" for part, ms in parts)


@cache
def drawn_ids(tokens: int, top_k: int, experts: int, ranks: int, skewed: bool) -> np.ndarray:
    """Distinct experts of each token. All are equally popular, or popularity is log-normal and half as high again on
    the first rank."""
    rng = np.random.default_rng(SEED)
    popularity = np.exp(0.7 * skewed * rng.standard_normal(experts))
    if skewed:
        popularity[: experts // ranks] *= 1.5
    return draw_ids(rng, tokens, top_k, popularity)


def with_drawn_ids(moe_mlp: Callable[..., Any], skewed: bool) -> Callable[..., Any]:
    """The layer with `drawn_ids` instead of the router's, the same in each layer and on each rank."""

    def layer(tokens: jax.Array, ids: jax.Array, weights: jax.Array, experts: Any, **options: Any) -> Any:
        ranks = options["group"].size
        drawn = drawn_ids(len(ids), ids.shape[1], ranks * experts.down.shape[0], ranks, skewed)
        ids = jnp.where(ids >= 0, drawn, ids)
        return moe_mlp(tokens, ids, weights, experts, **options)

    return layer


def note_skew(case: Case, run: Run) -> None:
    config, ranks = case.config, run.group.size
    ids = drawn_ids(case.sequences * case.length, config.num_experts_per_tok, config.num_experts, ranks, True)
    load = np.bincount(ids.ravel(), minlength=config.num_experts)
    expert, rank = load.max() / load.mean(), load.reshape(ranks, -1).sum(1).max() / load.sum() * ranks
    run.note(f"{case}: the busiest expert has {expert:.1f} times the mean load, the busiest GPU {rank:.2f} times")


class Step(NamedTuple):
    """A compiled step, how it computes the model, and the name of its policy in `layers.REMAT`."""

    program: jax.stages.Compiled
    way: Any
    remat: str


# Milliseconds of a step, and its policy, by mixture of experts, of the cases so far.
_steps: dict[Case, dict[str, tuple[float, str]]] = {}


def note_layer(case: Case, run: Run) -> None:
    """Estimates from two depths what a layer adds to a step, and what 48 layers take."""
    deeper = dataclasses.replace(case, layers=2 * case.layers, quick=True)
    for name, (deep, remat) in _steps.get(deeper, {}).items():
        shallow, other = _steps[case].get(name, (0.0, None))
        if other is None:
            continue
        if other != remat:
            run.note(f"{name}: the two depths recompute different parts, so the time of a layer is not known")
            continue
        layer = (deep - shallow) / case.layers
        whole = deep + (QWEN3_30B.num_hidden_layers - deeper.layers) * layer
        rate = case.micro_batches * case.sequences * case.length / whole * 1e3
        run.note(f"{name}: a layer adds {layer:.1f} ms to a step; all 48 would give {rate:,.0f} tokens/s a GPU")


def time_gradients(case: Case, run: Run, params: Any, ways: Mapping[str, Any], batch: jax.Array) -> dict[str, float]:
    """Milliseconds by the mixture of experts. Notes the losses, and on a GPU what the time was spent on."""
    config = case.config
    dtype = next(iter(ways.values())).dtype
    working = jax.jit(lambda params: model.cast(params, config, dtype))(params)

    def compiled(way: Any) -> jax.stages.Compiled:
        def loss(working: Any) -> jax.Array:
            return training.loss_of(working, batch, config, way, balance=0, z=0)[0]

        return jax.jit(jax.value_and_grad(loss)).lower(working).compile()

    programs = {name: compiled(way) for name, way in ways.items()}
    calls = {name: partial(program, working) for name, program in programs.items()}
    run.note(f"{case}: losses " + ", ".join(f"{name} {call()[0]:.4f}" for name, call in calls.items()))
    times = in_turns(calls, run.options.repeats, 1 if run.on_cpu else 4)
    for name, call in calls.items() if not run.on_cpu else ():
        run.note(f"{case}, {name}, gradient: {parts_of(call, programs[name].as_text() or '')}")
    return times


def held_bytes(program: jax.stages.Compiled) -> int:
    """Bytes of operands and temporaries on a device."""
    memory: Any = program.memory_analysis()
    return memory.temp_size_in_bytes + memory.argument_size_in_bytes


def fits(program: jax.stages.Compiled) -> bool:
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")  # none on CPUs
    return limit is None or held_bytes(program) <= limit


def first_that_fits(name: str, run: Run, way: Any, lower: Callable[[Any], jax.stages.Lowered]) -> Step | None:
    for remat in [run.options.remat] if run.options.remat else layers.REMAT:
        way = dataclasses.replace(way, remat=layers.REMAT[remat])
        program = lower(way).compile()
        if fits(program):
            return Step(program, way, remat)
        run.note(f"{name}, remat {remat}: a step needs {held_bytes(program) / 2**30:.1f} GiB a GPU, too many")
    return None


def rows(case: Case, run: Run) -> Iterator[Row]:
    import optax  # here, so that --help needs no extras

    config, group = case.config, run.group
    room = {"capacity_factor": CAPACITY_FACTOR, "on_overflow": "drop"}
    how = layers.Run(group, dtype=jnp.float32 if run.on_cpu else jnp.bfloat16, unroll=case.layers, moe=room)
    ways = {OURS: how, PLAIN: dataclasses.replace(how, moe_mlp=plain_mixture)}
    if case.skewed:
        note_skew(case, run)
    ways = {
        name: dataclasses.replace(way, moe_mlp=with_drawn_ids(way.moe_mlp, case.skewed)) for name, way in ways.items()
    }
    optimizer = optax.adamw(1e-4, b2=0.95)
    state = training.first_state(jax.random.key(SEED), config, optimizer, how)
    shape = case.micro_batches, case.sequences * group.size, case.length + 1
    sharded = NamedSharding(group.mesh, P(None, AXIS))
    batches = jax.device_put(
        np.random.default_rng(SEED).integers(0, config.vocab_size, shape).astype(np.int32), sharded
    )

    def lower(way: Any) -> jax.stages.Lowered:
        return training.make_train_step(config, optimizer, way, state, balance=0).lower(state, batches)

    # One after the other: XLA times the tilings of a product while it compiles.
    found = {name: first_that_fits(f"{case}, {name}", run, way, lower) for name, way in ways.items()}
    steps = {name: step for name, step in found.items() if step is not None}
    if not steps:
        return
    of_gradient = time_gradients(case, run, state.params, {name: step.way for name, step in steps.items()}, batches[0])
    last: dict[str, Any] = {}  # metrics

    def one_step(name: str) -> Callable[[], Any]:
        def call() -> Any:
            nonlocal state
            state, last[name] = steps[name].program(state, batches)
            return last[name]

        return call

    of_step = in_turns({name: one_step(name) for name in steps}, run.options.repeats, 1)
    _steps[case] = {name: (ms, steps[name].remat) for name, ms in of_step.items()}
    note_layer(case, run)
    tokens = case.sequences * case.length  # of a micro-batch and GPU
    peak = training.peak_flops(group.mesh.devices.flat[0])
    for name, step in steps.items():
        rate = case.micro_batches * tokens / of_step[name] * 1e3
        flops = case.flops(case.micro_batches * tokens) / of_step[name] * 1e3
        yield {
            "model": case,
            "mixture of experts": name,
            "gradient, ms": f"{of_gradient[name]:,.1f}",
            "gradient, TF/s a GPU": f"{case.flops(tokens) / of_gradient[name] / 1e9:,.0f}",
            "step, ms": f"{of_step[name]:,.1f}",
            "tokens/s a GPU": f"{rate:,.0f}",
            "TF/s a GPU": f"{flops / 1e12:,.0f}",
            "MFU": f"{flops / peak:.1%}" if peak else "-",
            "GiB a GPU": f"{held_bytes(step.program) / 2**30:.1f}",
            "remat": step.remat,
            "dropped": f"{float(last[name].dropped):.1%}",
        }


def cases(run: Run) -> list[Case]:
    if run.on_cpu:
        small = Case(2, 1, 32, 2, small=True)
        return [small, dataclasses.replace(small, skewed=True, quick=False)]
    layers = run.options.layers or (6 if run.group.size == 1 else 12)
    first = Case(layers, 4, 4096, run.options.micro_batches)
    others = {"layers": max(1, layers // 2)}, {"skewed": True}
    return [first, *(dataclasses.replace(first, quick=False, **other) for other in others)]


def notes(run: Run) -> Iterator[str]:
    yield f"medians of {run.options.repeats} turns, both models in turns; a gradient is of one micro-batch"
    yield "AdamW with float32 weights; working copies in bfloat16 are made once a step"
    yield "remat: what each layer keeps for the backward pass, by the names of `layers.REMAT`"
    room = "of a GPU in jax_ep, from one rank to one expert in plain JAX"
    yield f"rows have room for {CAPACITY_FACTOR} times the even load, {room}"
    yield "the scan over layers is unrolled"
    yield "ids are drawn instead of the router's, evenly, or skewed: some are popular, most of all on the first GPU"
    yield "without the losses of routers; GiB as XLA plans operands and temporaries"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, help="[6 on one GPU, 12 on several]")
    parser.add_argument("--micro-batches", type=int, default=4, help="[%(default)s]")
    parser.add_argument("--remat", choices=layers.REMAT, help="[the first of these with which a step fits]")


def open_all(options: argparse.Namespace) -> jax_ep.Group:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # XLA takes three quarters of a GPU by default
    return runner.open_all(options)


BENCH = Bench(
    __doc__,
    cases,
    rows,
    notes,
    arguments,
    quick="one number of layers, routed evenly",
    repeats=3,
    open=open_all,
    packages=("optax",),
)
