"""Quantizing to float8, products of float8 operands, and a layer of them, against float64 of the same rounding."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest
from conftest import OpenGroup

import jax_ep
from jax_ep import Float8Rows, Float8Weights, Implementation, dequantize, lax, moe_mlp, quantize_rows, quantize_weights

BLOCK = 128
BFLOAT16 = helpers.DTYPES[0]


def rounded_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What float8 keeps of rows [M, H], in float32, and the scale of every value."""
    kept = [oracle.through_fp8(row.astype(np.float32)) for row in rows]
    return np.stack([row for row, _ in kept]), np.stack([scales for _, scales in kept])


def rounded_weights(weights: np.ndarray) -> np.ndarray:
    """What float8 keeps of matrices [G, K, N], in float32."""
    kept = np.empty(weights.shape, np.float32)
    for group, row, column in np.ndindex(weights.shape[0], weights.shape[1] // BLOCK, weights.shape[2] // BLOCK):
        rows, columns = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
        block = weights[group, rows, columns].astype(np.float32)
        largest = np.abs(block).max()
        scale = np.float32(1) if largest == 0 else np.float32(largest / np.float32(448))
        inverse = np.float32(1) if largest == 0 else min(np.float32(448) / largest, np.finfo(np.float32).max)
        kept[group, rows, columns] = (block * inverse).astype(oracle.FP8).astype(np.float32) * scale
    return kept


@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
def test_rows(dtype: np.dtype, rng: np.random.Generator) -> None:
    """Ordinary values, zeros, subnormals, values beyond 448; a block with a NaN or an infinity is NaN."""
    rows = rng.standard_normal((9, 384)).astype(dtype)
    rows[0, :128], rows[1], rows[2, 5:9] = 0, rows[1] * 1000, np.finfo(np.float16).smallest_subnormal
    rows[3, 128:256] = np.finfo(np.float16).smallest_subnormal
    spoiled = rows.copy()
    spoiled[4, 130], spoiled[5, 7] = np.nan, np.inf
    quantized = helpers.fetch(jax.jit(quantize_rows)(rows))
    expected, scales = rounded_rows(rows)
    np.testing.assert_allclose(np.repeat(quantized.scales, BLOCK, axis=1), scales, rtol=2.0**-22)
    helpers.assert_rounded_to_float8(quantized.values.astype(np.float32) * scales, expected)
    back = helpers.fetch(jax.jit(lambda x: dequantize(quantize_rows(x), np.float32))(spoiled))
    assert np.isnan(back[4, 128:256]).all()
    assert np.isnan(back[5, :128]).all()
    spoiled[4, 128:256] = spoiled[5, :128] = 0
    np.testing.assert_array_equal(np.isfinite(back), ~np.isnan(np.where(spoiled == 0, back, 0)))


def test_weights(rng: np.random.Generator) -> None:
    weights = rng.standard_normal((3, 256, 384)).astype(np.float32) * rng.lognormal(0, 3, (3, 256, 1)).astype(
        np.float32
    )
    weights[1, :128, 128:256] = 0
    quantized = helpers.fetch(jax.jit(quantize_weights)(weights))
    assert quantized.values.dtype == oracle.FP8
    assert quantized.scales.shape == (3, 2, 3)
    found = helpers.fetch(dequantize(Float8Weights(*map(jnp.asarray, quantized)), np.float32))
    expected = rounded_weights(weights)
    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(found, expected)
    largest = np.abs(weights.reshape(3, 2, BLOCK, 3, BLOCK)).max(axis=(2, 4), keepdims=True)
    smallest = (np.ones((1, 1, BLOCK, 1, BLOCK)) * largest).reshape(weights.shape) / 448 * 2.0**-9
    assert (np.abs(found - expected) <= 1.02 * np.maximum(np.abs(expected) / 8, smallest)).all()


@pytest.mark.parametrize("result", ["bfloat16", "float32"])
def test_products(result: str, rng: np.random.Generator) -> None:
    """Both operands are rounded to bfloat16, by 2^-9 of a value at most; so is a result of that dtype."""
    sizes = np.array([5, 0, 17, 3], np.int32)
    rows = rng.standard_normal((29, 256)).astype(np.float32)
    weights = rng.standard_normal((4, 256, 128)).astype(np.float32)

    def both(rows: jax.Array, weights: jax.Array) -> Any:
        quantized = quantize_rows(rows), quantize_weights(weights)
        dense = Float8Weights(*(x[2] for x in quantized[1]))
        grouped = lax.ragged_dot(*quantized, jnp.asarray(sizes), preferred_element_type=jnp.dtype(result))
        return *quantized, grouped, lax.dot(quantized[0], dense, preferred_element_type=jnp.dtype(result))

    lhs, rhs, grouped, dense = helpers.fetch(jax.jit(both)(rows, weights))
    left = lhs.values.astype(float) * np.repeat(lhs.scales, BLOCK, axis=1)
    right = rhs.values.astype(float) * np.repeat(np.repeat(rhs.scales, BLOCK, axis=1), BLOCK, axis=2)
    expected, magnitude = np.zeros((29, 128)), np.zeros((29, 128))
    for group, end in enumerate(np.cumsum(sizes)):
        here = slice(end - sizes[group], end)
        expected[here], magnitude[here] = left[here] @ right[group], np.abs(left[here]) @ np.abs(right[group])
    bound = (2.0**-8 + 2.0**-18 + 256 * 2.0**-24) * magnitude
    bound += (2.0**-9 if result == "bfloat16" else 2.0**-24) * (np.abs(expected) + bound)
    assert grouped.dtype == dense.dtype == jnp.dtype(result)
    assert (np.abs(grouped.astype(float) - expected) <= bound).all()
    assert (np.abs(dense.astype(float) - expected)[5:22] <= bound[5:22]).all()
    assert not grouped[25:].any()


def wrong_products() -> list[tuple[Any, Any, type[Exception], str]]:
    values, scales = jnp.zeros((4, 256), oracle.FP8), jnp.zeros((4, 2))
    weights = Float8Weights(jnp.zeros((2, 256, 128), oracle.FP8), jnp.zeros((2, 2, 1)))
    rows = Float8Rows(values, scales)
    return [
        (jnp.zeros((4, 256)), weights, TypeError, r"lhs must be Float8Rows .*, got float32\[4,256\]"),
        (rows, jnp.zeros((2, 256, 128)), TypeError, r"rhs must be Float8Weights"),
        (Float8Rows(values, scales[:, :1]), weights, ValueError, r"lhs\.scales must have shape \[M, K / 128\]"),
        (Float8Rows(values.astype(np.float32), scales), weights, TypeError, r"lhs\.values must be of dtype float8"),
        (rows, weights._replace(scales=scales), ValueError, r"rhs\.scales must have shape"),
        (rows, weights._replace(values=weights.values[:, :128]), ValueError, r"rhs\.values must have 256 rows"),
        (rows, weights._replace(values=weights.values[..., :64]), ValueError, r"multiples of 128"),
    ]


@pytest.mark.parametrize("case", range(7))
def test_wrong_products(case: int) -> None:
    lhs, rhs, error, match = wrong_products()[case]
    with pytest.raises(error, match=f"^ragged_dot: .*{match}"):
        jax.eval_shape(lax.ragged_dot, lhs, rhs, jnp.zeros(2, jnp.int32))


def test_wrong_dtypes_and_sizes() -> None:
    plain, weights, *_ = wrong_products()[0]
    rows = quantize_rows(jnp.asarray(plain))
    with pytest.raises(TypeError, match=r"^ragged_dot: preferred_element_type must be bfloat16, float32 or None"):
        lax.ragged_dot(rows, weights, jnp.zeros(2, jnp.int32), preferred_element_type=np.float16)
    with pytest.raises(
        ValueError, match=r"^quantize_rows: rows must have sizes that are multiples of 128, got \(130,\)"
    ):
        quantize_rows(jnp.zeros((2, 130)))
    with pytest.raises(ValueError, match=r"^quantize_weights: weights must have shape \[K, N\] or \[G, K, N\]"):
        quantize_weights(jnp.zeros(128))
    with pytest.raises(TypeError, match=r"^dequantize: quantized must be Float8Rows or Float8Weights"):
        dequantize(jnp.zeros((2, 128)))  # pyright: ignore[reportArgumentType]


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype(float).reshape(-1) - expected.reshape(-1)) / np.linalg.norm(expected))


def test_a_layer(implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Rounding to 3 bits of mantissa moves a value by 2^-4 at most, and by some 2.6 % of it on average; two products
    of two such operands, and an activation between them, keep the result within 10 %. Gradients see it once or twice.
    """
    group = open_group(2)
    case = helpers.draw_case(rng, 2, 24, 2, 4, BLOCK, BFLOAT16)
    layer = moe_oracle.draw_layer(rng, case.tokens, case.weights, 4, 2 * BLOCK)
    cotangent = rng.standard_normal(case.tokens.shape).astype(BFLOAT16)
    expected, gradient = moe_oracle.gated_experts(layer, case.ids, cotangent)

    def both(model: moe_oracle.Layer, ids: jax.Array, cotangent: jax.Array) -> Any:
        def forward(model: moe_oracle.Layer) -> jax.Array:
            tokens, weights, gate, up, down = model
            options: dict[str, Any] = {"group": group, "implementation": implementation, "precision": "float8"}
            return moe_mlp(tokens, ids, weights, gate, up, down, **options)

        out, back = jax.vjp(forward, model)
        return out, back(cotangent)[0]

    out, found = helpers.fetch(helpers.per_rank(both, group.mesh)(layer, case.ids, cotangent))
    assert 0.005 < relative(out, expected) < 0.1
    for name, a, b in zip(layer._fields, found, gradient, strict=True):
        assert 0.001 < relative(a, b) < 0.1, name


def test_wrong_layers(open_group: OpenGroup) -> None:
    group = open_group(2)

    def layer(hidden: int, width: int, **options: Any) -> Any:
        def body() -> jax.Array:
            tokens, matrix = jnp.zeros((4, hidden)), jnp.zeros((1, hidden, width))
            ids = jnp.zeros((4, 1), jnp.int32)
            varying = [jax.lax.pcast(x, ("ep",), to="varying") for x in (tokens, ids, matrix, matrix)]
            tokens, ids, gate, up = varying
            return moe_mlp(tokens, ids, None, gate, up, up.swapaxes(1, 2), group=group, **options)

        return jax.eval_shape(helpers.per_rank(body, group.mesh))

    with pytest.raises(ValueError, match=r"^moe_mlp: precision must be 'float8' or None, got 'float4'"):
        layer(128, 128, precision="float4")
    with pytest.raises(ValueError, match=r"needs H and F to be multiples of 128, got F, H = \(64, 128\)"):
        layer(128, 64, precision="float8")
    assert jax_ep.quantize_rows is quantize_rows
