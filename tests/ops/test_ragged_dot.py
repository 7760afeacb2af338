"""`jax_ep.lax.ragged_dot`, of rows as they are or gathered, against numpy in float64, and where it runs for CUDA."""

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import Rng

from jax_ep import PlatformError
from jax_ep._kit import gemm
from jax_ep.lax import ragged_dot, ragged_dot_general
from jax_ep.ops.matmul import api as matmul

BFLOAT16, FLOAT16, FLOAT32 = helpers.DTYPES


class Case(NamedTuple):
    """Groups of rows; `rows` counts those behind the last group too."""

    rows: int
    contracted: int
    columns: int
    sizes: tuple[int, ...]
    of: int = 0  # rows that are gathered out of so many; 0: they are not


CASES = [
    Case(64, 64, 64, (64,)),
    Case(300, 72, 136, (0, 1, 127, 0, 130, 17, 0)),
    Case(256, 128, 256, (128, 128)),
    Case(40, 24, 8, (0, 0, 0)),
    Case(97, 16, 40, (50, 40, 30)),  # more than there are
    Case(33, 13, 9, (20, 3)),  # no multiples of 8
    Case(1000, 512, 384, (1, 2, 3, 4, 5, 6, 7, 8, 500, 100)),
]
GATHERED = [
    Case(300, 72, 136, (0, 1, 127, 0, 130, 17, 0), of=40),
    Case(256, 128, 256, (128, 128), of=256),
    Case(97, 16, 40, (50, 40, 30), of=900),  # more than there are
    Case(1000, 256, 384, (1, 2, 3, 4, 5, 6, 7, 8, 500, 100), of=17),
    Case(40, 24, 8, (0, 0, 40), of=1),
    Case(33, 13, 9, (20, 3), of=5),  # no multiples of 8
]


def test_signature_is_that_of_jax() -> None:
    def parameters(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
        return [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]

    *theirs, indices, implementation = parameters(ragged_dot)
    assert theirs == parameters(jax.lax.ragged_dot)
    assert indices == ("lhs_indices", inspect.Parameter.KEYWORD_ONLY, None)
    assert implementation == ("implementation", inspect.Parameter.KEYWORD_ONLY, "auto")


class Operands(NamedTuple):
    lhs: Any
    rhs: Any
    sizes: Any
    indices: Any
    cotangent: Any


def draw(rng: Rng, case: Case, dtype: np.dtype) -> Operands:
    """Indices are repeated, and -1 is among them."""
    lhs = rng.standard_normal((case.of or case.rows, case.contracted)).astype(dtype)
    rhs = rng.standard_normal((len(case.sizes), case.contracted, case.columns)).astype(dtype)
    indices = rng.integers(-1, case.of, case.rows, dtype=np.int32) if case.of else None
    cotangent = rng.standard_normal((case.rows, case.columns)).astype(dtype)
    return Operands(lhs, rhs, np.array(case.sizes, np.int32), indices, cotangent)


def exact(lhs: Any, rhs: Any, sizes: Any, indices: Any, cotangent: Any) -> tuple[np.ndarray, ...]:
    """The product and both gradients."""
    if indices is None:
        return oracle.ragged_dot(lhs, rhs, sizes), *oracle.ragged_dot_gradients(lhs, rhs, sizes, cotangent)
    rows, d_lhs = lhs[np.clip(indices, 0, len(lhs) - 1)].astype(np.float64), np.zeros(lhs.shape)
    inside = (indices >= 0) & (indices < len(lhs))
    rows[~inside] = np.where(indices[~inside, None] == -1, 0, np.nan)
    product, d_rows, d_rhs = exact(rows, rhs, sizes, None, cotangent)
    np.add.at(d_lhs, indices[inside], d_rows[inside])
    return product, d_lhs, d_rhs


def magnitudes(lhs: Any, rhs: Any, sizes: Any, indices: Any, cotangent: Any) -> tuple[np.ndarray, ...]:
    return exact(np.abs(lhs), np.abs(rhs), sizes, indices, np.abs(cotangent))


def with_gradients(product: Any, left: Any, right: Any, cotangent: Any) -> tuple[jax.Array, ...]:
    out, pull = jax.vjp(product, left, right)
    return out, *pull(cotangent.astype(out.dtype))


def product_and_gradients(lhs: Any, rhs: Any, sizes: Any, indices: Any, cotangent: Any) -> tuple[jax.Array, ...]:
    return with_gradients(lambda x, y: ragged_dot(x, y, sizes, lhs_indices=indices), lhs, rhs, cotangent)


def numbers_of(contracted: Any, ragged: Any = (0,), groups: Any = (0,), batches: Any = ((), ())) -> Any:
    return jax.lax.RaggedDotDimensionNumbers((contracted, batches), ragged, groups)


FORMS = {
    "plain": numbers_of(([1], [1])),
    "transposed": numbers_of(([1], [2])),
    "contracted": numbers_of(([0], [0]), groups=()),
}
# The product and its gradients are those of one sum over rows of cotangent, lhs and rhs: which of the three are a
# form's result or cotangent, its left and its right operand.
ROLES = {"plain": (0, 1, 2), "transposed": (1, 0, 2), "contracted": (2, 1, 0)}


def assert_near(actual: Any, wanted: np.ndarray, magnitude: np.ndarray, roundings: int = 1) -> None:
    """Within the rounding of float32 sums and so many to the result's dtype."""
    limits = jnp.finfo(actual.dtype)
    error = np.abs(np.asarray(actual, np.float64) - wanted)
    allowed = float(limits.eps) * (np.abs(wanted) + (roundings - 1) * magnitude)
    allowed += 32 * roundings * 2.0**-23 * magnitude + float(limits.smallest_subnormal)
    assert np.all(error <= allowed), f"{error.max()} at {np.unravel_index(error.argmax(), error.shape)}"


@pytest.mark.matrix(1)
@pytest.mark.usefixtures("core")
@pytest.mark.parametrize(
    ("dtype", "result"), [*((dtype, None) for dtype in (BFLOAT16, FLOAT16, FLOAT32)), (BFLOAT16, FLOAT32)], ids=str
)
@pytest.mark.parametrize(
    "of",
    [*(("", case) for case in CASES + GATHERED), *itertools.product(FORMS, [CASES[i] for i in (1, 4, 5)])],
    ids=str,
)
def test_products_and_gradients(of: tuple[str, Case], dtype: np.dtype, result: Any, rng: Rng) -> None:
    """The cotangents of gathered rows are rounded before they are summed."""
    form, case = of
    operands = draw(rng, case, dtype)
    options: dict[str, Any] = {"preferred_element_type": result}
    options |= {"ragged_dot_dimension_numbers": FORMS[form]} if form else {"lhs_indices": operands.indices}
    product = partial(ragged_dot_general if form else ragged_dot, group_sizes=jnp.asarray(operands.sizes), **options)
    roles = ROLES[form or "plain"]
    cotangent, *both = ([operands.cotangent, operands.lhs, operands.rhs][role] for role in roles)
    found = jax.jit(partial(with_gradients, product))(*both, cotangent)
    assert [x.dtype for x in found] == [result or dtype, dtype, dtype]
    wanted, most = exact(*operands), magnitudes(*operands)
    for mine, role in zip(found, roles, strict=True):
        assert_near(mine, wanted[role], most[role], 2 if case.of and role == 1 else 1)


@pytest.mark.usefixtures("core")
def test_other_groups_are_not_seen(rng: Rng) -> None:
    """NaN and infinity in one group, and behind the last, stay there in the product and in both gradients."""
    operands = draw(rng, Case(100, 64, 72, (30, 21, 40)), BFLOAT16)
    bad, clean = slice(30, 51), np.r_[0:30, 51:91]
    product, d_lhs, d_rhs = exact(*operands)
    operands.lhs[bad], operands.lhs[91:], operands.cotangent[bad] = np.nan, np.inf, np.inf
    found = [np.asarray(x, np.float64) for x in jax.jit(product_and_gradients)(*operands)]
    assert np.isnan(found[0][bad]).all()
    for mine, right in zip(found, (product, d_lhs), strict=False):
        np.testing.assert_allclose(mine[clean], right[clean], rtol=0.01, atol=0.01)
        assert not mine[91:].any()
    np.testing.assert_allclose(found[2][[0, 2]], d_rhs[[0, 2]], rtol=0.01, atol=0.01)


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("bad", [-2, 40, np.iinfo(np.int32).min, np.iinfo(np.int32).max])
def test_out_of_bounds_is_nan_and_stays_in_its_group(bad: int, rng: Rng) -> None:
    operands = draw(rng, Case(200, 64, 72, (70, 60, 50), of=40), BFLOAT16)
    right = exact(*operands)
    at = rng.integers(70, 130)
    operands.indices[[at, 190]] = bad  # in the second group and behind the last
    out, d_lhs, d_rhs = (np.asarray(x, np.float64) for x in jax.jit(product_and_gradients)(*operands))
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


def test_gradients_have_the_same_bits_each_time(rng: Rng) -> None:
    helpers.assert_same_bits_again(jax.jit(product_and_gradients), draw(rng, GATHERED[3], BFLOAT16), 1)


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("name", ["indices", "lhs"])
def test_vmap_of_one_operand(name: str, rng: Rng) -> None:
    drawn = [draw(rng, Case(30, 16, 24, (10, 5, 12), of=7), BFLOAT16) for _ in range(3)]
    batch = [drawn[0]._replace(**{name: getattr(each, name)}) for each in drawn]
    given = drawn[0]._replace(**{name: np.stack([getattr(each, name) for each in drawn])})
    axes = tuple(0 if each == name else None for each in Operands._fields)
    found = jax.jit(jax.vmap(product_and_gradients, in_axes=axes))(*given)[0]
    for mine, each in zip(found, batch, strict=True):
        assert_near(mine, exact(*each)[0], magnitudes(*each)[0])


class QArray:
    """As qwix has it."""


@pytest.mark.usefixtures("core")
def test_bad_operands_are_refused() -> None:
    lhs, rhs, sizes = jnp.zeros((8, 8), BFLOAT16), jnp.zeros((2, 8, 8), BFLOAT16), jnp.zeros(2, jnp.int32)
    integers, floats = ({"lhs": lhs.astype(dtype), "rhs": rhs.astype(dtype)} for dtype in (int, FLOAT32))
    not_here = ValueError if gemm.has_gemm() else PlatformError
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"rhs": jnp.zeros((2, 16, 8), BFLOAT16)}, TypeError, "8.*16"),
        ({"group_offset": jnp.zeros(1, jnp.int32)}, NotImplementedError, "group_offset must be None"),
        (
            integers | {"implementation": "pallas"},
            ValueError,
            "implementation='pallas' needs lhs and rhs of one dtype.*got int32",
        ),
        (floats | {"implementation": "kernels"}, not_here, "implementation='kernels' needs"),
        (
            {"implementation": "ffi"},
            ValueError,
            "implementation must be one of 'auto', 'kernels', 'pallas', 'xla'; got 'ffi'",
        ),
        ({"lhs_indices": jnp.zeros((4, 1), jnp.int32)}, ValueError, r"lhs_indices must have shape \[M\], got \(4, 1\)"),
        ({"lhs_indices": jnp.zeros(4)}, TypeError, "lhs_indices must be of an integer dtype, got float32"),
        ({"lhs_indices": [0, 1]}, TypeError, "lhs_indices must be an array, got list"),
        ({"group_sizes": [1.0, 2.0]}, TypeError, "group_sizes must be of an integer dtype, got float64"),
        ({"group_sizes": None}, TypeError, "group_sizes must be of an integer dtype, got object"),
    ]
    usual: Any = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes}
    for change, error, text in refused:
        with pytest.raises(error, match=text):
            ragged_dot(**usual | change)
    with pytest.raises(TypeError, match=r"ragged_dot_dimension_numbers must be jax.lax.RaggedDot.*, got tuple"):
        ragged_dot_general(lhs, rhs, sizes, cast(Any, (((1,), (1,)), ((), ()))))
    for product in (ragged_dot, partial(ragged_dot_general, ragged_dot_dimension_numbers=FORMS["plain"])):
        for operand in ("lhs", "rhs"):
            with pytest.raises(TypeError, match=rf": {operand} must be an array, got QArray: call qwix.ragged_dot$"):
                product(**usual | {operand: QArray()})


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("gathers", [False, True])
def test_sizes_beyond_32_bits(gathers: bool, rng: Rng) -> None:
    lhs, rhs, *_ = draw(rng, Case(8, 8, 8, (0, 0)), FLOAT32)
    indices = np.arange(8) if gathers else None
    out = ragged_dot(lhs, rhs, cast(Any, [3, 2**31]), lhs_indices=cast(Any, indices))
    np.testing.assert_allclose(out, oracle.ragged_dot(lhs, rhs, [3, 5]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_constant_sizes_of_a_dtype_below_the_rows(dtype: Any, rng: Rng) -> None:
    lhs, rhs, sizes, *_ = draw(rng, Case(300, 8, 8, (100, 127)), FLOAT32)
    out = ragged_dot(lhs, rhs, sizes.astype(dtype))
    np.testing.assert_allclose(out, oracle.ragged_dot(lhs, rhs, sizes), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("form", ["plain", "transposed", "contracted"])
def test_no_groups(form: str) -> None:
    lhs, rhs, sizes = jnp.ones((4, 8)), jnp.ones((4, 8) if form == "contracted" else (0, 8, 8)), jnp.zeros(0, jnp.int32)
    out, pull = jax.vjp(lambda x, y: ragged_dot_general(x, y, sizes, FORMS[form]), lhs, rhs)
    assert out.shape == ((0, 8, 8) if form == "contracted" else (4, 8))
    for x in (out, *pull(out)):
        assert not np.asarray(x).any()


HIGHEST, BY_BFLOAT16 = jax.lax.Precision.HIGHEST, jax.lax.DotAlgorithmPreset.BF16_BF16_F32


@pytest.mark.matrix(1)
@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("dtypes", [("bfloat16",) * 2, ("bfloat16", "float32"), ("int8",) * 2, ("int8", "bfloat16")])
@pytest.mark.parametrize("result", [None, jnp.float32, jnp.int32])
@pytest.mark.parametrize("precision", [None, (HIGHEST, HIGHEST), BY_BFLOAT16, "highest"], ids=str)
@pytest.mark.parametrize("sizes", [jnp.int8, jnp.uint32])
def test_the_forms_of_other_libraries_tests(
    dtypes: tuple[str, str], result: Any, precision: Any, sizes: Any, rng: Rng
) -> None:
    """What tokamax' and JAX's own tests pass: it does as `jax.lax.ragged_dot` does, or is refused as there."""
    case = Case(48, 16, 24, (20, 0, 23))
    lhs, rhs = (jnp.asarray(x * 3).astype(dtype) for x, dtype in zip(draw(rng, case, FLOAT32)[:2], dtypes, strict=True))
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


BILINEAR = {  # the product by one-hot arrays: row to group, row to row of lhs, and two identities
    "plain": "mg,mx,kK,nN->mn xk gKN",
    "gathered": "mg,mx,kK,nN->mn xk gKN",
    "transposed": "mg,mx,kK,nN->mn xk gNK",
    "contracted": "mg,mx,kK,nN->gKN mk xn",
}
Both = tuple[Any, Any]  # of the left and of the right operand


def jacobians(product: Any, x: Both, d: Both, w: Any) -> Any:
    return [jacobian(product, (0, 1))(*x) for jacobian in (jax.jacrev, jax.jacfwd)]


def second_derivatives(product: Any, x: Both, d: Both, w: Any) -> Any:
    def total(*x: jax.Array) -> jax.Array:
        return jnp.sum(w * product(*x))

    both = (jax.jacrev, jax.jacfwd)
    return [outer(inner(total, (0, 1)), (0, 1))(*x) for outer in both for inner in both]


AXES = [axes for axes in itertools.product((0, None), repeat=3) if 0 in axes]


def batches(product: Any, x: Both, d: Both, w: Any) -> Any:
    """Of vjp, and of jvp along the left operand: the last axis is of the cotangent, or of the tangent."""

    def moved(left: jax.Array, right: jax.Array, d_left: jax.Array) -> Any:
        return jax.jvp(lambda left: product(left, right), (left,), (d_left,))

    def pulled(left: jax.Array, right: jax.Array, w: jax.Array) -> Any:
        return jax.vjp(product, left, right)[1](w)

    given = [((*x, last), function) for last, function in ((w, pulled), (d[0], moved))]
    return [
        jax.vmap(function, in_axes=axes)(
            *(y if axis is None else jnp.stack([y, 2 * y]) for y, axis in zip(ys, axes, strict=True))
        )
        for ys, function in given
        for axes in AXES
    ]


@pytest.mark.matrix(1)
@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("form", BILINEAR)
@pytest.mark.parametrize("derivatives", [jacobians, second_derivatives, batches])
def test_derivatives_in_batches(form: str, derivatives: Any, rng: Rng) -> None:
    """Those of the product by one-hot arrays, of small integers, which have no rounding."""
    rows, n, sizes = 5, 8, np.array([2, 0, 2], np.int32)
    indices = np.array([2, 0, -1, 2, 1]) if form == "gathered" else np.arange(rows)
    groups = np.append(np.repeat(np.eye(3), sizes, axis=0), np.zeros((1, 3)), axis=0)
    of_lhs = (indices[:, None] == np.arange(rows)).astype(float)
    shapes = {"contracted": (rows, n), "transposed": (3, n, n)}
    x, d = (
        tuple(rng.integers(-2, 3, shape).astype(BFLOAT16) for shape in ((rows, n), shapes.get(form, (3, n, n))))
        for _ in range(2)
    )

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        if form in FORMS:
            return ragged_dot_general(left, right, jnp.asarray(sizes), FORMS[form])
        return ragged_dot(left, right, jnp.asarray(sizes), lhs_indices=jnp.asarray(indices))

    w = rng.integers(-2, 3, jax.eval_shape(product, *x).shape).astype(BFLOAT16)
    tensor = np.einsum(BILINEAR[form].replace(" ", ""), groups, of_lhs, np.eye(n), np.eye(n))
    tensor = tensor.reshape(w.size, x[0].size, x[1].size).astype(np.float32)

    def exactly(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum("olr,l,r->o", tensor, left.reshape(-1), right.reshape(-1)).reshape(w.shape)

    found = jax.jit(partial(derivatives, product))(x, d, w)
    wanted = jax.jit(partial(derivatives, exactly))(*jax.tree.map(helpers.wide, (x, d, w)))
    for mine, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(helpers.wide(mine), right)


def test_other_forms_are_jax_own(rng: Rng) -> None:
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


def test_cuda_programs_call_the_core(monkeypatch: pytest.MonkeyPatch, rng: Rng) -> None:
    """The product gathers rows, the gradient of the matrices its contraction; that of the rows gathers nothing."""
    monkeypatch.setattr(gemm, "has_gemm", lambda: True)
    for of in (0, 40):
        text = lowered_for_cuda(product_and_gradients, *draw(rng, Case(64, 32, 16, (30, 20), of), BFLOAT16))
        calls = [line for line in text.splitlines() if "jax_ep_grouped_matmul" in line]
        kinds = sorted(('gathered = "lhs"' in line, 'grouping = "k_grouped"' in line) for line in calls)
        assert kinds == sorted([(False, False), (of > 0, False), (of > 0, True)])
        # Pallas kernels hold the names of their callers.
        own = "\n".join(line for line in text.splitlines() if "triton" not in line)
        assert "ragged_dot" not in own.replace("jax_ep", "")
    _, rhs, sizes, _, cotangent = draw(rng, Case(64, 32, 16, (30, 20)), BFLOAT16)
    transposed = partial(ragged_dot_general, ragged_dot_dimension_numbers=FORMS["transposed"])
    text = lowered_for_cuda(transposed, cotangent, rhs, sizes)
    assert "rhs_is_k_by_n = false" in text
    assert "transpose" not in text
    for case, dtype in ((Case(64, 32, 16, (30, 20)), FLOAT32), (Case(64, 36, 16, (30, 20)), BFLOAT16)):
        assert "jax_ep_" not in lowered_for_cuda(ragged_dot, *draw(rng, case, dtype)[:3])


def test_the_core_is_chosen_on_hopper() -> None:
    """A library that lost the core would silently be slow."""
    devices = jax.devices()
    if devices[0].platform != "gpu" or not str(getattr(devices[0], "compute_capability", "")).startswith("9."):
        pytest.skip("needs Hopper GPUs")
    assert gemm.has_gemm()
    assert matmul.ragged_dot is ragged_dot
