"""combine against the oracle, and what must not influence it: order, padding, NaN of others, where it runs."""

from typing import Any

import helpers
import jax
import numpy as np
import oracle
import pytest
from helpers import DTYPES, Rng

from jax_ep import Group, Implementation

SIZE, EXPERTS = 4, 16


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 21, 24, 256])
def test_order_of_the_sum(width: int, dtype: np.dtype, implementation: Implementation, group: Group, rng: Rng) -> None:
    """To the last bit, also of outputs that are wider than tokens, or narrower; tokens are float32 in any case.

    Some assignments are skipped, or all of a token; rows of no token are NaN.
    """
    options: dict[str, Any] = {"num_experts": EXPERTS, "capacity": SIZE * 6 * 8}
    case = helpers.draw_case(rng, SIZE, 6, 8, EXPERTS, 16)
    case.ids[:, 0, 1] = case.ids[:, 1] = -1
    case.weights[:] = 2.0 ** rng.integers(-3, 4, case.weights.shape)  # exact products: a fused multiply-add is no other
    outputs = rng.standard_normal((SIZE, SIZE * 6 * 8, width)).astype(dtype)
    layout = oracle.dispatch(*case, **options)
    for rank, used in enumerate(layout.group_sizes.sum(axis=1)):
        outputs[rank, used:] = np.nan

    def body(*operands: jax.Array) -> jax.Array:
        *routed, outputs = operands
        both = helpers.round_trip(group, implementation=implementation, experts=lambda _: outputs, **options)
        return both(*routed)[1]

    combined = helpers.run(group, body, *case, outputs)
    wanted = oracle.combine_in_order(outputs, layout.targets, case.weights, round_own=implementation == "xla")
    assert combined.dtype == dtype
    np.testing.assert_array_equal(helpers.wide(combined), helpers.wide(wanted))
