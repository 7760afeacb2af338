"""Our ops beside each other and beside XLA's collectives in one program: right values, and no end of waiting.

test_processes.py runs the same in several processes.
"""

import helpers
import jax
import jax.numpy as jnp
import mixed_cases
import numpy as np
import pytest
from conftest import OpenGroup, Rng

from jax_ep import Group

ON_CPU = jax.default_backend() == "cpu"
SIZE = 4 if ON_CPU else helpers.largest_size()
# XLA's CPU client deadlocks over many programs that nobody awaits.
TURNS, LOOK = (6, 1) if ON_CPU else (1000, 100)

pytestmark = [pytest.mark.usefixtures("native"), pytest.mark.timeout(300)]


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

    found = helpers.fetch(helpers.per_rank(jax.grad(loss), one.mesh)(drawn.tokens, drawn.ids, drawn.weights))
    factors = [(1 + turn) * scale / 16 for turn in range(turns)]
    powers = np.cumprod([np.ones_like(scale), *factors], axis=0)
    wanted = np.broadcast_to(powers[-1] + powers[:-1].sum(0), found.shape)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
