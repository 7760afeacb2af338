"""Which exchanges run again in the backward pass, by the policy of `jax.checkpoint`: calls in compiled programs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import pytest
from test_matrix import COMBINED, DISPATCHED, POLICIES

from jax_ep import Group, combine, dispatch

SIZE, EXPERTS, TOKENS, TOP_K, HIDDEN, LAYERS = 2, 4, 5, 2, 16, 3

pytestmark = [pytest.mark.usefixtures("native"), pytest.mark.optimized]


def calls(text: str, target: str) -> int:
    return text.count(f'custom_call_target="{target}"')


def chain(group: Group) -> Callable[..., jax.Array]:
    def layer(tokens: jax.Array, ids: jax.Array, weights: jax.Array, gate: jax.Array, *_: jax.Array) -> jax.Array:
        out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS)
        rows = jnp.tanh(jax.lax.ragged_dot(out.rows, gate, out.group_sizes))
        return combine(rows, out.routing, group=group)

    return layer


def layer(group: Group) -> Callable[..., jax.Array]:
    return partial(helpers.moe_sums, group=group)


def policies() -> dict[str, tuple[Any, int, int]]:
    """For each policy, the dispatches and the combines in the program of the gradient of a scan over layers.

    One of each is in the loop forward, and the gradient of the dispatch, which is a combine too, in the one backward.
    """
    p = jax.checkpoint_policies
    both = p.save_only_these_names(DISPATCHED, COMBINED)
    counts = {"everything": (1, 2), "nothing": (2, 3), "dots": (2, 3), "dispatch": (1, 3), "combine": (2, 2)}
    found = {name: (POLICIES[name], *calls) for name, calls in (counts | {"offloaded": (1, 2)}).items()}
    return found | {"both": (both, 1, 2), "dots or both": (p.save_from_both_policies(p.dots_saveable, both), 1, 2)}


def gradient_of_layers(group: Group, layer: Callable[..., jax.Array], policy: Any) -> Any:
    """With respect to tokens, weights and matrices. What follows the layer needs its result for its own gradient."""

    def loss(tokens: jax.Array, ids: jax.Array, weights: jax.Array, *matrices: jax.Array) -> jax.Array:
        def block(tokens: jax.Array, _: None) -> tuple[jax.Array, None]:
            return tokens + jnp.tanh(layer(tokens, ids, weights, *matrices)), None

        kept = jax.checkpoint(block, policy=policy, prevent_cse=False)  # pyright: ignore[reportPrivateImportUsage]
        return jnp.sum(jax.lax.scan(kept, tokens, length=LAYERS)[0] ** 2)

    def gradient(*operands: jax.Array) -> Any:
        return jax.grad(loss, argnums=(0, *range(2, len(operands))))(*operands)

    return helpers.per_rank(gradient, group.mesh)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("form", [chain, layer])
@pytest.mark.parametrize("policy", policies())
def test_what_runs_again(form: Any, policy: str, group: Group, rng: helpers.Rng) -> None:
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    matrices = moe_oracle.draw_layer(rng, case.tokens, case.weights, EXPERTS, HIDDEN)[2:]
    chosen, dispatches, combines = policies()[policy]
    compiled = gradient_of_layers(group, form(group), chosen).lower(*case, *matrices).compile()
    text = compiled.as_text()
    assert (calls(text, DISPATCHED), calls(text, COMBINED)) == (dispatches, combines)
    if policy == "nothing":
        kept = gradient_of_layers(group, form(group), policies()["everything"][0])
        assert helpers.bits(helpers.fetch(compiled(*case, *matrices))) == helpers.bits(
            helpers.fetch(kept(*case, *matrices))
        )
