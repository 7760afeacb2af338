"""Trains the language model of moe_lm.py on the sources of the standard library: `python -m jax_ep demo`."""

import argparse
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_ep

if __name__ == "__main__":  # run as a file: the package is its folder
    sys.path.append(str(Path(__file__).parents[1]))
    __package__ = "examples"

from . import moe_lm
from .moe_lm_data import load_bytes, sample_batch

SEED = 0
SEQUENCES, LENGTH = 8, 128  # of a batch, over all devices
SAMPLE_PROMPT, SAMPLE_LENGTH = b"def ", 64
SMOOTHING = 20  # steps over which the reported losses and loads are averaged

TrainStep = Callable[[moe_lm.Params, Any, np.ndarray], tuple[moe_lm.Params, Any, moe_lm.Metrics]]


def make_train_step(
    params: moe_lm.Params, steps: int, config: moe_lm.Config, group: jax_ep.Group
) -> tuple[Any, TrainStep]:
    """The state of the optimizer, placed like the parameters, and one jitted step of training."""
    import optax  # here, so that --help needs no extras

    warmup = min(20, steps // 4)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, warmup, max(steps, warmup + 1), end_value=2e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))
    replicated = NamedSharding(group.mesh, P())
    state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, replicated), optimizer.init(params))
    placement = jax.tree.map(lambda x: x.sharding, (params, state))

    def train_step(params: moe_lm.Params, state: Any, batch: jax.Array):
        gradients, metrics = jax.grad(moe_lm.loss, has_aux=True)(params, batch, config, group)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, metrics

    return state, jax.jit(train_step, donate_argnums=(0, 1), out_shardings=(*placement, replicated))


def train(
    params: moe_lm.Params, text: np.ndarray, steps: int, config: moe_lm.Config, group: jax_ep.Group
) -> tuple[moe_lm.Params, moe_lm.Metrics]:
    """Trains with a progress bar; returns the weights and the metrics of every step, stacked."""
    from tqdm import tqdm

    state, train_step = make_train_step(params, steps, config, group)
    rng = np.random.default_rng(SEED)
    history: list[moe_lm.Metrics] = []
    start = time.perf_counter()
    with tqdm(range(steps), unit="step", mininterval=0.5, postfix="compiling", disable=jax.process_index() != 0) as bar:
        for step in bar:
            params, state, metrics = train_step(params, state, sample_batch(text, rng, SEQUENCES, LENGTH))
            history.append(jax.device_get(metrics))  # awaits the step
            if step == 0:
                start = time.perf_counter()  # the first step compiles
                continue
            loss, load, dropped = history[-1]
            rate = step * SEQUENCES * LENGTH / (time.perf_counter() - start)
            relative = load * load.size
            bar.set_postfix_str(
                f"loss {loss:.3f}, {rate:,.0f} tokens/s, expert load {relative.min():.2f}-{relative.max():.2f}x mean, "
                f"dropped {dropped:.1%}",
                refresh=False,
            )
    return params, jax.tree.map(lambda *values: np.stack(values), *history)


def agrees_with_reference(
    params: moe_lm.Params, batch: np.ndarray, config: moe_lm.Config, group: jax_ep.Group
) -> tuple[bool, float]:
    """Runs the first MoE layer on a batch with the configured ops and with implementation="xla".

    Returns whether all integers (what was counted) are equal, and the largest difference of any float.
    """

    def per_device(params: moe_lm.Params, batch: jax.Array):
        layer = jax.tree.map(lambda stacked: stacked[0], params.layers)
        x = params.embedding[batch[:, :-1].astype(jnp.int32)]
        x = x + moe_lm.attention(layer, x, config.heads)
        tokens = moe_lm.rms_norm(x, layer.moe_norm).reshape(-1, config.d_model)
        ids, weights = jax_ep.nn.softmax_top_k(tokens @ layer.router, config.top_k)
        run = partial(moe_lm.experts, layer, tokens, ids, weights, group=group)
        return run(config=config), run(config=dataclasses.replace(config, implementation="xla"))

    axis = group.axis_name
    specs = moe_lm.partition_specs(axis), P(axis)
    both = jax.jit(jax.shard_map(per_device, mesh=group.mesh, in_specs=specs, out_specs=P(axis)))(params, batch)
    same, difference = True, 0.0
    for ours, reference in zip(*map(jax.tree.leaves, moe_lm.fetch(both)), strict=True):
        if np.issubdtype(ours.dtype, np.integer):
            same = same and np.array_equal(ours, reference)
        else:
            difference = max(difference, float(np.max(np.abs(ours - reference))))
    return same, difference


def plot(metrics: moe_lm.Metrics, size: int, path: Path) -> None:
    """Writes the loss curve and the expert load, at the start and at the end of training, as a PNG."""
    from matplotlib.figure import Figure

    steps, experts = metrics.load.shape
    last = min(SMOOTHING, steps)
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(metrics.loss, color="tab:blue", alpha=0.3, linewidth=0.8)
    smooth = np.convolve(metrics.loss, np.ones(last) / last, mode="valid")
    left.plot(np.arange(last - 1, steps) - last // 2, smooth, color="tab:blue")
    left.set(title="Training loss", xlabel="step", ylabel="nats per byte")
    for name, load, shift in (("first", metrics.load[:last], -0.2), ("last", metrics.load[-last:], 0.2)):
        right.bar(np.arange(experts) + shift, load.mean(axis=0), width=0.4, label=f"{name} {last} steps")
    right.axhline(1 / experts, color="black", linestyle="--", linewidth=0.8, label="even")
    for rank in range(1, size):
        right.axvline(rank * experts / size - 0.5, color="lightgray", linewidth=0.8)
    right.set(
        title=f"Expert load ({experts} experts on {size} devices)", xlabel="expert", ylabel="share of assignments"
    )
    right.margins(y=0.15)
    right.legend(loc="upper center", ncols=3)
    figure.savefig(path, dpi=120, format="png")


def open_group(nodes: int | None, config: moe_lm.Config) -> jax_ep.Group:
    """Over as many devices as divide the experts and the batch; `nodes`: over as many of each node.

    Raises:
      SystemExit: the devices are not of so many nodes, or a node has none.
    """
    devices = np.array(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))
    count = math.gcd(devices.size, SEQUENCES, config.experts)
    if nodes is None:
        return jax_ep.Group(Mesh(devices[:count], ("ep",)), "ep")
    if nodes < 1 or devices.size % nodes or count % nodes:
        sys.exit(f"--nodes must divide the {devices.size} devices, and the {count} that are used, got {nodes}")
    mesh = Mesh(devices.reshape(nodes, -1)[:, : count // nodes], ("node", "ep"))
    return jax_ep.Group(mesh, mesh.axis_names, across_nodes=True)


def main(arguments: list[str]) -> int:
    """Returns 0 if the loss fell and the ops agreed with implementation="xla"."""
    parser = argparse.ArgumentParser(prog="python -m jax_ep demo", description="Train a small MoE language model.")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("jax_ep_demo.png"), help="PNG file; default: %(default)s")
    parser.add_argument("--nodes", type=int, help="into which the devices are split, such as processes; default: none")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    out = options.out.absolute()
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        parser.error(f"--out must be a file that can be written, got {options.out}")

    config, text = moe_lm.Config(), load_bytes()
    show: Callable[[str], None] = partial(print, flush=True) if jax.process_index() == 0 else lambda _: None
    with open_group(options.nodes, config) as group:
        params = moe_lm.init_params(jax.random.key(SEED), config, group)
        count = sum(x.size for x in jax.tree.leaves(params))
        show(
            f"{count:,} parameters, top-{config.top_k} of {config.experts} experts in {config.layers} layers, "
            f"on {group.nodes} x {group.size // group.nodes} x {group.mesh.devices.flat[0].device_kind}\n"
            f"{text.size:,} bytes of the Python standard library, {SEQUENCES * LENGTH} a step, seed {SEED}"
        )
        params, metrics = train(params, text, options.steps, config, group)

        batch = sample_batch(text, np.random.default_rng(SEED + 1), SEQUENCES, LENGTH)
        same, difference = agrees_with_reference(params, batch, config, group)
        sample = moe_lm.generate(params, SAMPLE_PROMPT, SAMPLE_LENGTH, SEED, config, group)
        group.check()
    if jax.process_index() == 0:
        plot(metrics, group.size, options.out)

    last = min(SMOOTHING, options.steps // 2)
    start, end = float(metrics.loss[0]), float(np.mean(metrics.loss[-last:]))
    fell, agreed = end < 0.9 * start, same and difference <= 1e-4
    printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in sample.decode(errors="replace"))
    show(f"\nsample:\n{printable}\n")
    show(f"loss: {start:.3f} at the start, {end:.3f} at the end (mean of {last} steps), in nats per byte")
    show(
        f"live batch, against implementation='xla': routing {'equal' if same else 'DIFFERENT'}, "
        f"largest difference {difference:.1e}: {'agreed' if agreed else 'DISAGREED'}"
    )
    show(f"wrote {options.out}")
    if not fell:
        show("FAILED: the loss did not fall")
    return 0 if fell and agreed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
