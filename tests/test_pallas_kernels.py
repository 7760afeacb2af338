"""The Pallas kernels against numpy, on a CPU in interpret mode, and what they become for a GPU: index matching, and of
grouped products what test_ragged_dot and test_gathered_product do not reach."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec as P
from matrix_forms import ACTIVATIONS

from jax_ep import pallas_kernels
from jax_ep.pallas_kernels import grouped_matmul, grouped_outer, index_match

INTERPRET = jax.default_backend() == "cpu"

# A machine without a GPU can still lower for one.
_DEVICE = AbstractDevice("NVIDIA H200", None, "gpu")
H200 = AbstractMesh((4,), ("ep",), axis_types=(AxisType.Auto,), abstract_device=_DEVICE)


def expected_positions(global_ids: np.ndarray, local_ids: np.ndarray) -> np.ndarray:
    """By dictionary."""
    place = {int(row): position for position, row in reversed(list(enumerate(global_ids)))}
    return np.array([place.get(int(row), global_ids.size) for row in local_ids], np.int32)


def draw_ids(rng: np.random.Generator, num_rows: int, size: int, unique: int, count: int) -> tuple[np.ndarray, ...]:
    """A padded union of `unique` ids, and ids of which some are in it, some are not, and some are no rows at all."""
    global_ids = np.full(size, num_rows, np.int32)
    global_ids[:unique] = np.sort(rng.choice(4 * size, unique, replace=False)) * (num_rows // (4 * size))
    strange = np.array([-1, num_rows, np.iinfo(np.int32).min, np.iinfo(np.int32).max], np.int32)
    drawn = (global_ids, rng.integers(0, num_rows, count, np.int32), strange)
    return global_ids, rng.permuted(np.concatenate(drawn))[:count]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("count", [1, 127, 128, 1000])
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 500])
@pytest.mark.parametrize("filled", [0.0, 0.7, 1.0])
def test_positions(rng: np.random.Generator, size: int, filled: float, count: int) -> None:
    global_ids, local_ids = draw_ids(rng, 3000, size, round(filled * size), count)
    got = index_match(jnp.asarray(global_ids), jnp.asarray(local_ids), interpret=INTERPRET)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, expected_positions(global_ids, local_ids))


@pytest.mark.parametrize("block", [1, 8, 1024])
def test_blocks_of_any_size(rng: np.random.Generator, block: int) -> None:
    global_ids, local_ids = draw_ids(rng, 10_000, 300, 250, 77)
    got = index_match(jnp.asarray(global_ids), jnp.asarray(local_ids), block=block, interpret=INTERPRET)
    np.testing.assert_array_equal(got, expected_positions(global_ids, local_ids))


def test_nothing_to_find_or_to_find_it_in() -> None:
    none, some = jnp.zeros(0, jnp.int32), jnp.arange(3, dtype=jnp.int32)
    np.testing.assert_array_equal(index_match(none, some, interpret=INTERPRET), [0, 0, 0])
    assert index_match(some, none, interpret=INTERPRET).shape == (0,)


def test_a_large_table_under_jit(rng: np.random.Generator) -> None:
    global_ids, local_ids = draw_ids(rng, 2**31 - 1, 50_000, 45_000, 20_000)
    matched = jax.jit(lambda a, b: index_match(a, b, interpret=INTERPRET))(global_ids, local_ids)
    np.testing.assert_array_equal(matched, expected_positions(global_ids, local_ids))


@pytest.mark.parametrize(
    ("match", "change"),
    [
        (r"local_ids must have shape \[N\], got \(1, 3\)", {"local_ids": np.zeros((1, 3), np.int32)}),
        (r"global_ids must be an array, got list", {"global_ids": [0, 1, 2]}),
        (r"one integer dtype, got int32 and int16", {"local_ids": np.zeros(3, np.int16)}),
        (r"one integer dtype, got int32 and float32", {"local_ids": np.zeros(3, np.float32)}),
        (r"block must be a power of two below 2\*\*31, got 48", {"block": 48}),
        (r"block must be a power of two below 2\*\*31, got 2147483648", {"block": 2**31}),
        (r"block must be a Python int, got float", {"block": 2.0}),
    ],
)
def test_wrong_arguments_are_named(match: str, change: dict) -> None:
    ids = jnp.zeros(3, jnp.int32)
    arguments: dict[str, Any] = {"global_ids": ids, "local_ids": ids} | change
    with pytest.raises((ValueError, TypeError), match=match):
        index_match(**arguments)


def test_it_lowers_for_gpus_inside_shard_map() -> None:
    ids = np.zeros(400, np.int32)
    with jax.sharding.use_abstract_mesh(H200):
        mapped = jax.jit(jax.shard_map(index_match, mesh=H200, in_specs=(P(), P("ep")), out_specs=P("ep")))
        lowered = mapped.trace(ids, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in lowered


SIZES = (13, 0, 50, 20)


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
def test_gated_products(activation: str, dtype: np.dtype, rng: np.random.Generator) -> None:
    """Of gathered rows; those behind the last group are zero."""
    lhs, gate, up = (
        rng.standard_normal(shape).astype(dtype) for shape in ((60, 40), (len(SIZES), 40, 72), (len(SIZES), 40, 72))
    )
    indices = rng.integers(-1, 60, 100).astype(np.int32)
    out, *products = helpers.fetch(
        grouped_matmul(
            jnp.asarray(lhs),
            (jnp.asarray(gate), jnp.asarray(up)),
            jnp.asarray(SIZES),
            indices=jnp.asarray(indices),
            activation=activation,
            keep_products=True,
            precision="highest",
            interpret=INTERPRET,
        )
    )
    rows = np.where((indices >= 0)[:, None], helpers.wide(lhs)[indices], 0)
    group = np.repeat(np.arange(len(SIZES) + 1), [*SIZES, 100 - sum(SIZES)])
    unit = float(jnp.finfo(dtype).eps)
    for found, matrix in zip(products, (gate, up), strict=True):
        by_group = np.concatenate([helpers.wide(matrix), np.zeros((1, 40, 72))])
        wanted = np.einsum("mk,mkn->mn", rows, by_group[group])
        np.testing.assert_allclose(helpers.wide(found), wanted, rtol=unit, atol=1e-4)
    first, second = map(helpers.wide, products)
    wanted = np.asarray(ACTIVATIONS[activation](first)) * second
    np.testing.assert_allclose(helpers.wide(out), wanted, rtol=2 * unit, atol=5e-5)  # 1 + tanh cancels


def test_matrices_of_groups_without_rows_are_zero(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.standard_normal((83, 24)), jnp.float32)
    out = grouped_outer(x, x, jnp.asarray(SIZES), interpret=INTERPRET)
    assert not np.asarray(out[1]).any()
    assert np.asarray(out[0]).any()


@pytest.mark.parametrize("name", ["rows", "outer", *pallas_kernels.ACTIVATIONS])
def test_products_lower_for_gpus_inside_shard_map(name: str) -> None:
    def body(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, indices: jax.Array) -> Any:
        if name == "outer":
            return grouped_outer(lhs, lhs, sizes, lhs_indices=indices, rhs_indices=indices)
        if name == "rows":
            return grouped_matmul(lhs, (rhs,), sizes, indices=indices, transpose_rhs=True)
        return grouped_matmul(lhs, (rhs, rhs), sizes, indices=indices, activation=name, keep_products=True)

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
        ("activation must be one of silu, gelu, relu or None, got 'tanh'", {"activation": "tanh"}),
        ("rhs must be two matrices with an activation, otherwise one, got 1", {"activation": "silu"}),
        ("keep_products must be false where activation is None, got True", {"keep_products": True}),
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
