"""More rows than a rank has room for: exactly full, or one too many, which raises. test_dispatch.py has drops."""

import logging
import re
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from conftest import Rng
from helpers import Case

from jax_ep import CapacityError, Group, Implementation, dispatch
from jax_ep.runtime.undelivered import capacity_error

SIZE, EXPERTS, CAPACITY = 4, 8, 12
ONE_TOO_MANY = rf"rank 2 needs {CAPACITY + 1} rows but capacity is {CAPACITY}\b"


def case_with(rng: Rng, rows_of_rank_2: int, tokens: int = 4) -> Case:
    """Rank 2 owns experts 4 and 5 and is sent so many rows; every other rank fewer."""
    case = helpers.draw_case(rng, SIZE, tokens, 2, EXPERTS, 16)
    case.ids[:] = -1
    case.ids[:, 3, 0] = (0, 3, 6, 0)
    picks = case.ids.reshape(-1, 2)[: rows_of_rank_2 // 2]
    picks[:] = (5, 4)
    if rows_of_rank_2 % 2:
        case.ids[3, 3, 1] = 4
    return case


LATE = helpers.LATE_TOKENS  # on their way when ranks learn of the lack of room


@pytest.mark.parametrize(("tokens", "capacity"), [(4, CAPACITY), (LATE, 2 * LATE)])
def test_one_too_many_raises_and_the_group_goes_on(
    tokens: int, capacity: int, implementation: Implementation, group: Group, rng: Rng
) -> None:
    program = helpers.dispatch_combine(group, num_experts=EXPERTS, capacity=capacity, implementation=implementation)
    full, too_many = (case_with(rng, rows, tokens) for rows in (capacity, capacity + 1))
    says = re.escape(str(capacity_error("dispatch", 2, capacity + 1, capacity)))  # and what to do
    for _ in range(3):
        with helpers.expect_failure(group, CapacityError, says, implementation):
            dispatched, _ = helpers.fetch(program(*too_many))
            helpers.assert_nothing_delivered(dispatched, implementation)
        group.check()  # reported once
        helpers.assert_round_trip(helpers.fetch(program(*full)), full, num_experts=EXPERTS)


@pytest.mark.usefixtures("native")
def test_all_ranks_stop_together(group: Group, rng: Rng) -> None:
    """A rank with room must not go on to a collective where it would wait for the rank without."""
    options: dict[str, Any] = {"num_experts": EXPERTS, "implementation": "kernels"}

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        total = jax.lax.psum(helpers.round_trip(group, capacity=CAPACITY, **options)(tokens, ids, weights)[1], "ep")
        return helpers.round_trip(group, **options)(tokens + total, ids, weights)[1]

    program = helpers.per_rank(body, group.mesh)
    for _ in range(3):
        with helpers.expect_failure(group, CapacityError, ONE_TOO_MANY):
            helpers.fetch(program(*case_with(rng, CAPACITY + 1)))
        assert np.isfinite(helpers.fetch(program(*case_with(rng, CAPACITY)))).all()


@pytest.mark.usefixtures("native")
def test_a_compiled_loop_learns_of_it(group: Group, rng: Rng) -> None:
    """Where nobody checks or traces anything: on a CPU the execution raises, on a GPU the next one, either once."""
    program = helpers.dispatch_combine(group, num_experts=EXPERTS, capacity=CAPACITY, implementation="kernels")
    full, too_many = case_with(rng, CAPACITY), case_with(rng, CAPACITY + 1)
    for _ in range(3):
        with helpers.awaiting_failure(group, ONE_TOO_MANY):
            helpers.fetch(program(*too_many))
        if group.platform != "cpu":
            with pytest.raises(jax.errors.JaxRuntimeError, match=f"CapacityError: .*{ONE_TOO_MANY}"):
                helpers.fetch(program(*full))
        helpers.assert_round_trip(helpers.fetch(program(*full)), full, num_experts=EXPERTS)
    with pytest.raises(CapacityError, match=ONE_TOO_MANY):
        group.check()
    group.check()


@pytest.mark.parametrize(
    ("factor", "alignment", "wanted"),
    [(1, 1, 18), (1.25, 1, 23), (1.25, 8, 24), (0.01, 4, 4), (np.float32(1e6), 1, 72), (1e300, 1, 72)],
)
def test_a_factor_is_times_the_even_load(factor: float, alignment: int, wanted: int, group: Group) -> None:
    """18 assignments of each rank; 72 of all, which find room whatever the factor. test_matrix.py looks at the rows."""
    case = helpers.draw_case(np.random.default_rng(0), 4, 6, 3, 8, 16)
    options: dict[str, Any] = {"num_experts": 16, "alignment": alignment, "on_overflow": "drop"}
    program = helpers.dispatch_combine(group, capacity_factor=factor, implementation="xla", **options)
    assert jax.eval_shape(program, *case)[0].rows.shape[1] == wanted


def test_few_rows_are_warned_of_once(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    """Who means times the even load, and writes an int."""

    def route(tokens: jax.Array, ids: jax.Array) -> Any:
        return dispatch(tokens, ids, group=group, num_experts=8, capacity=2).group_sizes

    with caplog.at_level(logging.WARNING, "jax_ep"):
        for _ in range(2):
            jax.eval_shape(helpers.per_rank(route, group.mesh), np.zeros((4, 40, 8)), np.zeros((4, 40, 2), np.int32))
    (record,) = caplog.records
    assert "capacity=2 is 2 rows, where an even load is of 80" in record.getMessage()
    assert "capacity_factor=2" in record.getMessage()
