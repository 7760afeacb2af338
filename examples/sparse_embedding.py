"""Word vectors, trained data-parallel with sparse gradients: `python -m jax_ep demo-sparse`.

Every device draws its own pairs of words. It touches a few hundred rows of two tables [V, D], and sends only these:
`sparse_value_and_grad` gives the gradient as rows, `sparse_all_reduce` adds up the rows of all devices, and a row-wise
optimizer updates nothing else. All devices keep the same tables, bit by bit.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import jax_ep
from jax_ep import embedding

if __name__ == "__main__":  # run as a file: the package is its folder
    sys.path.append(str(Path(__file__).parents[1]))
    __package__ = "examples"

from .word_data import Batch, Corpus, load_corpus, sample_batch

SEED = 0
DIMENSION = 64
PAIRS, NOISE = 4096, 256  # of a batch, over all devices
NEGATIVES = 5  # how many random words weigh as much as the true one
LEARNING_RATE = 0.1
PROBES = ("month", "float", "thread", "server", "parse", "width", "read", "true")
FREQUENT = 3000  # words among which neighbours are looked for

Tables: TypeAlias = dict[str, jax.Array]  # "center" and "context", [V, D] each


class Metrics(NamedTuple):
    loss: jax.Array  # [] nats per pair
    own_rows: jax.Array  # [] rows that a device touched, on average
    all_rows: jax.Array  # [] rows that any device touched


def loss(rows: dict[str, Any]) -> jax.Array:
    """Summed over one device's pairs: rows are "center" [B, D] and "context": {"true" [B, D], "noise" [M, D]}.

    Negative sampling (Mikolov et al. 2013), with noise that the pairs of a device share (Ji et al. 2016).
    """
    center, true, noise = rows["center"], rows["context"]["true"], rows["context"]["noise"]
    attraction = jnp.sum(jax.nn.softplus(-jnp.sum(center * true, axis=1)))
    repulsion = jnp.sum(jax.nn.softplus(center @ noise.T))
    return attraction + NEGATIVES / noise.shape[0] * repulsion


def init_tables(key: jax.Array, vocabulary: int) -> Tables:
    center = jax.random.uniform(key, (vocabulary, DIMENSION), minval=-0.5, maxval=0.5) / np.sqrt(DIMENSION)
    return {"center": center, "context": jnp.zeros((vocabulary, DIMENSION))}


def summed_gradient(tables: Tables, batch: Batch, group: jax_ep.Group) -> tuple[dict[str, jax_ep.SparseRows], Metrics]:
    """On one device: the gradient of the loss of all devices. Words drawn twice are added up before they are sent."""
    ids = {"center": batch.center, "context": {"true": batch.context, "noise": batch.noise}}
    value, gradient = embedding.sparse_value_and_grad(loss)(tables, ids)
    own = {name: jax_ep.coalesce(rows) for name, rows in gradient.items()}
    total = {
        name: jax_ep.sparse_all_reduce(rows, group=group, capacity=min(rows.num_rows, group.size * rows.indices.size))
        for name, rows in own.items()
    }
    mean = partial(jax.lax.pmean, axis_name=group.axis_name)
    own_rows, all_rows = (jnp.sum(jnp.stack([rows[name].count for name in tables])) for rows in (own, total))
    return total, Metrics(mean(value) / batch.center.size, mean(own_rows.astype(jnp.float32)), all_rows)


Step = Callable[[Tables, Any, Batch, float], tuple[Tables, Any, Metrics]]


def make_train_step(group: jax_ep.Group) -> Step:
    """One jitted step of row-wise Adagrad: the tables and their state are replicated, the batch is spread."""

    def per_device(tables: Tables, state: Any, batch: Batch, learning_rate: jax.Array) -> tuple[Tables, Any, Metrics]:
        gradient, metrics = summed_gradient(tables, batch, group)
        return *embedding.rowwise_adagrad(learning_rate).step(tables, state, gradient), metrics

    specs = (P(), P(), P(group.axis_name), P())
    return jax.jit(jax.shard_map(per_device, mesh=group.mesh, in_specs=specs, out_specs=P()), donate_argnums=(0, 1))


def train(corpus: Corpus, steps: int, group: jax_ep.Group) -> tuple[Tables, Metrics]:
    """Trains with a progress bar; returns the tables and the metrics of every step, stacked."""
    from tqdm import tqdm  # here, so that --help needs no extras

    step = make_train_step(group)
    place = partial(jax.device_put, device=jax.sharding.NamedSharding(group.mesh, P()))
    tables = place(init_tables(jax.random.key(SEED), len(corpus.vocabulary)))
    state = place(embedding.rowwise_adagrad(LEARNING_RATE).init(tables))
    rng = np.random.default_rng(SEED)
    history: list[Metrics] = []
    with tqdm(range(steps), unit="step", mininterval=0.5, postfix="compiling") as bar:
        for i in bar:
            batch = sample_batch(corpus, rng, PAIRS, NOISE)
            tables, state, metrics = step(tables, state, batch, LEARNING_RATE * (1 - i / steps))
            history.append(jax.device_get(metrics))  # awaits the step
            bar.set_postfix_str(f"loss {history[-1].loss:.3f}", refresh=False)
    return tables, jax.tree.map(lambda *values: np.stack(values), *history)


def neighbours(corpus: Corpus, tables: Tables, word: str, count: int = 6) -> list[str]:
    """The frequent words whose vectors point most nearly the same way."""
    vectors = np.asarray(tables["center"])[:FREQUENT]
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    closeness = vectors @ vectors[corpus.vocabulary.index(word)]
    return [corpus.vocabulary[i] for i in np.argsort(-closeness)[1 : count + 1]]


def received_bytes(metrics: Metrics, vocabulary: int, size: int) -> tuple[float, float]:
    """What a device receives over all steps: with sparse rows, and in a dense all-reduce of both tables."""
    row = DIMENSION * 4
    # All holders of a row but one send it to that one, which sends the sum to all others.
    rows = np.sum(metrics.own_rows + metrics.all_rows * (size - 2) / size)
    dense = len(metrics.loss) * 2 * vocabulary * row * 2 * (size - 1) / size
    return float(rows * (row + 4)), dense  # a row travels with its id


def main(arguments: list[str]) -> int:
    """Returns 0 if the loss fell."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_ep demo-sparse", description="Train word vectors with sparse gradients."
    )
    parser.add_argument("--steps", type=int, default=2000, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps must be at least 2")

    corpus = load_corpus(np.random.default_rng(SEED))
    devices = np.array(jax.devices())
    devices = devices[: np.gcd.reduce([devices.size, PAIRS, NOISE])]  # the batch must divide
    with jax_ep.Group(Mesh(devices, ("dp",)), "dp") as group:
        print(
            f"2 tables of {len(corpus.vocabulary):,} words x {DIMENSION}, {PAIRS} pairs a step "
            f"on {group.size} x {devices[0].device_kind}",
            flush=True,
        )
        start = time.perf_counter()
        tables, metrics = train(corpus, options.steps, group)
        seconds = time.perf_counter() - start
        group.check()

    print()
    for word in PROBES:
        print(f"{word:>8}: {', '.join(neighbours(corpus, tables, word))}")
    last = min(100, options.steps // 2)
    first_loss, last_loss = float(metrics.loss[0]), float(np.mean(metrics.loss[-last:]))
    sparse, dense = received_bytes(metrics, len(corpus.vocabulary), group.size)
    fell = last_loss < 0.9 * first_loss
    print(f"\nloss: {first_loss:.3f} at the start, {last_loss:.3f} at the end (mean of {last} steps), in nats per pair")
    print(
        f"{options.steps * PAIRS / seconds:,.0f} pairs/s\n"
        f"each device received {sparse / 1e6:,.0f} MB; a dense all-reduce would have brought it {dense / 1e6:,.0f} MB: "
        f"{(dense - sparse) / 1e6:,.0f} MB not sent"
    )
    if not fell:
        print("FAILED: the loss did not fall")
    return 0 if fell else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
