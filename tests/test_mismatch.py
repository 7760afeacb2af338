"""Ranks that do not run the same op with the same shapes: an error that names both sides, and nothing is written."""

import re
import time
from pathlib import Path

import helpers
import jax
import jax.numpy as jnp
import mismatch_worker as worker
import numpy as np
import pytest
from conftest import OpenGroup
from test_processes import CPU_DEVICES, ON_CPU, PROCESSES, launch_script

from jax_ep import MismatchError, dispatch

pytestmark = pytest.mark.usefixtures("native")


def test_processes_that_differ(tmp_path: Path) -> None:
    """Today's last batch has another size in one of them, or they took another branch."""
    output = launch_script(Path(worker.__file__), f"--cpu-devices={CPU_DEVICES}")
    assert "Exception in thread" not in output, output
    by_plan = [worker.PLANS] if not ON_CPU and PROCESSES == 2 else []
    for name in [*worker.CASES, *by_plan]:
        errors = re.findall(rf"^\[{name}\] (.*)$", output, re.MULTILINE)
        assert len(errors) == PROCESSES, output
        assert any("all ranks must run the same ops" in error for error in errors), errors


@pytest.mark.skipif(not ON_CPU, reason="a GPU's ranks of one process meet in the kernel, as those of several do")
def test_a_diverging_branch(open_group: OpenGroup) -> None:
    """Half of the ranks dispatch 4 tokens, half 6: each finds the others at another call."""
    group = open_group(4, timeout=1.0)

    def send(x: jax.Array) -> jax.Array:
        ids = jnp.zeros((x.shape[0], 1), jnp.int32)
        return dispatch(x, ids, group=group, num_experts=4, capacity=32, implementation="ffi").tokens

    def body(x: jax.Array, left: jax.Array) -> jax.Array:
        return jax.lax.cond(left, lambda: send(x), lambda: send(x[:4]))

    start = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError):
        helpers.fetch(
            helpers.per_rank(body, group.mesh)(np.ones((4, 6, 8), np.float32), np.array([True, False, True, False]))
        )
    assert time.monotonic() - start < group.timeout + 2
    with pytest.raises(MismatchError, match=r"dispatch float32 T=(4|6) .*waits in dispatch float32 T=(4|6)"):
        group.check()
