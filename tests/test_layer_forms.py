"""The forms that experts have in models: one matrix for gate and up, two matrices, biases, units, weighed inputs."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest
from conftest import OpenGroup
from layer_cases import (
    EXPERTS,
    HIDDEN,
    SIZE,
    TOKENS,
    TOP_K,
    WIDTH,
    assert_near,
    draw,
    everything,
)
from moe_oracle import Biases, Layer

from jax_ep import Experts, Gated, Implementation, combine, dispatch, moe_mlp


def clipped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """That of GPT-OSS."""
    gate, up = jnp.minimum(gate, 1.5), jnp.clip(up, -1.5, 1.5)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def squared(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0) ** 2


ALL = (0, 1, 2)
# Which matrices are one or none, which have biases, the unit, and whether inputs are weighed.
FORMS: dict[str, dict[str, Any]] = {
    "one matrix": {"one_matrix": True},
    "one matrix, biased, gated": {"one_matrix": True, "biased": ALL, "gated": clipped},
    "gated": {"gated": clipped},
    "bias of down": {"biased": (2,)},
    "bias of up": {"biased": (1,)},
    "two matrices": {"two": squared},
    "two matrices, biased": {"two": squared, "biased": (1, 2)},
    "weighed inputs": {"weigh_inputs": True},
    "weighed inputs, all": {"weigh_inputs": True, "one_matrix": True, "biased": ALL, "gated": clipped},
    "weighed inputs, two matrices": {"weigh_inputs": True, "two": squared},
}


@pytest.mark.parametrize("capacity", [None, 60])
@pytest.mark.parametrize("name", FORMS)
def test_forms(
    name: str,
    capacity: int | None,
    implementation: Implementation,
    open_group: OpenGroup,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values and all gradients, also where rows that nobody uses hold anything."""
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    form, group = FORMS[name], open_group(SIZE)
    if capacity and form.get("weigh_inputs"):
        pytest.skip("the other capacity shows it")
    layer, case, cotangent = draw(rng, np.float32)
    everything(case, rng)
    shapes, two = (WIDTH, WIDTH, HIDDEN), form.get("two")
    biases: Any = tuple(
        (rng.standard_normal((SIZE, EXPERTS // SIZE, width)) / 4).astype(np.float32)
        if i in form.get("biased", ())
        else None
        for i, width in enumerate(shapes)
    )

    def experts_of(model: Layer, biases: Biases) -> Experts:
        gate, up = model.gate, model.up
        if form.get("one_matrix"):
            gate, up = jnp.concatenate([gate, up], axis=2), None
        activation = Gated(form["gated"]) if "gated" in form else two or "silu"
        return Experts(None if two else gate, up, model.down, biases=biases, activation=activation)

    def of_rank(model: Layer, biases: Biases, ids: jax.Array, cotangent: jax.Array) -> Any:
        options: dict[str, Any] = {"group": group, "implementation": implementation, "capacity": capacity}
        options["weigh_inputs"] = form.get("weigh_inputs", False)

        def sums(model: Layer, biases: Biases) -> jax.Array:
            return moe_mlp(model.tokens, ids, model.weights, experts_of(model, biases), **options)[0]

        out, pull = jax.vjp(sums, model, biases)
        return out, *pull(cotangent)

    actual = helpers.fetch(helpers.per_rank(of_rank, group.mesh)(layer, biases, case.ids, cotangent))
    unit = two or form.get("gated", moe_oracle.silu_gated)
    given = layer._replace(gate=None) if two else layer
    weighed: dict[str, Any] = {"weigh_inputs": form.get("weigh_inputs", False)}
    out, gradient, *d_biases = moe_oracle.gated_experts(given, case.ids, cotangent, biases, unit=unit, **weighed)
    if two:
        gradient = gradient._replace(gate=np.zeros_like(layer.gate))
    assert_near(actual, (out, gradient, *(d_biases or [(None,) * 3])), 2e-5)


@pytest.mark.parametrize(
    ("ids_dtype", "weights_dtype"), [(np.int8, jnp.bfloat16), (np.uint32, np.float16), (np.int64, np.float64)]
)
def test_ids_and_weights_are_cast(
    ids_dtype: Any, weights_dtype: Any, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    """The gradient comes in the dtype of the weights; an id beyond int32 is invalid, and not wrapped around."""
    group = open_group(SIZE)
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    ids = case.ids.astype(ids_dtype)
    if np.iinfo(ids_dtype).max > 2**31:
        ids[0, 0, 0] = 2**32 - 1  # -1 in 32 bits
    wide = case.weights.astype(weights_dtype)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        def routed(weights: jax.Array) -> Any:
            out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, implementation=implementation)
            sums = combine(out.rows, out.routing, group=group, implementation=implementation)
            return sums.sum(), out.routing.invalid

        return *jax.grad(routed, has_aux=True)(weights), weights

    with jax.enable_x64(True):
        gradient, invalid, weights = helpers.fetch(helpers.per_rank(body, group.mesh)(case.tokens, ids, wide))
    assert gradient.dtype == weights.dtype == weights_dtype
    assert invalid.sum() == (np.iinfo(ids_dtype).max > 2**31)
    wanted = np.broadcast_to(case.tokens.sum(axis=2, keepdims=True), gradient.shape) * (ids < EXPERTS)
    np.testing.assert_allclose(helpers.wide(gradient), wanted, rtol=1e-2, atol=1e-2)
