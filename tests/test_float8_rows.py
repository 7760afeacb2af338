"""dispatch(wire="float8_rows"): rows that stay in float8, and their scales."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import OpenGroup

import jax_ep

EXPERTS = 8
FLOAT8 = jnp.float8_e4m3fn


def dispatch_only(group: jax_ep.Group, **options: Any) -> Any:
    def dispatch(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        return jax_ep.dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, wire="float8_rows", **options)

    return helpers.per_rank(dispatch, group.mesh)


@pytest.mark.matrix
# Scales that are made of 16-byte words, and others; several messages, whole and not.
@pytest.mark.parametrize(
    ("tokens", "hidden"), [*((6, hidden) for hidden in (128, 384, 512, 2048, 5120)), (helpers.LATE_TOKENS, 256)]
)
@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
def test_values_and_scales(
    tokens: int,
    hidden: int,
    dtype: np.dtype,
    implementation: jax_ep.Implementation,
    open_group: OpenGroup,
    rng: np.random.Generator,
) -> None:
    case = helpers.draw_case(rng, 4, tokens, 3, EXPERTS, hidden, dtype)
    case.tokens[:, 1, :128] = 0  # a block without a largest value
    case.ids[:, 2, 1:] = -1
    program = dispatch_only(open_group(4), implementation=implementation, alignment=4)
    dispatched = helpers.fetch(program(*case))
    values, scales = np.asarray(dispatched.rows.values), dispatched.rows.scales
    expected = oracle.dispatch(*case, num_experts=EXPERTS, capacity=values.shape[1], alignment=4)
    helpers.assert_routing(dispatched, expected)
    assert values.dtype == FLOAT8
    assert scales.shape == (*values.shape[:2], hidden // 128)
    for rank in range(4):
        filled = set(expected.row_of[rank][expected.row_of[rank] >= 0].tolist())
        for row in range(values.shape[1]):
            if row not in filled:
                assert not np.any(values[rank, row].astype(np.float32))
                assert not np.any(scales[rank, row])
                continue
            rounded, expected_scales = oracle.through_fp8(expected.rows[rank, row].astype(np.float32))
            np.testing.assert_allclose(scales[rank, row], expected_scales[::128], rtol=2.0**-22)
            found = values[rank, row].astype(np.float32) * np.repeat(scales[rank, row], 128)
            helpers.assert_rounded_to_float8(found, rounded, implementation)


def test_overflow_delivers_nan(open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(2)
    case = helpers.draw_case(rng, 2, 6, 3, EXPERTS, 128)
    dispatched = helpers.fetch(dispatch_only(group, implementation="xla", capacity=4)(*case))
    assert np.all(np.isnan(dispatched.rows.scales))
    with pytest.raises(jax_ep.CapacityError):
        group.check()
