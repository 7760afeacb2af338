"""`jax_ep.lax.ragged_dot` against numpy in float64, and that its programs for CUDA run on the GEMM core."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep._kit import gemm
from jax_ep.lax import ragged_dot, ragged_dot_general
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


@pytest.mark.matrix(1)
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


@pytest.mark.matrix(1)
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


class QArray:
    """As qwix has it."""


@pytest.mark.parametrize(
    "product", [ragged_dot, partial(ragged_dot_general, ragged_dot_dimension_numbers=cast(Any, None))]
)
@pytest.mark.parametrize("operand", ["lhs", "rhs"])
def test_quantized_operands_are_refused_by_name(product: Any, operand: str) -> None:
    operands: Any = {"lhs": jnp.zeros((8, 8)), "rhs": jnp.zeros((1, 8, 8))} | {operand: QArray()}
    with pytest.raises(TypeError, match=rf": {operand} must be an array, got QArray: call qwix.ragged_dot$"):
        product(**operands, group_sizes=jnp.ones(1, int))


HIGHEST, BY_BFLOAT16 = jax.lax.Precision.HIGHEST, jax.lax.DotAlgorithmPreset.BF16_BF16_F32


@pytest.mark.matrix(1)
@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("dtypes", [("bfloat16",) * 2, ("bfloat16", "float32"), ("int8",) * 2, ("int8", "bfloat16")])
@pytest.mark.parametrize("result", [None, jnp.float32, jnp.int32])
@pytest.mark.parametrize("precision", [None, (HIGHEST, HIGHEST), BY_BFLOAT16, "highest"], ids=str)
@pytest.mark.parametrize("sizes", [jnp.int8, jnp.uint32])
def test_the_forms_of_other_libraries_tests(
    dtypes: tuple[str, str], result: Any, precision: Any, sizes: Any, rng: np.random.Generator
) -> None:
    """What tokamax' and JAX's own tests pass: it does as `jax.lax.ragged_dot` does, or is refused as there."""
    case = Case(48, 16, 24, (20, 0, 23))
    lhs, rhs = (jnp.asarray(x * 3).astype(dtype) for x, dtype in zip(draw(rng, case, FLOAT32), dtypes, strict=False))
    given = {"group_sizes": jnp.asarray(case.sizes, sizes), "precision": precision, "preferred_element_type": result}
    try:
        wanted = jax.lax.ragged_dot(lhs, rhs, **given)
    except Exception as error:
        with pytest.raises(type(error)):
            ragged_dot(lhs, rhs, **given)
    else:
        found = ragged_dot(lhs, rhs, **given)
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (found, wanted)), rtol=0.01, atol=0.1)


def numbers_of(contracted: Any, ragged: Any = (0,), groups: Any = (0,), batches: Any = ((), ())) -> Any:
    return jax.lax.RaggedDotDimensionNumbers((contracted, batches), ragged, groups)


FORMS = {
    "plain": numbers_of(([1], [1])),
    "transposed": numbers_of(([1], [2])),
    "contracted": numbers_of(([0], [0]), groups=()),
}


@pytest.mark.matrix(1)
@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "result"), [(BFLOAT16, None), (FLOAT32, None), (BFLOAT16, FLOAT32)], ids=str)
@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[5]], ids=str)
def test_general(case: Case, form: str, dtype: Any, result: Any, rng: np.random.Generator) -> None:
    """A product of a matrix transposed, and one over the rows of groups: values and gradients."""
    lhs, rhs, sizes = draw(rng, case, dtype)
    group_sizes = jnp.asarray(sizes)
    rows = rng.standard_normal((case.rows, case.columns)).astype(dtype)
    left, right = {"plain": (lhs, rhs), "transposed": (rows, rhs), "contracted": (lhs, rows)}[form]

    def wanted(left: Any, right: Any, cotangent: Any) -> tuple[Any, ...]:
        """Of form "transposed" the matrices are [G, N, K], as `rhs` is for rows of N values."""
        if form == "plain":
            return exact(case, left, right), *exact_gradients(case, left, right, cotangent)
        if form == "transposed":
            d_matrix, d_rows = exact(case, cotangent, right), exact_gradients(case, cotangent, right, left)[1]
            return exact_gradients(case, np.zeros_like(lhs), right, left)[0], d_matrix, d_rows
        return exact_gradients(case, left, rhs, right)[1], *by_matrices(left, right, cotangent)

    def by_matrices(left: Any, right: Any, cotangent: Any) -> tuple[Any, Any]:
        return exact_gradients(case, left, cotangent, right)[0], exact(case, left, cotangent)

    def body(left: Any, right: Any, cotangent: Any) -> Any:
        product = partial(ragged_dot_general, ragged_dot_dimension_numbers=FORMS[form], preferred_element_type=result)
        out, pull = jax.vjp(lambda left, right: product(left, right, group_sizes), left, right)
        return out, *pull(cotangent.astype(out.dtype))

    shape = {"plain": rows.shape, "transposed": lhs.shape, "contracted": rhs.shape}[form]
    cotangent = rng.standard_normal(shape).astype(dtype)
    found = jax.jit(body)(left, right, cotangent)
    assert found[0].dtype == (result or dtype)
    magnitudes = wanted(*map(np.abs, (left, right, cotangent)))
    for mine, right_one, magnitude in zip(found, wanted(left, right, cotangent), magnitudes, strict=True):
        assert_near(mine, right_one, magnitude)


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("form", ["plain", "transposed"])
def test_second_derivatives(form: str, rng: np.random.Generator) -> None:
    """Forward over reverse, as of the product by `jax.lax`."""
    case = Case(40, 16, 16, (20, 0, 13))
    lhs, rhs, sizes = map(jnp.asarray, draw(rng, case, FLOAT32))
    change = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), (lhs, rhs))

    def both(product: Any) -> Any:
        def loss(operands: Any) -> jax.Array:
            return jnp.sum(jnp.sin(product(*operands, sizes, FORMS[form])))

        return jax.jit(lambda operands: jax.jvp(jax.grad(loss), (operands,), (change,)))((lhs, rhs))

    for mine, theirs in zip(*(jax.tree.leaves(both(f)) for f in (ragged_dot_general, by_plain)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-3)


def by_plain(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, numbers: Any) -> jax.Array:
    """JAX differentiates this form once and again."""
    return jax.lax.ragged_dot(lhs, rhs.swapaxes(1, 2) if numbers == FORMS["transposed"] else rhs, sizes)


def test_other_forms_are_jax_own(rng: np.random.Generator) -> None:
    """A batch of matrices of which groups divide the contraction, and groups of columns that are no rows."""
    lhs, rhs, sizes = (
        jnp.asarray(rng.standard_normal((3, 4, 8))),
        jnp.asarray(rng.standard_normal((3, 8, 5))),
        jnp.array([[3, 2], [8, 0], [1, 7]]),
    )
    numbers = numbers_of(([2], [1]), ragged=[2], groups=(), batches=([0], [0]))
    found, wanted = (f(lhs, rhs, sizes, numbers) for f in (ragged_dot_general, jax.lax.ragged_dot_general))
    np.testing.assert_array_equal(found, wanted)
    given = inspect.signature(jax.lax.ragged_dot_general).parameters
    assert list(inspect.signature(ragged_dot_general).parameters) == list(given)


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
    transposed = partial(ragged_dot_general, ragged_dot_dimension_numbers=FORMS["transposed"])
    text = lowered_for_cuda(transposed, operands[3], *operands[1:3])
    assert "rhs_is_k_by_n = false" in text
    assert "transpose" not in text
    assert "jax_ep_" not in lowered_for_cuda(ragged_dot, *draw(rng, case, FLOAT32))
    assert "jax_ep_" not in lowered_for_cuda(ragged_dot, *draw(rng, Case(64, 36, 16, (30, 20)), BFLOAT16))


def test_the_core_is_chosen_on_hopper() -> None:
    """A library that lost the core would silently be slow."""
    devices = jax.devices()
    if devices[0].platform != "gpu" or not str(getattr(devices[0], "compute_capability", "")).startswith("9."):
        pytest.skip("needs Hopper GPUs")
    assert gemm.has_gemm()
    assert matmul.ragged_dot is ragged_dot
