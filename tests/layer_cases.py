"""Layers, and the chain of the ops that they stand for; operands and comparisons."""

from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax
import moe_oracle
import numpy as np
from helpers import BIG, Case, Rng
from moe_oracle import Layer

from jax_ep import Group, Implementation, combine, dispatch, lax

SIZE, EXPERTS, TOKENS, TOP_K, HIDDEN, WIDTH = 4, 8, 6, 3, 16, 24
ROWS = SIZE * TOKENS * TOP_K  # so many can arrive at one rank

Body = Callable[..., jax.Array]


def layer_of(group: Group, implementation: Implementation = "auto", activation: Any = "silu", **options: Any) -> Body:
    """On one rank, (tokens, ids, weights, gate, up, down) -> [T, H]."""
    given: dict[str, Any] = {"group": group, "implementation": implementation, "activation": activation}
    return partial(helpers.moe_sums, **given, **options)


def chain(group: Group, implementation: Implementation, activation: Any = jax.nn.silu, **options: Any) -> Body:
    """The layer op by op, differentiated by JAX."""
    multiply = jax.lax.ragged_dot if implementation == "xla" else lax.ragged_dot

    def layer(tokens: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any) -> jax.Array:
        rows, sizes, routing = dispatch(
            tokens, ids, weights, group=group, num_experts=EXPERTS, implementation=implementation, **options
        )
        inner = activation(multiply(rows, gate, sizes)) * multiply(rows, up, sizes)
        return combine(multiply(inner, down, sizes), routing, group=group, implementation=implementation)

    return layer


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


def zipf(case: Case, rng: Rng) -> None:
    share = 1 / np.arange(1, EXPERTS + 1)
    for chosen in case.ids.reshape(-1, TOP_K):
        chosen[:] = rng.choice(EXPERTS, TOP_K, replace=False, p=share / share.sum())


def one_expert_gets_all(case: Case, rng: Rng) -> None:
    case.ids[:] = 5


def everything_skipped(case: Case, rng: Rng) -> None:
    case.ids[:] = -1


ROUTINGS = (everything, zipf, one_expert_gets_all, everything_skipped)


def draw(
    rng: Rng, dtype: Any, hidden: int = HIDDEN, tokens: int = TOKENS, width: int = WIDTH
) -> tuple[Layer, Case, np.ndarray]:
    case = helpers.draw_case(rng, SIZE, tokens, TOP_K, EXPERTS, hidden, np.dtype(dtype))
    layer = moe_oracle.draw_layer(rng, case.tokens, case.weights, EXPERTS, width)
    return layer, case, rng.standard_normal(case.tokens.shape).astype(dtype)


def assert_same_bits(actual: Any, wanted: Any) -> None:
    for mine, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(helpers.wide(mine), helpers.wide(theirs))
    assert [x.dtype for x in jax.tree.leaves(actual)] == [x.dtype for x in jax.tree.leaves(wanted)]


def assert_near(actual: Any, wanted: Any, unit: float) -> None:
    """`unit` of the largest value of each array."""
    for mine, right in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(helpers.wide(mine), right, rtol=0, atol=unit * max(np.abs(right).max(), 1e-6))
