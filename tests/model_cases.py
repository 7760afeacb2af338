"""The checkpoints of tests/models and the modules of examples/models."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import Group
from jax_ep.__main__ import load as load_module

FIXTURES = Path(__file__).parent / "models"
checkpoint, families, layers, losses, model, training = (
    load_module("examples", f"models.{name}")
    for name in ("checkpoint", "families", "layers", "losses", "model", "training")
)
of_each_family = pytest.mark.parametrize("family", families.FAMILIES)


def config_of(family: str) -> Any:
    return families.config_of(FIXTURES / family)


def run_of(group: Group, **options: Any) -> Any:
    return layers.Run(group, dtype=jnp.float32, **options)


def loaded(family: str, group: Group) -> Any:
    return model.load(FIXTURES / family, config_of(family), group, jnp.float32)


def assert_near(found: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance), found, wanted)
