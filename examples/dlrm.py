"""Click prediction by a small DLRM (Naumov et al. 2019), its tables spread over all devices.

`python examples/dlrm.py` trains it in one process, `python -m jax_ep.launch -n 2 examples/dlrm.py` in two.

Two tables of one width are one stacked table of which every device holds a part. A step sends the ids of its examples
to the owners and their rows home, and the gradients back, which the owners add up: one exchange for both tables and for
the bags of items that a user saw. The layers above are dense and data-parallel.
"""

import argparse
import sys
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_ep
from jax_ep import embedding

SEED, BATCH = 0, 4096  # examples of all devices
HEIGHTS = {"item": 2_000, "user": 30_000}  # rows of the tables, in the order of their names
D, BAG, FEATURES, HIDDEN = 16, 8, 4, 64
ROWS = embedding.rowwise_adagrad(0.1)
LAYERS = optax.adam(1e-2)

Batch: TypeAlias = dict[str, Any]  # "ids": {"user" [B], "item": {"shown" [B], "seen" [B, BAG]}}, "features", "clicks"


def draw_batch(rng: np.random.Generator) -> Batch:
    """Popular items and active users are in most examples. Whom an item pleases depends on both, and on their past."""

    def ids(table: str, *shape: int) -> np.ndarray:
        return ((rng.zipf(1.2, (BATCH, *shape)) * 7919) % HEIGHTS[table]).astype(np.int32)

    seen = np.where(np.arange(BAG) < rng.integers(0, BAG + 1, (BATCH, 1)), ids("item", BAG), -1)
    user, shown, features = ids("user"), ids("item"), rng.standard_normal((BATCH, FEATURES)).astype(np.float32)
    logits = np.sin(user) + 2 * np.sin(shown * 5) + np.mean(np.cos(seen), axis=1) + features[:, 0]
    clicks = rng.uniform(size=BATCH) < 1 / (1 + np.exp(-2 * logits))
    ids_of = {"user": user, "item": {"shown": shown, "seen": seen.astype(np.int32)}}
    return {"ids": ids_of, "features": features, "clicks": clicks.astype(np.float32)}


def init(key: jax.Array, ranks: int) -> tuple[jax.Array, list[jax.Array]]:
    """The stacked table, whose rows the ranks divide, and the matrices above it."""
    keys = jax.random.split(key, 3)
    height = -(-sum(HEIGHTS.values()) // ranks) * ranks
    shapes = (height, D), (3 * D + 3 + FEATURES, HIDDEN), (HIDDEN, 1)
    table, *layers = (jax.random.normal(k, shape) / shape[1] ** 0.5 for k, shape in zip(keys, shapes, strict=True))
    return table, layers


def loss(rows: dict[str, Any], layers: list[jax.Array], batch: Batch) -> jax.Array:
    """Of one device: the mean over its examples, in nats."""
    seen = embedding.bag(rows["item"]["seen"], batch["ids"]["item"]["seen"], combiner="mean")
    vectors = jnp.stack([rows["user"], rows["item"]["shown"], seen], axis=1)
    products = jnp.einsum("bid,bjd->bij", vectors, vectors)[:, *np.triu_indices(3, 1)]
    x = jnp.concatenate([vectors.reshape(len(seen), -1), products, batch["features"]], axis=1)
    logits = jax.nn.relu(x @ layers[0]) @ layers[1]
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits[:, 0], batch["clicks"]))


def make_step(group: jax_ep.Group, specs: Any) -> Any:
    """(table, state of the table, layers, state of the layers), batch -> the same, loss."""
    gradients_of = embedding.sparse_value_and_grad(loss, 1, group=group)

    def step(state: Any, batch: Batch) -> tuple[Any, jax.Array]:
        table, of_table, layers, of_layers = state
        value, gradients = gradients_of(table, embedding.stacked_ids(batch["ids"], HEIGHTS), layers, batch)
        by_rows, by_layers = embedding.scale(gradients, 1 / group.size)  # of the mean over devices
        table, of_table = ROWS.step(table, of_table, by_rows)
        updates, of_layers = LAYERS.update(by_layers, of_layers)
        state = table, of_table, optax.apply_updates(layers, updates), of_layers
        return state, jax.lax.pmean(value, group.axis_name)

    mapped = jax.shard_map(step, mesh=group.mesh, in_specs=(specs, P("dp")), out_specs=(specs, P()))
    return jax.jit(mapped, donate_argnums=0)


def train(group: jax_ep.Group, steps: int) -> list[float]:
    """The loss of every step."""

    def place(x: Any, spec: Any) -> jax.Array:  # every process has all of x, and puts its part on its devices
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, NamedSharding(group.mesh, spec), lambda index: x[index])

    table, layers = init(jax.random.key(SEED), group.size)
    state = table, ROWS.init(table), layers, LAYERS.init(layers)
    specs = (P("dp"), P("dp"), *jax.tree.map(lambda _: P(), state[2:]))
    state = jax.tree.map(place, state, specs)
    step, rng, losses = make_step(group, specs), np.random.default_rng(SEED), []
    for _ in range(steps):
        state, value = step(state, jax.tree.map(lambda x: place(x, P("dp")), draw_batch(rng)))
        losses.append(float(value))  # awaits the step
        group.check()
    return losses


def main(arguments: list[str]) -> int:
    """Returns 0 if the loss fell."""
    parser = argparse.ArgumentParser(description="Train a small DLRM whose tables are spread over all devices.")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    options = parser.parse_args(arguments)
    with jax_ep.Group(Mesh(np.array(jax.devices()), ("dp",)), "dp") as group:
        losses = train(group, options.steps)
        if jax.process_index() == 0:
            print(f"{group.size} devices of {jax.process_count()} processes, {options.steps} steps of {BATCH} examples")
            print(f"loss {losses[0]:.4f} at the start, {losses[-1]:.4f} at the end", flush=True)
    return 0 if losses[-1] < 0.95 * losses[0] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
