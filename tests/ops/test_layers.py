"""What `moe_mlp` keeps, waits for, counts and ignores. test_matrix.py compares its numbers."""

import dataclasses
from functools import partial
from typing import Any

import helpers
import jax
import jax.extend
import jax.numpy as jnp
import layer_cases
import matrix_forms
import moe_oracle
import numpy as np
import oracle
import pytest
from conftest import OpenGroup, Rng
from layer_cases import EXPERTS, SIZE
from matrix_forms import LAYER, alone

from jax_ep import Experts, Group, Implementation, moe_mlp


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["default", "several clamped, biased", "activation gated", "matrices two"])
def test_rows_are_not_kept(name: str, open_group: OpenGroup, rng: Rng) -> None:
    """What the backward pass of a layer holds: each token where it landed, and the products before the unit."""
    group, form, held = open_group(1), alone(LAYER)[name], []

    def body(floats: Any, known: Any) -> jax.Array:
        out, pull = jax.vjp(lambda floats: matrix_forms.layer(form, group)(floats, known), floats)
        held.extend(x.shape for x in jax.tree.leaves(pull))
        return out

    jax.eval_shape(helpers.per_rank(body, group.mesh), *matrix_forms.draw(form, 1, rng, layer=True)[:2])
    assert held.count((matrix_forms.TOKENS, matrix_forms.HIDDEN)) == 1
    assert held.count((matrix_forms.EVEN, matrix_forms.HIDDEN)) == 0
    assert held.count((matrix_forms.EVEN, matrix_forms.WIDTH)) == (1 if name == "matrices two" else 2)


@pytest.mark.usefixtures("native")
def test_a_shared_expert_waits_for_no_rows(group: Group, rng: Rng) -> None:
    """Rows do not wait for it either: neither product is an operand of the other until both are added."""
    form = alone(LAYER)["shared yes"]
    operands = matrix_forms.draw(form, SIZE, rng, layer=True)
    traced = jax.make_jaxpr(helpers.per_rank(matrix_forms.layer(form, group), group.mesh))(*operands[:2])
    (jitted,) = traced.eqns
    (mapped,) = (each.params["jaxpr"] for each in jitted.params["jaxpr"].eqns if each.primitive.name == "shard_map")
    behind: dict[Any, set[str]] = {}  # for every value, what it was made of
    for equation in mapped.eqns:
        inputs = [behind.get(x, set()) for x in equation.invars if not isinstance(x, jax.extend.core.Literal)]
        text, made_of = str(equation), set().union(*inputs)
        is_dense = "dot_general[" in text and "ragged" not in text
        kind, other = ("exchange", "shared") if "ffi_call" in text else ("shared", "exchange")
        if is_dense or kind == "exchange":
            assert other not in made_of
            made_of = made_of | {kind}
        behind |= dict.fromkeys(equation.outvars, made_of)
    assert behind[mapped.outvars[0]] == {"exchange", "shared"}


def test_tokens_that_go_nowhere(implementation: Implementation, open_group: OpenGroup, rng: Rng) -> None:
    """Padding tokens may hold anything. Their NaN reaches no sum and no gradient."""
    form: matrix_forms.Form = {"implementation": implementation}
    group = open_group(2)
    floats, known, _ = matrix_forms.draw(form, 2, rng, layer=True)
    floats["tokens"][:, 3], known["ids"][:, 3] = np.nan, (-1, EXPERTS)

    def body(floats: Any, known: Any) -> Any:
        out, pull = jax.vjp(lambda floats: matrix_forms.layer(form, group)(floats, known), floats)
        return out, pull(out)[0]

    out, gradient = helpers.run(group, body, floats, known)
    assert all(np.isfinite(helpers.wide(x)).all() for x in jax.tree.leaves((out, gradient)))
    assert not np.any(out[:, 3])
    assert not np.any(gradient["tokens"][:, 3])


def test_stats(implementation: Implementation, group: Group, rng: Rng) -> None:
    layer, case, _ = layer_cases.draw(rng, np.float32)

    def body(model: Any, ids: jax.Array) -> Any:
        options: dict[str, Any] = {"capacity": 8, "on_overflow": "drop", "implementation": implementation}
        experts = Experts(gate=model.gate, up=model.up, down=model.down)
        return moe_mlp(model.tokens, ids, model.weights, experts, group=group, **options)[1]

    stats, expected = helpers.run(group, body, layer, case.ids), oracle.dispatch(*case, num_experts=EXPERTS, capacity=8)
    np.testing.assert_array_equal(stats.counts, expected.counts.sum(axis=1))
    assert expected.dropped.any()
    for name in ("dropped", "invalid"):
        np.testing.assert_array_equal(getattr(stats, name), getattr(expected, name), name)


@pytest.mark.parametrize("implementation", ["auto", "xla"])
@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_no_gradient_of_float8(name: str, implementation: Any, group: Group, rng: Rng) -> None:
    form = {"precision": "float8", "frozen": (name,), "implementation": implementation}

    def body(floats: Any, known: Any) -> Any:
        def loss(scales: jax.Array) -> jax.Array:
            changed = known | {name: dataclasses.replace(known[name], scales=scales)}
            return matrix_forms.layer(form, group)(floats, changed).sum()

        return jax.grad(loss)(known[name].scales)

    with pytest.raises(TypeError, match=rf"^moe_mlp: experts\.{name} in float8 has no gradient"):
        jax.eval_shape(helpers.per_rank(body, group.mesh), *matrix_forms.draw(form, SIZE, rng, layer=True)[:2])


@pytest.mark.usefixtures("native")
def test_experts_quantized_by_qwix(group: Group, rng: Rng) -> None:
    """The layer is that of the rounded matrices; test_matrix.py has the products of the example."""
    qwix = pytest.importorskip("qwix")
    layer, case, cotangent = layer_cases.draw(rng, np.float32)
    quantize = partial(qwix.quantize, qtype=jnp.int8, channelwise_axes=[0, 2])

    def body(model: Any, ids: jax.Array) -> Any:
        matrices = {name: quantize(getattr(model, name)) for name in ("gate", "up", "down")}
        options: Any = {"group": group, "product": qwix.ragged_dot}
        out = moe_mlp(model.tokens, ids, model.weights, Experts(**matrices), **options)[0]
        return out, model._replace(**{name: qwix.dequantize(each) for name, each in matrices.items()})

    found, rounded = helpers.run(group, body, layer, case.ids)
    layer_cases.assert_near(found, moe_oracle.gated_experts(rounded, case.ids, cotangent)[0], 1e-5)
    assert np.abs(rounded.gate - layer.gate).max() > 1e-3
