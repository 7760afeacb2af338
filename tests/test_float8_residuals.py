"""Layers in float8 under `jax.checkpoint`: what it keeps of float8 values must survive.

JAX rounds every float that it keeps by `reduce_precision`, which makes NaN of the largest float8 value.
"""

from typing import Any

import helpers
import jax
import moe_oracle
import numpy as np
import pytest
from conftest import OpenGroup
from moe_oracle import Layer

from jax_ep import Implementation, dispatch
from jax_ep.float8 import quantize_weights
from jax_ep.ops.moe.experts import PRODUCTS

SIZE, EXPERTS, TOKENS, TOP_K, WIDTH = 2, 4, 6, 2, 128

P = jax.checkpoint_policies
POLICIES: dict[str, Any] = {
    "default": None,
    "everything": P.everything_saveable,
    "rows": P.save_only_these_names("jax_ep_dispatch"),
    "products": P.save_only_these_names(PRODUCTS),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("quantized", [False, True], ids=["arrays", "Float8Weights"])
def test_a_kept_layer_is_near_the_exact_one(
    policy: str, quantized: bool, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    group = open_group(SIZE)
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, WIDTH, np.dtype(np.float32))
    layer = moe_oracle.draw_layer(rng, case.tokens, case.weights, EXPERTS, WIDTH)
    cotangent = rng.standard_normal(case.tokens.shape).astype(np.float32)

    def run(model: Layer, ids: jax.Array, cotangent: jax.Array) -> Any:
        matrices: Any = tuple(map(quantize_weights, model[2:])) if quantized else model[2:]

        def experts(tokens: jax.Array, weights: jax.Array, matrices: Any) -> jax.Array:
            options: Any = {"group": group, "precision": "float8", "implementation": implementation}
            return helpers.moe_sums(tokens, ids, weights, *matrices, **options)

        kept = jax.checkpoint(experts, policy=POLICIES[policy])  # pyright: ignore[reportPrivateImportUsage]
        if quantized:  # no gradients of these: they are arguments that JAX keeps
            out, pull = jax.vjp(lambda *floats: kept(*floats, matrices), *model[:2])
            return out, pull(cotangent)
        out, pull = jax.vjp(kept, *model[:2], matrices)
        d_tokens, d_weights, d_matrices = pull(cotangent)
        return out, (d_tokens, d_weights, *d_matrices)

    out, gradient = helpers.fetch(helpers.per_rank(run, group.mesh)(layer, case.ids, cotangent))
    exact, exact_gradient = moe_oracle.gated_experts(layer, case.ids, cotangent)
    for found, right in zip((out, *gradient), (exact, *exact_gradient[: len(gradient)]), strict=True):
        # Each float8 operand is off by 2^-4 at most, and four come one after the other.
        assert np.linalg.norm(found - right) < 0.25 * np.linalg.norm(right)


@pytest.mark.parametrize("policy", ["default", "everything", "rows"])
def test_rows_that_a_dispatch_left_in_float8(
    policy: str, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    """As residuals of a product that the user differentiates."""
    group = open_group(SIZE)
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, WIDTH, np.dtype(np.float32))

    def run(tokens: jax.Array, ids: jax.Array, scale: jax.Array) -> Any:
        def scaled(scale: jax.Array) -> jax.Array:
            options: Any = {"wire": "float8_rows", "num_experts": EXPERTS}
            rows = dispatch(tokens, ids, group=group, implementation=implementation, **options).rows
            return (jax.numpy.repeat(rows.scales, 128, axis=1) * rows.values.astype("float32") * scale).sum()

        return jax.grad(jax.checkpoint(scaled, policy=POLICIES[policy]))(scale)  # pyright: ignore[reportPrivateImportUsage]

    scale = np.ones((SIZE,), np.float32)
    found = helpers.fetch(helpers.per_rank(run, group.mesh)(case.tokens, case.ids, scale))
    for rank in range(SIZE):
        ids = case.ids // (EXPERTS // SIZE) == rank
        sent = case.tokens * ids.sum(-1)[..., None]
        assert abs(found[rank] - sent.sum()) < 2.0**-4 * np.abs(sent).sum()
