"""Forward mode of all ops: `jax.jvp` and `jax.linearize` against differences, and against the backward pass; and
second derivatives."""

from collections.abc import Callable, Sequence
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest
import sparse_cases
from helpers import Rng
from jax.sharding import PartitionSpec as P
from matmul_cases import OPS, served

import jax_ep
from jax_ep import Group, Implementation, SparseRows, combine, dispatch

SIZE, EXPERTS, TOKENS, TOP_K, HIDDEN, WIDTH = 2, 4, 5, 2, 16, 8

Body = Callable[..., jax.Array]


def per_operand(rng: Rng, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [rng.standard_normal(x.shape).astype(x.dtype) for x in operands]


def assert_tangents(group: Group, body: Body, operands: Sequence[np.ndarray], rng: Rng, *known: np.ndarray) -> None:
    """Of body(*operands, *known) on each rank: J v by differences, and <w, J v> = <J^T w, v>, summed over ranks."""
    there, back = assert_steps(group, body, operands, rng, *known, backward=True)
    np.testing.assert_allclose(there, back, rtol=1e-4, atol=1e-4)


def assert_steps(
    group: Group, body: Body, operands: Sequence[np.ndarray], rng: Rng, *known: np.ndarray, backward: bool = False
) -> tuple[float, float]:
    """J v by differences; returns <w, J v> and, if `backward`, <J^T w, v>."""

    def products(primals: Any, tangents: Any, known: Any) -> Any:
        def function(*primals: jax.Array) -> jax.Array:
            return body(*primals, *known)

        moved = jax.jvp(function, primals, tangents)[1]
        out, linear = jax.linearize(function, *primals)
        step = 2.0**-8
        ends = [function(*(p + s * step * t for p, t in zip(primals, tangents, strict=True))) for s in (1, -1)]
        weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        pulled = jax.vjp(function, *primals)[1](helpers.vary(weight)) if backward else tangents
        back = sum(jnp.sum(a * b) for a, b in zip(pulled, tangents, strict=True))
        return moved, linear(*tangents), (ends[0] - ends[1]) / (2 * step), jnp.sum(weight * moved), back

    tangents = per_operand(rng, operands)
    program = helpers.per_rank(products, group.mesh)
    moved, linear, steps, there, back = helpers.fetch(program(tuple(operands), tuple(tangents), known))
    assert np.abs(moved).max() > 0.1
    np.testing.assert_array_equal(moved, linear)
    np.testing.assert_allclose(moved, steps, rtol=0, atol=5e-3 * np.abs(moved).max())
    return there.sum(), back.sum()


def draw_layer(rng: Rng) -> tuple[list[np.ndarray], np.ndarray]:
    """Tokens, weights, gate, up and down; and ids, of which some skip or name an expert twice."""
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    case.ids[0, 0, 0] = -1
    case.ids[1, :, 1] = case.ids[1, :, 0]
    return list(moe_oracle.draw_layer(rng, case.tokens, case.weights, EXPERTS, WIDTH)), case.ids


@pytest.mark.usefixtures("native")
def test_gradients_of_layers(group: Group, rng: Rng) -> None:
    """Forward over reverse, and reverse over reverse."""
    operands, ids = draw_layer(rng)

    def gradient(tokens: Any, weights: Any, gate: Any, up: Any, down: Any, ids: Any) -> jax.Array:
        def loss(*operands: jax.Array) -> jax.Array:
            tokens, weights, *matrices = operands
            return jnp.sum(helpers.moe_sums(tokens, ids, weights, *matrices, group=group) ** 2)

        gradients = jax.grad(loss, argnums=(0, 1, 2, 3, 4))(tokens, weights, gate, up, down)
        return jnp.concatenate([x.reshape(-1) for x in gradients])

    assert_tangents(group, gradient, operands, rng, ids)


def test_second_order(implementation: Implementation, group: Group, rng: Rng) -> None:
    """With elementwise experts tanh(scale * row): `jax.lax.ragged_dot` has no second derivative."""
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    tokens, ids, weights = (jnp.asarray(x.reshape(-1, x.shape[-1])) for x in case)
    scales = rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)

    def sparse(tokens: jax.Array, weights: jax.Array, scales: jax.Array) -> jax.Array:
        def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array, scales: jax.Array) -> jax.Array:
            out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, implementation=implementation)
            row_scales = jnp.repeat(scales, out.group_sizes, axis=0, total_repeat_length=out.rows.shape[0])
            return combine(jnp.tanh(row_scales * out.rows), out.routing, group=group, implementation=implementation)

        mapped = jax.shard_map(body, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"))
        return jnp.sum(mapped(tokens, ids, weights, scales) ** 2)

    def dense(tokens: jax.Array, weights: jax.Array, scales: jax.Array) -> jax.Array:
        return jnp.sum(jnp.einsum("tk,tkh->th", weights, jnp.tanh(scales[ids] * tokens[:, None])) ** 2)

    def steepness(loss: Body) -> Body:
        def squared(*model: jax.Array) -> jax.Array:
            return sum((jnp.sum(g**2) for g in jax.grad(loss, argnums=(0, 1, 2))(*model)), start=jnp.zeros(()))

        return squared

    second = helpers.fetch(jax.jit(jax.grad(steepness(sparse), argnums=(0, 1, 2)))(tokens, weights, scales))
    exact = jax.grad(steepness(dense), argnums=(0, 1, 2))(tokens, weights, scales)
    for mine, right in zip(second, exact, strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=1e-5 * float(np.abs(right).max()))


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_products(op: str, implementation: Implementation, group: Group, rng: Rng) -> None:
    """Forward over reverse."""
    a, b = (rng.standard_normal((SIZE, 16, 16)).astype(np.float32) / 4 for _ in range(2))
    if not served(group, implementation, (16, 16), a.dtype):
        pytest.skip("kernels on a GPU take 16-bit operands alone")

    def gradient(a: jax.Array, b: jax.Array) -> jax.Array:
        def loss(a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.sum(helpers.vary(OPS[op](a, b, group=group, implementation=implementation)) ** 2)

        return jnp.concatenate(jax.grad(loss, argnums=(0, 1))(a, b))

    assert_tangents(group, gradient, [a, b], rng)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("op", sparse_cases.OPS)
def test_sparse_sums(op: str, sharded: bool, implementation: Implementation, group: Group, rng: Rng) -> None:
    rows = 12
    ids = sparse_cases.zipf(rng, SIZE, 7, rows)
    ids[0, 0] = rows
    values = sparse_cases.draw_values(rng, ids, 3)
    options: dict[str, Any] = {"op": op, "sharded": sharded, "capacity": 12, "implementation": implementation}

    def total(values: jax.Array, ids: jax.Array) -> jax.Array:
        entries = SparseRows.from_entries(ids, values, num_rows=rows)
        return helpers.vary(jax_ep.sparse_all_reduce(entries, group=group, **options).values)

    assert_tangents(group, total, [values], rng, ids)
