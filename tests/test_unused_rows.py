"""Rows that no token goes to, behind those of the last expert: a dispatch zeroes them, a layer leaves them."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup
from helpers import LATE_TOKENS

from jax_ep import Implementation, dispatch

SIZE, EXPERTS, TOP_K, HIDDEN = 4, 8, 2, 128


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results begin as NaN, so what no op writes can be told from what it does."""
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")


@pytest.mark.matrix
@pytest.mark.parametrize("wire", [None, "float8", "float8_rows"])
@pytest.mark.parametrize("tokens", [5, LATE_TOKENS])
def test_a_dispatch_zeroes_them(
    tokens: int, wire: Any, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    group, case = open_group(SIZE), helpers.draw_case(rng, SIZE, tokens, TOP_K, EXPERTS, HIDDEN)
    options: Any = {"num_experts": EXPERTS, "alignment": 4, "wire": wire, "implementation": implementation}
    out = helpers.fetch(helpers.per_rank(lambda *x: dispatch(*x, group=group, **options), group.mesh)(*case))
    for array in jax.tree.leaves(out.rows):
        for rank, used in enumerate(out.group_sizes.sum(axis=1)):
            assert array[rank, used:].size
            assert not helpers.wide(array[rank, used:]).any()


@pytest.mark.usefixtures("native")
def test_a_search_for_nan_finds_none(open_group: OpenGroup, rng: np.random.Generator) -> None:
    """What a backward pass keeps are results of a program, too."""
    group, case = open_group(SIZE), helpers.draw_case(rng, SIZE, 40, TOP_K, EXPERTS, HIDDEN)
    matrices = np.ones((SIZE, EXPERTS // SIZE, HIDDEN, HIDDEN), case.tokens.dtype)

    def of_rank(tokens: jax.Array, ids: jax.Array, weights: jax.Array, matrix: jax.Array) -> jax.Array:
        return helpers.moe_sums(tokens, ids, weights, matrix, matrix, matrix, group=group)

    program = helpers.per_rank(of_rank, group.mesh)
    with jax.debug_nans(True):
        out, pull = jax.vjp(lambda tokens: program(tokens, case.ids, case.weights, matrices), jnp.asarray(case.tokens))
        (gradient,) = pull(out)
    assert np.isfinite(np.asarray(gradient)).all()
