"""dispatch over nodes, and layers, of nothing; and ids that no table has. test_dispatch.py has dispatch in one node."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_cases as cases
from helpers import Rng
from nodes_cases import over

from jax_ep import Group, Implementation, NodeOptions, SparseRows, sparse_all_reduce

SIZE, EXPERTS = 2, 4

Shape = tuple[int, int, int]  # T, K, H


@pytest.mark.parametrize(
    ("shape", "capacity", "wire"), [((0, 2, 128), None, "float8"), ((3, 0, 128), 2, "float8"), ((3, 2, 0), 2, None)]
)
def test_nothing_over_nodes(shape: Shape, capacity: Any, wire: Any, implementation: Implementation, rng: Rng) -> None:
    tokens, top_k, hidden = shape
    options: dict[str, Any] = {"implementation": implementation, "wire": wire, "on_overflow": "drop"}

    def body(*larger: jax.Array) -> Any:
        rows, ids, weights = larger[0][:tokens, :hidden], larger[1][:tokens, :top_k], larger[2][:tokens, :top_k]
        both = helpers.round_trip(group, num_experts=EXPERTS, **options)
        return jax.grad(lambda rows, weights: jnp.sum(both(rows, ids, weights)[1]), (0, 1))(rows, weights)

    with over(2, SIZE, nodes=NodeOptions(capacity)) as group:
        # Emptied inside: jaxlib 0.10 and 0.11 may fail, or crash, when they compile a shard_map with empty operands.
        case = helpers.draw_case(rng, group.size, tokens=5, top_k=2, experts=EXPERTS, hidden=128)
        found = helpers.run(group, body, *helpers.on_mesh(group.mesh, case))
        group.check()
    assert [x.shape[2:] for x in found] == [(tokens, hidden), (tokens, top_k)]
    assert not any(map(np.any, found))


@pytest.mark.parametrize(
    ("axes", "options", "remat"),
    [
        *(({"ep": 2}, options, False) for options in ({}, {"capacity": 4, "wire": "float8"})),
        ({"node": 2, "ep": 2}, {"capacity": 4}, False),
        *((axes, {}, True) for axes in ({"ep": 2}, {"node": 2, "ep": 2})),
    ],
    ids=str,
)
@pytest.mark.usefixtures("native")
def test_layers_without_tokens(
    axes: dict[str, int], options: dict[str, Any], remat: bool, implementation: Implementation
) -> None:
    """Forward, and differentiated; also under `jax.checkpoint` around a `jax.shard_map` that cuts its tokens. No
    overflow is left to report."""
    on_cpu = jax.default_backend() == "cpu"
    if not on_cpu and (remat or not options):
        pytest.skip("XLA:GPU ends the process while it compiles this (jax 0.11.2)")
    mesh, spec = helpers.mesh_of(**axes), jax.P(tuple(axes))
    with Group(mesh, tuple(axes), across_nodes=len(axes) > 1, nodes=NodeOptions(chunks=2)) as group:

        def sums(tokens: jax.Array, weights: jax.Array, ids: jax.Array, *matrices: jax.Array) -> jax.Array:
            by: dict[str, Any] = {"group": group, "implementation": implementation}
            out = helpers.moe_sums(tokens[:0], ids[:0], weights[:0], *matrices, **by, **options)
            return out if on_cpu else jnp.pad(out, ((0, 1), (0, 0)))  # XLA:GPU may crash on empty results, too

        mapped = jax.shard_map(sums, mesh=mesh, in_specs=spec, out_specs=spec)
        if remat:
            mapped = jax.checkpoint(mapped)  # pyright: ignore[reportPrivateImportUsage]
        derived = jax.value_and_grad(lambda *x: jnp.sum(mapped(*x) ** 2), (0, 1, 3, 4, 5))
        rows = 0 if on_cpu and not remat else 3 * group.size  # XLA:GPU may crash on a shard_map of empty operands
        shapes = [(rows, 128), (rows, 2), *[(EXPERTS, 128, 128)] * 3]
        operands: list[Any] = [np.ones(shape, np.float32) for shape in shapes]
        operands.insert(2, np.zeros((rows, 2), np.int32))
        lowered = jax.jit(lambda *x: (mapped(*x), *derived(*x))).lower(*operands)
        assert "callback" not in lowered.as_text()
        out, value, gradients = helpers.fetch(lowered.compile()(*operands))
        group.check()
    assert out.shape == (0 if on_cpu else group.size, 128)
    assert not any(map(np.any, (out, value, *gradients)))
    assert [x.shape for x in gradients] == shapes


@pytest.mark.matrix(1)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA:GPU ends the process while it compiles this")
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (4, 0)])
@pytest.mark.parametrize("activation", ["gelu", "clamped_swiglu"])
def test_types_without_rows(
    activation: Any, tokens: int, top_k: int, shared: bool, implementation: Implementation, group: Group
) -> None:
    """JAX gives some results of empty operands a type that varies over no axis, and then rejects their cotangents."""
    rows = jax.P() if shared else jax.P("ep")
    ids = np.zeros((tokens * group.size, top_k), np.int32)

    def sums(tokens: jax.Array, weights: jax.Array, ids: jax.Array, *experts: jax.Array) -> jax.Array:
        by: dict[str, Any] = {"group": group, "implementation": implementation, "shared_tokens": shared}
        unit: dict[str, Any] = {"biases": experts[3:], "activation": activation}
        return helpers.moe_sums(tokens, ids, weights, *experts[:3], **by, **unit)

    specs = (rows, rows, rows, *[jax.P("ep")] * 6)
    mapped = jax.shard_map(sums, mesh=group.mesh, in_specs=specs, out_specs=rows)
    shapes = [(len(ids), 16), ids.shape, *[(EXPERTS, 16, 16)] * 3, *[(EXPERTS, 16)] * 3]
    operands: list[Any] = [np.ones(shape, np.float32) for shape in shapes]
    operands.insert(2, ids)
    gradient = jax.grad(lambda *x: jnp.sum(mapped(*x) ** 2), (0, 1, *range(3, 9)))
    assert [x.shape for x in jax.eval_shape(gradient, *operands)] == shapes
    if not shared or tokens:  # XLA does not compile a shard_map of empty operands alone
        assert not any(map(np.any, helpers.fetch(jax.jit(gradient)(*operands))))


@pytest.mark.parametrize("sharded", [False, True])
def test_constant_ids_beyond_32_bits(sharded: bool, implementation: Implementation, group: Group) -> None:
    """They are numpy's, which jax would cut to 32 bits without a word."""
    ids, values = np.array([2**32, 2, 2**32 + 1, -(2**32)]), np.ones((4, 3), np.float32)

    def body(anything: jax.Array) -> Any:
        rows = SparseRows(ids, values + anything, jnp.int32(4), 33)  # pyright: ignore[reportArgumentType]
        options: dict[str, Any] = {"capacity": 8, "sharded": sharded, "implementation": implementation}
        found = sparse_all_reduce(rows, group=group, **options)
        return helpers.vary(found.todense()), helpers.vary(found.ignored)

    dense, ignored = helpers.run(group, body, np.zeros(group.size, np.float32))
    np.testing.assert_array_equal(
        dense.sum(0) if sharded else dense[0], group.size * (np.arange(33) == 2)[:, None] * np.ones(3)
    )
    assert set(ignored) == {3 * group.size}


@pytest.mark.matrix
@pytest.mark.parametrize("count", [0, -1, -helpers.BIG, 3, 8, helpers.BIG])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_ids_and_counts_beyond_all(
    count: int, dtype: Any, sharded: bool, implementation: Implementation, group: Group, rng: Rng
) -> None:
    """Ids of 64 bits must not wrap around to those of rows, and a count no array has counts what there is."""
    num_rows, entries, info = 33, 8, np.iinfo(dtype)
    strange = [info.min, info.min + 1, -1, num_rows, num_rows + 1, info.max - 1, info.max]
    strange += [2**31, 2**32, 2**32 + 1, -(2**32), -(2**32) + 1] if dtype is np.int64 else []
    ids = rng.integers(0, num_rows, (SIZE, entries)).astype(dtype)
    ids[:, ::2] = rng.choice(np.array(strange, dtype), (SIZE, entries // 2))
    values = cases.draw_values(rng, ids, 3)

    def body(ids: jax.Array, values: jax.Array) -> SparseRows:
        rows = SparseRows(ids, values, jnp.int32(count), num_rows)
        return sparse_all_reduce(rows, group=group, capacity=20, sharded=sharded, implementation=implementation)

    with jax.enable_x64(True):
        actual = helpers.run(group, body, ids, values)
    counted = max(0, min(count, entries))
    wanted = cases.expected(ids[:, :counted], values[:, :counted], num_rows=num_rows, capacity=20, sharded=sharded)
    assert actual.indices.dtype == dtype
    cases.assert_reduced(actual, wanted, np.float32)
