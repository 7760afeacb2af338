"""Layers with their gradients, and operands: some ids are skipped, or name no expert, or one twice."""

from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax
import moe_oracle
import numpy as np
from helpers import BIG, Case, Rng
from moe_oracle import Layer

from jax_ep import Group, Implementation

SIZE, EXPERTS, TOKENS, TOP_K, HIDDEN, WIDTH = 4, 8, 6, 3, 16, 24

Body = Callable[..., jax.Array]


def layer_of(group: Group, implementation: Implementation = "auto", **options: Any) -> Body:
    """On one rank, (tokens, ids, weights, gate, up, down) -> [T, H]."""
    return partial(helpers.moe_sums, group=group, implementation=implementation, **options)


def with_gradient(group: Group, layer: Body) -> Any:
    """The program (Layer, ids, cotangent) -> (sums, gradient Layer), for all ranks."""

    def both(model: Layer, ids: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, Layer]:
        out, pull = jax.vjp(lambda m: layer(m.tokens, ids, *m[1:]), model)
        return out, pull(cotangent)[0]

    return helpers.per_rank(both, group.mesh)


def everything(case: Case, rng: Rng) -> None:
    """Skips, ids that do not exist, an expert named twice, a rank that sends nothing and one that gets nothing."""
    case.ids[case.ids // 2 == 1] += 4
    case.ids[0, 0] = (-1, EXPERTS, BIG)
    case.ids[1, :, 1] = case.ids[1, :, 0]
    case.ids[2] = -1


def draw(rng: Rng, dtype: Any) -> tuple[Layer, Case, np.ndarray]:
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN, np.dtype(dtype))
    layer = moe_oracle.draw_layer(rng, case.tokens, case.weights, EXPERTS, WIDTH)
    everything(case, rng)
    return layer, case, rng.standard_normal(case.tokens.shape).astype(dtype)


def assert_near(actual: Any, wanted: Any, unit: float) -> None:
    """`unit` of the largest value of each array."""
    for mine, right in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(helpers.wide(mine), right, rtol=0, atol=unit * max(np.abs(right).max(), 1e-6))
