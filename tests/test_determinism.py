"""Every run gives equal bits, and nothing hangs however many ops are in flight at once."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import OpenGroup, Rng
from mismatch_cases import dispatched, exchanged, reduced

from jax_ep import Implementation

EXPERTS = 16


def test_a_hundred_runs_give_the_same_bits(implementation: Implementation, open_group: OpenGroup, rng: Rng) -> None:
    """A tenth as many of XLA's formulation."""
    size = helpers.largest_size()
    group = open_group(size)
    if implementation == "xla" and group.platform != "cpu":
        pytest.skip("XLA's scatter-add on a GPU, in the gradient, sums in no fixed order")

    options: dict[str, Any] = {"num_experts": EXPERTS, "implementation": implementation}

    def loss(tokens: jax.Array, weights: jax.Array, ids: jax.Array) -> tuple[jax.Array, Any]:
        both = helpers.round_trip(group, experts=jnp.tanh, **options)(tokens, ids, weights)
        return (both[1] ** 2).sum(), both

    program = helpers.per_rank(jax.grad(loss, argnums=(0, 1), has_aux=True), group.mesh)
    case = helpers.draw_case(rng, size, 16, 8, EXPERTS, 32)
    operands, times = (case.tokens, case.weights, case.ids), 99 if implementation == "kernels" else 9
    helpers.assert_same_bits_again(program, operands, times)


def test_many_independent_ops_in_one_program(
    native: None, open_group: OpenGroup, rng: Rng, pytestconfig: pytest.Config
) -> None:
    """64 pairs that XLA may run in any order and at once, among its own collectives, 200 times on GPUs and at night."""
    often = jax.default_backend() != "cpu" or pytestconfig.getoption("nightly")
    pairs, runs, size = 64, 200 if often else 30, 4
    group = open_group(size)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        combined, sums = [], []
        for index in range(pairs):
            sent = tokens * (index + 1)
            combined.append(helpers.round_trip(group, num_experts=8, implementation="kernels")(sent, ids, weights)[1])
            if index % 4 == 0:
                sums.append(jax.lax.psum(sent, "ep"))
        return jnp.stack(combined), jnp.stack(sums)

    program = helpers.per_rank(body, group.mesh)
    case = helpers.draw_case(rng, size, 3, 2, 8, 8)
    case.tokens[:] = np.round(case.tokens * 4)  # small integers and halves: every sum is exact
    case.weights[:] = 0.5
    layout = oracle.dispatch(*case, num_experts=8, capacity=64)
    factors = np.arange(1, pairs + 1).reshape(-1, 1, 1)
    one = oracle.combine(layout.rows, layout.targets, case.weights)
    for _ in range(runs):
        combined, sums = helpers.fetch(program(*case))
        np.testing.assert_array_equal(combined, one[:, None] * factors)
        np.testing.assert_array_equal(sums, np.broadcast_to(case.tokens.sum(axis=0) * factors[::4], sums.shape))


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="two threads put their ops on GPUs in no order")
def test_threads_that_run_different_ops(open_group: OpenGroup) -> None:
    """On a CPU their calls are told apart, and run in one order on all ranks: neither disturbs the other."""
    group, x = open_group(4), np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)
    ops = {"dispatch": dispatched, "sparse_all_reduce": reduced, "ragged_all_to_all": exchanged}
    programs = {name: helpers.per_rank(partial(op, group), group.mesh) for name, op in ops.items()}
    wanted = {name: helpers.fetch(program(x)) for name, program in programs.items()}

    def repeat(name: str) -> list[np.ndarray]:
        return [helpers.fetch(programs[name](x)) for _ in range(20)]

    with ThreadPoolExecutor(len(ops)) as threads:
        for name, found in zip(ops, threads.map(repeat, ops), strict=True):
            for each in found:
                np.testing.assert_array_equal(each, wanted[name], name)
    group.check()
