"""A tensor-parallel MLP that guesses the next byte of Python sources: `python -m jax_ep demo-mlp`.

Between the layers each device holds a share of the rows (sequence parallelism), inside them a share of the hidden
units: `all_gather_matmul` brings all rows to the hidden units of a device, `matmul_reduce_scatter` sums what the
devices made of them and leaves each its share of the rows. Both move blocks of rows while others are being multiplied,
and so do their gradients, which are the same two ops the other way round.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_ep

if __name__ == "__main__":  # run as a file: the package is its folder
    sys.path.append(str(Path(__file__).parents[1]))
    __package__ = "examples"

from .moe_lm_data import load_bytes, sample_batch

SEED = 0
CONTEXT, D_BYTE = 8, 32  # bytes that are seen, and the features of each
D_MODEL, D_HIDDEN, LAYERS = CONTEXT * D_BYTE, 512, 2
ROWS = 512  # of a batch, over all devices
SMOOTHING = 20  # steps over which the reported loss is averaged


class Params(NamedTuple):
    embedding: jax.Array  # [256, D_BYTE]
    expand: jax.Array  # [LAYERS, D_MODEL, D_HIDDEN], hidden units spread over the devices
    contract: jax.Array  # [LAYERS, D_HIDDEN, D_MODEL], likewise
    logits: jax.Array  # [D_MODEL, 256]


def partition_specs(axis: str | tuple[str, ...]) -> Any:
    """The specs of `Params`."""
    return Params(*(P(), P(None, None, axis), P(None, axis), P()))  # pyright: ignore


def init_params(key: jax.Array, group: jax_ep.Group) -> Params:
    """Random weights, placed on the devices of the group."""
    shapes = (256, D_BYTE), (LAYERS, D_MODEL, D_HIDDEN), (LAYERS, D_HIDDEN, D_MODEL), (D_MODEL, 256)

    def draw(key: jax.Array, shape: Any, spec: P) -> jax.Array:
        values = jax.random.normal(key, shape) / np.sqrt(shape[-2])
        return jax.device_put(values, NamedSharding(group.mesh, spec))

    return Params(*map(draw, jax.random.split(key, len(shapes)), shapes, partition_specs(group.axis_name)))


def loss(params: Params, batch: jax.Array, dtype: Any, group: jax_ep.Group) -> jax.Array:
    """Mean cross-entropy in nats of the last byte of each row of `batch` [ROWS, CONTEXT + 1], given its other bytes."""
    import optax  # here, so that --help needs no extras

    def per_device(params: Params, batch: jax.Array) -> jax.Array:
        x = params.embedding[batch[:, :-1].astype(jnp.int32)].reshape(-1, D_MODEL).astype(dtype)
        for expand, contract in zip(params.expand.astype(dtype), params.contract.astype(dtype), strict=True):
            mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=1, keepdims=True)
            normal = (x / jnp.sqrt(mean_square + 1e-6)).astype(dtype)
            hidden = jax.nn.gelu(jax_ep.all_gather_matmul(normal, expand, group=group))
            x = x + jax_ep.matmul_reduce_scatter(hidden, contract, group=group)
        logits = x.astype(jnp.float32) @ params.logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1].astype(jnp.int32))
        return jax.lax.pmean(losses.mean(), group.axis_name)

    specs = partition_specs(group.axis_name), P(group.axis_name)
    return jax.shard_map(per_device, mesh=group.mesh, in_specs=specs, out_specs=P())(params, batch)


def train(params: Params, text: np.ndarray, steps: int, dtype: Any, group: jax_ep.Group) -> list[float]:
    """Trains with a progress bar; returns the loss of every step."""
    import optax
    from tqdm import tqdm

    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, steps))
    state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Params, state: Any, batch: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, batch, dtype, group)
        updates, state = optimizer.update(gradient, state, params)
        return jax.tree.map(jnp.add, params, updates), state, value

    rng, losses = np.random.default_rng(SEED), []
    with tqdm(range(steps), unit="step", mininterval=0.5, postfix="compiling") as bar:
        for _ in bar:
            params, state, value = train_step(params, state, sample_batch(text, rng, ROWS, CONTEXT))
            losses.append(float(value))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    return losses


def main(arguments: list[str]) -> int:
    """Returns 0 if the loss fell."""
    parser = argparse.ArgumentParser(prog="python -m jax_ep demo-mlp", description="Train a tensor-parallel MLP.")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps must be at least 2")

    text = load_bytes()
    devices = np.array(jax.devices())
    devices = devices[: np.gcd.reduce([devices.size, ROWS, D_HIDDEN // 8])]  # rows and hidden units must divide
    with jax_ep.Group(Mesh(devices, ("tp",)), "tp") as group:
        dtype = jnp.float32 if group.platform == "cpu" else jnp.bfloat16
        print(
            f"{LAYERS} layers of {D_HIDDEN} hidden units over {group.size} x {devices[0].device_kind}, "
            f"{jnp.dtype(dtype).name}",
            flush=True,
        )
        start = time.perf_counter()
        losses = train(init_params(jax.random.key(SEED), group), text, options.steps, dtype, group)
        seconds = time.perf_counter() - start
        group.check()

    last = min(SMOOTHING, options.steps // 2)
    first_loss, last_loss = losses[0], float(np.mean(losses[-last:]))
    fell = last_loss < 0.9 * first_loss
    print(f"loss: {first_loss:.3f} at the start, {last_loss:.3f} at the end (mean of {last} steps), in nats per byte")
    print(f"{options.steps / seconds:,.1f} steps/s")
    if not fell:
        print("FAILED: the loss did not fall")
    return 0 if fell else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
