"""A batch of an op (`jax.vmap`), or of no more than its derivative, is one call after the other."""

from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import OpenGroup, Rng
from jax.sharding import PartitionSpec as P
from matmul_cases import OPS

import jax_ep
from jax_ep import Group, Implementation, SparseRows
from jax_ep._kit import gemm

SIZE, EXPERTS, BATCH, TOKENS, TOP_K, HIDDEN = 2, 8, 3, 4, 2, 16

Body = Callable[..., Any]


def there_and_back(group: Group, implementation: Implementation) -> Body:
    """Of experts that are tanh(scale * row)."""

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array, scale: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"num_experts": EXPERTS, "implementation": implementation}
        both = helpers.round_trip(group, experts=lambda rows: jnp.tanh(scale * rows), **options)
        return both(tokens, ids, weights)[1]

    return body


def draw(rng: Rng) -> dict[str, np.ndarray]:
    """Tokens, ids, weights and a scale of rows: [R, BATCH, ...] each."""
    cases = [helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN) for _ in range(BATCH)]
    drawn = [np.stack(x, axis=1) for x in zip(*cases, strict=True)]
    return dict(
        zip(
            ("tokens", "ids", "weights", "scale"),
            (*drawn, rng.uniform(1, 2, (SIZE, BATCH)).astype(np.float32)),
            strict=True,
        )
    )


@pytest.mark.matrix(1)
@pytest.mark.parametrize("batched", ["tokens", "ids", "weights", "scale"])
def test_one_operand_is_batched(batched: str, implementation: Implementation, group: Group, rng: Rng) -> None:
    """Against numpy; test_matrix.py batches all of them."""
    drawn = draw(rng)
    for name, x in drawn.items():
        x[:, 1:] = x[:, 1:] if name == batched else x[:, :1]
    operands = [x if name == batched else x[:, 0] for name, x in drawn.items()]
    body = jax.vmap(there_and_back(group, implementation), in_axes=tuple(0 if x == batched else None for x in drawn))
    found = helpers.fetch(helpers.per_rank(body, group.mesh)(*operands))
    tokens, ids, weights, scale = drawn.values()
    scales = scale[ids // (EXPERTS // SIZE), np.arange(BATCH)[:, None, None]]  # those of an expert's rank
    wanted = np.einsum("rbtk,rbtkh->rbth", weights, np.tanh(scales[..., None] * tokens[:, :, :, None]))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_jacobians(implementation: Implementation, group: Group, rng: Rng) -> None:
    """The op runs once, its derivative is batched; backward and forward agree."""
    body = there_and_back(group, implementation)

    def both(tokens: jax.Array, ids: jax.Array, weights: jax.Array, scale: jax.Array) -> Any:
        def of_two(factor: jax.Array, weights: jax.Array) -> jax.Array:
            return body(factor[:, None] * tokens, ids, weights, scale).sum(axis=1)

        factor = jnp.ones_like(tokens[:, 0])
        return jax.jacrev(of_two, argnums=(0, 1))(factor, weights), jax.jacfwd(of_two, argnums=(0, 1))(factor, weights)

    operands = [x[:, 0] for x in draw(rng).values()]
    backward, forward = helpers.fetch(helpers.per_rank(both, group.mesh)(*operands))
    # Backward: how all ranks' results follow this rank's operands. Forward: how its results follow all ranks' operands.
    total = [x.sum(axis=tuple(range(2, x.ndim))).sum() for x in (*backward, *forward)]
    np.testing.assert_allclose(total[:2], total[2:], rtol=1e-4)


SPMD_CASES: dict[str, tuple[Body, tuple[tuple[int, ...], ...]]] = {
    "gradient of the layer": (
        lambda group, implementation, ids, tokens, weights, *matrices: jax.grad(
            lambda *x: jnp.sum(
                helpers.moe_sums(x[0], ids, x[1], *x[2:], group=group, implementation=implementation) ** 2
            ),
            argnums=(0, 1, 2),
        )(tokens, weights, *matrices),
        ((TOKENS, HIDDEN), (TOKENS, TOP_K), *[(EXPERTS // SIZE, HIDDEN, HIDDEN)] * 3),
    ),
    "ragged_all_to_all": (
        lambda group, implementation, ids, x: jax_ep.lax.ragged_all_to_all(
            x,
            jnp.zeros((SIZE * 2, HIDDEN)),
            *[jnp.asarray([0, 2]), jnp.full(2, 2), jnp.full(2, 2 * jax.lax.axis_index("ep")), jnp.full(2, 2)],
            axis_name="ep",
            implementation=implementation,
        ),
        ((TOKENS, HIDDEN),),
    ),
    "gradient of gathered rows": (
        lambda group, implementation, ids, x, matrices: jax.grad(
            lambda x: jnp.sum(
                jax_ep.lax.ragged_dot(x, matrices, jnp.array([1, 2]), lhs_indices=ids[:, 0] % TOKENS) ** 2
            )
        )(x),
        ((TOKENS, HIDDEN), (2, HIDDEN, HIDDEN)),
    ),
    "routers": (
        lambda group, implementation, ids, logits: jax_ep.nn.physical_ids(
            jax_ep.nn.round_tokens(
                jax_ep.nn.softmax_top_k(logits, 4), 2, EXPERTS, multiple=2, axis_name="ep"
            ).expert_ids,
            jax_ep.nn.plan_replicas(np.arange(EXPERTS), num_ranks=SIZE, num_slots=EXPERTS + 2),
        ),
        ((TOKENS, EXPERTS),),
    ),
    "sparse_all_reduce": (
        lambda group, implementation, ids, values: helpers.vary(
            jax_ep.sparse_all_reduce(
                SparseRows.from_entries(ids[:, 0], values, num_rows=EXPERTS),
                group=group,
                capacity=EXPERTS,
                implementation=implementation,
            ).todense()
        ),
        ((TOKENS, HIDDEN),),
    ),
    **{
        op: (
            lambda group, implementation, ids, a, b, op=op: helpers.vary(
                OPS[op](a, b, group=group, implementation=implementation)
            ),
            ((8, 8), (8, 8)),
        )
        for op in OPS
    },
}


def of_spread_batch(case: str, implementation: Implementation, open_group: OpenGroup, rng: Rng) -> Any:
    """The function of an element, the function of a batch over another axis of the mesh, and the operands."""
    group = open_group(mesh=helpers.mesh_of(dp=2, ep=SIZE))
    function, shapes = SPMD_CASES[case]
    ids = rng.integers(0, EXPERTS, (4, SIZE * TOKENS, TOP_K)).astype(np.int32)
    floats = [rng.standard_normal((4, SIZE * n, *rest)).astype(np.float32) for n, *rest in shapes]
    if case in OPS:
        floats = [x.astype(jnp.bfloat16) for x in floats]
    body = partial(function, group, implementation)
    mapped = jax.shard_map(body, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"))
    return mapped, jax.vmap(mapped, spmd_axis_name="dp"), (ids, *floats)


@pytest.mark.parametrize("case", ["gradient of the layer", "gradient of gathered rows"])
def test_a_spread_batch_of_products_by_kernels(
    case: str, monkeypatch: pytest.MonkeyPatch, open_group: OpenGroup, rng: Rng
) -> None:
    """The choice of kernels by platform is batched, too. It is only traced: a CPU has no such kernels."""
    monkeypatch.setattr(gemm, "pallas_platforms", lambda: ("cuda",))
    _, spread, operands = of_spread_batch(case, "kernels", open_group, rng)
    assert "pallas_call" in str(jax.make_jaxpr(spread)(*operands))


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


@pytest.mark.matrix(1)
@pytest.mark.parametrize("case", SPMD_CASES)
def test_a_batch_that_is_spread(case: str, implementation: Implementation, open_group: OpenGroup, rng: Rng) -> None:
    """`jax.vmap(..., spmd_axis_name=)` over another axis of the mesh, as each of its elements alone."""
    mapped, spread, (ids, *floats) = of_spread_batch(case, implementation, open_group, rng)
    spread = helpers.fetch(jax.jit(spread)(ids, *floats))
    alone = jax.jit(mapped)
    each = [helpers.fetch(alone(ids[i], *(x[i] for x in floats))) for i in range(len(ids))]
    for a, b in zip(jax.tree.leaves(spread), jax.tree.leaves(jax.tree.map(lambda *x: np.stack(x), *each)), strict=True):
        np.testing.assert_allclose(helpers.wide(a), helpers.wide(b), rtol=1e-5, atol=1e-5)
