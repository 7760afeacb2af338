"""Ops beside each other and beside XLA's collectives: every run gives equal bits, nothing hangs however many ops are in
flight, and ranks that do not run the same op get an error that names both sides. test_processes.py runs the same in
several processes."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import mixed_cases
import numpy as np
import oracle
import pytest
from conftest import OpenGroup, Rng
from mismatch_cases import dispatched, exchanged, reduced

from jax_ep import Group, Implementation, MismatchError

EXPERTS = 16
OPS = {"dispatch": dispatched, "sparse_all_reduce": reduced, "ragged_all_to_all": exchanged}
ON_CPU = jax.default_backend() == "cpu"
SIZE = 4 if ON_CPU else helpers.largest_size()
# XLA's CPU client deadlocks over many programs that nobody awaits.
TURNS, LOOK = (6, 1) if ON_CPU else (1000, 100)

pytestmark = [pytest.mark.usefixtures("native"), pytest.mark.timeout(300)]


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


def test_many_independent_ops_in_one_program(open_group: OpenGroup, rng: Rng, pytestconfig: pytest.Config) -> None:
    """64 pairs that XLA may run in any order and at once, among its own collectives, 200 times on GPUs and at night."""
    often = not ON_CPU or pytestconfig.getoption("nightly")
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


@pytest.mark.skipif(not ON_CPU, reason="two threads put their ops on GPUs in no order")
def test_threads_that_run_different_ops(open_group: OpenGroup) -> None:
    """On a CPU their calls are told apart, and run in one order on all ranks: neither disturbs the other."""
    group, x = open_group(4), np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)
    programs = {name: helpers.per_rank(partial(op, group), group.mesh) for name, op in OPS.items()}
    wanted = {name: helpers.fetch(program(x)) for name, program in programs.items()}

    def repeat(name: str) -> list[np.ndarray]:
        return [helpers.fetch(programs[name](x)) for _ in range(20)]

    with ThreadPoolExecutor(len(OPS)) as threads:
        for name, found in zip(OPS, threads.map(repeat, OPS), strict=True):
            for each in found:
                np.testing.assert_array_equal(each, wanted[name], name)
    group.check()


@pytest.fixture
def pair(groups: int, open_group: OpenGroup) -> tuple[Group, Group]:
    """Two groups over one mesh, or one group twice."""
    opened = [open_group(SIZE, timeout=60.0) for _ in range(groups)]
    return opened[0], opened[-1]


@pytest.mark.parametrize(("groups", "check_vma"), [(1, True), (2, True), (2, False)])
def test_in_one_program(pair: tuple[Group, Group], check_vma: bool, rng: Rng) -> None:
    options = {"collectives": True, "in_turn": False, "check_vma": check_vma}
    mixed_cases.run(*pair, mixed_cases.draw(rng, SIZE, 8 * SIZE), turns=TURNS, look=LOOK, **options)


@pytest.mark.parametrize("groups", [1, 2])
def test_scan_and_remat(pair: tuple[Group, Group], rng: Rng) -> None:
    """The gradient of a chain of exchanges and of XLA's collectives, whose forward pass runs twice."""
    turns, drawn, (one, other) = 3, mixed_cases.draw(rng, SIZE, 8), pair
    scale = (drawn.weights * (1 + drawn.ids % 3)).sum(-1, keepdims=True)

    def loss(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        @jax.checkpoint
        def step(x: jax.Array, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = mixed_cases.routed(one, x, ids, weights) + mixed_cases.routed(other, turn * x, ids, weights)
            return y / 16, jax.lax.psum(jnp.sum(x, dtype=jnp.float32), "ep")

        last, sums = jax.lax.scan(step, tokens, jnp.arange(turns, dtype=jnp.float32))
        return jnp.sum(last) + jnp.sum(sums) / one.size

    found = helpers.run(one, jax.grad(loss), drawn.tokens, drawn.ids, drawn.weights)
    factors = [(1 + turn) * scale / 16 for turn in range(turns)]
    powers = np.cumprod([np.ones_like(scale), *factors], axis=0)
    wanted = np.broadcast_to(powers[-1] + powers[:-1].sum(0), found.shape)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.skipif(not ON_CPU, reason="a GPU's ranks of one process meet in the kernel, as those of several do")
@pytest.mark.parametrize(("left", "right"), [("dispatch", "dispatch"), ("ragged_all_to_all", "dispatch")])
def test_a_diverging_branch(left: str, right: str, open_group: OpenGroup) -> None:
    """Half of the ranks call an op with 6 rows, half one with 4: each finds the others at another call."""
    group = open_group(4, timeout=0.5)

    def body(x: jax.Array, takes_left: jax.Array) -> jax.Array:
        def run(op: str, x: jax.Array) -> jax.Array:
            return jnp.sum(OPS[op](group, x))

        return jax.lax.cond(takes_left, lambda: run(left, x), lambda: run(right, x[:4]))

    operands = np.ones((4, 6, 8), np.float32), np.array([True, False, True, False])
    program = helpers.per_rank(body, group.mesh).lower(*operands).compile()
    start = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError):
        helpers.fetch(program(*operands))
    assert time.monotonic() - start < group.timeout + 2
    either = f"({left}|{right})"
    with pytest.raises(MismatchError, match=f"^{either} .*waits in {either} ") as caught:
        group.check()
    assert left in str(caught.value)
    assert right in str(caught.value)
