"""Quantizing to float8, and products of float8 operands, against float64 of the same rounding. test_matrix.py has
gradients, and layers."""

import re
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_ep import float8, lax
from jax_ep._kit import gemm
from jax_ep.float8 import Float8Rows, Float8Weights, dequantize, quantize_rows, quantize_weights

BLOCK = 128


def assert_rounded(found: np.ndarray, weights: np.ndarray) -> None:
    """Checks what float8 kept of matrices [G, K, N]."""
    np.testing.assert_array_equal(found, oracle.through_fp8(weights.astype(np.float32), BLOCK, BLOCK)[0])


@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
def test_rows(dtype: np.dtype, rng: helpers.Rng) -> None:
    """Ordinary values, zeros, subnormals, values beyond 448; a block with a NaN or an infinity is NaN."""
    rows = rng.standard_normal((64, 512)).astype(dtype)  # so large that XLA's maximum on a CPU drops NaN
    rows[0, :128], rows[1], rows[2, 5:9] = 0, rows[1] * 1000, np.finfo(np.float16).smallest_subnormal
    rows[3, 128:256] = np.finfo(np.float16).smallest_subnormal
    spoiled = rows.copy()
    spoiled[4, 130], spoiled[5, 7] = np.nan, np.inf
    quantized = helpers.fetch(jax.jit(quantize_rows)(rows))
    expected, scales = oracle.through_fp8(rows.astype(np.float32))
    np.testing.assert_array_equal(np.repeat(quantized.scales, BLOCK, axis=1), scales)
    np.testing.assert_array_equal(quantized.values.astype(np.float32) * scales, expected)
    back = helpers.fetch(jax.jit(lambda x: dequantize(quantize_rows(x), np.float32))(spoiled))
    assert np.isnan(back[4, 128:256]).all()
    assert np.isnan(back[5, :128]).all()
    spoiled[4, 128:256] = spoiled[5, :128] = 0
    np.testing.assert_array_equal(np.isfinite(back), ~np.isnan(np.where(spoiled == 0, back, 0)))


def test_zeros_of_a_block_of_tiny_values() -> None:
    """448 / largest is no float32, and zero times infinity would be NaN."""
    rows = np.zeros((8, BLOCK), np.float32)
    rows[0, 5] = 2e-37
    values = helpers.fetch(jax.jit(quantize_rows)(rows)).values.astype(np.float32)
    np.testing.assert_array_equal(values != 0, rows != 0)
    assert np.isfinite(values).all()


def test_weights(rng: helpers.Rng) -> None:
    weights = (rng.standard_normal((3, 256, 384)) * rng.lognormal(0, 3, (3, 256, 1))).astype(np.float32)
    weights[1, :128, 128:256] = 0
    quantized = jax.jit(quantize_weights)(weights)
    assert (quantized.values.dtype, quantized.values.shape) == (oracle.FP8, (3, 384, 256))
    assert quantized.scales.shape == (3, 3, 2)
    assert_rounded(helpers.fetch(dequantize(quantized, np.float32)), weights)


@pytest.mark.parametrize("kernel", [False, True])
def test_the_gradient_of_quantizing_is_zero(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernel quantizes, which has no derivative."""
    monkeypatch.setattr(gemm, "has_gemm", lambda: kernel)
    gradient = jax.grad(lambda x: quantize_weights(x).scales.sum())(jnp.ones((2, 256, 128)))
    np.testing.assert_array_equal(gradient, 0)


class Product(NamedTuple):
    """[sum of the sizes and more, k] x [groups, k, n]."""

    sizes: tuple[int, ...]
    rows: int
    k: int
    n: int


PRODUCTS = [
    Product((5, 0, 17, 3), 29, 256, 128),
    Product((0, 1, 127, 0, 300, 130, 0), 613, 640, 384),
    Product((192,), 192, 128, 640),
    Product((70, 3), 64, 256, 256),  # more than there are
]


def draw_product(case: Product, rng: helpers.Rng, spread: float = 2) -> tuple[Float8Rows, Float8Weights]:
    """`spread`: of the magnitudes of terms in one sum, as a standard deviation of their logarithm."""
    rows = rng.standard_normal((case.rows, case.k)) * rng.lognormal(0, 2, (case.rows, 1))
    weights = rng.standard_normal((len(case.sizes), case.k, case.n)) * rng.lognormal(0, spread, (1, case.k, 1))
    rows[:2, :BLOCK] = 0
    both = jax.jit(lambda rows, weights: (quantize_rows(rows), quantize_weights(weights)))
    return both(rows.astype(np.float32), weights.astype(np.float32))


def multiplied(case: Product, lhs: Float8Rows, rhs: Float8Weights) -> tuple[np.ndarray, np.ndarray]:
    """In float64: what the product is of what both operands hold, and the sum of its terms' magnitudes."""
    lhs, rhs = helpers.fetch((lhs, rhs))
    left = np.asarray(lhs.values, float) * np.repeat(lhs.scales, BLOCK, axis=1)
    right = np.asarray(rhs.values, float) * np.repeat(np.repeat(rhs.scales, BLOCK, axis=1), BLOCK, axis=2)
    right = right.swapaxes(1, 2)
    return oracle.ragged_dot(left, right, case.sizes), oracle.ragged_dot(np.abs(left), np.abs(right), case.sizes)


def assert_product(found: np.ndarray, expected: np.ndarray, magnitude: np.ndarray, spread: float = 2) -> None:
    """Hopper's tensor cores add 32 products of float8 and the sum so far, and cut off what is less than 2^-13 of the
    largest of these. By a model of it in numpy that costs 2^-9 of the magnitudes where they are spread, 2^-12.9 if not.

    Elsewhere both operands are rounded to bfloat16, by 2^-8 of a value at most.
    """
    kept = 2.0**-8.5 if spread else 2.0**-12
    bound = (kept if gemm.has_gemm() else 2.0**-7 + 2.0**-16) * magnitude + 640 * 2.0**-24 * magnitude
    bound += (2.0**-8 if found.dtype == helpers.DTYPES[0] else 2.0**-24) * (np.abs(expected) + bound)
    assert (np.abs(found.astype(float) - expected) <= bound).all()


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
@pytest.mark.parametrize("result", ["bfloat16", "float32"])
def test_products(case: Product, result: str, rng: helpers.Rng) -> None:
    operands = draw_product(case, rng)
    product = jax.jit(partial(float8.ragged_dot, preferred_element_type=jnp.dtype(result)))
    found = helpers.fetch(product(*operands, jnp.array(case.sizes)))
    assert found.dtype == jnp.dtype(result)
    assert_product(found, *multiplied(case, *operands))
    assert not found[sum(case.sizes) :].any()


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products_of_gathered_rows(case: Product, rng: helpers.Rng) -> None:
    """The bits of the product of rows that were taken before. -1 is a row of zeros, other indices outside are NaN."""
    (lhs, rhs), sizes = draw_product(case, rng), jnp.array(case.sizes)
    indices = rng.integers(-1, case.rows, case.rows, dtype=np.int32)
    indices[rng.integers(case.rows, size=3)] = -1
    bits, scales = (jnp.where(indices[:, None] < 0, 0, x[indices]) for x in (lhs.bits, lhs.scales))
    program = jax.jit(lambda lhs, indices: float8.ragged_dot(lhs, rhs, sizes, lhs_indices=indices))
    wanted = helpers.fetch(jax.jit(float8.ragged_dot)(Float8Rows(bits, scales), rhs, sizes))
    np.testing.assert_array_equal(helpers.fetch(program(lhs, indices)), wanted)
    end = min(sum(case.sizes), case.rows)
    for at, outside in ((0, case.rows), (end // 2, -2), (end - 1, helpers.BIG)):
        indices[at] = outside
    isnan = np.isnan(helpers.fetch(program(lhs, indices))).all(axis=1)
    np.testing.assert_array_equal(isnan, ((indices < -1) | (indices >= case.rows)) & (np.arange(case.rows) < end))


@pytest.mark.parametrize("spread", [0, 2])
@pytest.mark.parametrize("rows", [3, 128, 300])
def test_dense_products(rows: int, spread: float, rng: helpers.Rng) -> None:
    case = Product((rows,), rows, 384, 256)
    lhs, rhs = draw_product(case, rng, spread)
    found = helpers.fetch(jax.jit(float8.dot)(lhs, jax.tree.map(lambda x: x[0], rhs)))
    assert found.dtype == helpers.DTYPES[0]
    assert_product(found, *multiplied(case, lhs, rhs), spread)


def test_sizes_beyond_32_bits(rng: helpers.Rng) -> None:
    """Constant sizes, of rows in float8, gathered or not, and of others, give what those within the rows give."""
    lhs, rhs = draw_product(Product((3, 5), 8, 128, 128), rng)
    for rows, options in ((lhs, {}), (lhs, {"lhs_indices": np.arange(8)}), (dequantize(lhs), {})):
        product = partial(float8.ragged_dot, rows, rhs, **options)
        np.testing.assert_array_equal(product(np.array([3, 2**31])), product(np.array([3, 5])))


def test_products_of_nan_and_infinity(rng: helpers.Rng) -> None:
    """Each reaches the rows and columns that it meets, and no others; but XLA multiplies rows by all matrices."""
    case = Product((40, 60), 100, 256, 256)
    lhs, rhs = draw_product(case, rng)
    lhs = replace(lhs, scales=lhs.scales.at[7, 1].set(jnp.nan).at[41, 0].set(jnp.inf))
    if gemm.has_gemm():
        rhs = replace(rhs, scales=rhs.scales.at[1, 1, 0].set(jnp.nan))
    found = helpers.fetch(jax.jit(float8.ragged_dot)(lhs, rhs, jnp.array(case.sizes)))
    expected = np.ones(found.shape, bool)
    expected[[7, 41]] = False
    expected[40:, BLOCK:] &= not gemm.has_gemm()
    np.testing.assert_array_equal(np.isfinite(found), expected)


WEIGHTS = Float8Weights(helpers.zeros((2, 128, 256), np.uint8), helpers.zeros((2, 1, 2)))
ROWS = Float8Rows(helpers.zeros((4, 256), np.uint8), helpers.zeros((4, 2)))
PLAIN, SIZES = helpers.zeros((4, 256)), helpers.zeros((2,), np.int32)
FLOATS, E5M2 = np.zeros(2, np.float32), WEIGHTS.bits.view(jnp.float8_e5m2)
ragged_dot, dot = float8.ragged_dot, float8.dot
WRONG: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
    (ragged_dot, (PLAIN, np.zeros((2, 256, 64), np.float32), SIZES), ValueError, "rhs must have sizes that are multi"),
    (ragged_dot, (PLAIN, np.zeros((2, 256, 128), np.float16), SIZES), TypeError, "rhs must be of dtype float32"),
    (ragged_dot, (PLAIN[:, :128], WEIGHTS, SIZES), ValueError, r"\[G, K, N\] = \(2, 128, 128\), got Float8Weights"),
    (ragged_dot, (ROWS, np.zeros((2, 128, 128), np.float32), SIZES), ValueError, r"rhs\.bits must have 256 columns"),
    (ragged_dot, (ROWS, WEIGHTS, FLOATS), TypeError, "group_sizes must be of an integer dtype, got flo"),
    (ragged_dot, (ROWS, WEIGHTS, np.zeros(3, int)), ValueError, r"group_sizes must have .* = \(2,\), got \(3,\)"),
    *(
        (ragged_dot, (replace(ROWS, **lhs), replace(WEIGHTS, **rhs), SIZES), error, match)
        for lhs, rhs, error, match in (
            ({"scales": ROWS.scales[:, :1]}, {}, ValueError, r"lhs\.scales must have shape \[M, K / 128\]"),
            ({"bits": ROWS.bits.view(oracle.FP8)}, {}, TypeError, r"lhs\.bits must be of dtype uint8"),
            ({}, {"scales": ROWS.scales}, ValueError, r"rhs\.scales must have shape"),
            ({}, {"bits": WEIGHTS.bits[..., :128]}, ValueError, r"rhs\.bits must have 256 columns"),
            ({}, {"bits": E5M2}, TypeError, r"rhs\.bits must be of dtype uint8, float8_e4m3fn, got float8_e5m2"),
            ({}, {"bits": WEIGHTS.bits[:, :64]}, ValueError, r"multiples of 128"),
            ({}, {"bits": WEIGHTS.bits[0, 0]}, ValueError, r"rhs\.bits must have shape \[G, N, K\], got \(256,\)"),
            ({}, {"bits": None}, TypeError, r"rhs\.bits must be an array, got NoneType"),
        )
    ),
    (ragged_dot, (ROWS, np.zeros((2, 256, 64), np.float32), SIZES), ValueError, "rhs must have sizes that are multi"),
    (ragged_dot, (ROWS, np.zeros((2, 256, 128), np.int32), SIZES), TypeError, "rhs must be of dtype .*, got int32"),
    (ragged_dot, (ROWS, np.zeros(2, np.float32), SIZES), ValueError, r"rhs must have shape \[G, K, N\], got \(2,\)"),
    (ragged_dot, (ROWS, WEIGHTS, SIZES, np.float16), TypeError, "preferred_element_type must be bfloat16, float32 or"),
    (dot, (PLAIN, WEIGHTS), TypeError, r"lhs must be Float8Rows .*, got float32\[4,256\]"),
    (dot, (ROWS, PLAIN), TypeError, r"rhs must be Float8Weights"),
    (ragged_dot, (PLAIN, [1.0], SIZES), TypeError, "rhs must be an array or Float8Weights, got list"),
    (ragged_dot, (ROWS, ROWS, SIZES), TypeError, "rhs must be an array or Float8Weights, got Float8Rows"),
    (lax.ragged_dot, (ROWS, WEIGHTS, SIZES), TypeError, r"lhs must be an array, got Float8Rows: call jax_ep\.float8"),
    (quantize_rows, (PLAIN[:, :130],), ValueError, r"rows must have sizes that are multiples of 128, got \(130,\)"),
    (quantize_weights, (PLAIN[0],), ValueError, r"weights must have shape \[K, N\] or \[G, K, N\]"),
    (dequantize, (PLAIN,), TypeError, "quantized must be Float8Rows or Float8Weights"),
    *((dequantize, (ROWS, wrong), TypeError, "dtype must be ") for wrong in ("x", None, np.int32)),
    *(
        (dequantize, (misfit,), ValueError, rf"quantized\.{match}")
        for misfit, match in (
            (replace(ROWS, scales=ROWS.scales[:, :1]), r"scales must have shape \[M, K / 128\] = \(4, 2\)"),
            (replace(ROWS, bits=ROWS.bits[:, :130]), "bits must have sizes that are multiples of 128"),
            (replace(WEIGHTS, scales=WEIGHTS.scales[:1]), r"scales must have shape \[G, N / 128, K / 128\]"),
            (replace(WEIGHTS, bits=WEIGHTS.bits[0, 0]), r"bits must have shape \[N, K\] or \[G, N, K\]"),
        )
    ),
]


@pytest.mark.parametrize(("op", "operands", "error", "match"), WRONG)
def test_wrong_operands(op: Any, operands: tuple[Any, ...], error: type[Exception], match: str) -> None:
    name = f"float8.{op.__name__}" if op in (ragged_dot, dot) else op.__name__
    with pytest.raises(error, match=f"^{re.escape(name)}: .*{match}"):
        op(*operands)


@pytest.mark.parametrize(
    ("lhs", "match"),
    [(ROWS, "products of float8 operands have no .*moe_mlp"), (PLAIN, "float8.ragged_dot: rhs in float8 has no grad")],
)
def test_float8_has_no_gradient(lhs: Any, match: str) -> None:
    with pytest.raises(TypeError, match=f"^{match}"):
        jax.grad(lambda scales: ragged_dot(lhs, replace(WEIGHTS, scales=scales), SIZES).sum())(WEIGHTS.scales)


def test_weights_of_float8_arrays(rng: helpers.Rng) -> None:
    """They are those of the bits, of numpy, of JAX, and traced."""
    rhs = quantize_weights(jnp.asarray(rng.standard_normal((2, 128, 128)), jnp.float32))

    def again(values: Any) -> Float8Weights:
        return Float8Weights(values, rhs.scales)

    for weights in (again(rhs.values), again(np.asarray(rhs.values)), jax.jit(again)(rhs.values)):
        np.testing.assert_array_equal(weights.bits, rhs.bits, strict=True)
