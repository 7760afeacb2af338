"""How near a layer and its gradients are to an oracle's."""

from typing import Any

import helpers
import jax
import numpy as np


def assert_near(actual: Any, wanted: Any, unit: float) -> None:
    """`unit` of the largest value of each array."""
    for mine, right in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(helpers.wide(mine), right, rtol=0, atol=unit * max(np.abs(right).max(), 1e-6))
