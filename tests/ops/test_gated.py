"""Gated units in one kernel on Hopper: to the bit the products and the activation one after the other, as XLA does; of
float8 operands by parts elsewhere. The sum of two grouped products in one kernel: one sum, rounded once."""

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
from helpers import DTYPES

from jax_ep import lax
from jax_ep._kit import ffi, gemm
from jax_ep.float8 import Float8Rows, dequantize, quantize_rows, quantize_weights
from jax_ep.ops.matmul import float8
from jax_ep.ops.matmul.api import biased_product, gated_product, sum_of_lhs_gradients
from jax_ep.ops.matmul.gated import ACTIVATIONS, ClampedSwiglu, known_unit
from jax_ep.ops.moe.units import with_bias

pytestmark = pytest.mark.usefixtures("native")
on_hopper = pytest.mark.skipif(not gemm.has_gemm(), reason="needs GPUs with the GEMM core")

UNITS = ["silu", "gelu", "relu", "clamped_swiglu", ClampedSwiglu(limit=0.5, slope=-1.25)]
# The last two have few tiles of a long contraction: products alone split it, so that their sums have other bits.
SHAPES = [(10, 8, 8), (600, 136, 72), (3000, 264, 328), (1400, 2048, 640), (128, 2048, 128)]


def gated(activation: Any, *operands: Any, keep_products: bool = False) -> tuple[Any, Any]:
    """The unit and the kept products of (rows, sizes, matrices, biases): by the op, and by one product after the
    other."""
    unit, (rows, sizes, rhs, biases) = known_unit(activation), operands
    assert unit is not None

    def composed(rows: Any, sizes: Any, *operands: Any) -> Any:
        matrices, added = operands[: len(rhs)], operands[len(rhs) :] or (None,) * len(rhs)
        products = tuple(
            with_bias(lax.ragged_dot(rows, matrix, sizes, preferred_element_type=jnp.float32), bias, sizes)
            for matrix, bias in zip(matrices, added, strict=True)
        )
        rounded = tuple(product.astype(rows.dtype) for product in products)
        parts = rounded if len(rhs) == 2 else jnp.split(rounded[0], 2, axis=1)
        return unit.function(*parts), rounded if keep_products else ()

    found = gated_product(unit, composed, rows, sizes, rhs, biases, keep_products=keep_products)
    return found, composed(rows, sizes, *rhs, *biases)


def by_no_kernel(rows: Any, sizes: Any, matrix: Any, bias: Any) -> jax.Array:
    return jnp.full((rows.shape[0], bias.shape[1]), jnp.nan, rows.dtype)


def assert_same_bits(found: Any, wanted: Any) -> None:
    """But for the bits of a NaN."""
    for mine, right in zip(*map(jax.tree.leaves, helpers.fetch((found, wanted))), strict=True):
        np.testing.assert_array_equal(helpers.wide(mine), helpers.wide(right))
        finite = ~np.isnan(helpers.wide(right))
        np.testing.assert_array_equal(mine.view(np.uint16)[finite], right.view(np.uint16)[finite])


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("activation", UNITS, ids=str)
def test_every_value(activation: Any, dtype: np.dtype) -> None:
    """Each of the 2^16 values as a product by gate: in the first column of a row, times one."""
    rows, (gate, up) = np.zeros((1 << 16, 8), dtype), np.zeros((2, 1, 8, 8), dtype)
    rows[:, 0], rows[:, 1] = np.arange(1 << 16, dtype=np.uint16).view(dtype), 1
    gate[..., 0, :] = 1
    up[..., 1, :] = np.array([1, -1, 0.3, 3, 1e-3, 100, -0.7, 2], dtype)
    assert_same_bits(*jax.jit(partial(gated, activation))(rows, np.array([1 << 16], np.int32), (gate, up), ()))


@pytest.mark.matrix
@on_hopper
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("one_matrix", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("keep_products", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(
    shape: tuple[int, int, int], keep_products: bool, biased: bool, one_matrix: bool, dtype: np.dtype, rng: Rng
) -> None:
    """Rows after the last group are zeros. A product alone gets its bias before it is rounded, too."""
    rows, hidden, width = shape
    lhs = rng.standard_normal((rows, hidden)).astype(dtype)
    gate, up = (rng.standard_normal((2, 4, hidden, width)) / hidden**0.5).astype(dtype)
    rhs = (np.concatenate([gate, up], axis=2),) if one_matrix else (gate, up)
    biases = tuple(rng.standard_normal((4, x.shape[2])).astype(dtype) for x in rhs) if biased else ()
    program = jax.jit(partial(gated, "silu", keep_products=keep_products))
    for filled in (rows, rows - rows // 8):
        sizes = rng.multinomial(filled, [0.5, 0, 0.3, 0.2]).astype(np.int32)
        found, wanted = program(lhs, sizes, rhs, biases)
        assert_same_bits(found, wanted)
        assert np.abs(helpers.wide(found[0])).sum() > 0
        assert not helpers.wide(found[0])[filled:].any()
        if biased and keep_products and hidden < 2048:
            added = jax.jit(partial(biased_product, by_no_kernel))
            assert_same_bits([added(lhs, sizes, *each) for each in zip(rhs, biases, strict=True)], list(wanted[1]))


@pytest.mark.parametrize(
    ("shape", "splits"), [((64, 768, 2048, 8), True), ((64, 768, 512, 8), False), ((65536, 768, 2048, 8), False)]
)
def test_which_contractions_are_split(shape: tuple[int, int, int, int], splits: bool) -> None:
    """Long ones of few tiles: rows, columns, contraction, groups, on 132 SMs."""
    assert ffi.library("cpu").splits_contraction(*shape, 132) is splits


@pytest.mark.matrix
@on_hopper
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("tiny", [False, True], ids=["", "subnormal"])
@pytest.mark.parametrize(("rows", "n", "k"), [(5, 8, 8), (300, 72, 136), (1500, 328, 264), (4100, 640, 768)])
def test_rounded_once(rows: int, n: int, k: int, tiny: bool, dtype: np.dtype, rng: Rng) -> None:
    """Half a unit in the last place of the exact sum, and what float32 loses of its terms."""
    scale = 4 * float(jnp.finfo(dtype).tiny) if tiny else 1
    cotangents = tuple((rng.standard_normal((2, rows, k)) * scale).astype(dtype))
    rhs = tuple((rng.standard_normal((2, 5, n, k)) / k**0.5).astype(dtype))
    sizes: Any = rng.multinomial(rows - rows // 8, [0.5, 0.2, 0, 0.3, 0]).astype(np.int32)
    together = jax.jit(lambda cotangents, rhs: sum_of_lhs_gradients(cotangents, rhs, sizes))
    assert 'formula = "summed"' in together.lower(cotangents, rhs).as_text()
    actual = helpers.wide(together(cotangents, rhs)).astype(np.float64)
    exact, terms = np.zeros((2, rows, n))
    for cotangent, matrix in zip(cotangents, rhs, strict=True):
        left, right = helpers.wide(cotangent), helpers.wide(matrix).swapaxes(1, 2)
        exact += oracle.ragged_dot(left, right, sizes)
        terms += oracle.ragged_dot(np.abs(left), np.abs(right), sizes)
    limits = jnp.finfo(dtype)
    allowed = 0.5 * float(limits.eps) * np.abs(exact) + 0.5 * float(limits.smallest_subnormal) + 2e-6 * terms
    assert (np.abs(actual - exact) <= allowed).all()
    assert not actual[sizes.sum() :].any()


def lowered(gradient: bool, dtype: Any = DTYPES[0], biased: bool = False, **options: Any) -> jax.stages.Lowered:
    """A layer, or its gradient."""

    def loss(tokens: Any, ids: Any, gate: Any, up: Any) -> Any:
        biases = (gate[:, 0],) * 3 if biased else None
        return helpers.moe_sums(tokens, ids, None, gate, up, gate, biases=biases, **options).sum()

    body = jax.grad(loss, argnums=(0, 2, 3)) if gradient else loss
    tokens, ids = jnp.ones((1, 4096, 128), dtype), jnp.zeros((1, 4096, 1), jnp.int32)
    return helpers.per_rank(body, options["group"].mesh).lower(tokens, ids, *[jnp.ones((1, 1, 128, 128), dtype)] * 2)


@on_hopper
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_kernels_of_a_layer(biased: bool, gradient: bool, open_group: OpenGroup) -> None:
    """The unit is one kernel, forward and with a gradient, too; so is the sum of the gradients in the rows."""
    program = lowered(gradient, biased=biased, group=open_group(1), activation="clamped_swiglu")
    text = program.compile().as_text() or ""
    assert text.count('formula = "gated"') == 1
    # A gradient alone needs no product by down.
    assert text.count("is_biased = true") == (2 - gradient if biased else 0)
    assert text.count('formula = "summed"') == gradient
    # By down, and by down transposed.
    assert program.as_text().count('formula = "store", grouping = "m_grouped"') <= 1 + gradient


@on_hopper
@pytest.mark.parametrize(("dtype", "gradient", "calls"), [(0, False, True), (0, True, False), (1, False, False)])
def test_a_kernel_of_float8(dtype: int, gradient: bool, calls: bool, open_group: OpenGroup) -> None:
    """Forward alone: a gradient keeps the products. Other dtypes than bfloat16 go by parts."""
    text = lowered(gradient, DTYPES[dtype], group=open_group(1), precision="float8").as_text()
    assert ('dtype = "float8_e4m3fn", formula = "gated"' in text) is calls


def test_clamped_swiglu(rng: Rng) -> None:
    """Its values and gradients, as torch.clamp has them where a product equals the limit."""
    gate, up, cotangent = rng.normal(0, 6, (3, 1000))
    gate[:4], up[2:8] = [7, 7, 50, -50], [7, -7, 7, -7, 50, -50]
    g, u = np.minimum(gate, 7), np.clip(up, -7, 7)
    sigmoid = 1 / (1 + np.exp(-1.702 * g))
    d_g = (u + 1) * (sigmoid + 1.702 * g * sigmoid * (1 - sigmoid))
    wanted = (u + 1) * g * sigmoid, cotangent * d_g * (gate <= 7), cotangent * g * sigmoid * (abs(up) <= 7)
    out, pull = jax.vjp(ClampedSwiglu(), *(jnp.asarray(x, jnp.float32) for x in (gate, up)))
    found = out, *pull(jnp.asarray(cotangent, jnp.float32))
    for mine, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, right, rtol=2e-5, atol=2e-5)
    assert np.isnan(ClampedSwiglu()(jnp.array([jnp.nan, 1.0]), jnp.array([1.0, jnp.nan]))).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"limit": 0}, ValueError, "limit must be positive and finite, got 0.0"),
        ({"limit": float("nan")}, ValueError, "limit must be positive and finite, got nan"),
        ({"slope": float("inf")}, ValueError, "slope must be finite, got inf"),
        ({"slope": "1"}, TypeError, "slope must be a float, got"),
    ],
)
def test_wrong_clamps(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^ClampedSwiglu: {message}"):
        ClampedSwiglu(**change)


# Rows, K and F, and the rows of each group: tiles with and without a second half, rows behind all groups, none at all.
FLOAT8_SHAPES = [
    (5, 128, 128, (5,)),
    (300, 256, 128, (100, 0, 64, 1)),
    (700, 640, 384, (129, 200, 0, 256, 63)),
    (1500, 384, 256, (0, 0)),
]


def draw(rng: Rng, shape: Any, *, one_matrix: bool) -> tuple[Any, ...]:
    """Rows, group sizes, and gate and up, quantized."""
    rows, k, columns, sizes = shape
    gate, up = (rng.standard_normal((len(sizes), k, columns)).astype(DTYPES[0]) / k**0.5 for _ in range(2))
    matrices = [np.concatenate([gate, up], axis=2)] if one_matrix else [gate, up]
    left = quantize_rows(jnp.asarray(rng.standard_normal((rows, k)).astype(DTYPES[0])))
    return left, jnp.array(sizes, jnp.int32), *(quantize_weights(jnp.asarray(x)) for x in matrices)


def both(activation: Any, *operands: Any) -> tuple[Float8Rows, Float8Rows]:
    """What the op makes, and its parts."""

    def composed(rows: Float8Rows, sizes: jax.Array, *rhs: Any) -> Float8Rows:
        products = [float8.quantize_and_multiply(rows, matrix, sizes) for matrix in rhs]
        gate, up = products if len(products) == 2 else jnp.split(products[0], 2, axis=1)
        return quantize_rows((ACTIVATIONS[activation](gate) * up).astype(gate.dtype))

    op = partial(float8.gated_product_to_float8, activation, composed)
    return helpers.fetch((jax.jit(op)(*operands), jax.jit(composed)(*operands)))


def wide(rows: Float8Rows) -> np.ndarray:
    return np.asarray(dequantize(jax.tree.map(jnp.asarray, rows), jnp.float32))


def assert_alike(ours: Float8Rows, parts: Float8Rows) -> None:
    """Scales to within XLA's division; values to within a step where a scale is nearly between two."""
    np.testing.assert_allclose(ours.scales, parts.scales, rtol=1e-6)
    mine, theirs = (helpers.wide(x.values) for x in (ours, parts))
    np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
    differ = (mine != theirs) & ~np.isnan(mine)
    assert differ.mean() < 0.02
    assert np.all(np.abs(mine - theirs)[differ] <= np.maximum(np.abs(theirs[differ]) / 8, 2.0**-9))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("shape", FLOAT8_SHAPES, ids=str)
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
    assert np.all(np.abs(wide(ours) - made) <= bound)


def test_what_is_no_number(rng: Rng) -> None:
    """A NaN or an infinity spoils the blocks of its row, and nothing else; rows of zeros have the scale 1."""
    rows, sizes, *rhs = draw(rng, (200, 256, 256, (90, 110)), one_matrix=False)
    scales = rows.scales.at[3, 1].set(jnp.nan).at[150, 0].set(jnp.inf)
    ours, parts = both("silu", Float8Rows(rows.bits.at[17].set(0), scales), sizes, *rhs)
    found = wide(ours)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wide(parts)))
    spoiled = np.isnan(found).any(axis=1)
    assert set(np.flatnonzero(spoiled)) == {3, 150}
    assert np.isnan(found[spoiled]).all()
    assert (ours.scales[17] == 1).all()
    assert not found[17].any()
