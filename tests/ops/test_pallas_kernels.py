"""The Pallas kernels against numpy, on a CPU in interpret mode, and what they become for a GPU."""

import re
from functools import partial
from itertools import starmap
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import matrix_forms
import numpy as np
import oracle
import pytest
from helpers import Rng, zeros
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec as P
from test_float8_products import assert_rounded

from jax_ep import pallas_kernels
from jax_ep._kit import gemm
from jax_ep.ops.matmul.api import gated_product, ragged_dot, rhs_gradient
from jax_ep.ops.matmul.gated import ClampedSwiglu, known_unit
from jax_ep.pallas_kernels import grouped_matmul, grouped_outer, nearest_quotient, quantize, quantize_matrices
from jax_ep.pallas_kernels.grouped_matmul import outer_tiling, row_tiling, step_bytes, within

INTERPRET = jax.default_backend() == "cpu"

# A machine without a GPU can still lower for one.
_DEVICE = AbstractDevice("NVIDIA H200", None, "gpu")
H200 = AbstractMesh((4,), ("ep",), axis_types=(AxisType.Auto,), abstract_device=_DEVICE)

SIZES, BY_RANK = (13, 0, 50, 20), P("ep")


def lowered_for_h200(body: Any, operands: Any, in_specs: Any = BY_RANK, out_specs: Any = BY_RANK, **jit: Any) -> str:
    """What `body` becomes in `jax.shard_map` on four H200, for operands of these types."""
    with jax.sharding.use_abstract_mesh(H200):
        mapped = jax.jit(jax.shard_map(body, mesh=H200, in_specs=in_specs, out_specs=out_specs), **jit)
        return mapped.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def test_sizes_beyond_the_rows(rng: Rng) -> None:
    lhs, rhs = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 16), (3, 16, 16)))
    sizes = jnp.array([30, 2**31 - 1, 2**31 - 1], jnp.int32)
    (found,) = grouped_matmul(jnp.asarray(lhs), (jnp.asarray(rhs),), sizes, precision="highest", interpret=INTERPRET)
    np.testing.assert_allclose(found, oracle.ragged_dot(lhs, rhs, (30, 10, 0)), rtol=1e-5, atol=1e-5)


def test_products_with_64_bit_ints(rng: Rng) -> None:
    lhs, rhs = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 16), (3, 16, 16)))
    with jax.enable_x64(True):
        sizes, options = jnp.array([30, 0, 7]), {"precision": "highest", "interpret": INTERPRET}
        (product,) = grouped_matmul(jnp.asarray(lhs), (jnp.asarray(rhs),), sizes, **options)
        outer = grouped_outer(jnp.asarray(lhs), product, sizes, **options)
    np.testing.assert_allclose(product, oracle.ragged_dot(lhs, rhs, (30, 0, 7)), rtol=1e-5, atol=1e-5)
    wanted = oracle.ragged_dot_gradients(lhs, rhs, (30, 0, 7), np.asarray(product))[1]
    np.testing.assert_allclose(outer, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
def test_gated_products(activation: str, dtype: np.dtype, rng: Rng) -> None:
    """Of gathered rows; those behind the last group are zero."""
    lhs, (gate, up) = (rng.standard_normal(shape).astype(dtype) for shape in ((60, 40), (2, len(SIZES), 40, 72)))
    indices = rng.integers(-1, 60, 100).astype(np.int32)
    known = known_unit(activation)
    assert known is not None
    options: dict[str, Any] = {"unit": known.function, "keep_products": True, "precision": "highest"}
    operands = jax.tree.map(jnp.asarray, (lhs, (gate, up), np.array(SIZES)))
    out, *products = helpers.fetch(
        grouped_matmul(*operands, indices=jnp.asarray(indices), interpret=INTERPRET, **options)
    )
    rows = np.where((indices >= 0)[:, None], helpers.wide(lhs)[indices], 0)
    unit = float(jnp.finfo(dtype).eps)
    for found, matrix in zip(products, (gate, up), strict=True):
        wanted = oracle.ragged_dot(rows, helpers.wide(matrix), SIZES)
        np.testing.assert_allclose(helpers.wide(found), wanted, rtol=unit, atol=1e-4)
    first, second = map(helpers.wide, products)
    wanted = np.asarray(matrix_forms.ACTIVATIONS[activation](first)) * second
    np.testing.assert_allclose(helpers.wide(out), wanted, rtol=2 * unit, atol=5e-5)  # 1 + tanh cancels


def dequantized(bits: jax.Array, scales: jax.Array) -> np.ndarray:
    """[G, K, N] float32."""
    values = np.asarray(bits).view(jnp.float8_e4m3fn).astype(np.float32).reshape(-1, *bits.shape[-2:])
    each = np.asarray(scales).reshape(-1, *scales.shape[-2:])
    return (values * np.repeat(np.repeat(each, 128, axis=1), 128, axis=2)).swapaxes(1, 2)


@pytest.mark.parametrize("most_bytes", [2**31, 4 * 256 * 128])
@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
def test_quantized_matrices(dtype: np.dtype, most_bytes: int, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "MOST_BYTES", most_bytes)
    drawn = rng.standard_normal((3, 256, 384)) * rng.lognormal(0, 3, (3, 256, 1))
    matrices = drawn.clip(-6e4, 6e4).astype(dtype)  # what float16 holds
    matrices[1, :128, 128:256] = 0
    spoiled = matrices.copy()
    spoiled[2, 130, 7] = np.nan
    found = dequantized(*helpers.fetch(quantize_matrices(jnp.asarray(spoiled), interpret=INTERPRET)))
    assert np.isnan(found[2, 128:, :128]).all()
    found[2, 128:, :128] = matrices[2, 128:, :128] = 0
    assert_rounded(found, matrices)


def test_quotients_round_to_nearest() -> None:
    """Of 448 and every 24 digits, from every result that is two units off."""
    digits, most = np.arange(2**23, 2**24).astype(np.float32), np.float32(quantize.LARGEST)
    nearest = jax.jit(nearest_quotient)
    for a, b, exact in ((most, digits, most / digits), (digits, most, digits / most)):
        for units in range(-2, 3):
            near = (exact.view(np.int32) + units).view(np.float32)
            np.testing.assert_array_equal(nearest(a, b, near), exact)


GATED: Any = partial(grouped_matmul, unit=ClampedSwiglu(), keep_products=True)
PRODUCTS: dict[str, Any] = {  # of rows, matrices, sizes of groups, and the rows to gather
    "rows": lambda lhs, rhs, sizes, at: grouped_matmul(lhs, (rhs,), sizes, indices=at, transpose_rhs=True),
    "outer": lambda lhs, rhs, sizes, at: grouped_outer(lhs, lhs, sizes, lhs_indices=at, rhs_indices=at),
    "quantize": lambda lhs, rhs, sizes, at: quantize_matrices(rhs),
    "gated": lambda lhs, rhs, sizes, at: GATED(lhs, (rhs, rhs), sizes, indices=at),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_lower_for_gpus_inside_shard_map(name: str) -> None:
    shapes = ((64, 128), jnp.bfloat16), ((16, 128, 128), jnp.bfloat16), ((16,), jnp.int32), ((400,), jnp.int32)
    assert "triton" in lowered_for_h200(PRODUCTS[name], starmap(jax.ShapeDtypeStruct, shapes))


@pytest.mark.parametrize("of", ["gated", "outer", "rows"])
@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
def test_tiles_fit_the_shared_memory_of_amd_gpus(of: str, dtype: np.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowered for gfx942. Both stages of a step fit 64 KiB, whatever the size of the groups is."""
    products, groups = 2 if of == "gated" else 1, 16
    for rows in (100, 1000, 10_000):
        cut = row_tiling(rows, 512, 512, groups, products, dtype)
        cut = outer_tiling(512, 512, rows, groups, dtype) if of == "outer" else cut
        assert 2 * step_bytes(within("outer", 2**16, cut, products, dtype), products, dtype) <= 2**16
    monkeypatch.setattr(gemm, "pallas_platforms", lambda: ("cuda", "rocm"))
    monkeypatch.setattr(gemm, "has_gemm", lambda: False)  # this host's GPUs may have it
    shapes = ((10_000, 512), dtype), ((groups, 512, 512), dtype), ((groups,), np.int32)

    def product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> Any:
        if of == "outer":
            return rhs_gradient(lhs, lhs, sizes)
        if of == "rows":
            return ragged_dot(lhs, rhs, sizes)
        unit = known_unit("silu")
        assert unit is not None
        return gated_product(unit, lambda rows, *_: (rows, ()), lhs, sizes, (rhs, rhs), keep_products=False)

    device = AbstractDevice("gfx942", None, "gpu")
    mesh = AbstractMesh((1,), ("ep",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(product).trace(*starmap(jax.ShapeDtypeStruct, shapes))
        text = traced.lower(lowering_platforms=("rocm",)).as_text()
    assert re.findall(r"num_stages = (\d+)", text) == ["2"]


@pytest.mark.parametrize("name", ["rows", "outer", "quantize"])
def test_offsets_in_large_arrays(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Offsets have 64 bits in every array of more than 2^31 values; or no call has such an array."""
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, debug=True))  # prints what Triton compiles
    shapes = ((2**20, 4096), jnp.bfloat16), ((160, 4096, 4096), jnp.bfloat16), ((160,), jnp.int32)
    with jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(partial(PRODUCTS[name], at=None)).trace(*starmap(jax.ShapeDtypeStruct, shapes))
        traced.lower(lowering_platforms=("cuda",))
    calls = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "pallas_call"]
    arrays = [var.aval for eqn in calls for var in (*eqn.invars, *eqn.outvars)]
    narrow = {x.dtype.itemsize for x in arrays if x.size <= 2**31}
    wide = {x.dtype.itemsize for x in arrays if x.size > 2**31}
    assert wide == {2}
    assert narrow == ({1, 4} if name == "quantize" else {4})
    offsets = re.findall(r"tt\.addptr .*!tt\.ptr<bf16>>?, (?:tensor<[\dx]+)?(i\d+)", capsys.readouterr().out)
    assert set(offsets) == {"i64"}


def test_a_jax_without_triton() -> None:
    script = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
import jax, jax.numpy as jnp, jax_ep
from jax_ep._kit import gemm
from jax_ep.lax import ragged_dot
operands = jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.array([1, 3])
assert (ragged_dot(*operands) == 8).all()
try:
    ragged_dot(*operands, implementation="pallas")
except NotImplementedError as error:
    print(error)
jax.default_backend = lambda: "gpu"
print("by Pallas:", gemm.pallas_platforms())
"""
    output = helpers.run_python("-c", script)
    assert f"pallas_kernels: jax {jax.__version__} has no Triton backend of Pallas\nby Pallas: ()\n" in output


def test_arrays_of_more_than_2_31_values(rng: Rng) -> None:
    if INTERPRET or jax.devices()[0].memory_stats()["bytes_limit"] < 16 * 2**30:
        pytest.skip("needs a GPU with 16 GiB")
    groups, k, n = 160, 7168, 2048
    lhs, rhs = (jnp.asarray(rng.standard_normal((2 * groups, columns)), jnp.bfloat16) for columns in (k, n))
    sizes = jnp.full(groups, 2)
    matrices = grouped_outer(lhs, rhs, sizes)
    products = grouped_matmul(lhs, (matrices,), sizes)[0]
    bits, scales = quantize_matrices(matrices)
    for group in (0, groups // 2, groups - 14, groups - 13, groups - 1):  # the parts of `bits` meet in 146.3
        rows = slice(2 * group, 2 * group + 2)
        left, right, matrix = (helpers.wide(x).astype(float) for x in (lhs[rows], rhs[rows], matrices[group]))
        np.testing.assert_allclose(matrix, left.T @ right, rtol=2.0**-8, atol=1e-5)
        np.testing.assert_allclose(helpers.wide(products[rows]), left @ matrix, rtol=2.0**-7, atol=1)
        assert_rounded(dequantized(bits[group], scales[group]), matrix[None])


FOUR = np.zeros(4, np.int32)
PRODUCT: dict[str, Any] = {"lhs": zeros((4, 8)), "rhs": (zeros((2, 8, 8)),), "group_sizes": FOUR[:2]}
OUTER: dict[str, Any] = {"lhs": zeros((4, 8)), "rhs": zeros((4, 6)), "group_sizes": FOUR[:2]}
SEGMENTS: dict[str, Any] = {"values": zeros((4, 8)), "starts": np.array([0, 1, 4])}
MANY = jax.ShapeDtypeStruct((2**31 - 64,), np.int32)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("grouped_matmul", PRODUCT | {"lhs": zeros((4,))}, r"lhs must have shape \[M, K\], got \(4,\)"),
    ("grouped_matmul", PRODUCT | {"group_sizes": FOUR[None]}, r"group_sizes must have shape \[G\], got \(1, 4\)"),
    ("grouped_matmul", PRODUCT | {"rhs": (zeros((2, 4, 8)),)}, r"rhs must be \[G, K, N\] with K = 8, got \(2, 4, 8\)"),
    ("grouped_matmul", PRODUCT | {"unit": jnp.multiply}, "rhs must be two matrices with a unit, otherwise one, got 1"),
    ("grouped_matmul", PRODUCT | {"keep_products": True}, "keep_products must be false where unit is None, got True"),
    ("grouped_matmul", PRODUCT | {"shared_bytes": 4095}, "shared_bytes must be at least 4096, got 4095"),
    ("grouped_matmul", PRODUCT | {"indices": FOUR[None]}, r"indices must have shape \[M\], got \(1, 4\)"),
    ("grouped_matmul", PRODUCT | {"lhs": zeros((0, 8))}, "operands must not be empty, got 0 rows and"),
    ("grouped_outer", OUTER | {"rhs": zeros((5, 6))}, "rhs must have as many rows as lhs, or as its indices, 4, got 5"),
    ("grouped_outer", OUTER | {"rhs_indices": FOUR[:3]}, "rhs must have as many rows as lhs, .*, 4, got 3"),
    ("grouped_outer", OUTER | {"group_sizes": FOUR[:0]}, "operands must not be empty, got 4 rows and"),
    ("quantize_matrices", {"matrices": zeros((1, 130, 128))}, "matrices must .* with K and N multiples of 128 and"),
    ("quantize_matrices", {"matrices": zeros((0, 128, 128))}, "matrices must not be empty, .*, got"),
    ("quantize_matrices", {"matrices": zeros((128, 128))}, r"matrices must have shape \[G, K, N\], got \(128, 128\)"),
    ("sum_segments", SEGMENTS | {"values": zeros((4,))}, r"values must have shape \[N, D\], got \(4,\)"),
    (
        *("sum_segments", SEGMENTS | {"values": FOUR[:, None]}),
        "values must be of dtype bfloat16, float16, float32, got int32",
    ),
    ("sum_segments", SEGMENTS | {"starts": FOUR[:0]}, "starts must have at least one element"),
    ("sum_segments", SEGMENTS | {"scale": zeros((3,))}, r"scale must have shape \[S\] = \(2,\), got \(3,\)"),
    ("sum_segments", SEGMENTS | {"order": zeros((4,))}, "order must be of dtype integer, got float32"),
    ("sum_segments", SEGMENTS | {"groups": FOUR[:0]}, r"groups must have shape \[G \+ 1\] = \(1,\), got \(0,\)"),
    ("sum_segments", SEGMENTS | {"order": MANY}, r"values must have fewer than 2\*\*31 - 64 rows"),
    ("counting_sort", {"ids": FOUR[:, None], "groups": 3}, r"ids must have shape \[N\], got \(4, 1\)"),
    ("counting_sort", {"ids": zeros((4,)), "groups": 3}, "ids must be of dtype int32, int64, got float32"),
    ("counting_sort", {"ids": np.zeros(2049, np.int32), "groups": 3}, "ids must have 1 to 2048 elements, got 2049"),
    ("counting_sort", {"ids": FOUR, "groups": 0}, r"groups must be in \[1, 2\*\*31 - 4\), got 0"),
    ("runs_of_sorted", {"ids": FOUR[:, None], "limit": 3}, r"ids must have shape \[N\], got \(4, 1\)"),
    ("runs_of_sorted", {"ids": zeros((4,)), "limit": 3}, "ids must be of dtype signedinteger, got float32"),
    ("runs_of_sorted", {"ids": 3, "limit": 3}, "ids must be an array, got int"),
    ("runs_of_sorted", {"ids": FOUR, "limit": -1}, r"limit must be in \[0, 2147483647\], got -1"),
]


@pytest.mark.parametrize(("name", "given", "match"), REFUSED)
def test_what_is_refused(name: str, given: dict[str, Any], match: str) -> None:
    call = getattr(pallas_kernels, name)
    kinds = ValueError if name == "grouped_matmul" else (TypeError, ValueError)
    with pytest.raises(kinds, match=f"^{name}: {match}"):
        jax.eval_shape(call, **given) if name == "sum_segments" else call(**given)
