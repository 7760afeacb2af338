"""`moe_mlp` against the oracle, and against the chain of ops that it stands for, differentiated by JAX.

Sums have the bits of the chain. Gradients have as many roundings or fewer, so they are as near to the exact ones. In
float8 they differ by rounding; those of the weights go straight through the last product's, too.
"""

import dataclasses
from functools import partial
from typing import Any

import helpers
import jax
import jax.extend
import jax.numpy as jnp
import layer_cases
import moe_oracle
import numpy as np
import oracle
import pytest
from conftest import OpenGroup, Rng
from helpers import DTYPES
from layer_cases import EXPERTS, HIDDEN, ROWS, SIZE, WIDTH, Body, assert_near, assert_same_bits, draw, layer_of
from moe_oracle import Layer

from jax_ep import Experts, Gated, Group, Implementation, combine, dispatch, float8, lax, moe_mlp
from jax_ep.float8 import Float8Rows, quantize_rows, quantize_weights


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("form", ["silu", "biased", "of the user", "two matrices"])
def test_rows_are_not_kept(form: str, open_group: OpenGroup, rng: Rng) -> None:
    """What the backward pass of a layer holds: each token where it landed, and the products before the unit."""
    group, held = open_group(1), []
    gated, two = Gated(lambda gate, up: jnp.tanh(gate) * (up + 1)), form == "two matrices"

    def layer(model: Layer, ids: jax.Array) -> jax.Array:
        biases = (model.gate[:, 0], model.up[:, 0], model.down[:, 0]) if form == "biased" else None
        gate = None if two else model.gate
        activation: Any = gated if form in ("biased", "of the user") else "silu"
        experts = Experts(gate=gate, up=model.up, down=model.down, biases=biases, activation=activation)
        return moe_mlp(model.tokens, ids, model.weights, experts, group=group, capacity=ROWS)[0]

    def body(model: Layer, ids: jax.Array) -> jax.Array:
        out, pull = jax.vjp(lambda m: layer(m, ids), model)
        held.extend(x.shape for x in jax.tree.leaves(pull))
        return out

    drawn, case, _ = draw(rng, np.float32)
    jax.eval_shape(helpers.per_rank(body, group.mesh), *jax.tree.map(lambda x: x[:1], (drawn, case.ids)))
    assert held.count((layer_cases.TOKENS, HIDDEN)) == 1
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


def draw_shared(rng: Rng) -> list[np.ndarray]:
    """Of twice the width; the same on all ranks."""
    shapes = ((HIDDEN, 2 * WIDTH), (HIDDEN, 2 * WIDTH), (2 * WIDTH, HIDDEN))
    drawn = ((rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32) for shape in shapes)
    return [np.broadcast_to(x, (SIZE, *x.shape)) for x in drawn]


@pytest.mark.usefixtures("native")
def test_a_shared_expert_waits_for_no_rows(group: Group, rng: Rng) -> None:
    """Nor do rows wait for it: neither's products come into the other's operands, until both are added."""
    layer, case, _ = draw(rng, np.float32)

    def body(model: Layer, shared: list[Any], ids: jax.Array) -> jax.Array:
        gate, up, down = shared
        experts = Experts(gate=gate, up=up, down=down)
        return layer_of(group, "kernels", shared_experts=experts)(model.tokens, ids, *model[1:])

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


PROMOTED: list[dict[str, Any]] = [{}, {"wire": "float8"}, {"precision": "float8"}, {"weigh_inputs": True}]
PROMOTED += [{"shared_tokens": True}, {"on_overflow": "drop", "capacity": ROWS // 2}]


@pytest.mark.parametrize("options", PROMOTED, ids=str)
def test_without_implicit_promotion(
    options: dict[str, Any], implementation: Implementation, group: Group, rng: Rng
) -> None:
    """Layers with biases and a shared expert, where JAX refuses operands of different ranks or dtypes."""
    model, case, _ = draw(rng, np.float32, hidden=128, width=128)
    square = jnp.ones((128, 128))
    shared = Experts(gate=square, up=square, down=square, biases=(jnp.ones(128), jnp.ones(128), jnp.ones(128)))

    def loss(model: Layer, ids: jax.Array) -> jax.Array:
        biases = model.gate[:, 0], model.up[:, 0], model.down[:, 0]
        how: Any = {"shared_experts": shared, "implementation": implementation} | options
        tokens, weights, ids = jax.lax.psum((model.tokens, model.weights, ids), "ep") if shares else (*model[:2], ids)
        experts = Experts(gate=model.gate, up=model.up, down=model.down, biases=biases)
        return moe_mlp(tokens, ids, weights, experts, group=group, **how)[0].sum()

    shares = "shared_tokens" in options
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(helpers.per_rank(jax.grad(loss), group.mesh), model, case.ids)


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


# Layers of float8 operands: 2 ranks, 4 experts.


def float8_layer(group: Group, **options: Any) -> Body:
    """On one rank, (tokens, ids, weights, gate, up, down) -> [T, H]."""
    return partial(helpers.moe_sums, group=group, **{"precision": "float8"} | options)


@jax.custom_vjp
def straight(rows: jax.Array, quantized: Float8Rows, matrix: jax.Array, sizes: jax.Array) -> jax.Array:
    """The product in float8, with the gradients of the one that is not."""
    kept = jnp.bfloat16 if rows.dtype == jnp.bfloat16 else jnp.float32
    return float8.ragged_dot(quantized, quantize_weights(matrix), sizes, preferred_element_type=kept)


def _forward(rows: jax.Array, quantized: Float8Rows, matrix: jax.Array, sizes: jax.Array) -> Any:
    return straight(rows, quantized, matrix, sizes), (rows, matrix, sizes)


def _backward(kept: Any, cotangent: jax.Array) -> Any:
    rows, matrix, sizes = kept
    d_rows, d_matrix = jax.vjp(lambda rows, matrix: lax.ragged_dot(rows, matrix, sizes), rows, matrix)[1](cotangent)
    return d_rows, None, d_matrix, None


straight.defvjp(_forward, _backward)


def float8_chain(group: Group) -> Body:
    """The layer op by op: rows are multiplied as they arrive in float8."""

    def layer(tokens: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any) -> jax.Array:
        sent: dict[str, Any] = {"group": group, "num_experts": 4, "wire": "float8"}
        rows, sizes, routing = dispatch(tokens, ids, weights, **sent)
        sent["wire"] = "float8_rows"
        arrived = dispatch(jax.lax.stop_gradient(tokens), ids, None, **sent).rows
        inner = jax.nn.silu(straight(rows, arrived, gate, sizes)) * straight(rows, arrived, up, sizes)
        quantized = quantize_rows(jax.lax.stop_gradient(inner))
        return combine(straight(inner, quantized, down, sizes), routing, group=group)

    return layer


def draw_float8(rng: Rng, dtype: Any, tokens: int = 12) -> tuple[Layer, np.ndarray, np.ndarray]:
    case = helpers.draw_case(rng, 2, tokens, 2, 4, 256, np.dtype(dtype))
    case.ids[0, 0], case.ids[1, :, 1] = -1, case.ids[1, :, 0]
    layer = moe_oracle.draw_layer(rng, case.tokens, case.weights, 4, 128)
    return layer, case.ids, rng.standard_normal(case.tokens.shape).astype(dtype)


@pytest.mark.matrix(1)
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [helpers.DTYPES[0], helpers.DTYPES[2]], ids=str)
def test_float8_against_the_chain(dtype: np.dtype, open_group: OpenGroup, rng: Rng) -> None:
    group = open_group(2)
    layer, ids, cotangent = draw_float8(rng, dtype, tokens=96)
    both = float8_layer(group), float8_chain(group)
    ours, wanted = (helpers.fetch(layer_cases.with_gradient(group, each)(layer, ids, cotangent)) for each in both)
    assert_same_bits(ours[0], wanted[0])
    for name, mine, theirs in zip(layer._fields, ours[1], wanted[1], strict=True):
        allowed = 0.05 if name == "weights" else max(2 * float(jnp.finfo(dtype).eps), 1e-5)
        assert helpers.relative(mine, helpers.wide(theirs)) < allowed, name
    assert all(np.abs(helpers.wide(x)).sum() > 0 for x in ours[1])


def test_quantized_matrices(implementation: Implementation, open_group: OpenGroup, rng: Rng) -> None:
    """Matrices that come in float8, or some of them, give the bits of those that the layer quantizes. Gradients in the
    tokens differ by the rounding of the matrices."""
    group = open_group(2)
    layer, ids, cotangent = draw_float8(rng, helpers.DTYPES[0])

    def all_of_them(model: Layer, ids: jax.Array, cotangent: jax.Array) -> Any:
        gate, up, down = (quantize_weights(x) for x in model[2:])
        body = float8_layer(group, implementation=implementation)
        chosen = (model[2:], (gate, up, down), (gate, model.up, model.down), (model.gate, model.up, down))
        sums = [lambda x, some=some: body(x, ids, model.weights, *some) for some in chosen]
        kept, pulls = zip(*(jax.vjp(each, model.tokens) for each in sums[:2]), strict=True)
        return kept, [each(model.tokens) for each in sums], [pull(cotangent)[0] for pull in pulls]

    kept, alone, (exact, found) = helpers.run(group, all_of_them, layer, ids, cotangent)
    for first, *others in (kept, alone):  # a forward pass alone need not round the products by gate and up
        for other in others:
            assert_same_bits(other, first)
    assert 0.001 < helpers.relative(found, helpers.wide(exact)) < 0.1


@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_no_gradient_of_float8(implementation: Any, open_group: OpenGroup, rng: Rng) -> None:
    group = open_group(2)
    layer, ids, _ = draw_float8(rng, np.float32)

    def body(name: str, model: Layer, ids: jax.Array) -> Any:
        def loss(scales: jax.Array) -> jax.Array:
            matrices = {each: getattr(model, each) for each in ("gate", "up", "down")}
            matrices[name] = dataclasses.replace(quantize_weights(matrices[name]), scales=scales)
            where: dict[str, Any] = {"implementation": implementation}
            return float8_layer(group, **where)(model.tokens, ids, model.weights, **matrices).sum()

        return jax.grad(loss)(quantize_weights(getattr(model, name)).scales)

    for name in ("gate", "up", "down"):
        with pytest.raises(TypeError, match=rf"^moe_mlp: experts\.{name} in float8 has no gradient"):
            jax.eval_shape(helpers.per_rank(partial(body, name), group.mesh), layer, ids)
