"""Products of a user's own, by qwix, and what they may ask of a routing; test_matrix.py has those of the example."""

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


@pytest.mark.usefixtures("native")
def test_qwix(group: jax_ep.Group, rng: helpers.Rng) -> None:
    """Scales and products are exact but for float32: the layer is that of the rounded matrices."""
    qwix = pytest.importorskip("qwix")
    model, case, cotangent = draw(rng, np.float32)
    everything(case, rng)

    def of_ranks(change: Any) -> dict[str, Any]:
        each = {name: [change(jnp.asarray(x)) for x in getattr(model, name)] for name in ("gate", "up", "down")}
        return {name: jax.tree.map(lambda *x: np.stack(x), *matrices) for name, matrices in each.items()}

    quantize = partial(qwix.quantize, qtype=jnp.int8, channelwise_axes=[0, 2])
    leaves, treedef = jax.tree.flatten(jax_ep.Experts(**of_ranks(quantize)))

    def body(tokens: Any, weights: Any, ids: Any, cotangent: Any, *leaves: Any) -> Any:
        def layer(tokens: Any, weights: Any) -> Any:
            product, experts = qwix.ragged_dot, treedef.unflatten(leaves)
            return jax_ep.moe_mlp(tokens, ids, weights, experts, group=group, product=product)[0]

        out, pull = jax.vjp(layer, tokens, weights)
        return out, *pull(cotangent)

    found = helpers.run(group, body, model.tokens, model.weights, case.ids, cotangent, *leaves)
    rounded = model._replace(**of_ranks(lambda matrix: qwix.dequantize(quantize(matrix))))
    wanted, gradient = moe_oracle.gated_experts(rounded, case.ids, cotangent)
    assert_near(found, (wanted, gradient.tokens, gradient.weights), 1e-5)
    assert np.linalg.norm(wanted - moe_oracle.gated_experts(model, case.ids, cotangent)[0]) > 1e-3  # than without int8


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
