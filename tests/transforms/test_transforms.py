"""Transformations of JAX, where an op or a layer need more than right numbers (test_matrix.py): a batch (`jax.vmap`)
is one call after the other, and `jax.checkpoint` runs again what its policy says."""

from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest
import test_matrix
from conftest import Rng
from jax.sharding import PartitionSpec as P
from test_matrix import COMBINED, DISPATCHED, POLICIES, SPREAD, TRANSFORMATIONS

import jax_ep
from jax_ep import Group, combine, dispatch
from jax_ep._kit import gemm

SIZE, EXPERTS, BATCH, TOKENS, TOP_K, HIDDEN, LAYERS = 2, 8, 3, 4, 2, 16, 3

Body = Callable[..., Any]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels of ours may multiply there")
@pytest.mark.parametrize(("op", "name"), [("moe_mlp", "default"), ("op", "ragged_dot, gathered")])
def test_a_spread_batch_of_products_by_kernels(op: str, name: str, monkeypatch: pytest.MonkeyPatch, rng: Rng) -> None:
    """The choice of kernels by platform is batched, too. It is only traced: a CPU has no such kernels."""
    monkeypatch.setattr(gemm, "pallas_platforms", lambda: ("cuda",))
    under, form = TRANSFORMATIONS[SPREAD], test_matrix.OPS[op].form(name, rng)
    with test_matrix.opened(form, under) as group:
        program, ranks, operands, *directions = test_matrix.prepared(op, form, under, group, rng)
        traced = jax.make_jaxpr(program)(*helpers.on_mesh(ranks, (*operands[:2], *directions)))
    assert "pallas_call" in str(traced)


def test_a_spread_batch_of_routings(rng: Rng) -> None:
    """`jax.vmap(..., spmd_axis_name=)` over another axis of the mesh, as each of its elements alone."""
    mesh, logits = helpers.mesh_of(dp=2, ep=SIZE), rng.standard_normal((4, SIZE * TOKENS, EXPERTS)).astype(np.float32)
    plan = jax_ep.nn.plan_replicas(np.arange(EXPERTS), num_ranks=SIZE, num_slots=EXPERTS + 2)

    def routed(logits: jax.Array) -> jax.Array:
        routing = jax_ep.nn.softmax_top_k(logits, 4)
        rounded = jax_ep.nn.round_tokens(routing, 2, EXPERTS, multiple=2, axis_name="ep")
        return jax_ep.nn.physical_ids(rounded.expert_ids, plan)

    mapped = jax.jit(jax.shard_map(routed, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    found = helpers.fetch(jax.jit(jax.vmap(mapped, spmd_axis_name="dp"))(logits))
    np.testing.assert_array_equal(found, np.stack([mapped(each) for each in logits]))


def test_kernels_copy_no_shared_matrices(rng: Rng) -> None:
    """A product and its gradient by the rows, of a batch of rows and one array of matrices."""
    groups, rows, k, n = 4, 24, 16, 40
    lhs, rhs = (rng.standard_normal(shape).astype(np.float32) for shape in ((BATCH, rows, k), (groups, k, n)))
    sizes = np.full((BATCH, groups), rows // groups, np.int32)

    def both(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> Any:
        out, pull = jax.vjp(lambda lhs: jax_ep.lax.ragged_dot(lhs, rhs, sizes, implementation="pallas"), lhs)
        return out, pull(out)

    compiled = jax.jit(jax.vmap(both, in_axes=(0, None, 0))).lower(lhs, rhs, sizes).compile()
    text = compiled.as_text() or ""
    assert f"f32[{groups},{k},{n}]" in text
    assert f"f32[{BATCH},{groups},{k},{n}]" not in text
    out, (d_lhs,) = compiled(lhs, rhs, sizes)
    for i in range(BATCH):
        wanted = oracle.ragged_dot(lhs[i], rhs, sizes[i])
        np.testing.assert_allclose(out[i], wanted, rtol=1e-4, atol=1e-4)
        back = oracle.ragged_dot_gradients(lhs[i], rhs, sizes[i], wanted)[0]
        np.testing.assert_allclose(d_lhs[i], back, rtol=1e-4, atol=1e-3)


def chain(tokens: jax.Array, ids: jax.Array, weights: jax.Array, gate: jax.Array, *_: jax.Array, group: Group) -> Any:
    out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS)
    return combine(jnp.tanh(jax.lax.ragged_dot(out.rows, gate, out.group_sizes)), out.routing, group=group)


BOTH = jax.checkpoint_policies.save_only_these_names(DISPATCHED, COMBINED)
DOTS_OR_BOTH = jax.checkpoint_policies.save_from_both_policies(POLICIES["dots"], BOTH)
MORE_POLICIES = POLICIES | {"both": BOTH, "dots or both": DOTS_OR_BOTH}
# The dispatches and the combines in the program of the gradient of a scan over layers: one of each in the loop forward,
# and the gradient of the dispatch, which is a combine too, in the one backward; and those that run again.
CALLS = {
    **{"everything": (1, 2), "nothing": (2, 3), "dots": (2, 3), "dispatch": (1, 3), "combine": (2, 2)},
    **{"offloaded": (1, 2), "both": (1, 2), "dots or both": (1, 2)},
}


def gradient_of_layers(group: Group, layer: Body, policy: str) -> Any:
    """With respect to tokens, weights and matrices. What follows the layer needs its result for its own gradient."""

    def loss(tokens: jax.Array, ids: jax.Array, *others: jax.Array) -> jax.Array:
        def block(tokens: jax.Array, _: None) -> tuple[jax.Array, None]:
            return tokens + jnp.tanh(layer(tokens, ids, *others, group=group)), None

        kept = jax.checkpoint(  # pyright: ignore[reportPrivateImportUsage]
            block, policy=MORE_POLICIES[policy], prevent_cse=False
        )
        return jnp.sum(jax.lax.scan(kept, tokens, length=LAYERS)[0] ** 2)

    return helpers.per_rank(jax.grad(loss, argnums=(0, 2, 3, 4, 5)), group.mesh)


@pytest.mark.matrix(1)
@pytest.mark.optimized
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("form", [chain, helpers.moe_sums])
@pytest.mark.parametrize("policy", CALLS)
def test_what_runs_again(form: Any, policy: str, group: Group, rng: Rng) -> None:
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    operands = *case, *moe_oracle.draw_layer(rng, case.tokens, case.weights, EXPERTS, HIDDEN)[2:]
    compiled = gradient_of_layers(group, form, policy).lower(*operands).compile()
    found = [compiled.as_text().count(f'custom_call_target="{name}"') for name in (DISPATCHED, COMBINED)]
    assert found == [*CALLS[policy]]
    if policy == "nothing":
        kept = gradient_of_layers(group, form, "everything")
        assert helpers.bits(helpers.fetch(compiled(*operands))) == helpers.bits(helpers.fetch(kept(*operands)))
