"""`jax_ep.lax.ragged_dot` against numpy in float64, and that its programs for CUDA run on the GEMM core."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep._kit import gemm
from jax_ep.lax import ragged_dot
from jax_ep.ops.matmul import api as matmul

BFLOAT16, FLOAT16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)


class Case(NamedTuple):
    """Groups of rows; `rows` counts those behind the last group too."""

    rows: int
    contracted: int
    columns: int
    sizes: tuple[int, ...]


CASES = [
    Case(64, 64, 64, (64,)),
    Case(300, 72, 136, (0, 1, 127, 0, 130, 17, 0)),
    Case(256, 128, 256, (128, 128)),
    Case(40, 24, 8, (0, 0, 0)),
    Case(97, 16, 40, (50, 40, 30)),  # more than there are
    Case(33, 13, 9, (20, 3)),  # no multiples of 8
    Case(1000, 512, 384, (1, 2, 3, 4, 5, 6, 7, 8, 500, 100)),
]


def test_signature_is_that_of_jax() -> None:
    def parameters(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
        return [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]

    *theirs, indices, implementation = parameters(ragged_dot)
    assert theirs == parameters(jax.lax.ragged_dot)
    assert indices == ("lhs_indices", inspect.Parameter.KEYWORD_ONLY, None)
    assert implementation == ("implementation", inspect.Parameter.KEYWORD_ONLY, "auto")


def draw(rng: np.random.Generator, case: Case, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lhs = rng.standard_normal((case.rows, case.contracted)).astype(dtype)
    rhs = rng.standard_normal((len(case.sizes), case.contracted, case.columns)).astype(dtype)
    return lhs, rhs, np.array(case.sizes, np.int32)


def ranges(case: Case) -> list[slice]:
    ends = np.minimum(np.cumsum(case.sizes), case.rows)
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def exact(case: Case, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    out = np.zeros((case.rows, case.columns))
    for group, rows in enumerate(ranges(case)):
        out[rows] = lhs[rows].astype(np.float64) @ rhs[group].astype(np.float64)
    return out


def exact_gradients(case: Case, lhs: np.ndarray, rhs: np.ndarray, cotangent: np.ndarray) -> tuple[np.ndarray, ...]:
    d_lhs, d_rhs = np.zeros(lhs.shape), np.zeros(rhs.shape)
    for group, rows in enumerate(ranges(case)):
        above = cotangent[rows].astype(np.float64)
        d_lhs[rows] = above @ rhs[group].astype(np.float64).T
        d_rhs[group] = lhs[rows].astype(np.float64).T @ above
    return d_lhs, d_rhs


def assert_near(actual: Any, wanted: np.ndarray, magnitude: np.ndarray) -> None:
    """Within the rounding of float32 sums and of the result's dtype."""
    unit = float(jnp.finfo(actual.dtype).eps)
    error = np.abs(np.asarray(actual, np.float64) - wanted)
    allowed = unit * np.abs(wanted) + 32 * 2.0**-23 * magnitude + float(jnp.finfo(actual.dtype).smallest_subnormal)
    assert np.all(error <= allowed), f"{error.max()} at {np.unravel_index(error.argmax(), error.shape)}"


@pytest.mark.matrix
@pytest.mark.usefixtures("core")
@pytest.mark.parametrize(
    ("dtype", "result"), [*((dtype, None) for dtype in (BFLOAT16, FLOAT16, FLOAT32)), (BFLOAT16, FLOAT32)], ids=str
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_product(case: Case, dtype: np.dtype, result: np.dtype | None, rng: np.random.Generator) -> None:
    lhs, rhs, sizes = draw(rng, case, dtype)
    out = jax.jit(partial(ragged_dot, preferred_element_type=result))(lhs, rhs, sizes)
    assert out.dtype == (result or dtype)
    assert_near(out, exact(case, lhs, rhs), exact(case, np.abs(lhs), np.abs(rhs)))


def gradients(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
    _, pull = jax.vjp(lambda lhs, rhs: ragged_dot(lhs, rhs, sizes), lhs, rhs)
    return pull(cotangent)


@pytest.mark.matrix
@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case, dtype: np.dtype, rng: np.random.Generator) -> None:
    lhs, rhs, sizes = draw(rng, case, dtype)
    cotangent = rng.standard_normal((case.rows, case.columns)).astype(dtype)
    actual = jax.jit(gradients)(lhs, rhs, sizes, cotangent)
    wanted = exact_gradients(case, lhs, rhs, cotangent)
    magnitudes = exact_gradients(case, *(np.abs(x) for x in (lhs, rhs, cotangent)))
    for mine, right, magnitude in zip(actual, wanted, magnitudes, strict=True):
        assert mine.dtype == dtype
        assert_near(mine, right, magnitude)


@pytest.mark.usefixtures("core")
def test_other_groups_are_not_seen(rng: np.random.Generator) -> None:
    """NaN and infinity in one group, and behind the last, stay there in the product and in both gradients."""
    case = Case(100, 64, 72, (30, 21, 40))
    lhs, rhs, sizes = draw(rng, case, BFLOAT16)
    cotangent = rng.standard_normal((case.rows, case.columns)).astype(BFLOAT16)
    bad, clean = slice(30, 51), np.r_[0:30, 51:91]
    wanted = exact_gradients(case, lhs, rhs, cotangent)
    product = exact(case, lhs, rhs)
    lhs[bad], lhs[91:], cotangent[bad] = np.nan, np.inf, np.inf
    out = np.asarray(jax.jit(ragged_dot)(lhs, rhs, sizes), np.float64)
    d_lhs, d_rhs = (np.asarray(x, np.float64) for x in jax.jit(gradients)(lhs, rhs, sizes, cotangent))
    assert np.isnan(out[bad]).all()
    for mine, right in ((out, product), (d_lhs, wanted[0])):
        np.testing.assert_allclose(mine[clean], right[clean], rtol=0.01, atol=0.01)
        assert not mine[91:].any()
    np.testing.assert_allclose(d_rhs[[0, 2]], wanted[1][[0, 2]], rtol=0.01, atol=0.01)


@pytest.mark.usefixtures("core")
def test_inside_shard_map_and_scan(rng: np.random.Generator) -> None:
    """Unvarying weights get the sum of all devices' gradients; `check_vma` is on."""
    if "cpu" in gemm.pallas_platforms():
        pytest.skip("Pallas interprets inside shard_map with check_vma=False alone")
    size, case = 2, Case(48, 16, 16, (20, 0, 25))
    mesh = helpers.mesh_of(ep=size)
    pieces = [draw(rng, case, BFLOAT16) for _ in range(size)]
    lhs, rhs = np.concatenate([piece[0] for piece in pieces]), pieces[0][1]
    sizes = np.concatenate([piece[2] for piece in pieces])

    def loss(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return ragged_dot(x, rhs, sizes), None

        out, _ = jax.lax.scan(layer, lhs, length=1)
        return jax.lax.psum(out.astype(jnp.float32).sum(), "ep")

    def body(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> Any:
        return jax.value_and_grad(loss, argnums=(0, 1))(lhs, rhs, sizes)

    specs = (P("ep"), P(), P("ep"))
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(P(), (P("ep"), P()))))
    value, (d_lhs, d_rhs) = helpers.fetch(program(lhs, rhs, sizes))
    ones = np.ones((case.rows, case.columns), BFLOAT16)
    wanted = [exact_gradients(case, piece[0], rhs, ones) for piece in pieces]
    total = sum(exact(case, piece[0], rhs).sum() for piece in pieces)
    np.testing.assert_allclose(value, total, rtol=0.01, atol=1)
    np.testing.assert_allclose(d_lhs.astype(np.float64), np.concatenate([w[0] for w in wanted]), rtol=0.02, atol=0.1)
    np.testing.assert_allclose(d_rhs.astype(np.float64), wanted[0][1] + wanted[1][1], rtol=0.02, atol=0.2)


@pytest.mark.usefixtures("core")
def test_vmap(rng: np.random.Generator) -> None:
    case, count = Case(30, 16, 24, (10, 5, 12)), 3
    operands = [draw(rng, case, BFLOAT16) for _ in range(count)]
    out = jax.jit(jax.vmap(ragged_dot))(*(np.stack(each) for each in zip(*operands, strict=True)))
    for mine, (lhs, rhs, _) in zip(out, operands, strict=True):
        assert_near(mine, exact(case, lhs, rhs), exact(case, np.abs(lhs), np.abs(rhs)))


@pytest.mark.usefixtures("core")
def test_bad_operands_are_refused() -> None:
    lhs, rhs, sizes = jnp.zeros((8, 8), BFLOAT16), jnp.zeros((2, 16, 8), BFLOAT16), jnp.zeros(2, jnp.int32)
    with pytest.raises((TypeError, ValueError)):
        ragged_dot(lhs, rhs, sizes)  # 8 is not 16
    with pytest.raises(NotImplementedError):
        ragged_dot(lhs, rhs[:, :8], sizes, group_offset=jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="implementation must be one of 'auto', 'pallas', 'xla'; got 'ffi'"):
        ragged_dot(lhs, rhs[:, :8], sizes, implementation="ffi")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"implementation='pallas' needs lhs and rhs of one dtype.*got int32"):
        ragged_dot(lhs.astype(int), rhs[:, :8].astype(int), sizes, implementation="pallas")


def lowered_for_cuda(function: Callable[..., Any], *operands: Any) -> str:
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def test_cuda_programs_call_the_core(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Three products for value and gradients, none of them XLA's; what the core cannot take is XLA's."""
    monkeypatch.setattr(gemm, "has_gemm", lambda: True)
    case = Case(64, 32, 16, (30, 20))
    operands = (*draw(rng, case, BFLOAT16), np.ones((case.rows, case.columns), BFLOAT16))
    text = lowered_for_cuda(lambda *x: (ragged_dot(*x[:3]), gradients(*x)), *operands)
    assert text.count('grouping = "rows"') >= 2
    assert text.count('grouping = "contraction"') == 1
    assert "ragged_dot" not in text.replace("jax_ep", "")
    assert "jax_ep_" not in lowered_for_cuda(ragged_dot, *draw(rng, case, FLOAT32))
    assert "jax_ep_" not in lowered_for_cuda(ragged_dot, *draw(rng, Case(64, 36, 16, (30, 20)), BFLOAT16))


def test_the_core_is_chosen_on_hopper() -> None:
    """A library that lost the core would silently be slow."""
    devices = jax.devices()
    if devices[0].platform != "gpu" or not str(getattr(devices[0], "compute_capability", "")).startswith("9."):
        pytest.skip("needs Hopper GPUs")
    assert gemm.has_gemm()
    assert matmul.ragged_dot is ragged_dot
