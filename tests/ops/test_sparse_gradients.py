"""Gradients of sparse_all_reduce against numpy: every entry takes the cotangent of its row, scaled by the op."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_cases as cases
from jax.sharding import PartitionSpec as P
from test_nodes import over

from jax_ep import Group, Implementation

SIZE, ENTRIES, WIDTH, ROWS = 4, 24, 5, 60
CAPACITY = {False: 64, True: 16}


@pytest.mark.matrix
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("op", cases.OPS)
def test_against_numpy(
    op: str, nodes: int, sharded: bool, check_vma: bool, implementation: Implementation, rng: np.random.Generator
) -> None:
    """The loss adds up one copy of the result: that of all ranks, or each rank's own rows."""
    ids = np.concatenate([cases.zipf(rng, SIZE, 20, ROWS), cases.out_of_range(rng, SIZE, 4, ROWS)], axis=1)
    values = cases.draw_values(rng, ids, WIDTH)
    weights = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    options: dict[str, Any] = {"capacity": CAPACITY[sharded], "implementation": implementation}
    with over(2, 2) if nodes == 2 else Group(helpers.mesh_of(ep=SIZE), "ep") as group:
        run = cases.reduced(group, ROWS, op=op, sharded=sharded, **options)

        def rows(ids: jax.Array, values: jax.Array) -> Any:
            out = run(ids, values)
            return out.indices, out.values

        ranks = P(group.axis_name)
        specs = (ranks, ranks) if sharded else (P(), P())
        mapped = jax.shard_map(rows, mesh=group.mesh, in_specs=ranks, out_specs=specs, check_vma=check_vma)

        def loss(values: jax.Array, ids: jax.Array) -> jax.Array:
            indices, summed = mapped(ids, values)
            return jnp.sum(jnp.asarray(weights).at[indices].get(mode="fill", fill_value=0) * summed)

        actual = helpers.fetch(jax.jit(jax.grad(loss))(values.reshape(-1, WIDTH), ids.reshape(-1)))
    np.testing.assert_allclose(actual.reshape(values.shape), cases.gradient(ids, weights, op), rtol=1e-5, atol=1e-6)


def test_grad_inside_shard_map_without_vma(
    implementation: Implementation, group: Group, rng: np.random.Generator
) -> None:
    """Where every rank has a loss of its own of the replicated result, the gradient is that of their sum."""
    ids = cases.zipf(rng, SIZE, ENTRIES, ROWS)
    values = cases.draw_values(rng, ids, WIDTH)
    weights = rng.standard_normal((SIZE, ROWS, WIDTH)).astype(np.float32)
    run = cases.reduced(group, ROWS, capacity=64, implementation=implementation)

    def gradient(ids: jax.Array, values: jax.Array, weights: jax.Array) -> jax.Array:
        def loss(values: jax.Array) -> jax.Array:
            out = run(ids, values)
            return jnp.sum(weights[0].at[out.indices].get(mode="fill", fill_value=0) * out.values)

        return jax.grad(loss)(values)

    mapped = jax.shard_map(gradient, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    actual = helpers.fetch(jax.jit(mapped)(ids.reshape(-1), values.reshape(-1, WIDTH), weights))
    wanted = cases.gradient(ids, weights.sum(axis=0), "sum")
    np.testing.assert_allclose(actual.reshape(values.shape), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrap", ["checkpoint", "scan"])
def test_transformed(wrap: str, implementation: Implementation, group: Group, rng: np.random.Generator) -> None:
    """The loss is not linear: the sum of squares of the summed table."""
    ids = cases.zipf(rng, SIZE, ENTRIES, ROWS)
    values = cases.draw_values(rng, ids, WIDTH)
    run = cases.reduced(group, ROWS, capacity=64, implementation=implementation)

    def squares(ids: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.sum(run(ids, values).values ** 2)

    def body(ids: jax.Array, values: jax.Array) -> jax.Array:
        if wrap == "checkpoint":
            return 2 * jax.checkpoint(squares)(ids, values)  # pyright: ignore[reportPrivateImportUsage]
        return jax.lax.scan(lambda total, _: (total + squares(ids, values), None), jnp.zeros(()), length=2)[0]

    mapped = jax.shard_map(body, mesh=group.mesh, in_specs=P("ep"), out_specs=P())
    actual = helpers.fetch(jax.jit(jax.grad(mapped, argnums=1))(ids.reshape(-1), values.reshape(-1, WIDTH)))
    table = np.zeros((ROWS, WIDTH))
    np.add.at(table, ids.reshape(-1), values.reshape(-1, WIDTH))
    np.testing.assert_allclose(actual.reshape(values.shape), 4 * table[ids], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_dropped_rows_have_no_gradient(
    sharded: bool, implementation: Implementation, group: Group, rng: np.random.Generator
) -> None:
    ids = cases.identical(rng, SIZE, ENTRIES, ROWS)
    values = cases.draw_values(rng, ids, WIDTH)
    options: dict[str, Any] = {"capacity": 3, "sharded": sharded, "on_overflow": "drop"}
    run = cases.reduced(group, ROWS, implementation=implementation, **options)
    spec = P("ep") if sharded else P()
    mapped = jax.shard_map(lambda i, v: run(i, v).values, mesh=group.mesh, in_specs=P("ep"), out_specs=spec)
    gradient = jax.jit(jax.grad(lambda v, i: jnp.sum(mapped(i, v)) * 2))
    actual = helpers.fetch(gradient(values.reshape(-1, WIDTH), ids.reshape(-1)))
    kept = cases.expected(ids, values, num_rows=ROWS, capacity=3, sharded=sharded).indices
    wanted = np.where(np.isin(ids, kept), 2.0, 0.0)
    np.testing.assert_array_equal(actual.reshape(values.shape), np.broadcast_to(wanted[..., None], values.shape))
