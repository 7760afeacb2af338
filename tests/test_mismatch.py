"""Ranks that do not run the same op with the same shapes: an error that names both sides, and nothing is written."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup
from mismatch_cases import dispatched, exchanged, reduced

from jax_ep import MismatchError

ON_CPU = jax.default_backend() == "cpu"

pytestmark = pytest.mark.usefixtures("native")


OPS = {"dispatch": dispatched, "sparse_all_reduce": reduced, "ragged_all_to_all": exchanged}


@pytest.mark.skipif(not ON_CPU, reason="a GPU's ranks of one process meet in the kernel, as those of several do")
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("dispatch", "dispatch"),
        ("sparse_all_reduce", "sparse_all_reduce"),
        ("ragged_all_to_all", "ragged_all_to_all"),
        ("ragged_all_to_all", "dispatch"),
    ],
)
def test_a_diverging_branch(left: str, right: str, open_group: OpenGroup) -> None:
    """Half of the ranks call an op with 4 rows, half one with 6: each finds the others at another call."""
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
