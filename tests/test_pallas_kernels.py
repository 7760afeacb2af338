"""The Pallas kernels against numpy, on a CPU in interpret mode, and what they become for a GPU: what
test_ragged_dot does not reach."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import matrix_forms
import numpy as np
import oracle
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec as P
from test_float8_products import assert_rounded

from jax_ep.ops.matmul.gated import ClampedSwiglu, known_unit
from jax_ep.pallas_kernels import grouped_matmul, grouped_outer, quantize_matrices

INTERPRET = jax.default_backend() == "cpu"

# A machine without a GPU can still lower for one.
_DEVICE = AbstractDevice("NVIDIA H200", None, "gpu")
H200 = AbstractMesh((4,), ("ep",), axis_types=(AxisType.Auto,), abstract_device=_DEVICE)

SIZES = (13, 0, 50, 20)


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
def test_gated_products(activation: str, dtype: np.dtype, rng: np.random.Generator) -> None:
    """Of gathered rows; those behind the last group are zero."""
    lhs, gate, up = (
        rng.standard_normal(shape).astype(dtype) for shape in ((60, 40), (len(SIZES), 40, 72), (len(SIZES), 40, 72))
    )
    indices = rng.integers(-1, 60, 100).astype(np.int32)
    known = known_unit(activation)
    assert known is not None
    out, *products = helpers.fetch(
        grouped_matmul(
            jnp.asarray(lhs),
            (jnp.asarray(gate), jnp.asarray(up)),
            jnp.asarray(SIZES),
            indices=jnp.asarray(indices),
            unit=known.function,
            keep_products=True,
            precision="highest",
            interpret=INTERPRET,
        )
    )
    rows = np.where((indices >= 0)[:, None], helpers.wide(lhs)[indices], 0)
    unit = float(jnp.finfo(dtype).eps)
    for found, matrix in zip(products, (gate, up), strict=True):
        wanted = oracle.ragged_dot(rows, helpers.wide(matrix), SIZES)
        np.testing.assert_allclose(helpers.wide(found), wanted, rtol=unit, atol=1e-4)
    first, second = map(helpers.wide, products)
    wanted = np.asarray(matrix_forms.ACTIVATIONS[activation](first)) * second
    np.testing.assert_allclose(helpers.wide(out), wanted, rtol=2 * unit, atol=5e-5)  # 1 + tanh cancels


@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
def test_quantized_matrices(dtype: np.dtype, rng: np.random.Generator) -> None:
    drawn = rng.standard_normal((3, 256, 384)) * rng.lognormal(0, 3, (3, 256, 1))
    matrices = drawn.clip(-6e4, 6e4).astype(dtype)  # what float16 holds
    matrices[1, :128, 128:256] = 0
    spoiled = matrices.copy()
    spoiled[2, 130, 7] = np.nan
    bits, scales = helpers.fetch(quantize_matrices(jnp.asarray(spoiled), interpret=INTERPRET))
    found = bits.view(jnp.float8_e4m3fn).astype(np.float32) * np.repeat(np.repeat(scales, 128, axis=1), 128, axis=2)
    found = found.swapaxes(1, 2)
    assert np.isnan(found[2, 128:, :128]).all()
    found[2, 128:, :128] = matrices[2, 128:, :128] = 0
    assert_rounded(found, matrices)


@pytest.mark.parametrize("name", ["rows", "outer", "quantize", "gated"])
def test_products_lower_for_gpus_inside_shard_map(name: str) -> None:
    def body(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, indices: jax.Array) -> Any:
        if name == "quantize":
            return quantize_matrices(rhs)
        if name == "outer":
            return grouped_outer(lhs, lhs, sizes, lhs_indices=indices, rhs_indices=indices)
        if name == "rows":
            return grouped_matmul(lhs, (rhs,), sizes, indices=indices, transpose_rhs=True)
        return grouped_matmul(lhs, (rhs, rhs), sizes, indices=indices, unit=ClampedSwiglu(), keep_products=True)

    shapes = ((64, 128), jnp.bfloat16), ((16, 128, 128), jnp.bfloat16), ((16,), jnp.int32), ((400,), jnp.int32)
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    with jax.sharding.use_abstract_mesh(H200):
        mapped = jax.jit(jax.shard_map(body, mesh=H200, in_specs=P("ep"), out_specs=P("ep")))
        assert "triton" in mapped.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("match", "change"),
    [
        (r"lhs must have shape \[M, K\], got \(4,\)", {"lhs": jnp.zeros(4)}),
        (r"rhs must be \[G, K, N\] with K = 8, got \(2, 4, 8\)", {"rhs": (jnp.zeros((2, 4, 8)),)}),
        ("rhs must be two matrices with a unit, otherwise one, got 1", {"unit": jnp.multiply}),
        ("keep_products must be false where unit is None, got True", {"keep_products": True}),
    ],
)
def test_wrong_products_are_named(match: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "lhs": jnp.zeros((4, 8)),
        "rhs": (jnp.zeros((2, 8, 8)),),
        "group_sizes": jnp.array([1, 3]),
    }
    with pytest.raises(ValueError, match=match):
        grouped_matmul(**arguments | change)
