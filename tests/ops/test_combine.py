"""combine against the oracle, and what must not influence it: order, padding, NaN of others, where it runs."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import DTYPES, Case, Rng

from jax_ep import Dispatched, Group, Implementation

SIZE, EXPERTS = 4, 16


def given_outputs(group: Group, implementation: Implementation):
    """A program (tokens, ids, weights, outputs) -> combine of `outputs`, whatever was dispatched."""

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array, outputs: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"num_experts": EXPERTS, "implementation": implementation}
        both = helpers.round_trip(group, experts=lambda _: outputs, capacity=outputs.shape[0], **options)
        return both(tokens, ids, weights)[1]

    return helpers.per_rank(body, group.mesh)


def layout_of(case: Case, capacity: int) -> oracle.Expected:
    return oracle.dispatch(*case, num_experts=EXPERTS, capacity=capacity)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 21, 24, 256])
def test_order_of_the_sum(width: int, dtype: np.dtype, implementation: Implementation, group: Group, rng: Rng) -> None:
    """To the last bit, also of outputs that are wider than tokens, or narrower; tokens are float32 in any case."""
    program = given_outputs(group, implementation)
    case = helpers.draw_case(rng, SIZE, 6, 8, EXPERTS, 16)
    case.weights[:] = 2.0 ** rng.integers(-3, 4, case.weights.shape)  # exact products: a fused multiply-add is no other
    outputs = rng.standard_normal((SIZE, SIZE * 6 * 8, width)).astype(dtype)
    combined = helpers.fetch(program(*case, outputs))
    targets = layout_of(case, SIZE * 6 * 8).targets
    wanted = oracle.combine_in_order(outputs, targets, case.weights, round_own=implementation == "xla")
    assert combined.dtype == dtype
    np.testing.assert_array_equal(helpers.wide(combined), helpers.wide(wanted))


def test_rows_of_no_token_do_not_matter(implementation: Implementation, group: Group, rng: Rng) -> None:
    program = given_outputs(group, implementation)
    case = helpers.draw_case(rng, SIZE, 5, 3, EXPERTS, 16)
    case.ids[:, 0, 1] = -1
    case.ids[:, 1] = -1
    layout = layout_of(case, SIZE * 5 * 3)
    outputs = rng.standard_normal((SIZE, SIZE * 5 * 3, 16)).astype(np.float32)
    for rank in range(SIZE):
        outputs[rank, layout.group_sizes[rank].sum() :] = np.nan
    combined = helpers.fetch(program(*case, outputs))
    np.testing.assert_array_equal(combined[:, 1], 0)
    helpers.assert_combined(combined, np.nan_to_num(outputs), layout.targets, case.weights)


def test_nan_stays_in_its_token(implementation: Implementation, group: Group, rng: Rng) -> None:
    """Values and gradients, through an expert whose derivative depends on its input."""

    both = helpers.round_trip(group, experts=jnp.square, num_experts=EXPERTS, implementation=implementation)

    def loss(tokens: jax.Array, weights: jax.Array, ids: jax.Array) -> tuple[jax.Array, tuple[Dispatched, jax.Array]]:
        out, combined = both(tokens, ids, weights)
        return combined.sum(), (out, combined)

    program = helpers.per_rank(jax.grad(loss, argnums=(0, 1), has_aux=True), group.mesh)
    case = helpers.draw_case(rng, SIZE, 4, 3, EXPERTS, 16)
    clean_gradients, (clean, clean_sum) = helpers.fetch(program(case.tokens, case.weights, case.ids))
    case.tokens[2, 1, 5] = np.nan
    gradients, (dirty, dirty_sum) = helpers.fetch(program(case.tokens, case.weights, case.ids))

    expected = layout_of(case, clean.rows.shape[1])
    helpers.assert_dispatched(dirty, expected)
    other_values = np.ones_like(case.tokens, bool)
    other_values[2, 1, 5] = False
    other_tokens = np.ones_like(case.weights, bool)
    other_tokens[2, 1] = False
    # XLA's scatter-add on a GPU sums in no fixed order.
    tolerance = 1e-6 if implementation == "xla" and group.platform != "cpu" else 0
    for before, after, others in (
        (clean_sum, dirty_sum, other_values),
        (clean_gradients[0], gradients[0], other_values),
        (clean_gradients[1], gradients[1], other_tokens),
    ):
        np.testing.assert_allclose(after[others], before[others], rtol=tolerance, atol=0)
        assert np.isnan(after[~others]).all()
