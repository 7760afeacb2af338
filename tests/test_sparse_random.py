"""Hundreds of random sparse reductions, with every buffer poisoned, against the oracle."""

from typing import Any, NamedTuple

import helpers
import hypothesis
import ml_dtypes
import numpy as np
import pytest
import sparse_cases as cases
from conftest import OpenGroup
from helpers import BIG, SEED
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jax_ep import CapacityError, Implementation

EXAMPLES = {"ffi": 70, "xla": 12}  # of each configuration


class Config(NamedTuple):
    """One compiled program."""

    size: int
    entries: int
    num_rows: int
    capacity: int
    width: int = 4
    method: str = "bitmap"
    op: str = "sum"
    sharded: bool = False
    overflow: str = "raise"
    dtype: Any = np.float32


CONFIGS = [
    Config(size=1, entries=9, num_rows=40, capacity=9, width=3),
    Config(size=2, entries=7, num_rows=33, capacity=8, op="mean", dtype=ml_dtypes.bfloat16),
    Config(size=4, entries=6, num_rows=64, capacity=24, width=20, method="match", op="mean_by_count"),
    Config(size=4, entries=8, num_rows=50, capacity=6, op="mean", sharded=True, overflow="drop", dtype=np.float16),
    Config(size=8, entries=5, num_rows=100, capacity=12, overflow="drop"),
    Config(size=8, entries=4, num_rows=30, capacity=3, sharded=True, method="match", op="mean_by_count"),
]


def draws(config: Config) -> st.SearchStrategy[np.ndarray]:
    """Ids of all ranks: uniform, or crowded on few rows; some outside of the table."""
    shape = (config.size, config.entries)
    valid = st.integers(0, config.num_rows - 1)
    strange = st.sampled_from([-1, -BIG - 1, config.num_rows, BIG])
    elements = [valid, st.one_of(valid, valid, valid, strange)]
    uniform = st.sampled_from(elements).flatmap(lambda e: hnp.arrays(np.int32, shape, elements=e, fill=st.nothing()))
    few = st.lists(valid, min_size=1, max_size=3)
    crowded = few.flatmap(lambda hot: hnp.arrays(np.int32, shape, elements=st.sampled_from([-1, *hot])))
    return st.one_of(uniform, crowded)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.size}-{config.method}-{config.op}")
def test_random_rows(
    config: Config, implementation: Implementation, open_group: OpenGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    group = open_group(config.size)
    options: dict[str, Any] = {"op": config.op, "sharded": config.sharded, "capacity": config.capacity}
    how = {"method": config.method, "on_overflow": config.overflow, "implementation": implementation}
    program = cases.program(group, config.num_rows, **options, **how)
    rng = np.random.default_rng(SEED)
    print(f"JAX_EP_TEST_SEED={SEED}")

    @hypothesis.seed(SEED)
    @hypothesis.settings(max_examples=EXAMPLES[implementation], deadline=None, database=None, print_blob=True)
    @hypothesis.given(ids=draws(config))
    def run(ids: np.ndarray) -> None:
        values = cases.draw_values(rng, ids, config.width, config.dtype)
        wanted = cases.expected(ids, values, num_rows=config.num_rows, **options)
        if config.overflow == "raise" and wanted.dropped.any():
            with helpers.expect_failure(group, CapacityError, f"capacity is {config.capacity}", implementation):
                assert np.isnan(helpers.wide(helpers.fetch(program(ids, values)).values)).all()
        else:
            cases.assert_reduced(helpers.fetch(program(ids, values)), wanted, config.dtype)

    run()
    group.check()
