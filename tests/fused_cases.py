"""What the tests of implementation="fused" share: operands, the program, and what must come out.

Operands are small integers, so every product is exact in float32 whatever the order of its sum, on GPUs and on CPUs.
"""

from typing import Any

import helpers
import numpy as np
import oracle
from helpers import Case

from jax_ep import Dispatched, Group, dispatch, dispatch_ragged_dot, ragged_dot_combine

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 3, 16, 24


def draw(rng: np.random.Generator, size: int, tokens: int, dtype: np.dtype) -> tuple[Case, np.ndarray]:
    """Tokens, of which some skip experts, name some that do not exist, or one of them twice; and a matrix an expert."""
    case = helpers.draw_case(rng, size, tokens, TOP_K, EXPERTS, HIDDEN)
    case.ids[-1, :, 1] = case.ids[-1, :, 0]
    case.ids[0, 0] = (-1, EXPERTS, helpers.BIG)
    rhs = rng.integers(-2, 3, (size, EXPERTS // size, HIDDEN, WIDTH)).astype(dtype)
    return case._replace(tokens=rng.integers(-2, 3, case.tokens.shape).astype(dtype)), rhs


def program(group: Group, **options: Any) -> Any:
    """For all ranks, (tokens, ids, weights, rhs) -> (product, Dispatched)."""

    def body(tokens: Any, ids: Any, weights: Any, rhs: Any) -> Any:
        options_of_all: dict[str, Any] = {"group": group, "num_experts": EXPERTS, "implementation": "fused"}
        return dispatch_ragged_dot(tokens, ids, weights, rhs, **options_of_all | options)

    return helpers.per_rank(body, group.mesh)


def product_of(expected: oracle.Expected, rhs: np.ndarray) -> np.ndarray:
    """[R, C, N] in the dtype of `rhs`."""
    out = np.zeros((*expected.tokens.shape[:2], rhs.shape[3]), rhs.dtype)
    ends = np.cumsum(expected.group_sizes, axis=1)
    for rank, expert in np.ndindex(*ends.shape):
        rows = slice(ends[rank, expert] - expected.group_sizes[rank, expert], ends[rank, expert])
        exact = expected.tokens[rank, rows].astype(np.float32) @ rhs[rank, expert].astype(np.float32)
        out[rank, rows] = exact.astype(rhs.dtype)
    return out


def assert_right(out: np.ndarray, dispatched: Any, case: Case, rhs: np.ndarray) -> None:
    expected = oracle.dispatch(*case, num_experts=EXPERTS, capacity=out.shape[1])
    helpers.assert_dispatched(dispatched, expected)
    np.testing.assert_array_equal(helpers.wide(out), helpers.wide(product_of(expected, rhs)))


def combine_program(group: Group, **options: Any) -> Any:
    """For all ranks, (tokens, ids, weights, rhs) -> (sums of "fused", sums of the chain, Dispatched)."""

    def body(tokens: Any, ids: Any, weights: Any, rhs: Any) -> Any:
        dispatched = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, **options)
        fused, chain = (
            ragged_dot_combine(dispatched.tokens, rhs, dispatched.routing, group=group, implementation=implementation)
            for implementation in ("fused", "ffi")
        )
        return fused, chain, dispatched

    return helpers.per_rank(body, group.mesh)


def assert_combined(results: tuple[np.ndarray, np.ndarray, Dispatched], case: Case, rhs: np.ndarray) -> None:
    """The bits of the chain; and numpy's values, for what arrived."""
    fused, chain, dispatched = results
    np.testing.assert_array_equal(helpers.wide(fused), helpers.wide(chain))
    assert fused.dtype == rhs.dtype
    arrived = oracle.dispatch(*case, num_experts=EXPERTS, capacity=dispatched.tokens.shape[1])
    arrived = arrived._replace(tokens=dispatched.tokens, group_sizes=dispatched.group_sizes)
    helpers.assert_combined(fused, product_of(arrived, rhs), np.asarray(dispatched.routing.targets), case.weights)
