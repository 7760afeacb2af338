"""`moe_mlp` against the oracle, and against the chain of ops that it stands for, differentiated by JAX.

Sums have the bits of the chain. Gradients have as many roundings or fewer, so they are as near to the exact ones.
"""

from typing import Any

import helpers
import jax
import jax.extend
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest
from conftest import OpenGroup
from helpers import DTYPES
from layer_cases import (
    EXPERTS,
    HIDDEN,
    ROUTINGS,
    ROWS,
    SIZE,
    TOKENS,
    TOP_K,
    WIDTH,
    assert_same_bits,
    chain,
    draw,
    layer_of,
    with_gradient,
    zipf,
)
from moe_oracle import Layer

from jax_ep import Experts, Gated, Implementation, moe_mlp


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("form", ["silu", "biased", "of the user", "two matrices"])
def test_rows_are_not_kept(form: str, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """What the backward pass of a layer holds: each token where it landed, and the products before the unit."""
    group, held = open_group(SIZE), []
    gated, two = Gated(lambda gate, up: jnp.tanh(gate) * (up + 1)), form == "two matrices"

    def layer(model: Layer, ids: jax.Array) -> jax.Array:
        biases = (model.gate[:, 0], model.up[:, 0], model.down[:, 0]) if form == "biased" else None
        gate = None if two else model.gate
        activation: Any = gated if form in ("biased", "of the user") else "silu"
        experts = Experts(gate, model.up, model.down, biases=biases, activation=activation)
        return moe_mlp(model.tokens, ids, model.weights, experts, group=group, capacity=ROWS)[0]

    def body(model: Layer, ids: jax.Array) -> jax.Array:
        out, pull = jax.vjp(lambda m: layer(m, ids), model)
        held.extend(x.shape for x in jax.tree.leaves(pull))
        return out

    drawn, case, _ = draw(rng, np.float32)
    jax.eval_shape(helpers.per_rank(body, group.mesh), drawn, case.ids)
    assert held.count((SIZE * TOKENS, HIDDEN)) == 1
    assert held.count((ROWS, HIDDEN)) == 0
    assert held.count((ROWS, WIDTH)) == (1 if two else 2)


def assert_as_near(ours: Layer, others: Layer, exact: Layer) -> None:
    """Ours is off by as many roundings as the chain, or fewer, of values whose mantissas are distributed otherwise."""
    mine, theirs = (moe_oracle.errors(x, exact) for x in (ours, others))
    print("errors", mine, "and of the chain", theirs)
    assert all(a <= 1.15 * b for a, b in zip(mine, theirs, strict=True))


@pytest.mark.optimized
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_against_the_chain(dtype: np.dtype, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Large enough that chance makes little of the errors."""
    group, tokens = open_group(SIZE), 64
    capacity = SIZE * tokens * TOP_K
    ours, others = (with_gradient(group, form(group, "ffi", capacity=capacity)) for form in (layer_of, chain))
    for change in ROUTINGS:
        print(change.__name__)
        layer, case, cotangent = draw(rng, dtype, hidden=96, tokens=tokens, width=80)
        change(case, rng)
        sums, gradient = helpers.fetch(ours(layer, case.ids, cotangent))
        sums_of_chain, gradient_of_chain = helpers.fetch(others(layer, case.ids, cotangent))
        assert_same_bits(sums, sums_of_chain)
        assert_as_near(gradient, gradient_of_chain, moe_oracle.gated_experts(layer, case.ids, cotangent)[1])


def draw_shared(rng: np.random.Generator) -> list[np.ndarray]:
    """Of twice the width; the same on all ranks."""
    shapes = ((HIDDEN, 2 * WIDTH), (HIDDEN, 2 * WIDTH), (2 * WIDTH, HIDDEN))
    drawn = ((rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32) for shape in shapes)
    return [np.broadcast_to(x, (SIZE, *x.shape)) for x in drawn]


@pytest.mark.usefixtures("native")
def test_a_shared_expert_waits_for_no_rows(open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Nor do rows wait for it: neither's products come into the other's operands, until both are added."""
    group = open_group(SIZE)
    layer, case, _ = draw(rng, np.float32)

    def body(model: Layer, shared: list[Any], ids: jax.Array) -> jax.Array:
        return layer_of(group, "ffi", shared=Experts(*shared))(model.tokens, ids, *model[1:])

    traced = jax.make_jaxpr(helpers.per_rank(body, group.mesh))(layer, draw_shared(rng), case.ids)
    (jitted,) = traced.eqns
    (mapped,) = (each.params["jaxpr"] for each in jitted.params["jaxpr"].eqns if each.primitive.name == "shard_map")
    behind: dict[Any, set[str]] = {}  # for every value, what it was made of
    dense_products = 0
    for equation in mapped.eqns:
        inputs = [behind.get(x, set()) for x in equation.invars if not isinstance(x, jax.extend.core.Literal)]
        made_of = set().union(*inputs)
        text = str(equation)
        if "ffi_call" in text:
            assert "shared" not in made_of
            made_of = made_of | {"exchange"}
        elif "dot_general[" in text and "ragged" not in text:
            assert "exchange" not in made_of
            made_of, dense_products = made_of | {"shared"}, dense_products + 1
        behind |= dict.fromkeys(equation.outvars, made_of)
    assert dense_products == 3
    assert behind[mapped.outvars[0]] == {"exchange", "shared"}


def test_stats(implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group, capacity = open_group(SIZE), 8
    layer, case, _ = draw(rng, np.float32)
    zipf(case, rng)
    case.ids[0, 3, :2] = EXPERTS, -7

    def body(model: Layer, ids: jax.Array) -> Any:
        options: dict[str, Any] = {"capacity": capacity, "on_overflow": "drop", "implementation": implementation}
        return moe_mlp(model.tokens, ids, model.weights, Experts(*model[2:]), group=group, **options)

    out, stats = helpers.fetch(helpers.per_rank(body, group.mesh)(layer, case.ids))
    valid = (case.ids >= 0) & (case.ids < EXPERTS)
    np.testing.assert_array_equal(stats.counts.reshape(-1), np.bincount(case.ids[valid], minlength=EXPERTS))
    np.testing.assert_array_equal(stats.invalid[:, 0], (~valid & (case.ids != -1)).sum(axis=(1, 2)))
    expected = oracle.dispatch(*case, num_experts=EXPERTS, capacity=capacity)
    assert expected.dropped.any()
    np.testing.assert_array_equal(stats.dropped, expected.dropped)
    assert out.shape == layer.tokens.shape
