"""More rows than a rank has room for: exactly full, one too many, raised or dropped and counted. Where rows are
dropped, experts get max-min fair shares, and so do the source ranks of each."""

import logging
import re
from typing import Any

import helpers
import jax
import numpy as np
import oracle
import pytest
from conftest import OpenGroup, Rng
from helpers import Case

from jax_ep import CapacityError, Group, Implementation, dispatch
from jax_ep.runtime.undelivered import capacity_error

SIZE, EXPERTS, CAPACITY = 4, 8, 12
ONE_TOO_MANY = rf"rank 2 needs {CAPACITY + 1} rows but capacity is {CAPACITY}\b"


def case_with(rng: Rng, rows_of_rank_2: int) -> Case:
    """Rank 2 owns experts 4 and 5 and is sent so many rows; every other rank fewer."""
    case = helpers.draw_case(rng, SIZE, 4, 2, EXPERTS, 16)
    case.ids[:] = -1
    case.ids[:, 3, 0] = (0, 3, 6, 0)
    picks = case.ids.reshape(-1, 2)[: rows_of_rank_2 // 2]
    picks[:] = (5, 4)
    if rows_of_rank_2 % 2:
        case.ids[3, 3, 1] = 4
    return case


def test_one_too_many_raises_and_the_group_goes_on(implementation: Implementation, group: Group, rng: Rng) -> None:
    program = helpers.dispatch_combine(group, num_experts=EXPERTS, capacity=CAPACITY, implementation=implementation)
    full, too_many = case_with(rng, CAPACITY), case_with(rng, CAPACITY + 1)
    says = re.escape(str(capacity_error("dispatch", 2, CAPACITY + 1, CAPACITY)))  # and what to do
    for _ in range(3):
        with helpers.expect_failure(group, CapacityError, says, implementation):
            dispatched, _ = helpers.fetch(program(*too_many))
            helpers.assert_nothing_delivered(dispatched, implementation)
        group.check()  # reported once
        helpers.assert_round_trip(helpers.fetch(program(*full)), full, num_experts=EXPERTS)


def test_a_layer_names_itself(implementation: Implementation, group: Group, rng: Rng) -> None:
    matrices = np.ones((SIZE, EXPERTS // SIZE, 16, 16), np.float32)

    def layer(tokens: jax.Array, ids: jax.Array, weights: jax.Array, matrices: jax.Array) -> jax.Array:
        options: Any = {"group": group, "capacity": CAPACITY, "implementation": implementation}
        return helpers.moe_sums(tokens, ids, weights, None, matrices, matrices, **options)

    with helpers.expect_failure(group, CapacityError, rf"\bmoe_mlp: {ONE_TOO_MANY}", implementation):
        helpers.run(group, layer, *case_with(rng, CAPACITY + 1), matrices)


def test_many_tokens_without_room(implementation: Implementation, group: Group, rng: Rng) -> None:
    """Tokens that are on their way when ranks learn of the lack of room do no harm."""
    case = helpers.draw_case(rng, SIZE, helpers.LATE_TOKENS, 2, EXPERTS, 16)
    capacity = 2 * helpers.LATE_TOKENS
    case.ids[:] = 5  # of rank 2
    program = helpers.dispatch_combine(group, num_experts=EXPERTS, capacity=capacity, implementation=implementation)
    for _ in range(2):
        needed = f"rank 2 needs {SIZE * capacity} rows but capacity is {capacity}"
        with helpers.expect_failure(group, CapacityError, needed, implementation):
            helpers.assert_nothing_delivered(helpers.fetch(program(*case))[0], implementation)
    case.ids[:] = (0, 3)
    case.ids[::2] = (5, 6)
    helpers.assert_round_trip(helpers.fetch(program(*case)), case, num_experts=EXPERTS)


@pytest.mark.usefixtures("native")
def test_all_ranks_stop_together(group: Group, rng: Rng) -> None:
    """A rank with room must not go on to a collective where it would wait for the rank without."""

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"num_experts": EXPERTS, "implementation": "kernels"}
        total = jax.lax.psum(helpers.round_trip(group, capacity=CAPACITY, **options)(tokens, ids, weights)[1], "ep")
        return helpers.round_trip(group, **options)(tokens + total, ids, weights)[1]

    program = helpers.per_rank(body, group.mesh)
    for _ in range(3):
        with helpers.expect_failure(group, CapacityError, ONE_TOO_MANY):
            helpers.fetch(program(*case_with(rng, CAPACITY + 1)))
        group.check()
        assert np.isfinite(helpers.fetch(program(*case_with(rng, CAPACITY)))).all()


@pytest.mark.usefixtures("native")
def test_a_compiled_loop_learns_of_it(group: Group, rng: Rng) -> None:
    """Where nobody checks or traces anything: on a CPU the execution raises, on a GPU the next one, either once."""
    program = helpers.dispatch_combine(group, num_experts=EXPERTS, capacity=CAPACITY, implementation="kernels")
    full, too_many = case_with(rng, CAPACITY), case_with(rng, CAPACITY + 1)
    for _ in range(3):
        helpers.assert_round_trip(helpers.fetch(program(*full)), full, num_experts=EXPERTS)
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


DROP: dict[str, Any] = {"on_overflow": "drop"}
FEW, LATE = 40, helpers.LATE_TOKENS


def skewed(rng: Rng, size: int, tokens: int, top_k: int, experts: int, hidden: int = 16) -> Case:
    """Experts by Zipf's law, ranks that ask for much and for little; some ids are skipped, some invalid."""
    case = helpers.draw_case(rng, size, tokens, top_k, experts, hidden)
    zipf = 1 / np.arange(1, experts + 1)
    ids = rng.permutation(experts)[rng.choice(experts, size=case.ids.shape, p=zipf / zipf.sum())]
    skipped = rng.random(ids.shape) < rng.uniform(0, 0.7, (size, 1, 1))
    ids = np.where(skipped, -1, np.where(rng.random(ids.shape) < 0.02, experts + 3, ids))
    return case._replace(ids=ids.astype(np.int32))


def too_little_room(case: Case, *, num_experts: int, alignment: int = 1) -> int:
    """A capacity that suffices for the rank that is asked for least, if there are several, and not for all."""
    needed = oracle.dispatch(*case, num_experts=num_experts, capacity=0, alignment=alignment).needed
    least = int(needed.min()) if len(needed) > 1 else 0
    room = (least + int(needed.max())) // 2 // alignment * alignment
    assert least <= room < needed.max()
    return room


# Ranks, tokens, experts of a token and of all, alignment.
SKEWED = [(1, FEW, 3, 12, 4), (2, FEW, 3, 6, 1), (4, FEW, 3, 36, 8), (4, 500, 4, 20, 1), (8, FEW, 2, 72, 2)]
SKEWED += [(2, LATE, 2, 10, 4), (4, LATE, 2, 12, 16), (8, 600, 2, 8, 1)]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("case", SKEWED, ids=str)
@pytest.mark.parametrize("expand", [True, False])
def test_skewed_routings(
    expand: bool,
    case: tuple[int, ...],
    implementation: Implementation,
    open_group: OpenGroup,
    rng: Rng,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where rows are not expanded, those that `indices` name."""
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    *shape, alignment = case
    group, options = open_group(shape[0]), {"num_experts": shape[-1], "alignment": alignment}
    one, other = (skewed(rng, *shape) for _ in range(2))
    capacity = too_little_room(one, **options)
    by: dict[str, Any] = {"capacity": capacity, "implementation": implementation, "expand": expand}
    program = helpers.dispatch_combine(group, **by, **options, **DROP)
    assert helpers.assert_round_trip(helpers.fetch(program(*one)), one, **options).dropped.sum() > 0
    helpers.assert_round_trip(helpers.fetch(program(*other)), other, **options)
    group.check()
