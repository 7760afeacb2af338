"""A model of `jax_ep.integrations.nnx.MoeMlp` layers: scanned and rematerialized, with FSDP, optax and orbax.

The mesh has two axes, and both shard the batch. "ep" shards the experts. "fsdp" shards every matrix and its moments of
the optimizer as well.

Checkpoints do not hold the group: open it before you load one. Modules are made and trained under `jax.set_mesh`, by
which Flax places what has an `out_sharding`.
"""

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_ep
from jax_ep.integrations.nnx import MoeAux, MoeMlp

ROWS = P(("fsdp", "ep"))
VOCABULARY = 256  # bytes
OPTIMIZER = optax.adamw(3e-3)  # one, so that a model that is made again runs what was compiled

State = tuple["Model", nnx.Optimizer]


@dataclasses.dataclass(frozen=True)
class Config:
    d_model: int = 64
    d_expert: int = 96
    experts: int = 8
    top_k: int = 2
    layers: int = 3
    context: int = 8  # bytes from which the next is predicted
    balance_weight: float = 0.01
    implementation: jax_ep.Implementation = "auto"


def matrix(rngs: nnx.Rngs, *shape: int, spec: P) -> nnx.Param:
    """Random values, the last two axes of a matrix, sharded by `spec`."""
    return nnx.Param(jax.random.normal(rngs.params(), shape) / shape[-2] ** 0.5, out_sharding=tuple(spec))


# What the backward pass keeps of a layer: what came over the wire, and nothing else.
remat = nnx.remat(policy=jax.checkpoint_policies.save_only_these_names("jax_ep_dispatch", "jax_ep_combine"))


class Model(nnx.Module):
    """Predicts the byte that follows `context` bytes."""

    def __init__(self, config: Config, group: jax_ep.Group, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})  # the axis of layers is not sharded
        def layers(rngs: nnx.Rngs) -> MoeMlp:
            return MoeMlp(
                config.d_model,
                config.d_expert,
                config.experts,
                config.top_k,
                group=group,
                fsdp="fsdp",
                implementation=config.implementation,
                rngs=rngs,
            )

        self.config = config
        self.embedding = matrix(rngs, VOCABULARY, config.d_model // config.context, spec=P())
        self.layers = layers(rngs)
        self.head = matrix(rngs, config.d_model, VOCABULARY, spec=P("fsdp"))

    def __call__(self, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Bytes [N, context] -> logits [N, 256], and the mean of the layers' balance losses."""

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0), transform_metadata={nnx.PARTITION_NAME: None})
        @remat
        def block(x: jax.Array, layer: MoeMlp) -> tuple[jax.Array, MoeAux]:
            out, aux = layer(rms_norm(x))
            return x + out, aux

        x, aux = block(self.embedding[text].reshape(len(text), -1), self.layers)
        return rms_norm(x) @ self.head[...], jnp.mean(aux.balance_loss)


def rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def drawn(config: Config, group: jax_ep.Group, seed: int) -> State:
    """A model and its optimizer, for `nnx.jit` or `nnx.eval_shape`."""
    model = Model(config, group, nnx.Rngs(seed))
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def create(config: Config, group: jax_ep.Group, seed: int = 0) -> State:
    """A model and its optimizer, made in their shards."""
    with jax.set_mesh(group.mesh):
        return nnx.jit(partial(drawn, config, group, seed))()


def loss(model: Model, batch: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats of the last byte of each row of `batch` [N, context + 1], and the weighted balance."""
    logits, balance = model(batch[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1])
    return jnp.mean(losses) + model.config.balance_weight * balance


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    value, gradient = nnx.value_and_grad(loss)(model, batch)
    optimizer.update(model, gradient)
    return value


def train(state: State, group: jax_ep.Group, batches: Callable[[int], Any], steps: range) -> list[float]:
    """Trains in place on batches [N, context + 1] of bytes, by the number of the step; returns the losses."""
    losses = []
    with jax.set_mesh(group.mesh):
        for step in steps:
            batch = jax.device_put(jnp.asarray(batches(step), jnp.int32), NamedSharding(group.mesh, ROWS))
            losses.append(float(train_step(*state, batch)))  # awaits the step
            group.check()
    return losses


def save(folder: Path, state: State) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), nnx.to_pure_dict(nnx.state(state)))


def resume(folder: Path, config: Config, group: jax_ep.Group) -> State:
    """What was saved, in the shards of this group's mesh, which need not be the one that it was saved from."""

    def on_devices(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(group.mesh, x.sharding.spec))

    with jax.set_mesh(group.mesh):
        state = nnx.eval_shape(partial(drawn, config, group, 0))
    with ocp.StandardCheckpointer() as checkpointer:
        target = jax.tree.map(on_devices, nnx.to_pure_dict(nnx.state(state)))
        nnx.update(state, checkpointer.restore(folder.absolute(), target))
    return state


def main() -> None:
    """Trains on the text of this file, over all devices."""
    parser = argparse.ArgumentParser(description="Train a small language model of Flax NNX.")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    steps = parser.parse_args().steps
    config, text = Config(), np.frombuffer(Path(__file__).read_bytes(), np.uint8)

    def batch(step: int) -> np.ndarray:
        starts = np.random.default_rng(step).integers(text.size - config.context, size=(256, 1))
        return text[starts + np.arange(config.context + 1)]

    mesh = Mesh(np.array(jax.devices()).reshape(1, -1), ("fsdp", "ep"))
    with jax_ep.Group(mesh, "ep") as group:
        state = create(config, group)
        for first in range(0, steps, 20):
            losses = train(state, group, batch, range(first, min(first + 20, steps)))
            print(f"step {first}: loss {losses[0]:.3f} nats per byte", flush=True)


if __name__ == "__main__":
    main()
