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

from jax_ep import Group, dispatch, lax
from jax_ep._kit import ffi, gemm
from jax_ep.float8 import Float8Rows, dequantize, quantize_rows, quantize_weights
from jax_ep.ops.matmul import float8, kernels
from jax_ep.ops.matmul.api import biased_product, gated_product, sum_of_lhs_gradients
from jax_ep.ops.matmul.gated import ACTIVATIONS, ClampedSwiglu, KnownUnit, known_unit
from jax_ep.ops.moe.units import with_bias

pytestmark = pytest.mark.usefixtures("native")
on_hopper = pytest.mark.skipif(not gemm.has_gemm(), reason="needs GPUs with the GEMM core")

UNITS = ["silu", "gelu", "relu", "clamped_swiglu", ClampedSwiglu(limit=0.5, slope=-1.25)]
SIZE, EXPERTS, TOP_K = 1, 4, 2
# The last has few tiles of a long contraction: products alone split it, so that their sums have other bits.
SHAPES = [(5, 8, 8), (300, 136, 72), (1500, 264, 328), (700, 2048, 640), (64, 2048, 128)]


in_float32 = partial(lax.ragged_dot, preferred_element_type=jnp.float32)


def unit_of(activation: Any) -> KnownUnit:
    unit = known_unit(activation)
    assert unit is not None
    return unit


def layer_of(group: Any, activation: Any, one_matrix: bool = False, **options: Any) -> Any:
    """(tokens, ids, gate, up, *biases) -> the gated unit of dispatched rows, and its parts, one after the other."""
    unit = unit_of(activation)

    def both(tokens: Any, ids: Any, gate: Any, up: Any, *biases: Any) -> Any:
        def joined(*arrays: Any) -> Any:
            return (jnp.concatenate(arrays, axis=-1),) if one_matrix and arrays else arrays

        rows, sizes, _ = dispatch(tokens, ids, group=group, num_experts=gate.shape[0], **options)
        of_gate, of_up = (
            with_bias(in_float32(rows, matrix, sizes), bias, sizes).astype(rows.dtype)
            for matrix, bias in zip((gate, up), biases or (None, None), strict=True)
        )
        parts = unit.function(of_gate, of_up)
        operands = (rows, sizes, joined(gate, up), joined(*biases))
        out, _ = gated_product(unit, lambda *_: (parts, ()), *operands, keep_products=False)
        return out, parts

    return helpers.per_rank(both, group.mesh)


def by_no_kernel(rows: Any, sizes: Any, matrix: Any, bias: Any) -> jax.Array:
    return jnp.full((rows.shape[0], bias.shape[1]), jnp.nan, rows.dtype)


def assert_same_bits(out: np.ndarray, wanted: np.ndarray) -> None:
    """But for the bits of a NaN."""
    np.testing.assert_array_equal(helpers.wide(out), helpers.wide(wanted))
    finite = ~np.isnan(helpers.wide(wanted))
    np.testing.assert_array_equal(out.view(np.uint16)[finite], wanted.view(np.uint16)[finite])


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("activation", UNITS, ids=str)
def test_every_value(activation: Any, dtype: np.dtype, group: Group) -> None:
    """Each of the 2^16 values as a product by gate: in the first column of a row, times one."""
    tokens = np.zeros((1, 1 << 16, 8), dtype)
    tokens[0, :, 0] = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    tokens[0, :, 1] = 1
    gate, up = np.zeros((2, 1, 1, 8, 8), dtype)
    gate[..., 0, :] = 1
    up[..., 1, :] = np.array([1, -1, 0.3, 3, 1e-3, 100, -0.7, 2], dtype)
    ids = np.zeros((1, 1 << 16, 1), np.int32)
    out, wanted = helpers.fetch(layer_of(group, activation)(tokens, ids, gate, up))
    assert_same_bits(out, wanted)


@pytest.mark.matrix
@on_hopper
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("one_matrix", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "hidden", "width"), SHAPES)
def test_shapes(
    tokens: int, hidden: int, width: int, biased: bool, one_matrix: bool, dtype: np.dtype, group: Group, rng: Rng
) -> None:
    program = layer_of(group, "silu", one_matrix, capacity=tokens * TOP_K + 40)
    for skipped in (0, tokens // 2):
        rows = rng.standard_normal((1, tokens, hidden)).astype(dtype)
        gate, up = (rng.standard_normal((2, 1, EXPERTS, hidden, width)) / hidden**0.5).astype(dtype)
        ids = rng.integers(0, EXPERTS - 1, (1, tokens, TOP_K)).astype(np.int32)  # the last expert gets nothing
        ids[:, :skipped] = -1
        biases = rng.standard_normal((2, 1, EXPERTS, width)).astype(dtype) if biased else ()
        out, wanted = helpers.fetch(program(rows, ids, gate, up, *biases))
        assert_same_bits(out, wanted)
        assert np.abs(helpers.wide(out)).sum() > 0
        assert not helpers.wide(out)[0, (tokens - skipped) * TOP_K :].any()


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("one_matrix", [False, True])
@pytest.mark.parametrize(("rows", "hidden", "width"), [(5, 8, 8), (300, 136, 72), (1500, 264, 328)])
def test_kept_products(rows: int, hidden: int, width: int, one_matrix: bool, dtype: np.dtype, rng: Rng) -> None:
    """The bits of the products alone plus their biases, rounded once."""
    lhs = rng.standard_normal((rows, hidden)).astype(dtype)
    gate, up = (rng.standard_normal((2, EXPERTS, hidden, width)) / hidden**0.5).astype(dtype)
    sizes = rng.multinomial(rows - rows // 8, [0.5, 0, 0.3, 0.2]).astype(np.int32)
    rhs = (np.concatenate([gate, up], axis=2),) if one_matrix else (gate, up)
    biases = [rng.standard_normal((EXPERTS, x.shape[2])).astype(dtype) for x in rhs]
    options: dict[str, Any] = {"matrices": len(rhs), "unit": unit_of("relu"), "keep_products": True}
    out, kept = jax.jit(partial(kernels.gated_matmul, **options))(lhs, sizes, *rhs, *biases)
    assert [x.shape for x in kept] == [(rows, x.shape[2]) for x in rhs]
    expert = np.repeat(np.arange(EXPERTS), sizes)
    for product, matrix, bias in zip(kept, rhs, biases, strict=True):
        wanted = np.array(jax.jit(in_float32)(lhs, matrix, sizes))
        wanted[: expert.size] += helpers.wide(bias[expert])
        wanted = wanted.astype(dtype)
        assert_same_bits(np.asarray(product), wanted)
        added = jax.jit(partial(biased_product, by_no_kernel))
        assert_same_bits(np.asarray(added(lhs, sizes, matrix, bias)), wanted)
    of_gate, of_up = map(helpers.wide, kept if len(kept) == 2 else np.split(np.asarray(kept[0]), 2, axis=1))
    assert_same_bits(np.asarray(out), (np.maximum(of_gate, 0) * of_up).astype(dtype))


@on_hopper
def test_its_derivative(rng: Rng) -> None:
    rows = jnp.asarray(rng.standard_normal((300, 64)), jnp.bfloat16)
    gate, up = jnp.asarray(rng.standard_normal((2, EXPERTS, 64, 72)) / 8, jnp.bfloat16)
    sizes = jnp.array([100, 0, 150, 30], jnp.int32)

    def composed(rows: Any, sizes: Any, gate: Any, up: Any) -> Any:
        return jax.nn.silu(lax.ragged_dot(rows, gate, sizes)) * lax.ragged_dot(rows, up, sizes), ()

    def ours(rows: Any, sizes: Any, gate: Any, up: Any) -> Any:
        return gated_product(unit_of("silu"), composed, rows, sizes, (gate, up), keep_products=False)

    def gradient(function: Any) -> Any:
        return jax.jit(
            jax.grad(lambda *x: function(x[0], sizes, *x[1:])[0].astype(jnp.float32).sum(), argnums=(0, 1, 2))
        )

    for mine, theirs in zip(*(gradient(function)(rows, gate, up) for function in (ours, composed)), strict=True):
        assert_same_bits(np.asarray(mine), np.asarray(theirs))
        assert np.abs(helpers.wide(mine)).sum() > 0


@pytest.mark.parametrize(
    ("shape", "splits"), [((64, 768, 2048, 8), True), ((64, 768, 512, 8), False), ((65536, 768, 2048, 8), False)]
)
def test_which_contractions_are_split(shape: tuple[int, int, int, int], splits: bool) -> None:
    """Long ones of few tiles: rows, columns, contraction, groups, on 132 SMs."""
    assert ffi.library("cpu").splits_contraction(*shape, 132) is splits


ADDED = 5  # groups


def draw_sum(rng: Rng, rows: int, n: int, k: int, dtype: np.dtype, scale: float) -> Any:
    cotangents = (rng.standard_normal((2, rows, k)) * scale).astype(dtype)
    rhs = (rng.standard_normal((2, ADDED, n, k)) / k**0.5).astype(dtype)
    sizes = rng.multinomial(rows - rows // 8, [0.5, 0.2, 0, 0.3, 0]).astype(np.int32)
    return tuple(cotangents), tuple(rhs), sizes


@pytest.mark.matrix
@on_hopper
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("tiny", [False, True], ids=["", "subnormal"])
@pytest.mark.parametrize(("rows", "n", "k"), [(5, 8, 8), (300, 72, 136), (1500, 328, 264), (4100, 640, 768)])
def test_rounded_once(rows: int, n: int, k: int, tiny: bool, dtype: np.dtype, rng: Rng) -> None:
    """Half a unit in the last place of the exact sum, and what float32 loses of its terms."""
    scale = 4 * float(jnp.finfo(dtype).tiny) if tiny else 1
    cotangents, rhs, sizes = draw_sum(rng, rows, n, k, dtype, scale)
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


@on_hopper
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_kernels_of_a_layer(biased: bool, gradient: bool, group: Group) -> None:
    """The unit is one kernel, forward and with a gradient, too; so is the sum of the gradients in the rows."""
    tokens, ids = jnp.ones((1, 4096, 64), jnp.bfloat16), jnp.zeros((1, 4096, 1), jnp.int32)
    gate = up = jnp.ones((1, 1, 64, 64), jnp.bfloat16)

    def loss(tokens: Any, ids: Any, gate: Any, up: Any) -> Any:
        biases = (gate[:, 0],) * 3 if biased else None
        options: dict[str, Any] = {"group": group, "biases": biases, "activation": "clamped_swiglu"}
        return helpers.moe_sums(tokens, ids, None, gate, up, gate, **options).astype(jnp.float32).sum()

    body = jax.grad(loss, argnums=(0, 2, 3)) if gradient else loss
    lowered = helpers.per_rank(body, group.mesh).lower(tokens, ids, gate, up)
    text = lowered.compile().as_text() or ""
    assert text.count('formula = "gated"') == 1
    # A gradient alone needs no product by down.
    assert text.count("is_biased = true") == (2 - gradient if biased else 0)
    assert text.count('formula = "summed"') == gradient
    # By down, and by down transposed.
    assert lowered.as_text().count('formula = "store", grouping = "m_grouped"') <= 1 + gradient


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
