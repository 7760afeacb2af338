"""dispatch_ragged_dot and ragged_dot_combine of float8 operands against the chain of unfused ops.

Sums have its bits. Gradients differ by rounding; those of the weights go straight through the last product's, too.
"""

import dataclasses
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest
from conftest import OpenGroup
from layer_cases import Body, assert_same_bits, with_gradient
from moe_oracle import Layer

from jax_ep import (
    Group,
    Implementation,
    combine,
    dispatch,
    dispatch_ragged_dot,
    float8,
    lax,
    moe_mlp,
    ragged_dot_combine,
)
from jax_ep.float8 import Float8Rows, Float8Weights, quantize_rows, quantize_weights

SIZE, EXPERTS, TOKENS, TOP_K, HIDDEN, WIDTH = 2, 4, 12, 2, 256, 128
FP8 = jnp.float8_e4m3fn


def fused(group: Group, **options: Any) -> Body:
    """On one rank, (tokens, ids, weights, gate, up, down) -> [T, H]."""

    def layer(tokens: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any) -> jax.Array:
        where: dict[str, Any] = {"group": group, "precision": "float8", **options}
        inner, dispatched = dispatch_ragged_dot(
            tokens, ids, weights, (gate, up), num_experts=EXPERTS, activation="silu", **where
        )
        return ragged_dot_combine(inner, down, dispatched.routing, **where)

    return layer


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


def chain(group: Group) -> Body:
    """The layer of unfused ops: rows are multiplied as they arrive in float8."""

    def layer(tokens: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any) -> jax.Array:
        sent: dict[str, Any] = {"group": group, "num_experts": EXPERTS, "wire_dtype": FP8}
        rows, sizes, routing = dispatch(tokens, ids, weights, **sent)
        arrived = dispatch(jax.lax.stop_gradient(tokens), ids, None, dequantize=False, **sent).tokens
        inner = jax.nn.silu(straight(rows, arrived, gate, sizes)) * straight(rows, arrived, up, sizes)
        quantized = quantize_rows(jax.lax.stop_gradient(inner))
        return combine(straight(inner, quantized, down, sizes), routing, group=group)

    return layer


def draw(rng: np.random.Generator, dtype: Any) -> tuple[Layer, np.ndarray, np.ndarray]:
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN, np.dtype(dtype))
    case.ids[0, 0], case.ids[1, :, 1] = -1, case.ids[1, :, 0]
    layer = moe_oracle.draw_layer(rng, case.tokens, case.weights, EXPERTS, WIDTH)
    return layer, case.ids, rng.standard_normal(case.tokens.shape).astype(dtype)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(helpers.wide(found) - expected) / np.linalg.norm(expected))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [helpers.DTYPES[0], helpers.DTYPES[2]], ids=str)
def test_against_the_chain(dtype: np.dtype, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(SIZE)
    layer, ids, cotangent = draw(rng, dtype)
    ours, wanted = (helpers.fetch(with_gradient(group, f(group))(layer, ids, cotangent)) for f in (fused, chain))
    assert_same_bits(ours[0], wanted[0])
    for name, mine, theirs in zip(layer._fields, ours[1], wanted[1], strict=True):
        allowed = 0.05 if name == "weights" else max(2 * float(jnp.finfo(dtype).eps), 1e-5)
        assert relative(mine, helpers.wide(theirs)) < allowed, name
    assert all(np.abs(helpers.wide(x)).sum() > 0 for x in ours[1])


def test_values(implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Within what two products of values with three bits of mantissa keep, as in test_float8_products.py."""
    group = open_group(SIZE)
    layer, ids, cotangent = draw(rng, helpers.DTYPES[0])
    program = with_gradient(group, fused(group, implementation=implementation))
    out, found = helpers.fetch(program(layer, ids, cotangent))
    expected, gradient = moe_oracle.gated_experts(layer, ids, cotangent)
    assert 0.005 < relative(out, expected) < 0.1
    for name, mine, right in zip(layer._fields, found, gradient, strict=True):
        assert 0.001 < relative(mine, right) < 0.1, name


def test_operands_in_float8(implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Matrices and rows that come in float8 give the bits of those that the ops quantize, also one of a pair."""
    group = open_group(SIZE)
    layer, ids, _ = draw(rng, helpers.DTYPES[0])

    def both(model: Layer, ids: jax.Array) -> Any:
        where: dict[str, Any] = {"group": group, "implementation": implementation}
        gate, up, down = (quantize_weights(x) for x in model[2:])
        results = []
        for pair in ((model.gate, model.up), (gate, model.up), (gate, up)):
            inner, (rows, _, routing) = dispatch_ragged_dot(
                model.tokens, ids, model.weights, pair, num_experts=EXPERTS, precision="float8", **where
            )
            assert rows.dtype == model.tokens.dtype
            inner = jax.nn.silu(inner[0]) * inner[1]
            for lhs, rhs in ((inner, model.down), (inner, down), (quantize_rows(inner), down)):
                results.append(ragged_dot_combine(lhs, rhs, routing, precision="float8", **where))
        return results

    first, *others = helpers.fetch(helpers.per_rank(both, group.mesh)(layer, ids))
    for other in others:
        assert_same_bits(other, first)


@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_no_gradient_of_float8(implementation: Any, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(SIZE)
    layer, ids, _ = draw(rng, np.float32)

    def last(routing: Any, rows: Float8Rows, down: Float8Weights) -> jax.Array:
        return ragged_dot_combine(rows, down, routing, group=group, implementation=implementation).sum()

    def body(argument: str, model: Layer, ids: jax.Array) -> Any:
        gate, down = quantize_weights(model.gate), quantize_weights(model.down)

        def first(gate: Float8Weights) -> Any:
            options: dict[str, Any] = {"group": group, "num_experts": EXPERTS, "implementation": implementation}
            return dispatch_ragged_dot(model.tokens, ids, model.weights, gate, **options)

        inner, (_, _, routing) = first(gate)
        if argument == "rhs":
            return jax.grad(lambda scales: first(dataclasses.replace(gate, scales=scales))[0].sum())(gate.scales)
        rows = quantize_rows(inner)
        return jax.grad(lambda scales: last(routing, dataclasses.replace(rows, scales=scales), down))(rows.scales)

    for argument in ("rhs", "lhs"):
        with pytest.raises(TypeError, match=f": {argument} in float8 has no gradient"):
            jax.eval_shape(helpers.per_rank(lambda *x, a=argument: body(a, *x), group.mesh), layer, ids)


@pytest.mark.usefixtures("native")
def test_a_layer_goes_the_same_way(open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Also with biases, and of gate and up in one."""
    group = open_group(SIZE)
    layer, ids, cotangent = draw(rng, helpers.DTYPES[0])
    nothing = jnp.zeros((EXPERTS // SIZE, WIDTH), layer.gate.dtype)

    def of_layer(**options: Any) -> Body:
        def body(tokens: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any) -> jax.Array:
            if options:
                return moe_mlp(tokens, ids, weights, gate, up, down, group=group, precision="float8", **options)
            both = jnp.concatenate([gate, up], axis=2)
            return moe_mlp(tokens, ids, weights, both, None, down, group=group, precision="float8")

        return with_gradient(group, body)

    wanted = helpers.fetch(with_gradient(group, fused(group))(layer, ids, cotangent))
    for options in ({"fused": True}, {"biases": (nothing, nothing, None)}):
        assert_same_bits(helpers.fetch(of_layer(**options)(layer, ids, cotangent)), wanted)
    assert_same_bits(helpers.fetch(of_layer()(layer, ids, cotangent))[0], wanted[0])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"precision": "float4"}, ValueError, "precision must be 'float8' or None, got 'float4'"),
        ({"wide": 64}, ValueError, r"rhs must have sizes that are multiples of 128, got \(256, 64"),
        ({"scales": 1}, ValueError, r"rhs.scales must have shape .* = \(2, 1, 2\), got \(2, 1, 1\)"),
        ({"experts": 1}, ValueError, r"rhs must have shape .* = \(2, 256, 128\), got Float8Weights of \(1, 256, 128\)"),
    ],
    ids=str,
)
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str, open_group: OpenGroup) -> None:
    group = open_group(SIZE)
    rhs: Any = jnp.zeros((changes.pop("experts", EXPERTS // SIZE), HIDDEN, changes.pop("wide", WIDTH)), jnp.bfloat16)
    if "64" not in message:
        rhs = quantize_weights(rhs)
    if "scales" in changes:
        rhs = dataclasses.replace(rhs, scales=rhs.scales[..., : changes.pop("scales")])

    def body(x: jax.Array) -> jax.Array:
        tokens, ids = jnp.zeros((TOKENS, HIDDEN), jnp.bfloat16), jnp.zeros((TOKENS, TOP_K), jnp.int32)
        options: dict[str, Any] = {"precision": "float8", **changes}
        dispatch_ragged_dot(tokens, ids, None, rhs, group=group, num_experts=EXPERTS, **options)
        return x

    with pytest.raises(error, match=f"^dispatch_ragged_dot: {message}"):
        jax.eval_shape(helpers.per_rank(body, group.mesh), np.zeros(SIZE))
