"""The Pallas kernels against numpy, on a CPU in interpret mode."""

from functools import partial
from typing import Any, Literal

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep.pallas_kernels import weighted_row_sum

INTERPRET = jax.default_backend() == "cpu"


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
@pytest.mark.parametrize("hidden", [7, 64, 200])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_weighted_row_sum(
    rng: np.random.Generator, backend: Literal["auto", "triton"], dtype: jnp.dtype, tolerance: float, hidden: int
) -> None:
    rows = jnp.asarray(rng.standard_normal((11, hidden)), dtype)
    index = rng.integers(-1, 11, (5, 3)).astype(np.int32)
    weights = rng.random((5, 3), np.float32)
    expected = np.zeros((5, hidden))
    for t, k in np.ndindex(5, 3):
        if index[t, k] >= 0:
            expected[t] += weights[t, k] * np.asarray(rows, np.float64)[index[t, k]]
    got = weighted_row_sum(
        rows, jnp.asarray(index), jnp.asarray(weights), block=64, backend=backend, interpret=INTERPRET
    )
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)


def test_weighted_row_sum_ignores_rows_that_are_not_picked(rng: np.random.Generator) -> None:
    rows = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32).at[0].set(jnp.nan)
    index = jnp.asarray([[1, -1], [-1, -1]], jnp.int32)
    got = weighted_row_sum(rows, index, jnp.ones((2, 2), jnp.float32), block=8, interpret=INTERPRET)
    np.testing.assert_array_equal(np.asarray(got), np.stack([np.asarray(rows[1]), np.zeros(8)]))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weights": jnp.zeros((3, 1))}, r"index and weights must both be \[T, K\], got \(3, 2\) and \(3, 1\)"),
        ({"rows": jnp.zeros(4)}, r"rows must have shape \[C, H\], got \(4,\)"),
        ({"rows": None}, "rows must be an array, got NoneType"),
        ({"index": jnp.zeros((3, 2))}, "index must be of an integer dtype, got float32"),
        ({"block": "8"}, "block must be a Python int, got str"),
        ({"block": 24}, "block must be a power of two below"),
        ({"backend": "cuda"}, "backend must be 'auto', 'mosaic' or 'triton', got 'cuda'"),
    ],
)
def test_what_weighted_row_sum_refuses(change: dict[str, Any], match: str) -> None:
    arrays = {"rows": jnp.zeros((2, 4)), "index": jnp.zeros((3, 2), jnp.int32), "weights": jnp.zeros((3, 2))}
    arguments: dict[str, Any] = arrays | change
    with pytest.raises((ValueError, TypeError), match=f"^{match}"):
        weighted_row_sum(**arguments, interpret=INTERPRET)


@pytest.mark.parametrize(("rows", "top_k"), [(0, 2), (3, 0), (0, 0)])
def test_weighted_row_sum_of_nothing(rows: int, top_k: int) -> None:
    index, weights = jnp.full((5, top_k), -1, jnp.int32), jnp.ones((5, top_k))
    got = weighted_row_sum(jnp.ones((rows, 7)), index, weights, interpret=INTERPRET)
    np.testing.assert_array_equal(got, np.zeros((5, 7)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_weighted_row_sum_compiles_for_hopper_by_mosaic(check_vma: bool) -> None:
    mesh = compile_only.mesh_of(2)
    summed = partial(weighted_row_sum, backend="mosaic")
    mapped = jax.shard_map(summed, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=check_vma)
    rows, index = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((8, 4), jnp.int32)
    weights = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    assert "mosaic_gpu" in compile_only.text_of(mapped, mesh, rows, index, weights, specs=[P("ep")] * 3)
