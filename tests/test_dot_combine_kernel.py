"""ragged_dot_combine(implementation="fused") against numpy, and to the bit against the chain of ops."""

import dataclasses
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import OpenGroup
from fused_cases import EXPERTS, HIDDEN, TOP_K, WIDTH, assert_combined, combine_program, draw
from helpers import DTYPES

from jax_ep import InvalidRoutingError, dispatch, ragged_dot_combine
from jax_ep._core import ffi, gemm

ON_GPU = ffi.library_name(jax.devices()[0]) != "cpu"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(ON_GPU and not gemm.has_gemm(), reason="needs GPUs with the GEMM core, or CPUs"),
]

# Few tokens, which are sent in their own order; and more, in that of their last rows.
SHAPES = [(1, 6), (1, 600), (2, 6), (2, 600), (4, 6), (4, 600), (EXPERTS, 6)]


@pytest.mark.parametrize(("size", "tokens"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES[:2] if ON_GPU else DTYPES, ids=str)
def test_values(dtype: np.dtype, size: int, tokens: int, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Many calls of one program: nothing of a call remains for the next."""
    group = open_group(size)
    call = combine_program(group, capacity=size * tokens * TOP_K)
    for _ in range(3):
        case, rhs = draw(rng, size, tokens, dtype)
        assert_combined(helpers.fetch(call(*case, rhs)), case, rhs)


@pytest.mark.parametrize("routing", ["one expert gets all", "everything is skipped", "one expert gets nothing"])
def test_skewed(routing: str, open_group: OpenGroup, rng: np.random.Generator) -> None:
    size, tokens = 2, 600
    group = open_group(size)
    case, rhs = draw(rng, size, tokens, BFLOAT16)
    if routing == "one expert gets nothing":
        case.ids[case.ids == 1] = 2
    else:
        case.ids[:] = 5 if routing == "one expert gets all" else -1
    assert_combined(helpers.fetch(combine_program(group, capacity=size * tokens * TOP_K)(*case, rhs)), case, rhs)


def test_drops(open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(2)
    case, rhs = draw(rng, 2, 600, BFLOAT16)
    results = helpers.fetch(combine_program(group, capacity=1000, on_overflow="drop")(*case, rhs))
    assert results[2].routing.dropped.any()
    assert_combined(results, case, rhs)


def test_gradients_of_the_chain(open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(2)
    case, rhs = draw(rng, 2, 40, BFLOAT16)

    def gradients(tokens: Any, ids: Any, weights: Any, rhs: Any) -> Any:
        rows, _, routing = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS)

        def loss(implementation: Any, rows: Any, rhs: Any, weights: Any) -> Any:
            changed = dataclasses.replace(routing, weights=weights)
            out = ragged_dot_combine(rows, rhs, changed, group=group, implementation=implementation)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        way = jax.value_and_grad(loss, argnums=(1, 2, 3))
        return [way(implementation, rows, rhs, routing.weights) for implementation in ("fused", "ffi")]

    ours, wanted = helpers.fetch(helpers.per_rank(gradients, group.mesh)(*case, rhs))
    assert all(np.abs(helpers.wide(x)).sum() > 0 for x in ours[1])
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(helpers.wide(mine), helpers.wide(theirs))


def test_row_out_of_bounds(open_group: OpenGroup, rng: np.random.Generator) -> None:
    """It is not followed, no rank delivers, and the group remains usable."""
    group, capacity = open_group(2), 2 * 600 * TOP_K
    case, rhs = draw(rng, 2, 600, BFLOAT16)
    *_, dispatched = helpers.fetch(combine_program(group, capacity=capacity)(*case, rhs))

    def body(lhs: Any, rhs: Any, routing: Any) -> Any:
        return ragged_dot_combine(lhs, rhs, routing, group=group, implementation="fused")

    call = helpers.per_rank(body, group.mesh)
    rows = np.asarray(dispatched.routing.rows).copy()
    rows[1, 0, 5, 0] = capacity + 3
    with helpers.awaiting_failure(group, "InvalidRoutingError: ragged_dot_combine: .* out of bounds"):
        out = helpers.fetch(call(dispatched.tokens, rhs, dataclasses.replace(dispatched.routing, rows=rows)))
        assert np.isnan(helpers.wide(out)).all()
    with pytest.raises(InvalidRoutingError, match=rf"^ragged_dot_combine: rank 1: routing\.rows holds {capacity + 3}"):
        group.check()
    out = helpers.fetch(call(dispatched.tokens, rhs, dispatched.routing))
    assert np.isfinite(helpers.wide(out)).all()


def test_no_columns(open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(2)
    case, rhs = draw(rng, 2, 4, BFLOAT16)
    assert rhs.shape[2:] == (HIDDEN, WIDTH)
    message = "^ragged_dot_combine: the columns of rhs must be a positive multiple of . where implementation='fused'"
    with pytest.raises(ValueError, match=message):
        combine_program(group)(*case, rhs[..., :0])
