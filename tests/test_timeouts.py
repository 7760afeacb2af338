"""A rank that stalls: an exception that names it in time, and life goes on."""

import time

import helpers
import jax
import numpy as np
import pytest
from conftest import OpenGroup

from jax_ep import Dispatched, Group, PeerTimeoutError

SIZE, EXPERTS, STALLED = 4, 8, 3
OPTIONS = {"num_experts": EXPERTS, "implementation": "ffi"}

pytestmark = pytest.mark.usefixtures("native")


def stall(group: Group, where: str) -> None:
    """On the CPU before or after the rank arrives; on a GPU its kernels are no longer launched, for either."""
    assert group._native is not None
    group._native.stall(STALLED, where)


def assert_nan_but_for_stalled(results: tuple[Dispatched, jax.Array]) -> None:
    """On a GPU. Nobody writes the results of the stalled rank."""
    dispatched, combined = jax.tree.map(lambda x: np.delete(x, STALLED, axis=0), results)
    helpers.assert_nothing_delivered(dispatched)
    assert np.isnan(combined).all()


@pytest.mark.parametrize("where", ["arrival", "protocol"])
def test_a_stalled_rank_is_named_and_a_new_group_works(
    where: str, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    timeout = 1.0
    group = open_group(SIZE, timeout=timeout)
    case = helpers.draw_case(rng, SIZE, 4, 2, EXPERTS, 16)
    program = helpers.dispatch_combine(group, **OPTIONS)
    helpers.assert_round_trip(helpers.fetch(program(*case)), case, num_experts=EXPERTS)

    stall(group, where)
    start = time.monotonic()
    with helpers.expect_failure(group, PeerTimeoutError, f"rank {STALLED}"):
        assert_nan_but_for_stalled(helpers.fetch(program(*case)))
    assert time.monotonic() - start < timeout + 1

    for _ in range(2):  # a failed group stays failed
        with pytest.raises(PeerTimeoutError, match=f"rank {STALLED}"):
            group.check()
    with pytest.raises(PeerTimeoutError, match=f"rank {STALLED}"):
        helpers.dispatch_combine(group, **OPTIONS)(*case)

    start = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError):
        helpers.fetch(program(*case))  # compiled before: fails without waiting again
    group.close()
    assert time.monotonic() - start < timeout

    new = helpers.dispatch_combine(open_group(SIZE), **OPTIONS)
    for _ in range(3):
        helpers.assert_round_trip(helpers.fetch(new(*case)), case, num_experts=EXPERTS)


def test_another_group_does_not_notice(open_group: OpenGroup, rng: np.random.Generator) -> None:
    failing, healthy = open_group(SIZE, timeout=0.5), open_group(SIZE)
    case = helpers.draw_case(rng, SIZE, 4, 2, EXPERTS, 16)
    stall(failing, "protocol")
    with helpers.expect_failure(failing, PeerTimeoutError, f"rank {STALLED}"):
        assert_nan_but_for_stalled(helpers.fetch(helpers.dispatch_combine(failing, **OPTIONS)(*case)))
    helpers.assert_round_trip(
        helpers.fetch(helpers.dispatch_combine(healthy, **OPTIONS)(*case)), case, num_experts=EXPERTS
    )
    healthy.check()
