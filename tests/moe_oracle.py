"""A layer of experts and its gradients: every expert answers every token, in float64. Shares no code with jax_ep."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Biases = tuple[Any, Any, Any]  # of gate, up and down: [R, E / R, N], each may be None


class Layer(NamedTuple):
    """What a layer of E experts on R ranks is differentiated in; ranks are a leading axis, also of the matrices."""

    tokens: Any  # [R, T, H]
    weights: Any  # [R, T, K]
    gate: Any  # [R, E / R, H, F]; None: two matrices
    up: Any  # [R, E / R, H, F]
    down: Any  # [R, E / R, F, H]


def silu_gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate / (1 + jnp.exp(-gate)) * up


def through_float8(x: jax.Array, *block: int) -> jax.Array:
    """`x`, rounded to float8_e4m3fn with a scale for each block of its last axes; derivatives pass straight through."""
    parts = [part for n, size in zip(x.shape[-len(block) :], block, strict=True) for part in (n // size, size)]
    blocks = jax.lax.stop_gradient(x).reshape(*x.shape[: -len(block)], *parts)
    largest = jnp.abs(blocks).max(axis=tuple(range(-1, -2 * len(block), -2)), keepdims=True)
    scales = jnp.where(largest == 0, 1, largest / 448)
    rounded = (blocks / scales).astype(jnp.float32).astype(jnp.float8_e4m3fn).astype(x.dtype) * scales
    return x + jax.lax.stop_gradient(rounded.reshape(x.shape) - x)


def sums(
    layer: Layer,
    biases: Biases,
    ids: Any,
    *,
    unit: Callable[..., jax.Array] = silu_gated,
    weigh_inputs: bool = False,
    float8: bool = False,
    qwix: bool = False,
) -> jax.Array:
    """The sums [R, T, H] of weight * ((unit(x gate + b, x up + b)) down + b); without gate, of unit(x up + b).

    Args:
      ids: [R, T, K]; an assignment outside [0, E) counts as zero.
      float8: products are those of rounded operands, their derivatives those of the operands as they are.
      qwix: both are those of operands in float8, with a scale for each row, and for each column of a rank's matrices.
    """
    experts = layer.down.shape[0] * layer.down.shape[1]
    weights = layer.weights[..., None]
    rows = layer.tokens[:, :, None] * (weights if weigh_inputs else 1)  # [R, T, K or 1, H]

    def multiplied(rows: jax.Array, matrix: Any, bias: Any, how: str) -> jax.Array:
        if qwix:
            rows, matrix = through_float8(rows, rows.shape[-1]), through_float8(matrix, *matrix.shape[1:3], 1)
        matrix = matrix.reshape(experts, *matrix.shape[2:])
        product = jnp.einsum(how, rows, matrix)
        if float8:
            rounded = jnp.einsum(how, through_float8(rows, 128), through_float8(matrix, 128, 128))
            product += jax.lax.stop_gradient(rounded - product)
        return product if bias is None else product + bias.reshape(experts, -1)

    first = [
        multiplied(rows, matrix, bias, "rtkh,ehf->rtkef")
        for matrix, bias in zip((layer.gate, layer.up), biases, strict=False)
        if matrix is not None
    ]
    answers = multiplied(unit(*first), layer.down, biases[2], "rtkef,efh->rtkeh")
    shares = jax.nn.one_hot(ids, experts) * (1 if weigh_inputs else weights)
    return jnp.einsum("rtke,rtkeh->rth", shares, jnp.broadcast_to(answers, (*shares.shape, answers.shape[-1])))


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """Programs compute in float64 on a CPU of this process: for GPUs XLA drops the rounding to float8."""
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), jax.default_device(cpu):
        yield


@partial(jax.jit, static_argnames=("unit", "weigh_inputs", "float8", "qwix"))
def _with_gradients(layer: Layer, biases: Biases, cotangent: jax.Array, ids: jax.Array, **form: Any) -> tuple[Any, ...]:
    out, pull = jax.vjp(lambda layer, biases: sums(layer, biases, ids, **form), layer, biases)
    return out, *pull(cotangent)


def gated_experts(
    layer: Layer, ids: np.ndarray, cotangent: np.ndarray, biases: Biases = (None, None, None), **form: Any
) -> tuple[Any, ...]:
    """The sums and the gradients for their cotangent, of `layer` and, if there are some, of `biases`."""
    with exactly():
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), (layer, biases, cotangent))
        found = jax.device_get(_with_gradients(*exact, ids, **form))
    return found if any(bias is not None for bias in biases) else found[:2]


def assert_near(actual: Any, wanted: Any, unit: float) -> None:
    """Within `unit` of the largest value of each array."""
    for mine, right in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        atol = unit * max(np.abs(right).max(), 1e-6)
        np.testing.assert_allclose(np.asarray(mine, np.float64), right, rtol=0, atol=atol)


def routed(logits: np.ndarray, top_k: int, score: str = "softmax") -> tuple[np.ndarray, np.ndarray]:
    """The best experts of each token, and their scores, which add up to 1."""
    ids = np.argsort(-logits, axis=1)[:, :top_k]
    powers = np.exp(np.take_along_axis(logits, ids, axis=1))
    scores = powers / (1 + powers) if score == "sigmoid" else powers
    return ids, scores / scores.sum(axis=1, keepdims=True)


def draw_layer(rng: np.random.Generator, tokens: np.ndarray, weights: np.ndarray, experts: int, width: int) -> Layer:
    """Random matrices in the dtype of `tokens`, such that values keep their size."""
    size, hidden = tokens.shape[0], tokens.shape[2]
    shapes = ((hidden, width), (hidden, width), (width, hidden))
    drawn = (rng.standard_normal((size, experts // size, *shape)) / shape[0] ** 0.5 for shape in shapes)
    return Layer(tokens, weights, *(x.astype(tokens.dtype) for x in drawn))
