"""A layer of gated experts and its gradients, assignment by assignment in float64. Shares no code with jax_ep."""

from typing import Any, NamedTuple

import numpy as np


class Layer(NamedTuple):
    """What a layer of E experts on R ranks is differentiated in; ranks are a leading axis, also of the matrices."""

    tokens: Any  # [R, T, H]
    weights: Any  # [R, T, K]
    gate: Any  # [R, E / R, H, F]
    up: Any  # [R, E / R, H, F]
    down: Any  # [R, E / R, F, H]


def gated_experts(layer: Layer, ids: np.ndarray, cotangent: np.ndarray) -> tuple[np.ndarray, Layer]:
    """The sums [R, T, H] of weight * ((silu(x gate) * (x up)) down), and the gradients for their cotangent.

    Args:
      ids: [R, T, K]; an assignment outside [0, E) counts as zero.
    """
    wide = Layer(*(np.asarray(x, np.float64) for x in layer))
    gate, up, down = (x.reshape(-1, *x.shape[2:]) for x in wide[2:])
    out, gradient = np.zeros_like(wide.tokens), Layer(*(np.zeros_like(x) for x in wide))
    d_gate, d_up, d_down = (x.reshape(-1, *x.shape[2:]) for x in gradient[2:])
    for rank, token, k in np.ndindex(*ids.shape):
        expert, weight, above = ids[rank, token, k], wide.weights[rank, token, k], cotangent[rank, token].astype(float)
        if not 0 <= expert < len(gate):
            continue
        x = wide.tokens[rank, token]
        gated, plain = x @ gate[expert], x @ up[expert]
        sigmoid = 1 / (1 + np.exp(-gated))
        inner = gated * sigmoid * plain
        answer = inner @ down[expert]
        out[rank, token] += weight * answer
        gradient.weights[rank, token, k] = above @ answer
        d_down[expert] += np.outer(inner, weight * above)
        d_inner = down[expert] @ (weight * above)
        d_gated = d_inner * plain * (sigmoid + gated * sigmoid * (1 - sigmoid))
        d_plain = d_inner * gated * sigmoid
        d_gate[expert] += np.outer(x, d_gated)
        d_up[expert] += np.outer(x, d_plain)
        gradient.tokens[rank, token] += gate[expert] @ d_gated + up[expert] @ d_plain
    return out, gradient


def errors(found: Layer, exact: Layer) -> Layer:
    """The distance of each gradient from the exact one, of the length of that: what is left after all roundings."""

    def error(x: Any, right: np.ndarray) -> float:
        length = np.linalg.norm(right)
        return float(np.linalg.norm(np.asarray(x, np.float64) - right) / (length if length else 1))

    return Layer(*map(error, found, exact))


def draw_layer(rng: np.random.Generator, tokens: np.ndarray, weights: np.ndarray, experts: int, width: int) -> Layer:
    """Random matrices in the dtype of `tokens`, such that values keep their size."""
    size, hidden = tokens.shape[0], tokens.shape[2]
    shapes = ((hidden, width), (hidden, width), (width, hidden))
    drawn = (rng.standard_normal((size, experts // size, *shape)) / shape[0] ** 0.5 for shape in shapes)
    return Layer(tokens, weights, *(x.astype(tokens.dtype) for x in drawn))
