"""MaxText's layer by its own steps and in four lines: values and gradients are those of experts one by one."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jax_ep import Group
from jax_ep.__main__ import load

EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 12, 10, 2


def gradient_of_logits(of_weights: np.ndarray, weights: np.ndarray, ids: np.ndarray, shape: Any) -> np.ndarray:
    """Through the softmax over the chosen ones."""
    found = np.zeros(shape)
    best = weights * (of_weights - (weights * of_weights).sum(axis=1, keepdims=True))
    np.put_along_axis(found, ids, best, axis=1)
    return found


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("axes", [(1, 1, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", ["sparse_matmul", "dispatched_matmul"])
def test_values_and_gradients(name: str, axes: tuple[int, int, int], rng: helpers.Rng) -> None:
    example = load("examples", "maxtext_moe")
    tokens = 5 * 8  # of all devices
    x, logits = (rng.standard_normal((tokens, width)).astype(np.float32) for width in (HIDDEN, EXPERTS))
    logits[:, 1] += 2  # a busy expert
    ids, weights = moe_oracle.routed(logits, TOP_K)
    layer = moe_oracle.draw_layer(rng, x[None], weights[None].astype(np.float32), EXPERTS, WIDTH)
    cotangent = rng.standard_normal(x.shape).astype(np.float32)
    expected, gradient = moe_oracle.gated_experts(layer, ids[None], cotangent[None])
    wanted = {
        "x": gradient.tokens[0],
        "logits": gradient_of_logits(gradient.weights[0], weights, ids, logits.shape),
        "w0": gradient.gate[0],
        "w1": gradient.up[0],
        "wo": gradient.down[0],
    }

    mesh = helpers.mesh_of(**dict(zip(("data", "fsdp", "expert"), axes, strict=True)))
    with Group(mesh, "expert", timeout=30) as group:
        mapped = example.over_devices(getattr(example, name), group)
        matrices = (jnp.asarray(matrix[0]) for matrix in (layer.gate, layer.up, layer.down))
        experts = example.Experts(
            *(jax.device_put(m, NamedSharding(mesh, spec)) for m, spec in zip(matrices, example.AT_REST, strict=True))
        )

        @jax.jit
        def both(x: jax.Array, logits: jax.Array, experts: Any) -> Any:
            out, back = jax.vjp(mapped, x, logits, experts)
            return out, back(jnp.asarray(cotangent))

        out, (of_x, of_logits, of_experts) = helpers.fetch(both(x, logits, experts))
        group.check()
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-5)
    for (what, exact), actual in zip(wanted.items(), (of_x, of_logits, *of_experts), strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=1e-4, err_msg=what)
