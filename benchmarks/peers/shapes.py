"""The layers that are compared, their operands, and what these must yield."""

import jax.numpy as jnp
import numpy as np

from ..moe_cases import MODELS, SEED, Case, Model, Shape, make_ids

CHECKED = 64  # tokens
TINY = "tiny"  # for a CPU

SHAPES = {
    "v3-half": MODELS["V3"].halved,
    "gpt-oss-half": MODELS["GPT-OSS"].halved,
    "qwen3-30b-half": MODELS["Qwen3-30B"].halved,
    "qwen3-30b-32k": Model("", Shape(32768, 2048, 8, 128), 768),
    "mixtral": MODELS["Mixtral"],
    "sonic-120b": Model("", Shape(32768, 4096, 8, 128), 1024),
    TINY: Model("", Shape(64, 128, 4, 8), 64),
}


def draw(model: Model) -> dict[str, np.ndarray]:
    """tokens and cotangent [T, H], weights and ids [T, K]; gate, up and down [2 H F], starts [E].

    The matrix of expert e is the H F numbers from starts[e] on: [H, F] of gate and up, [F, H] of down. To draw each for
    itself would take minutes. bfloat16 is stored as uint16, because numpy's files do not know it.
    """
    shape, size, rng = model.shape, model.shape.hidden * model.width, np.random.default_rng(SEED)

    def normal(scale: float, *sides: int) -> np.ndarray:
        return (np.float32(scale) * rng.standard_normal(sides, np.float32)).astype(jnp.bfloat16).view(np.uint16)

    scores = rng.random((shape.tokens, shape.top_k), np.float32)
    return {
        "tokens": normal(1, shape.tokens, shape.hidden),
        "cotangent": normal(1, shape.tokens, shape.hidden),
        "weights": scores / scores.sum(axis=1, keepdims=True),
        "ids": make_ids(Case(shape), ranks=1),
        "starts": rng.integers(size, size=shape.experts),
        "gate": normal(shape.hidden**-0.5, 2 * size),
        "up": normal(shape.hidden**-0.5, 2 * size),
        "down": normal(model.width**-0.5, 2 * size),
    }


def expected(model: Model, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of the first CHECKED tokens in float32: outputs, and the gradients in tokens and weights."""

    def wide(name: str, most: int | None = None) -> np.ndarray:
        return operands[name][:most].view(jnp.bfloat16).astype(np.float32)

    hidden, width = model.shape.hidden, model.width
    tokens, cotangent, weights = wide("tokens", CHECKED), wide("cotangent", CHECKED), operands["weights"][:CHECKED]
    gates, ups, downs = map(wide, ("gate", "up", "down"))
    out, d_tokens, d_weights = map(np.zeros_like, (tokens, tokens, weights))
    for expert in np.unique(operands["ids"][:CHECKED]):
        here = slice(operands["starts"][expert], operands["starts"][expert] + hidden * width)
        gate, up, down = gates[here].reshape(hidden, width), ups[here].reshape(hidden, width), downs[here]
        down = down.reshape(width, hidden)
        token, place = np.nonzero(operands["ids"][:CHECKED] == expert)
        weight, by_gate, by_up = weights[token, place, None], tokens[token] @ gate, tokens[token] @ up
        sigmoid = 1 / (1 + np.exp(-by_gate))
        answer, d_inner = (by_gate * sigmoid * by_up) @ down, (weight * cotangent[token]) @ down.T
        d_gate = d_inner * by_up * sigmoid * (1 + by_gate * (1 - sigmoid))
        out[token] += weight * answer
        d_tokens[token] += d_gate @ gate.T + (d_inner * by_gate * sigmoid) @ up.T
        d_weights[token, place] = (cotangent[token] * answer).sum(axis=1)
    return {"out": out, "d_tokens": d_tokens, "d_weights": d_weights}
