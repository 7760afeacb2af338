"""dispatch, with the combine of what it delivered, against the oracle: dtypes, sizes, shapes and strange routings."""

from typing import Any

import helpers
import ml_dtypes
import numpy as np
import oracle
import pytest
from conftest import OpenGroup
from helpers import BIG, DTYPES, LATE_TOKENS, SIZES, Case

from jax_ep import Implementation, dispatch

EXPERTS = 16


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_size_and_dtype(
    size: int, dtype: np.dtype, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    program = helpers.dispatch_combine(open_group(size), num_experts=EXPERTS, implementation=implementation)
    case = helpers.draw_case(rng, size, tokens=5, top_k=3, experts=EXPERTS, hidden=37, dtype=dtype)
    helpers.assert_round_trip(helpers.fetch(program(*case)), case, num_experts=EXPERTS)


@pytest.mark.parametrize(
    ("experts", "top_k", "hidden"), [(8, 2, 6144), (64, 6, 2048), (128, 4, 2880), (128, 8, 4096), (256, 8, 7168)]
)
def test_shapes_of_known_models(
    experts: int,
    top_k: int,
    hidden: int,
    implementation: Implementation,
    open_group: OpenGroup,
    rng: np.random.Generator,
) -> None:
    size = helpers.largest_size()
    program = helpers.dispatch_combine(open_group(size), num_experts=experts, implementation=implementation)
    case = helpers.draw_case(rng, size, 3, top_k, experts, hidden, np.dtype(ml_dtypes.bfloat16))
    helpers.assert_round_trip(helpers.fetch(program(*case)), case, num_experts=experts)


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(700, 8, 64), (LATE_TOKENS, 8, 64), (2, 3, 4096)])
def test_many_tokens_or_experts(
    tokens: int,
    top_k: int,
    experts: int,
    implementation: Implementation,
    open_group: OpenGroup,
    rng: np.random.Generator,
) -> None:
    program = helpers.dispatch_combine(open_group(4), num_experts=experts, implementation=implementation)
    case = helpers.draw_case(rng, 4, tokens, top_k, experts, hidden=8)
    helpers.assert_round_trip(helpers.fetch(program(*case)), case, num_experts=experts)


def nobody_picks_rank_1(case: Case) -> None:
    case.ids[(case.ids >= 4) & (case.ids < 8)] += 4


def rank_2_sends_nothing(case: Case) -> None:
    case.ids[2] = -1


def everything_skipped(case: Case) -> None:
    case.ids[:] = -1


def one_expert_gets_all(case: Case) -> None:
    case.ids[:] = 5


def same_expert_twice(case: Case) -> None:
    case.ids[:, :, 1] = case.ids[:, :, 0]


def some_skipped(case: Case) -> None:
    case.ids[:, ::2, 1] = -1


def out_of_range(case: Case) -> None:
    case.ids[:, 0] = (EXPERTS, -2, BIG)
    case.ids[1, 1] = (-BIG - 1, EXPERTS * 1000, 3)


STRANGE = (
    nobody_picks_rank_1,
    rank_2_sends_nothing,
    everything_skipped,
    one_expert_gets_all,
    same_expert_twice,
    some_skipped,
    out_of_range,
)


def test_strange_routings(
    implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    size, num_tokens, top_k = 4, 6, 3
    program = helpers.dispatch_combine(
        open_group(size), num_experts=EXPERTS, capacity=size * num_tokens * top_k, implementation=implementation
    )
    for change in STRANGE:
        print(change.__name__)
        case = helpers.draw_case(rng, size, num_tokens, top_k, EXPERTS, 24)
        change(case)
        expected = helpers.assert_round_trip(helpers.fetch(program(*case)), case, num_experts=EXPERTS)
        invalid = ((case.ids < -1) | (case.ids >= EXPERTS)).sum(axis=(1, 2))
        np.testing.assert_array_equal(expected.invalid[:, 0], invalid)


@pytest.mark.parametrize("capacity", [None, 6])
def test_no_tokens(
    capacity: int | None, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    group = open_group(4)
    both = helpers.round_trip(group, num_experts=8, capacity=capacity, implementation=implementation)
    # Emptied inside: jaxlib 0.10 and 0.11 may fail, or crash, when they compile a shard_map with empty operands.
    program = helpers.per_rank(lambda *one_token: both(*(x[:0] for x in one_token)), group.mesh)
    case = helpers.draw_case(rng, 4, tokens=1, top_k=2, experts=8, hidden=16)
    actual = helpers.fetch(program(*case))
    case = Case(*(x[:, :0] for x in case))
    helpers.assert_round_trip(actual, case, num_experts=8)
    assert actual[1].shape == (4, 0, 16)


def test_no_weights_count_as_one(
    implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    program = helpers.dispatch_combine(open_group(4), num_experts=8, implementation=implementation)
    case = helpers.draw_case(rng, 4, tokens=4, top_k=2, experts=8, hidden=16)
    actual = helpers.fetch(program(case.tokens, case.ids, None))
    helpers.assert_round_trip(actual, case._replace(weights=np.ones_like(case.weights)), num_experts=8)


@pytest.mark.parametrize("alignment", [4, 8])
def test_alignment(
    alignment: int, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    options = {"num_experts": EXPERTS, "alignment": alignment}
    program = helpers.dispatch_combine(open_group(4), implementation=implementation, **options)
    case = helpers.draw_case(rng, 4, 5, 3, EXPERTS, 16)
    expected = helpers.assert_round_trip(helpers.fetch(program(*case)), case, **options)
    assert not np.any(expected.group_sizes % alignment)


@pytest.mark.parametrize(
    ("dtype", "tokens", "hidden"), [*((dtype, 5, 384) for dtype in DTYPES), (DTYPES[0], LATE_TOKENS, 128)], ids=str
)
def test_fp8_wire(
    dtype: np.dtype,
    tokens: int,
    hidden: int,
    implementation: Implementation,
    open_group: OpenGroup,
    rng: np.random.Generator,
) -> None:
    program = helpers.dispatch_combine(open_group(4), num_experts=EXPERTS, wire="float8", implementation=implementation)
    case = helpers.draw_case(rng, 4, tokens, 3, EXPERTS, hidden, dtype)
    case.tokens[:, 1, -128:] = 0  # a block without a largest value
    case.tokens[:, 2] *= dtype.type(1e-3)
    dispatched, _ = helpers.fetch(program(*case))
    expected = oracle.dispatch(*case, num_experts=EXPERTS, capacity=dispatched.rows.shape[1], fp8=True)
    if implementation == "ffi":
        helpers.assert_dispatched(dispatched, expected)
        return
    helpers.assert_routing(dispatched, expected)
    plain = oracle.dispatch(*case, num_experts=EXPERTS, capacity=dispatched.rows.shape[1])
    scales = np.array([[oracle.through_fp8(row)[1] for row in rank] for rank in plain.rows])
    wanted = helpers.wide(expected.rows)
    one_ulp = np.maximum(np.abs(wanted) / 8, scales * 2.0**-9)  # three mantissa bits; 2**-9 is the smallest subnormal
    assert np.all(np.abs(helpers.wide(dispatched.rows) - wanted) <= one_ulp)


@pytest.mark.parametrize(("alignment", "capacity"), [(1, 7), (4, 8), (4, None)])
def test_group_sizes_of_a_routing(
    alignment: int,
    capacity: int | None,
    implementation: Implementation,
    open_group: OpenGroup,
    rng: np.random.Generator,
) -> None:
    group, case = open_group(4), helpers.draw_case(rng, 4, 6, 3, EXPERTS, 16)
    options: dict[str, Any] = {"alignment": alignment, "capacity": capacity, "on_overflow": "drop"}

    def both(tokens: Any, ids: Any, weights: Any) -> Any:
        out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, implementation=implementation, **options)
        return out.group_sizes, out.routing.group_sizes

    sizes, derived = helpers.fetch(helpers.per_rank(both, group.mesh)(*case))
    assert derived.dtype == sizes.dtype == np.int32
    np.testing.assert_array_equal(derived, sizes)
