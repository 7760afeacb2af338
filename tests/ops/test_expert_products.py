"""examples/expert_products.py against the oracle: layers whose matrices are int8, qwix' arrays, adapted at low rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest
from layer_cases import EXPERTS, SIZE, assert_near, draw, everything

import jax_ep
from jax_ep.__main__ import load

MATRICES = ("gate", "up", "down")
example = load("examples", "expert_products")


def run(group: jax_ep.Group, product: Any, model: Any, ids: Any, experts: Any, cotangent: Any) -> Any:
    """The sums, and the gradients in tokens, weights and the leaves of `experts` that are floats."""
    leaves, treedef = jax.tree.flatten(experts)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, np.floating)]

    def body(tokens: Any, weights: Any, ids: Any, cotangent: Any, *leaves: Any) -> Any:
        def layer(tokens: Any, weights: Any, moving: Any) -> Any:
            given = list(leaves)
            for i, leaf in zip(floats, moving, strict=True):
                given[i] = leaf
            return jax_ep.moe_mlp(tokens, ids, weights, treedef.unflatten(given), group=group, product=product)[0]

        out, pull = jax.vjp(layer, tokens, weights, [leaves[i] for i in floats])
        return out, pull(cotangent)

    return helpers.run(group, body, model.tokens, model.weights, ids, cotangent, *leaves)


def changed(model: Any, change: Callable[..., Any]) -> dict[str, Any]:
    """`change` of each rank's gate, up and down."""
    return {x: jax.tree.map(lambda *each: np.stack(each), *map(change, getattr(model, x))) for x in MATRICES}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["int8", "qwix"])
def test_int8(name: str, group: jax_ep.Group, rng: helpers.Rng) -> None:
    """Scales and products are exact but for float32: the layer is that of the rounded matrices."""
    model, case, cotangent = draw(rng, np.float32)
    everything(case, rng)
    if name == "qwix":
        qwix = pytest.importorskip("qwix")
        product, quantize = qwix.ragged_dot, partial(qwix.quantize, qtype=jnp.int8, channelwise_axes=[0, 2])
        back = qwix.dequantize
    else:
        product, quantize = example.int8_dot, example.quantized

        def back(matrix: Any) -> Any:
            return matrix.values * matrix.scales[:, None]

    experts = changed(model, lambda matrix: quantize(jnp.asarray(matrix)))
    rounded = model._replace(**changed(model, lambda matrix: back(quantize(jnp.asarray(matrix)))))
    out, (d_tokens, d_weights, _) = run(group, product, model, case.ids, jax_ep.Experts(**experts), cotangent)
    wanted, gradient = moe_oracle.gated_experts(rounded, case.ids, cotangent)
    assert_near((out, d_tokens, d_weights), (wanted, gradient.tokens, gradient.weights), 1e-5)
    assert np.linalg.norm(wanted - moe_oracle.gated_experts(model, case.ids, cotangent)[0]) > 1e-3  # than without int8


@pytest.mark.usefixtures("native")
def test_adapters(group: jax_ep.Group, rng: helpers.Rng) -> None:
    """Gradients of the factors are those of the whole matrix M = base + a b: M' b^T and a^T M'; the base has none."""
    model, case, cotangent = draw(rng, np.float32)

    def adapted(matrix: np.ndarray) -> Any:
        made = example.adapted(jnp.asarray(matrix), jax.random.key(0), 3)
        return made._replace(b=rng.standard_normal(made.b.shape).astype(np.float32))

    experts = changed(model, adapted)
    whole = model._replace(**{x: lora.base + lora.a @ lora.b for x, lora in experts.items()})
    out, (d_tokens, d_weights, leaves) = run(
        group, example.lora_dot, model, case.ids, jax_ep.Experts(**experts), cotangent
    )
    wanted, gradient = moe_oracle.gated_experts(whole, case.ids, cotangent)
    assert_near((out, d_tokens, d_weights), (wanted, gradient.tokens, gradient.weights), 1e-5)
    for name, (base, a, b) in zip(MATRICES, (leaves[:3], leaves[3:6], leaves[6:]), strict=True):
        factors, of_whole = experts[name], getattr(gradient, name)
        assert not base.any()
        assert_near((a, b), (of_whole @ factors.b.swapaxes(-1, -2), factors.a.swapaxes(-1, -2) @ of_whole), 2e-5)


@pytest.mark.parametrize("alignment", [1, 4])
def test_expert_and_weight_of_rows(alignment: int, implementation: Any, group: jax_ep.Group, rng: helpers.Rng) -> None:
    """Against one pass over the assignments in numpy; the weights of rows pull back to their assignments."""
    model, case, _ = draw(rng, np.float32)
    everything(case, rng)
    options: Any = {"num_experts": EXPERTS, "alignment": alignment, "implementation": implementation}
    local = EXPERTS // SIZE

    def body(tokens: Any, ids: Any, weights: Any) -> Any:
        def of_row(weights: Any) -> Any:
            routing = jax_ep.dispatch(tokens, ids, weights, group=group, **options).routing
            return routing.weight_of_row(), (routing.expert_of_row(), routing.row_mask(), routing.row_of)

        rows, pull, (expert, real, row_of) = jax.vjp(of_row, weights, has_aux=True)
        return rows, expert, real, row_of, pull(helpers.vary(jnp.arange(1.0, len(rows) + 1)))[0]

    weight, expert, real, row_of, pulled = helpers.run(group, body, case.tokens, case.ids, model.weights)
    wanted_pull = np.zeros_like(pulled)
    for rank in range(SIZE):
        wanted = np.zeros_like(weight[rank])
        for at in np.ndindex(*case.ids.shape):
            if (row := row_of[rank][at]) >= 0:
                wanted[row], wanted_pull[at] = model.weights[at], wanted_pull[at] + row + 1
                assert expert[rank, row] == case.ids[at] - rank * local
        np.testing.assert_array_equal(weight[rank], wanted)
        np.testing.assert_array_equal(real[rank], wanted != 0)
        counts = [(case.ids == rank * local + e).sum() for e in range(local)]
        sizes = [-(-count // alignment) * alignment for count in counts]
        sizes.append(len(expert[rank]) - sum(sizes))
        np.testing.assert_array_equal(expert[rank], np.repeat(range(local + 1), sizes))
    np.testing.assert_array_equal(pulled, wanted_pull)
