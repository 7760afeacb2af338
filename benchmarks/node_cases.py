"""What the benchmark of nodes measures: models, the ids that are drawn and what they ask of nodes, and operands."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .in_jit_loop import draw
from .layer import Model, draw_matrices
from .moe_cases import SEED, Shape

AXES = ("node", "ep")

V3 = Model("V3", Shape(4096, 7168, 8, 256, "bfloat16"), 2048)
SMALL = Model("small", Shape(512, 2048, 8, 64, "bfloat16"), 512)
TINY = Model("tiny", Shape(64, 256, 2, 16, "float32"), 32)  # XLA on a CPU sends 16-bit values as float32


class Operands(NamedTuple):
    """The operands of all ranks, on their devices."""

    ids: jax.Array
    weights: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    tokens: jax.Array


def draw_ids(shape: Shape, nodes: int, ranks: int, top_nodes: int | None) -> np.ndarray:
    """[R T, K] different experts, drawn alike from those of `top_nodes` nodes of each token, drawn alike."""
    rng, tokens = np.random.default_rng(SEED), nodes * ranks * shape.tokens
    arrivals = rng.random((tokens, shape.experts))
    if top_nodes is not None:
        barred = np.argsort(rng.random((tokens, nodes)), axis=1) >= top_nodes
        arrivals += np.repeat(barred, shape.experts // nodes, axis=1)
    return np.argsort(arrivals, axis=1)[:, : shape.top_k].astype(np.int32)


def tokens_for_nodes(ids: np.ndarray, experts: int, nodes: int, ranks: int) -> np.ndarray:
    """[R, N]: the tokens of each rank that need each node."""
    needs = (ids[..., None] // (experts // nodes) == np.arange(nodes)).any(axis=1)
    return needs.reshape(nodes * ranks, -1, nodes).sum(axis=1)


def rows_for_others(wanted: np.ndarray) -> float:
    """What a rank must send at least, on average: a row for each token and other node."""
    nodes = wanted.shape[1]
    own = np.repeat(np.arange(nodes), len(wanted) // nodes)
    return float(np.mean(wanted.sum(axis=1) - wanted[np.arange(len(wanted)), own]))


def make_operands(model: Model, ids: np.ndarray, mesh: Mesh) -> Operands:
    place, hidden, dtype = NamedSharding(mesh, P(AXES)), model.shape.hidden, jnp.dtype(model.shape.dtype)
    return Operands(
        jax.make_array_from_callback(ids.shape, place, lambda index: ids[index]),
        draw(mesh, SEED + 3, *ids.shape, dtype=jnp.float32),
        *draw_matrices(model, mesh),
        draw(mesh, SEED + 4, len(ids), hidden, dtype=dtype),
    )
