"""Layers of float8 operands against the chain of ops that they stand for.

Sums have its bits. Gradients differ by rounding; those of the weights go straight through the last product's, too.
"""

import dataclasses
from functools import partial
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

from jax_ep import Group, Implementation, combine, dispatch, float8, lax
from jax_ep.float8 import Float8Rows, quantize_rows, quantize_weights

SIZE, EXPERTS, TOKENS, TOP_K, HIDDEN, WIDTH = 2, 4, 12, 2, 256, 128


def layer_of(group: Group, **options: Any) -> Body:
    """On one rank, (tokens, ids, weights, gate, up, down) -> [T, H]."""
    return partial(helpers.moe_sums, group=group, **{"precision": "float8"} | options)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def straight(dgrad: bool, rows: jax.Array, quantized: Float8Rows, matrix: jax.Array, sizes: jax.Array) -> jax.Array:
    """The product in float8, with the gradients of the one that is not; with `dgrad`, that of the rows in float8."""
    kept = jnp.bfloat16 if rows.dtype == jnp.bfloat16 else jnp.float32
    return float8.ragged_dot(quantized, quantize_weights(matrix), sizes, preferred_element_type=kept)


def _forward(dgrad: bool, rows: jax.Array, quantized: Float8Rows, matrix: jax.Array, sizes: jax.Array) -> Any:
    return straight(dgrad, rows, quantized, matrix, sizes), (rows, matrix, sizes)


def _backward(dgrad: bool, kept: Any, cotangent: jax.Array) -> Any:
    rows, matrix, sizes = kept
    d_rows, d_matrix = jax.vjp(lambda rows, matrix: lax.ragged_dot(rows, matrix, sizes), rows, matrix)[1](cotangent)
    if dgrad:
        product = float8.ragged_dot(
            *(quantize_rows(cotangent), quantize_weights(matrix.swapaxes(1, 2)), sizes),
            preferred_element_type=jnp.bfloat16 if rows.dtype == jnp.bfloat16 else jnp.float32,
        )
        d_rows = product.astype(rows.dtype)
    return d_rows, None, d_matrix, None


straight.defvjp(_forward, _backward)


@jax.custom_vjp
def back_in_float8(x: jax.Array) -> jax.Array:
    """`x`, whose cotangent is rounded to float8."""
    return x


back_in_float8.defvjp(lambda x: (x, None), lambda _, c: (float8.dequantize(quantize_rows(c), c.dtype),))


def chain(group: Group, *, dgrad: bool = False) -> Body:
    """The layer op by op: rows are multiplied as they arrive in float8."""
    multiply = partial(straight, dgrad)

    def layer(tokens: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any) -> jax.Array:
        sent: dict[str, Any] = {"group": group, "num_experts": EXPERTS, "wire": "float8"}
        rows, sizes, routing = dispatch(tokens, ids, weights, **sent)
        sent["wire"] = "float8_rows"
        arrived = dispatch(jax.lax.stop_gradient(tokens), ids, None, **sent).rows
        inner = jax.nn.silu(multiply(rows, arrived, gate, sizes)) * multiply(rows, arrived, up, sizes)
        quantized = quantize_rows(jax.lax.stop_gradient(inner))
        sums = combine(multiply(inner, quantized, down, sizes), routing, group=group)
        return back_in_float8(sums) if dgrad else sums

    return layer


def draw(rng: np.random.Generator, dtype: Any) -> tuple[Layer, np.ndarray, np.ndarray]:
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN, np.dtype(dtype))
    case.ids[0, 0], case.ids[1, :, 1] = -1, case.ids[1, :, 0]
    layer = moe_oracle.draw_layer(rng, case.tokens, case.weights, EXPERTS, WIDTH)
    return layer, case.ids, rng.standard_normal(case.tokens.shape).astype(dtype)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(helpers.wide(found) - expected) / np.linalg.norm(expected))


@pytest.mark.optimized
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [helpers.DTYPES[0], helpers.DTYPES[2]], ids=str)
@pytest.mark.parametrize("precision", ["float8", "float8_dgrad"])
def test_against_the_chain(precision: str, dtype: np.dtype, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(SIZE)
    layer, ids, cotangent = draw(rng, dtype)
    both = layer_of(group, precision=precision), chain(group, dgrad=precision != "float8")
    ours, wanted = (helpers.fetch(with_gradient(group, each)(layer, ids, cotangent)) for each in both)
    assert_same_bits(ours[0], wanted[0])
    for name, mine, theirs in zip(layer._fields, ours[1], wanted[1], strict=True):
        allowed = 0.05 if name == "weights" else max(2 * float(jnp.finfo(dtype).eps), 1e-5)
        if precision != "float8":  # what differs by 2^-9 may become another value of float8
            allowed = max(allowed, 0.025 if name == "tokens" else 5e-3)
        assert relative(mine, helpers.wide(theirs)) < allowed, name
    assert all(np.abs(helpers.wide(x)).sum() > 0 for x in ours[1])


@pytest.mark.optimized
def test_quantized_matrices(implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Matrices that come in float8, or some of them, give the bits of those that the layer quantizes. Gradients in the
    tokens differ by the rounding of the matrices."""
    group = open_group(SIZE)
    layer, ids, cotangent = draw(rng, helpers.DTYPES[0])

    def all_of_them(model: Layer, ids: jax.Array, cotangent: jax.Array) -> Any:
        gate, up, down = (quantize_weights(x) for x in model[2:])
        body = layer_of(group, implementation=implementation)
        chosen = (model[2:], (gate, up, down), (gate, model.up, model.down), (model.gate, model.up, down))
        sums = [lambda x, some=some: body(x, ids, model.weights, *some) for some in chosen]
        first, second = (jax.vjp(each, model.tokens) for each in sums[:2])
        others = [each(model.tokens) for each in sums[2:]]
        return (first[0], second[0], *others), [pull(cotangent)[0] for _, pull in (first, second)]

    (first, *others), (exact, found) = helpers.fetch(helpers.per_rank(all_of_them, group.mesh)(layer, ids, cotangent))
    for other in others:
        assert_same_bits(other, first)
    assert 0.001 < relative(found, helpers.wide(exact)) < 0.1


@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_no_gradient_of_float8(implementation: Any, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(SIZE)
    layer, ids, _ = draw(rng, np.float32)

    def body(name: str, model: Layer, ids: jax.Array) -> Any:
        def loss(scales: jax.Array) -> jax.Array:
            matrices = {each: getattr(model, each) for each in ("gate", "up", "down")}
            matrices[name] = dataclasses.replace(quantize_weights(matrices[name]), scales=scales)
            where: dict[str, Any] = {"implementation": implementation}
            return layer_of(group, **where)(model.tokens, ids, model.weights, **matrices).sum()

        return jax.grad(loss)(quantize_weights(getattr(model, name)).scales)

    for name in ("gate", "up", "down"):
        with pytest.raises(TypeError, match=rf"^moe_mlp: experts\.{name} in float8 has no gradient"):
            jax.eval_shape(helpers.per_rank(partial(body, name), group.mesh), layer, ids)
