"""Gated units of float8 operands, which quantize what they make: in one kernel on Hopper, by parts elsewhere."""

from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import matrix_forms
import numpy as np
import oracle
import pytest
from conftest import OpenGroup, Rng

from jax_ep._kit import gemm
from jax_ep.float8 import Float8Rows, Float8Weights, dequantize, quantize_rows, quantize_weights
from jax_ep.ops.matmul import float8, kernels
from jax_ep.ops.matmul.gated import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("native")
on_hopper = pytest.mark.skipif(not gemm.has_gemm(), reason="needs GPUs with the GEMM core")

# Rows, K and F, and the rows of each group: tiles with and without a second half, rows behind all groups, none at all.
SHAPES = [
    (5, 128, 128, (5,)),
    (300, 256, 128, (100, 0, 64, 1)),
    (700, 640, 384, (129, 200, 0, 256, 63)),
    (1500, 384, 256, (0, 0)),
]


def draw(rng: Rng, shape: Any, *, one_matrix: bool) -> tuple[Any, ...]:
    """Rows, group sizes, and gate and up, quantized."""
    rows, k, columns, sizes = shape
    gate, up = (rng.standard_normal((len(sizes), k, columns)).astype(helpers.DTYPES[0]) / k**0.5 for _ in range(2))
    matrices = [np.concatenate([gate, up], axis=2)] if one_matrix else [gate, up]
    left = quantize_rows(jnp.asarray(rng.standard_normal((rows, k)).astype(helpers.DTYPES[0])))
    return left, jnp.array(sizes, jnp.int32), *(quantize_weights(jnp.asarray(x)) for x in matrices)


def both(activation: Any, *operands: Any) -> tuple[Float8Rows, Float8Rows]:
    """What the op makes, and its parts."""

    def composed(rows: Float8Rows, sizes: jax.Array, *rhs: Any) -> Float8Rows:
        products = [float8.quantize_and_multiply(rows, matrix, sizes) for matrix in rhs]
        gate, up = products if len(products) == 2 else jnp.split(products[0], 2, axis=1)
        return quantize_rows((ACTIVATIONS[activation](gate) * up).astype(gate.dtype))

    return (
        jax.jit(partial(float8.gated_product_to_float8, activation, composed))(*operands),
        jax.jit(composed)(*operands),
    )


def assert_alike(ours: Float8Rows, parts: Float8Rows) -> None:
    """Scales to within XLA's division; values to within a step where a scale is nearly between two."""
    np.testing.assert_allclose(ours.scales, parts.scales, rtol=1e-6)
    mine, theirs = (helpers.wide(np.asarray(x.values)) for x in (ours, parts))
    np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
    differ = mine != theirs
    differ[np.isnan(mine)] = False
    assert differ.mean() < 0.02
    assert np.all(np.abs(mine - theirs)[differ] <= np.maximum(np.abs(theirs[differ]) / 8, 2.0**-9))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("one_matrix", [False, True])
def test_values(shape: Any, activation: Any, one_matrix: bool, rng: Rng) -> None:
    """Against float64 of the rounded operands, and against the parts one after the other."""
    rows, sizes, *rhs = draw(rng, shape, one_matrix=one_matrix)
    ours, parts = both(activation, rows, sizes, *rhs)
    assert_alike(ours, parts)
    left, *matrices = (np.asarray(dequantize(x, jnp.float32)) for x in (rows, *rhs))
    gate, up = matrices if len(matrices) == 2 else np.split(matrices[0], 2, axis=2)
    of_gate, of_up = (oracle.ragged_dot(left, matrix, shape[3]) for matrix in (gate, up))
    made = np.asarray(matrix_forms.ACTIVATIONS[activation](of_gate)) * of_up
    magnitudes = (np.abs(of_gate) + 1) * (np.abs(of_up) + 1) * (np.arange(shape[0]) < sum(shape[3]))[:, None]
    largest = np.abs(made).reshape(shape[0], -1, 128).max(axis=2).repeat(128, axis=1)
    # A step of float8 is an eighth of a value, or 2^-9 of 448 where it is small; products are rounded to bfloat16.
    bound = np.abs(made) / 16 + largest * 2.0**-10 / 448 + magnitudes * 2.0**-5
    assert np.all(np.abs(helpers.wide(np.asarray(dequantize(ours, jnp.float32))) - made) <= bound)


def test_what_is_no_number(rng: Rng) -> None:
    """A NaN or an infinity spoils the blocks of its row, and nothing else; rows of zeros have the scale 1."""
    rows, sizes, *rhs = draw(rng, (200, 256, 256, (90, 110)), one_matrix=False)
    scales = np.array(rows.scales)
    scales[3, 1], scales[150, 0] = np.nan, np.inf
    bits = np.array(rows.bits)
    bits[17] = 0
    ours, parts = both("silu", Float8Rows(jnp.asarray(bits), jnp.asarray(scales)), sizes, *rhs)
    found = helpers.wide(np.asarray(dequantize(ours, jnp.float32)))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(helpers.wide(np.asarray(dequantize(parts, jnp.float32)))))
    spoiled = np.isnan(found).any(axis=1)
    assert set(np.flatnonzero(spoiled)) == {3, 150}
    assert np.isnan(found[spoiled]).all()
    np.testing.assert_array_equal(np.asarray(ours.scales)[17], 1)
    assert not found[17].any()


@on_hopper
def test_the_layer_calls_the_kernel(open_group: OpenGroup) -> None:
    """Forward alone: a gradient keeps the products. Other dtypes than bfloat16 go by parts."""
    group = open_group(1)

    def compiled(dtype: Any, *, gradient: bool) -> str:
        def layer(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> Any:
            ids = jnp.zeros((x.shape[0], 1), jnp.int32)
            weights = jnp.ones(ids.shape, jnp.float32)
            out = partial(helpers.moe_sums, group=group, precision="float8")
            if not gradient:
                return out(x, ids, weights, gate, up, down)
            return jax.grad(lambda x: jnp.sum(out(x, ids, weights, gate, up, down).astype(jnp.float32)))(x)

        shapes = ((64, 256), (2, 256, 128), (2, 256, 128), (2, 128, 256))
        arrays = [jax.ShapeDtypeStruct((1, *shape), dtype) for shape in shapes]
        return helpers.per_rank(layer, group.mesh).lower(*arrays).as_text()

    quantizes = 'dtype = "float8_e4m3fn", formula = "gated"'
    assert quantizes in compiled(jnp.bfloat16, gradient=False)
    assert quantizes not in compiled(jnp.bfloat16, gradient=True)
    assert quantizes not in compiled(jnp.float16, gradient=False)


def test_types() -> None:
    def quantized(kind: Any, values: tuple[int, ...], scales: tuple[int, ...]) -> Any:
        return kind(jax.ShapeDtypeStruct(values, jnp.uint8), jax.ShapeDtypeStruct(scales, jnp.float32))

    rows, weights = quantized(Float8Rows, (9, 256), (9, 2)), quantized(Float8Weights, (3, 512, 256), (3, 4, 2))
    call = partial(kernels.gated_matmul_float8, activation="relu")
    made = jax.eval_shape(call, rows, jax.ShapeDtypeStruct((3,), jnp.int32), weights)
    assert isinstance(made, Float8Rows)
    assert (made.bits.shape, made.bits.dtype) == ((9, 256), jnp.uint8)
    assert (made.scales.shape, made.scales.dtype) == ((9, 2), jnp.float32)
