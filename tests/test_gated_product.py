"""Gated units in one kernel, on Hopper: to the bit the products and the activation one after the other, as XLA does.
The sum of two grouped products in one kernel: one sum, rounded once."""

from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import DTYPES, Rng

from jax_ep import Group, dispatch, lax
from jax_ep._kit import ffi, gemm
from jax_ep.ops.matmul import kernels
from jax_ep.ops.matmul.api import biased_product, gated_product, sum_of_lhs_gradients
from jax_ep.ops.matmul.gated import ClampedSwiglu, KnownUnit, known_unit
from jax_ep.ops.moe.units import with_bias

pytestmark = pytest.mark.usefixtures("native")
on_hopper = pytest.mark.skipif(not gemm.has_gemm(), reason="needs GPUs with the GEMM core")

ACTIVATIONS = ["silu", "gelu", "relu", "clamped_swiglu", ClampedSwiglu(limit=0.5, slope=-1.25)]
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
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
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


@pytest.mark.parametrize("one_matrix", [False, True])
def test_products_that_are_kept(one_matrix: bool) -> None:
    shapes = [(2, 16, 16)] if one_matrix else [(2, 16, 8), (2, 16, 8)]
    rows, sizes, *rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((3, 16), (2,), *shapes))
    call = partial(kernels.gated_matmul, matrices=len(rhs), unit=unit_of("silu"), keep_products=True)
    product, kept = jax.eval_shape(call, rows, sizes, *rhs)
    assert product.shape == (3, 8)
    assert [x.shape for x in kept] == [(3, shape[2]) for shape in shapes]


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
