"""Layers of a group of one GPU, whose rows stay where they are, on the CPU, against the oracle of test_matrix."""

from collections.abc import Iterator
from typing import Any

import helpers
import matrix_forms
import pytest
import test_matrix
from matrix_forms import LAYER

from jax_ep import Group
from jax_ep.ops.moe import api
from jax_ep.ops.moe.types import DispatchConfig

TRANSFORMATIONS = ("grad", "remat dispatch", "scan", "vmap", "jvp")


def as_on_one_gpu(group: Group, config: DispatchConfig, assignments: int) -> bool:
    return not config.expand and config.wire is None and (config.drop or config.capacity >= assignments)


def cases() -> Iterator[Any]:
    """Each form under one transformation, for every seed under another."""
    for i, name in enumerate(name for name in matrix_forms.names(LAYER) if name.partition(" ")[0] != "nodes"):
        for j, transformation in enumerate(TRANSFORMATIONS):
            marks = [] if (i + j + helpers.SEED) % len(TRANSFORMATIONS) == 0 else [pytest.mark.nightly]
            yield pytest.param(name, transformation, marks=marks, id=f"{name} - {transformation}")


@pytest.mark.parametrize(("name", "transformation"), list(cases()))
@pytest.mark.usefixtures("native")
def test_numbers(name: str, transformation: str, rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "largest_size", lambda: 1)
    monkeypatch.setattr(api, "stays_in_place", as_on_one_gpu)
    test_matrix.test_numbers("moe_mlp", name, transformation, rng, monkeypatch)
