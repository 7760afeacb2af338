"""The examples train, and alike on every platform and with every implementation."""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from conftest import require_native
from jax.sharding import Mesh

from jax_ep import Group, Implementation
from jax_ep.__main__ import load

STEPS = 20


@pytest.fixture
def example() -> Callable[[str], ModuleType]:
    return partial(load, "examples")


def losses(demo: ModuleType, devices: Sequence[Any], implementation: Implementation) -> np.ndarray:
    config = demo.moe_lm.Config(implementation=implementation)
    with Group(Mesh(np.array(devices), ("ep",)), "ep") as group:
        params = demo.moe_lm.init_params(jax.random.key(demo.SEED), config, group)
        _, metrics = demo.train(params, demo.load_bytes(), STEPS, config, group)
        group.check()
    return metrics.loss


def test_losses_are_those_of_xla_on_the_cpu(example: Callable[[str], ModuleType]) -> None:
    require_native()
    demo = example("train_moe_lm")
    size = min(4, helpers.largest_size())
    ours = losses(demo, jax.devices()[:size], "ffi")
    wanted = losses(demo, jax.devices("cpu")[:size], "xla")
    print(f"largest difference {np.abs(ours - wanted).max():.1e}")
    np.testing.assert_allclose(ours, wanted, rtol=1e-4)
    assert ours[-1] < 0.8 * ours[0]


@pytest.mark.usefixtures("native")
def test_the_tensor_parallel_mlp_trains(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    assert example("tensor_parallel_mlp").main(["--steps", "10"]) == 0, capsys.readouterr().out


@pytest.mark.usefixtures("native")
def test_word_vectors_train(example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    assert example("sparse_embedding").main(["--steps", "100"]) == 0, capsys.readouterr().out
