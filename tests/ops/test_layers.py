"""`moe_mlp` against the oracle, and against the chain of ops that it stands for, differentiated by JAX.

Sums have the bits of the chain. Gradients have as many roundings or fewer, so they are as near to the exact ones.
"""

import dataclasses
from typing import Any

import helpers
import jax
import jax.extend
import jax.numpy as jnp
import layer_cases
import matrix_forms
import moe_oracle
import numpy as np
import oracle
import pytest
from conftest import OpenGroup, Rng
from helpers import DTYPES
from layer_cases import EXPERTS, SIZE, assert_near, assert_same_bits, draw, layer_of
from matrix_forms import LAYER, alone
from moe_oracle import Layer

from jax_ep import Experts, Gated, Group, Implementation, combine, dispatch, lax, moe_mlp


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["default", "several clamped, biased", "activation gated", "matrices two"])
def test_rows_are_not_kept(name: str, open_group: OpenGroup, rng: Rng) -> None:
    """What the backward pass of a layer holds: each token where it landed, and the products before the unit."""
    group, form, held = open_group(1), alone(LAYER)[name], []

    def body(floats: Any, known: Any) -> jax.Array:
        out, pull = jax.vjp(lambda floats: matrix_forms.layer(form, group)(floats, known), floats)
        held.extend(x.shape for x in jax.tree.leaves(pull))
        return out

    jax.eval_shape(helpers.per_rank(body, group.mesh), *matrix_forms.draw(form, 1, rng, layer=True)[:2])
    assert held.count((matrix_forms.TOKENS, matrix_forms.HIDDEN)) == 1
    assert held.count((matrix_forms.EVEN, matrix_forms.HIDDEN)) == 0
    assert held.count((matrix_forms.EVEN, matrix_forms.WIDTH)) == (1 if name == "matrices two" else 2)


def assert_as_near(ours: Layer, others: Layer, exact: Layer) -> None:
    """Ours is off by as many roundings as the chain, or fewer, of values whose mantissas are distributed otherwise."""
    mine, theirs = (moe_oracle.errors(x, exact) for x in (ours, others))
    print("errors", mine, "and of the chain", theirs)
    assert all(a <= 1.15 * b for a, b in zip(mine, theirs, strict=True))


@pytest.mark.optimized
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_against_the_chain(dtype: np.dtype, group: Group, rng: Rng) -> None:
    """Large enough that chance makes little of the errors."""
    tokens = 64
    capacity = SIZE * tokens * layer_cases.TOP_K
    ours, others = (
        layer_cases.with_gradient(group, form(group, "kernels", capacity=capacity))
        for form in (layer_of, layer_cases.chain)
    )
    for change in layer_cases.ROUTINGS:
        print(change.__name__)
        layer, case, cotangent = draw(rng, dtype, hidden=96, tokens=tokens, width=80)
        change(case, rng)
        sums, gradient = helpers.fetch(ours(layer, case.ids, cotangent))
        sums_of_chain, gradient_of_chain = helpers.fetch(others(layer, case.ids, cotangent))
        assert_same_bits(sums, sums_of_chain)
        assert_as_near(gradient, gradient_of_chain, moe_oracle.gated_experts(layer, case.ids, cotangent)[1])


@pytest.mark.usefixtures("native")
def test_a_shared_expert_waits_for_no_rows(group: Group, rng: Rng) -> None:
    """Rows do not wait for it either: neither product is an operand of the other until both are added."""
    form = alone(LAYER)["shared yes"]
    operands = matrix_forms.draw(form, SIZE, rng, layer=True)
    traced = jax.make_jaxpr(helpers.per_rank(matrix_forms.layer(form, group), group.mesh))(*operands[:2])
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


@pytest.mark.parametrize("form", ["moe_mlp", "rows of a dispatch", "rows that hold an assignment"])
def test_padding_and_an_infinite_slope(form: str, implementation: Implementation, group: Group, rng: Rng) -> None:
    """Padding tokens hold NaN, and at padding rows the unit has an infinite slope: neither is in a gradient, also of
    what the unit closes over, if the rows of a dispatch are masked before the unit."""
    how: Any = {"group": group, "implementation": implementation}

    def unit(gate: jax.Array, up: jax.Array, factor: Any = 1) -> jax.Array:
        return jnp.sqrt(jnp.abs(factor * gate)) * up

    def layer(tokens: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any, factor: jax.Array) -> jax.Array:
        if form == "moe_mlp":
            activation = Gated(lambda gate, up: unit(gate, up, factor))
            return layer_of(group, implementation, activation)(tokens, ids, weights, gate, up, down)
        rows, sizes, routing = dispatch(tokens, ids, weights, num_experts=EXPERTS, alignment=16, **how)
        multiply = jax.lax.ragged_dot if implementation == "xla" else lax.ragged_dot
        products = multiply(rows, gate, sizes)
        if form == "rows that hold an assignment":
            products = jnp.where(routing.row_mask()[:, None], products, 1)
        inner = unit(products, multiply(rows, up, sizes), factor)
        return combine(multiply(inner, down, sizes), routing, **how)

    def both(model: Layer, ids: jax.Array, cotangent: jax.Array, factor: jax.Array) -> Any:
        out, pull = jax.vjp(lambda m, *factor: layer(m.tokens, ids, *m[1:], *factor), model, factor)
        return out, *pull(cotangent)

    model, case, cotangent = draw(rng, np.float32)
    layer_cases.everything(case, rng)
    goes = ((case.ids >= 0) & (case.ids < EXPERTS)).any(axis=2, keepdims=True)
    given = model._replace(tokens=np.where(goes, model.tokens, np.float32(np.nan)))
    out, gradient, by_factor = helpers.run(group, both, given, case.ids, cotangent, np.ones(SIZE, np.float32))
    wanted, wanted_gradient = moe_oracle.gated_experts(model, case.ids, cotangent, unit=unit)
    assert_near(out, wanted, 1e-5)
    if form == "rows of a dispatch":
        assert np.isnan(gradient.gate).any()
    else:
        assert_near(gradient, wanted_gradient, 1e-4)
        assert_near(by_factor.sum(), np.sum(wanted * cotangent) / 2, 1e-4)  # sums grow as the root of the factor


def test_stats(implementation: Implementation, group: Group, rng: Rng) -> None:
    capacity = 8
    layer, case, _ = draw(rng, np.float32)
    layer_cases.zipf(case, rng)
    case.ids[0, 3, :2] = EXPERTS, -7

    def body(model: Layer, ids: jax.Array) -> Any:
        options: dict[str, Any] = {"capacity": capacity, "on_overflow": "drop", "implementation": implementation}
        experts = Experts(gate=model.gate, up=model.up, down=model.down)
        return moe_mlp(model.tokens, ids, model.weights, experts, group=group, **options)

    out, stats = helpers.run(group, body, layer, case.ids)
    valid = (case.ids >= 0) & (case.ids < EXPERTS)
    np.testing.assert_array_equal(stats.counts.reshape(-1), np.bincount(case.ids[valid], minlength=EXPERTS))
    np.testing.assert_array_equal(stats.invalid[:, 0], (~valid & (case.ids != -1)).sum(axis=(1, 2)))
    expected = oracle.dispatch(*case, num_experts=EXPERTS, capacity=capacity)
    assert expected.dropped.any()
    np.testing.assert_array_equal(stats.dropped, expected.dropped)
    assert out.shape == layer.tokens.shape


@pytest.mark.parametrize("implementation", ["auto", "xla"])
@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_no_gradient_of_float8(name: str, implementation: Any, open_group: OpenGroup, rng: Rng) -> None:
    group = open_group(2)
    form = {"precision": "float8", "frozen": (name,), "implementation": implementation}

    def body(floats: Any, known: Any) -> Any:
        def loss(scales: jax.Array) -> jax.Array:
            return layer(floats, known | {name: dataclasses.replace(known[name], scales=scales)}).sum()

        return jax.grad(loss)(known[name].scales)

    layer = matrix_forms.layer(form, group)
    with pytest.raises(TypeError, match=rf"^moe_mlp: experts\.{name} in float8 has no gradient"):
        jax.eval_shape(helpers.per_rank(body, group.mesh), *matrix_forms.draw(form, 2, rng, layer=True)[:2])


@pytest.mark.usefixtures("native")
def test_float8_rounds_what_the_unit_makes(open_group: OpenGroup, rng: Rng) -> None:
    """Squares of small integers, of which nothing else is rounded; with and without a gradient."""
    tokens = rng.integers(1, 16, (1, 8, 128)).astype(DTYPES[0])
    tokens[..., 0] = 448  # so that scales are exact
    one, ids = np.tile(np.eye(128, dtype=DTYPES[0]), (1, 2, 1, 1)), np.zeros((1, 8, 1), np.int32)
    options: dict[str, Any] = {"precision": "float8", "activation": Gated(lambda gate, up: gate * up)}
    group = open_group(1)

    def both(tokens: jax.Array, ids: jax.Array, one: jax.Array) -> list[jax.Array]:
        def sums(tokens: jax.Array) -> jax.Array:
            return helpers.moe_sums(tokens, ids, None, one, one, one, group=group, **options)

        return [sums(tokens), jax.vjp(sums, tokens)[0]]

    wanted = oracle.through_fp8(helpers.wide(tokens) ** 2)[0].astype(DTYPES[0])
    assert not np.array_equal(helpers.wide(wanted), helpers.wide(tokens) ** 2)
    for found in helpers.run(group, both, tokens, ids, one):
        np.testing.assert_array_equal(helpers.wide(found), helpers.wide(wanted))
