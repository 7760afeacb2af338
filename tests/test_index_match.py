"""Index matching: the Pallas kernel against numpy, on a CPU in interpret mode, and what it becomes for a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec as P

from jax_ep.pallas_kernels import index_match

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


@pytest.mark.matrix
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
