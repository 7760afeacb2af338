"""Ranks of one process that do not run the same op: an error that names both sides, and nothing is written."""

import time

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup
from mismatch_cases import dispatched, exchanged

from jax_ep import MismatchError

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(
        jax.default_backend() != "cpu", reason="a GPU's ranks of one process meet in the kernel, as those of several do"
    ),
]

OPS = {"dispatch": dispatched, "ragged_all_to_all": exchanged}


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
