"""`moe_mlp` against every expert computed for every token: values in numpy float64, gradients by plain JAX."""

from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import OpenGroup
from jax.sharding import PartitionSpec as P

from jax_ep import Group, moe_mlp

SIZE, EXPERTS, TOKENS, TOP_K, HIDDEN, WIDTH = 4, 8, 6, 3, 16, 24


class Model(NamedTuple):
    tokens: Any  # [R * T, H]
    weights: Any  # [R * T, K]
    gate: Any  # [E, H, F]
    up: Any  # [E, H, F]
    down: Any  # [E, F, H]


def draw(rng: np.random.Generator, dtype: Any = np.float32) -> tuple[Model, np.ndarray]:
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    case.ids[0, 0] = -1
    case.ids[1] = np.where(case.ids[1] == 3, 4, case.ids[1])  # some tokens name an expert twice
    case.ids[2, :, 0] = 7
    tokens, ids, weights = (x.reshape(-1, x.shape[-1]) for x in case)
    shapes = ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
    matrices = ((rng.standard_normal((EXPERTS, *shape)) / shape[0] ** 0.5).astype(dtype) for shape in shapes)
    return Model(tokens.astype(dtype), weights, *matrices), ids


def exact(model: Model, ids: np.ndarray) -> np.ndarray:
    tokens, weights, gate, up, down = (np.asarray(x, np.float64) for x in model)
    out = np.zeros_like(tokens)
    for token, row in enumerate(tokens):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            if expert >= 0:
                gated = row @ gate[expert]
                out[token] += weight * ((gated / (1 + np.exp(-gated)) * (row @ up[expert])) @ down[expert])
    return out


def dense(model: Model, ids: Any) -> Any:
    """Every expert sees every token; a one-hot mask picks."""
    tokens, weights, gate, up, down = model
    gated, plain = (jnp.einsum("th,ehf->etf", tokens, matrices) for matrices in (gate, up))
    outputs = jnp.einsum("etf,efh->eth", jax.nn.silu(gated) * plain, down)
    return jnp.einsum("tke,tk,eth->th", jax.nn.one_hot(ids, EXPERTS), weights, outputs)


def sharded(group: Group, implementation: str) -> Callable[[Model, Any], jax.Array]:
    def layer(model: Model, ids: jax.Array) -> jax.Array:
        tokens, *rest = model
        return moe_mlp(tokens, ids, *rest, group=group, implementation=implementation)

    return jax.shard_map(layer, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_values(dtype: Any, implementation: str, open_group: OpenGroup, rng: np.random.Generator) -> None:
    model, ids = draw(rng, dtype)
    actual = helpers.fetch(jax.jit(sharded(open_group(SIZE), implementation))(model, ids))
    wanted = exact(model, ids)
    assert actual.dtype == np.dtype(dtype)
    assert not actual[0].any()  # a token that skips all its experts
    # Five roundings on the way: gate, up, their product, down and the sum.
    allowed = 8 * float(jnp.finfo(dtype).eps) * np.abs(wanted).max()
    np.testing.assert_allclose(actual.astype(np.float64), wanted, rtol=0, atol=allowed)


def test_gradients(implementation: str, open_group: OpenGroup, rng: np.random.Generator) -> None:
    model, ids = draw(rng)
    target = rng.standard_normal(model.tokens.shape).astype(np.float32)
    layer = sharded(open_group(SIZE), implementation)
    actual = helpers.fetch(jax.jit(jax.grad(lambda m: jnp.sum(layer(m, ids) * target)))(model))
    wanted = jax.grad(lambda m: jnp.sum(dense(m, ids) * target))(model)
    for a, w in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(a, w, rtol=0, atol=1e-5 * float(np.abs(w).max()))


@pytest.mark.parametrize(
    ("name", "wrong", "match"),
    [
        ("gate", np.zeros((8, HIDDEN + 1, WIDTH), np.float32), r"gate must have shape \[E / R, H, F\]"),
        ("gate", np.zeros((0, HIDDEN, WIDTH), np.float32), "gate must have at least one expert on every rank"),
        ("up", np.zeros((8, HIDDEN, WIDTH + 8), np.float32), r"up must have shape \[E / R, H, F\]"),
        ("down", np.zeros((8, HIDDEN, WIDTH), np.float32), r"down must have shape \[E / R, F, H\]"),
        ("up", np.zeros((8, HIDDEN, WIDTH), np.float16), "up must be of dtype float32, got float16"),
    ],
)
def test_wrong_matrices(
    name: str, wrong: np.ndarray, match: str, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    model, ids = draw(rng)
    with pytest.raises((ValueError, TypeError), match=f"moe_mlp: {match}"):
        jax.eval_shape(sharded(open_group(SIZE), "xla"), model._replace(**{name: wrong}), ids)
