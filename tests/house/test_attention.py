"""The attention of examples/models, beside the plain formula in float32 and its gradients."""

import itertools
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Rng

from jax_ep import Group
from jax_ep.__main__ import load

SIZE = 1
BATCH, HEADS, GROUPS, DIM = 2, 4, 2, 16
layers = load("examples", "models.layers")


def plain(q: Any, k: Any, v: Any, sinks: Any, window: int | None) -> jax.Array:
    """Causal attention: the softmax of a row has one more column for the sink."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("btnd,bsnd->bnts", q, k) * DIM**-0.5
    query, key = np.ogrid[: q.shape[1], : k.shape[1]]
    seen = (key <= query) & (key > query - (window or key.size))
    logits = jnp.where(seen, logits, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, column], axis=-1)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(logits, axis=-1)[..., : key.size], v)


def draw(rng: Rng, length: int) -> list[np.ndarray]:
    """q, k, v and sinks."""
    shapes = (HEADS, DIM), (GROUPS, DIM), (GROUPS, DIM)
    drawn = [rng.standard_normal((BATCH, length, *shape), np.float32) for shape in shapes]
    return [*drawn, rng.standard_normal(HEADS, np.float32)]


def with_gradients(function: Any, operands: list[Any], cotangent: np.ndarray) -> Any:
    def both(operands: list[Any], cotangent: Any) -> Any:
        out, pull = jax.vjp(function, *operands)
        return out, *pull(cotangent.astype(out.dtype))

    return helpers.fetch(jax.jit(both)(operands, cotangent))


CUDNN = pytest.mark.skipif(jax.default_backend() == "cpu", reason="cuDNN runs on GPUs")
HALF = [("cudnn", None), ("xla", None), ("xla", 128)]


@pytest.mark.parametrize(
    ("implementation", "window", "sinks", "length"),
    [
        *itertools.product([""], [None, 8], [False, True], [8, 21]),
        *(pytest.param(*each, True, 512, marks=CUDNN) for each in HALF),
    ],
)
def test_values_and_gradients(
    implementation: str, window: int | None, sinks: bool, length: int, group: Group, rng: Rng
) -> None:
    """In float32; by an implementation in bfloat16, near what float32 gives for the same rounded operands."""
    operands: list[Any] = draw(rng, length)[: 3 + sinks]
    if implementation:
        operands = [jnp.asarray(x, jnp.bfloat16) for x in operands]
    run = layers.Run(group, attention=implementation) if implementation else layers.Run(group, jnp.float32)
    cotangent = rng.standard_normal(operands[0].shape, np.float32)

    def attend(q: Any, k: Any, v: Any, sinks: Any = None) -> jax.Array:
        return layers.attention(q, k, v, run, scale=DIM**-0.5, window=window, sinks=sinks)

    def exact(q: Any, k: Any, v: Any, sinks: Any = None) -> jax.Array:
        return plain(q, k, v, sinks, window)

    found = with_gradients(attend, operands, cotangent)
    wanted = with_gradients(exact, [x.astype(jnp.float32) for x in operands], cotangent)
    for name, one, other in zip(("out", "q", "k", "v", "sinks"), found, wanted, strict=False):
        if implementation:
            assert helpers.relative(one, np.asarray(other)) < 0.02, name
        else:
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
