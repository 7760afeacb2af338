"""dispatch with expand=False: the rows that `indices` name are those of expand=True, to the last bit."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup
from layer_cases import assert_same_bits

from jax_ep import CapacityError, Dispatched, Group, dispatch, lax
from jax_ep.float8 import Float8Rows

HIDDEN, TOP_K, EXPERTS = 128, 4, 16
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "by xla": {"implementation": "xla"},
    "float8": {"wire": "float8"},
    "float8 rows": {"wire": "float8_rows"},
    "float8 rows by xla": {"wire": "float8_rows", "implementation": "xla"},
    "aligned": {"alignment": 8},
    "dropped": {"capacity": 1.25, "on_overflow": "drop", "alignment": 4},
}


def draw(rng: np.random.Generator, size: int, tokens: int) -> tuple[np.ndarray, ...]:
    """Some assignments are skipped, invalid, or name an expert twice; some tokens have none."""
    case = helpers.draw_case(rng, size, tokens, TOP_K, EXPERTS, HIDDEN)
    ids = rng.integers(-1, EXPERTS + 1, case.ids.shape)
    ids[:, ::5] = -1
    return case.tokens, ids.astype(np.int32), case.weights


def run(group: Group, operands: tuple[np.ndarray, ...], **options: Any) -> Dispatched:
    def body(*operands: jax.Array) -> Dispatched:
        return dispatch(*operands, group=group, num_experts=EXPERTS, **options)

    return helpers.fetch(helpers.per_rank(body, group.mesh)(*operands))


def gathered(rows: np.ndarray, indices: Any) -> np.ndarray:
    """[R, M, N] by [R, C], in numpy."""
    return np.stack([np.where((at >= 0)[:, None], of[at], 0) for of, at in zip(rows, indices, strict=True)])


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("size", "tokens"), [(1, 30), (2, 40), (2, 700), (4, 16)])
@pytest.mark.parametrize("form", FORMS)
def test_rows(
    form: str, size: int, tokens: int, open_group: OpenGroup, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    group, operands = open_group(size), draw(rng, size, tokens)
    whole, landed = (run(group, operands, expand=expand, **FORMS[form]) for expand in (True, False))
    for wanted, found in zip(jax.tree.leaves(whole.rows), jax.tree.leaves(landed.rows), strict=True):
        assert found.shape[1] == size * tokens < wanted.shape[1]
        np.testing.assert_array_equal(gathered(found, landed.indices), wanted)
    assert isinstance(landed.rows, Float8Rows) == ("rows" in form)
    rest = (whole.group_sizes, whole.routing.targets, whole.routing.row_of, whole.routing.weights)
    assert_same_bits((landed.group_sizes, landed.routing.targets, landed.routing.row_of, landed.routing.weights), rest)


def test_more_slots_than_rows(open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Rows are expanded, and each is itself."""
    group, operands = open_group(4), draw(rng, 4, 16)
    options: dict[str, Any] = {"capacity": 40, "on_overflow": "drop"}
    whole, same = (run(group, operands, expand=expand, **options) for expand in (True, False))
    assert_same_bits(gathered(same.rows, same.indices), whole.rows)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_failure_makes_products_nan(implementation: Any, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group, (tokens, ids, weights) = open_group(2), draw(rng, 2, 8)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        options: Any = {"capacity": 20, "expand": False, "implementation": implementation}
        rows, _, routing = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, **options)
        return lax.ragged_dot(rows, jnp.ones((1, HIDDEN, 8)), jnp.array([20]), lhs_indices=routing.indices)

    with helpers.expect_failure(group, CapacityError, "capacity is 20", implementation):
        out = helpers.fetch(helpers.per_rank(body, group.mesh)(tokens, np.zeros_like(ids), weights))
        assert np.isnan(out).all()
