"""`jax_ep.lax.ragged_dot(..., lhs_indices=)` against numpy in float64, and where programs for CUDA gather."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_ragged_dot
from test_ragged_dot import BFLOAT16, FLOAT16, FLOAT32

from jax_ep._kit import gemm
from jax_ep.lax import ragged_dot


class Case(NamedTuple):
    """`indices` rows of a matrix of `rows`, in groups; those behind the last group count, too."""

    rows: int
    indices: int
    contracted: int
    columns: int
    sizes: tuple[int, ...]


CASES = [
    Case(40, 300, 72, 136, (0, 1, 127, 0, 130, 17, 0)),
    Case(256, 256, 128, 256, (128, 128)),
    Case(900, 97, 16, 40, (50, 40, 30)),  # more than there are
    Case(17, 1000, 256, 384, (1, 2, 3, 4, 5, 6, 7, 8, 500, 100)),
    Case(1, 40, 24, 8, (0, 0, 40)),
    Case(5, 33, 13, 9, (20, 3)),  # no multiples of 8
]


def draw(rng: np.random.Generator, case: Case, dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """lhs, rhs, group sizes, indices with repeated ones and -1, and a cotangent."""
    lhs = rng.standard_normal((case.rows, case.contracted)).astype(dtype)
    rhs = rng.standard_normal((len(case.sizes), case.contracted, case.columns)).astype(dtype)
    indices = rng.integers(-1, case.rows, case.indices, dtype=np.int32)
    cotangent = rng.standard_normal((case.indices, case.columns)).astype(dtype)
    return lhs, rhs, np.array(case.sizes, np.int32), indices, cotangent


def gathered(lhs: np.ndarray, indices: np.ndarray) -> np.ndarray:
    rows = lhs[np.clip(indices, 0, len(lhs) - 1)].astype(np.float64)
    rows[indices == -1] = 0
    rows[(indices < -1) | (indices >= len(lhs))] = np.nan
    return rows


def exact(case: Case, lhs: Any, rhs: Any, sizes: Any, indices: Any, cotangent: Any) -> tuple[np.ndarray, ...]:
    """The product and both gradients."""
    rows, d_lhs = gathered(lhs, indices), np.zeros(lhs.shape)
    taken = test_ragged_dot.Case(case.indices, case.contracted, case.columns, case.sizes)
    d_rows, d_rhs = test_ragged_dot.exact_gradients(taken, rows, rhs, cotangent)
    inside = (indices >= 0) & (indices < len(lhs))
    np.add.at(d_lhs, indices[inside], d_rows[inside])
    return test_ragged_dot.exact(taken, rows, rhs), d_lhs, d_rhs


def actual(lhs: Any, rhs: Any, sizes: Any, indices: Any, cotangent: Any) -> tuple[jax.Array, ...]:
    out, pull = jax.vjp(lambda lhs, rhs: ragged_dot(lhs, rhs, sizes, lhs_indices=indices), lhs, rhs)
    return out, *pull(cotangent.astype(out.dtype))


def assert_near(mine: Any, right: np.ndarray, magnitude: np.ndarray, roundings: int = 1) -> None:
    """Within the rounding of float32 sums and `roundings` to the result's dtype."""
    unit = float(jnp.finfo(mine.dtype).eps)
    error = np.abs(np.asarray(mine, np.float64) - right)
    allowed = unit * (np.abs(right) + (roundings - 1) * magnitude) + 64 * 2.0**-23 * magnitude + 1e-6
    assert np.all(error <= allowed), f"{error.max()} at {np.unravel_index(error.argmax(), error.shape)}"


@pytest.mark.matrix(1)
@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_product_and_gradients(case: Case, dtype: np.dtype, rng: np.random.Generator) -> None:
    """The cotangents of gathered rows are rounded before they are summed."""
    operands = draw(rng, case, dtype)
    lhs, rhs, sizes, indices, cotangent = operands
    right = exact(case, *operands)
    magnitudes = exact(case, np.abs(lhs), np.abs(rhs), sizes, indices, np.abs(cotangent))
    for mine, wanted, magnitude, roundings in zip(
        jax.jit(actual)(*operands), right, magnitudes, (1, 2, 1), strict=True
    ):
        assert mine.dtype == dtype
        assert_near(mine, wanted, magnitude, roundings)


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("bad", [-2, 40, np.iinfo(np.int32).min, np.iinfo(np.int32).max])
def test_out_of_bounds_is_nan_and_stays_in_its_group(bad: int, rng: np.random.Generator) -> None:
    case = Case(40, 200, 64, 72, (70, 60, 50))
    lhs, rhs, sizes, indices, cotangent = draw(rng, case, BFLOAT16)
    right = exact(case, lhs, rhs, sizes, indices, cotangent)
    at = rng.integers(70, 130)
    indices[[at, 190]] = bad  # in the second group and behind the last
    out, d_lhs, d_rhs = (np.asarray(x, np.float64) for x in jax.jit(actual)(lhs, rhs, sizes, indices, cotangent))
    assert np.isnan(out[at]).all()
    assert np.isnan(d_rhs[1]).all()
    others = np.arange(200) != at
    np.testing.assert_allclose(out[others], right[0][others], rtol=0.02, atol=0.05)
    np.testing.assert_allclose(d_rhs[[0, 2]], right[2][[0, 2]], rtol=0.02, atol=0.05)
    assert np.isfinite(d_lhs).all()


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize(("rows", "indices"), [(3, 0), (0, 4), (0, 0)])
def test_nothing_to_gather(rows: int, indices: int) -> None:
    lhs, rhs, sizes = jnp.ones((rows, 8), BFLOAT16), jnp.ones((2, 8, 16), BFLOAT16), jnp.array([indices, 0])
    out, pull = jax.vjp(lambda x, y: ragged_dot(x, y, sizes, lhs_indices=jnp.full(indices, -1)), lhs, rhs)
    assert out.shape == (indices, 16)
    for x in (out, *pull(out)):
        assert not np.asarray(x).any()


def test_gradients_have_the_same_bits_each_time(rng: np.random.Generator) -> None:
    operands = draw(rng, CASES[3], BFLOAT16)
    program = jax.jit(actual)
    first, second = program(*operands), program(*operands)
    for mine, again in zip(first, second, strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(again).tobytes()


@pytest.mark.usefixtures("core")
def test_tangents_and_second_derivatives(rng: np.random.Generator) -> None:
    """<w, J v> = <J^T w, v>, and of gradients too: in both operands at once."""
    case = Case(12, 50, 16, 24, (20, 25))
    lhs, rhs, sizes, indices, w = draw(rng, case, FLOAT32)
    v = tuple(rng.standard_normal(x.shape).astype(FLOAT32) for x in (lhs, rhs))

    def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return ragged_dot(lhs, rhs, jnp.asarray(sizes), lhs_indices=jnp.asarray(indices))

    def inner(a: Any, b: Any) -> float:
        return sum(float(np.vdot(np.float64(x), np.float64(y))) for x, y in zip(a, b, strict=True))

    tangent = jax.jit(lambda x, v: jax.jvp(product, x, v)[1])((lhs, rhs), v)
    back = jax.jit(lambda x, w: jax.vjp(product, *x)[1](w))((lhs, rhs), w)
    np.testing.assert_allclose(inner([tangent], [w]), inner(back, v), rtol=1e-4, atol=1e-3)

    def gradient(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(lambda *x: jnp.sum(jnp.tanh(product(*x)) * w), (0, 1))(lhs, rhs)

    u = tuple(rng.standard_normal(x.shape).astype(FLOAT32) for x in (lhs, rhs))
    hessian = jax.jit(lambda x, v: jax.jvp(gradient, x, v)[1])
    hessian_v, hessian_u = (hessian((lhs, rhs), each) for each in (v, u))
    np.testing.assert_allclose(inner(hessian_v, u), inner(hessian_u, v), rtol=1e-3, atol=1e-2)


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("batched", [(0, 0, 0, 0), (None, None, None, 0), (0, None, None, None)], ids=str)
def test_vmap(batched: tuple[int | None, ...], rng: np.random.Generator) -> None:
    case, count = Case(7, 30, 16, 24, (10, 5, 12)), 3
    drawn = [draw(rng, case, BFLOAT16) for _ in range(count)]
    operands = [np.stack(x) if b == 0 else x[0] for x, b in zip(zip(*drawn, strict=True), batched, strict=False)]
    out = jax.vmap(lambda *x: ragged_dot(*x[:3], lhs_indices=x[3]), in_axes=batched)(*operands)
    for i, mine in enumerate(out):
        each = [x[i] if b == 0 else x for x, b in zip(operands, batched, strict=True)]
        lhs, rhs, sizes, indices = each
        unused = drawn[0][4]
        right = exact(case, lhs, rhs, sizes, indices, unused)[0]
        assert_near(mine, right, exact(case, np.abs(lhs), np.abs(rhs), sizes, indices, unused)[0])


def test_bad_indices_are_refused() -> None:
    lhs, rhs, sizes = jnp.zeros((8, 8), BFLOAT16), jnp.zeros((2, 8, 8), BFLOAT16), jnp.zeros(2, jnp.int32)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (jnp.zeros((4, 1), jnp.int32), ValueError, r"lhs_indices must have shape \[M\], got \(4, 1\)"),
        (jnp.zeros(4), TypeError, "lhs_indices must be of an integer dtype, got float32"),
        ([0, 1], TypeError, "lhs_indices must be an array, got list"),
    ]
    for indices, error, text in wrong:
        with pytest.raises(error, match=text):
            ragged_dot(lhs, rhs, sizes, lhs_indices=indices)


def test_cuda_programs_gather_in_the_core(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """The product gathers rows, the gradient of the matrices its contraction; that of the rows gathers nothing."""
    monkeypatch.setattr(gemm, "has_gemm", lambda: True)
    text = test_ragged_dot.lowered_for_cuda(actual, *draw(rng, Case(40, 64, 32, 16, (30, 20)), BFLOAT16))
    calls = [line for line in text.splitlines() if "jax_ep_grouped_matmul" in line]
    kinds = sorted(('gathered = "lhs"' in line, 'grouping = "contraction"' in line) for line in calls)
    assert kinds == [(False, False), (True, False), (True, True)]
    assert "ragged_dot" not in text.replace("jax_ep", "")
