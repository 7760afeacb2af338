"""dispatch_ragged_dot and ragged_dot_combine beside the chain of unfused ops, differentiated by JAX.

Sums have the bits of the chain. Gradients have as many roundings or fewer, so they are as near to the exact ones.
"""

from typing import Any

import helpers
import moe_oracle
import numpy as np
import pytest
from conftest import OpenGroup
from helpers import DTYPES
from layer_cases import ROUTINGS, ROWS, SIZE, TOP_K, assert_same_bits, chain, draw, everything, fused, with_gradient
from moe_oracle import Layer


def assert_as_near(ours: Layer, others: Layer, exact: Layer) -> None:
    """Ours is off by as many roundings as the chain, or fewer, of values whose mantissas are distributed otherwise."""
    mine, theirs = (moe_oracle.errors(x, exact) for x in (ours, others))
    print("errors", mine, "and of the chain", theirs)
    assert all(a <= 1.15 * b for a, b in zip(mine, theirs, strict=True))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("change", ROUTINGS)
def test_against_the_chain(change: Any, dtype: np.dtype, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Large enough that chance makes little of the errors."""
    group, tokens = open_group(SIZE), 64
    layer, case, cotangent = draw(rng, dtype, hidden=96, tokens=tokens, width=80)
    change(case, rng)
    (sums, gradient), (sums_of_chain, gradient_of_chain) = (
        helpers.fetch(
            with_gradient(group, form(group, "ffi", capacity=SIZE * tokens * TOP_K))(layer, case.ids, cotangent)
        )
        for form in (fused, chain)
    )
    assert_same_bits(sums, sums_of_chain)
    assert_as_near(gradient, gradient_of_chain, moe_oracle.gated_experts(layer, case.ids, cotangent)[1])


@pytest.mark.usefixtures("native")
def test_runs_have_the_same_bits(open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(SIZE)
    program = with_gradient(group, fused(group, "ffi", capacity=ROWS))
    layer, case, cotangent = draw(rng, DTYPES[0])
    everything(case, rng)
    first, *others = (helpers.fetch(program(layer, case.ids, cotangent)) for _ in range(5))
    for other in others:
        assert_same_bits(other, first)
