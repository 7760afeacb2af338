"""dispatch with expand=False: where rows are, and what a failure leaves; test_fair_drops, test_dispatch have rows."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup

from jax_ep import CapacityError, Group, dispatch, lax

HIDDEN, TOP_K, EXPERTS = 128, 4, 16


@pytest.mark.parametrize("wire", [None, "float8", "float8_rows"])
@pytest.mark.parametrize(("options", "slots"), [({}, True), ({"capacity": 40, "on_overflow": "drop"}, False)], ids=str)
def test_a_slot_for_each_token(
    options: dict[str, Any], slots: bool, wire: Any, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    """Unless there are more slots than rows: then rows are expanded, and each is itself."""
    group, case = open_group(4), helpers.draw_case(rng, 4, 16, TOP_K, EXPERTS, HIDDEN)

    def body(*operands: jax.Array) -> Any:
        return dispatch(*operands, group=group, num_experts=EXPERTS, expand=False, wire=wire, **options)

    out = helpers.fetch(helpers.per_rank(body, group.mesh)(*case))
    rows = 4 * 16 if slots else 40
    assert all(x.shape[1] == rows for x in jax.tree.leaves(out.rows))
    if not slots:
        used = np.arange(40) < out.group_sizes.sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(out.indices, np.where(used, np.arange(40), -1))


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_failure_makes_products_nan(implementation: Any, group: Group, rng: np.random.Generator) -> None:
    tokens, ids, weights = helpers.draw_case(rng, 2, 8, TOP_K, EXPERTS, HIDDEN)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        options: Any = {"capacity": 20, "expand": False, "implementation": implementation}
        rows, _, routing = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, **options)
        return lax.ragged_dot(rows, jnp.ones((1, HIDDEN, 8)), jnp.array([20]), lhs_indices=routing.indices)

    with helpers.expect_failure(group, CapacityError, "capacity is 20", implementation):
        out = helpers.fetch(helpers.per_rank(body, group.mesh)(tokens, np.zeros_like(ids), weights))
        assert np.isnan(out).all()
