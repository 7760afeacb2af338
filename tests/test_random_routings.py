"""Hundreds of random routings, with every buffer poisoned, against the oracle."""

from typing import Any, NamedTuple

import helpers
import hypothesis
import ml_dtypes
import numpy as np
import pytest
from conftest import OpenGroup
from helpers import BIG, SEED, Case
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jax_ep import CapacityError, Implementation

EXAMPLES = {"ffi": 110, "xla": 15}  # of each configuration


class Config(NamedTuple):
    """One compiled program."""

    size: int
    tokens: int
    top_k: int
    experts: int
    capacity: int
    alignment: int = 1
    overflow: str = "raise"
    dtype: Any = np.float32
    hidden: int = 20


CONFIGS = [
    Config(size=1, tokens=7, top_k=3, experts=4, capacity=21),
    Config(size=2, tokens=5, top_k=2, experts=8, capacity=20, dtype=ml_dtypes.bfloat16, hidden=37),
    Config(size=4, tokens=4, top_k=4, experts=16, capacity=24),
    Config(
        size=4, tokens=6, top_k=2, experts=8, capacity=24, alignment=8, overflow="drop", dtype=np.float16, hidden=37
    ),
    Config(size=8, tokens=3, top_k=2, experts=8, capacity=5, overflow="drop"),
]


def routings(config: Config) -> st.SearchStrategy[np.ndarray]:
    """Ids of all ranks: uniform, or crowded on few experts so that capacities matter; some skipped, some invalid."""
    shape = (config.size, config.tokens, config.top_k)
    valid = st.integers(0, config.experts - 1)
    strange = st.sampled_from([-1, -2, config.experts, BIG, -BIG - 1])
    few = st.lists(valid, min_size=1, max_size=3)
    elements = [valid, st.one_of(valid, valid, valid, strange)]
    uniform = st.sampled_from(elements).flatmap(lambda e: hnp.arrays(np.int32, shape, elements=e, fill=st.nothing()))
    crowded = few.flatmap(lambda hot: hnp.arrays(np.int32, shape, elements=st.sampled_from([-1, *hot])))
    return st.one_of(uniform, crowded)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.size}-{config.overflow}")
def test_random_routings(
    config: Config, implementation: Implementation, open_group: OpenGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    group = open_group(config.size)
    options = {"num_experts": config.experts, "alignment": config.alignment}
    program = helpers.dispatch_combine(
        group, capacity=config.capacity, on_overflow=config.overflow, implementation=implementation, **options
    )
    rng = np.random.default_rng(SEED)
    print(f"JAX_EP_TEST_SEED={SEED}")

    @hypothesis.seed(SEED)
    @hypothesis.settings(max_examples=EXAMPLES[implementation], deadline=None, database=None, print_blob=True)
    @hypothesis.given(ids=routings(config))
    def run(ids: np.ndarray) -> None:
        drawn = helpers.draw_case(
            rng, config.size, config.tokens, config.top_k, config.experts, config.hidden, np.dtype(config.dtype)
        )
        case = drawn._replace(ids=ids)
        if config.overflow == "raise" and rows_needed(case, config) > config.capacity:
            check_overflow(case)
        else:
            helpers.assert_round_trip(helpers.fetch(program(*case)), case, **options)

    def check_overflow(case: Case) -> None:
        with helpers.expect_failure(group, CapacityError, f"capacity is {config.capacity}", implementation):
            helpers.assert_nothing_delivered(helpers.fetch(program(*case))[0], implementation)

    run()
    group.check()


def rows_needed(case: Case, config: Config) -> int:
    """By the fullest rank, without alignment."""
    valid = case.ids[(case.ids >= 0) & (case.ids < config.experts)]
    return int(np.bincount(valid // (config.experts // config.size), minlength=1).max(initial=0))
