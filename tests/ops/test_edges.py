"""dispatch and combine of nothing: no tokens, no experts chosen, no values in a row; and ids that no table has."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_cases as cases
from helpers import Rng
from nodes_cases import over

from jax_ep import Group, Implementation, NodeOptions, SparseRows, dispatch, sparse_all_reduce
from jax_ep.ops.moe import settings

SIZE, EXPERTS = 2, 4

Shape = tuple[int, int, int]  # T, K, H


FLOAT8: dict[str, Any] = {"wire": "float8"}
DROP: dict[str, Any] = {"on_overflow": "drop"}
NOTHING: list[tuple[Shape, dict[str, Any]]] = [
    *((shape, {}) for shape in ((0, 2, 16), (5, 0, 16), (5, 2, 0), (0, 0, 0))),
    *((shape, FLOAT8) for shape in ((0, 2, 128), (0, 2, 0), (5, 2, 0), (5, 0, 128))),
    ((0, 2, 16), {"capacity": 4}),
    ((0, 2, 128), FLOAT8 | DROP | {"nodes": NodeOptions()}),
    ((3, 0, 128), FLOAT8 | DROP | {"nodes": NodeOptions(2)}),
    ((3, 2, 0), DROP | {"nodes": NodeOptions(2)}),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("shape", "options"), NOTHING, ids=str)
def test_nothing(shape: Shape, options: dict[str, Any], implementation: Implementation, rng: Rng) -> None:
    tokens, top_k, hidden = shape
    options = dict(options)
    nodes = options.pop("nodes", None)

    def body(*larger: jax.Array) -> Any:
        rows, ids, weights = larger[0][:tokens, :hidden], larger[1][:tokens, :top_k], larger[2][:tokens, :top_k]

        def both(rows: jax.Array, weights: jax.Array) -> Any:
            by: dict[str, Any] = {"num_experts": EXPERTS, "implementation": implementation}
            found = helpers.round_trip(group, **by, **options)(rows, ids, weights)
            return jnp.sum(found[1]), found

        return jax.value_and_grad(both, (0, 1), has_aux=True)(rows, weights)

    with over(2, SIZE, nodes=nodes) if nodes else Group(helpers.mesh_of(ep=SIZE), "ep") as group:
        # Emptied inside: jaxlib 0.10 and 0.11 may fail, or crash, when they compile a shard_map with empty operands.
        case = helpers.draw_case(rng, group.size, tokens=5, top_k=2, experts=EXPERTS, hidden=128)
        (_, actual), gradients = helpers.run(group, body, *helpers.on_mesh(group.mesh, case))
        group.check()
    case = helpers.Case(case.tokens[:, :tokens, :hidden], *(x[:, :tokens, :top_k] for x in case[1:]))
    if nodes is None:
        helpers.assert_round_trip(actual, case, num_experts=EXPERTS)
    for gradient, operand in zip(gradients, (case.tokens, case.weights), strict=True):
        np.testing.assert_array_equal(gradient.reshape(operand.shape), np.zeros_like(operand))


@pytest.mark.parametrize("shape", [(5, 0, 16), (0, 2, 16), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("options", [{}, {"expand": False}, {"alignment": 8}], ids=str)
def test_nothing_on_one_gpu(shape: Shape, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, rng: Rng) -> None:
    """What a group of one GPU does, on the CPU: nothing is exchanged."""
    monkeypatch.setattr("test_edges.SIZE", 1)
    monkeypatch.setattr(settings, "is_alone_on_gpu", lambda group: True)
    test_nothing(shape, options, "kernels", rng)


@pytest.mark.parametrize(
    ("shape", "options"),
    [({"ep": 2}, {}), ({"ep": 2}, {"capacity": 4, "wire": "float8"}), ({"node": 2, "ep": 2}, {"capacity": 4})],
    ids=["default", "float8", "nodes"],
)
@pytest.mark.usefixtures("native")
def test_layers_without_tokens(shape: dict[str, int], options: dict[str, Any], implementation: Implementation) -> None:
    """Forward, and differentiated; `test_nothing` has the ops."""
    mesh, here = helpers.mesh_of(**shape), tuple(shape.values())
    with Group(mesh, tuple(shape), across_nodes=len(shape) > 1, nodes=NodeOptions(chunks=2)) as group:
        by: dict[str, Any] = {"group": group, "implementation": implementation}

        def sums(tokens: jax.Array, weights: jax.Array, ids: jax.Array, *matrices: jax.Array) -> jax.Array:
            return helpers.moe_sums(tokens, ids, weights, *matrices, **by, **options)

        def both(*operands: jax.Array) -> Any:
            derived = jax.value_and_grad(lambda *x: jnp.sum(sums(*x)), (0, 1, 3, 4, 5))
            return sums(*operands), *derived(*operands)

        shapes = [(0, 128), (0, 2), *[(EXPERTS // group.size, 128, 128)] * 3]
        operands: list[Any] = [np.ones((*here, *shape), np.float32) for shape in shapes]
        operands.insert(2, np.zeros((*here, 0, 2), np.int32))
        found = helpers.fetch(helpers.per_rank(both, mesh)(*operands))
        group.check()
    assert found[0].shape == (*here, 0, 128)
    assert not any(np.any(x) for x in jax.tree.leaves(found))
    assert [x.shape for x in found[2]] == [x.shape for x in operands if x.dtype == np.float32]


@pytest.mark.parametrize("shape", [{"ep": 2}, {"node": 2, "ep": 2}], ids=str)
@pytest.mark.usefixtures("native")
def test_rematerialized_layers_without_tokens(shape: dict[str, int], implementation: Implementation, rng: Rng) -> None:
    """`jax.checkpoint` around a `jax.shard_map` that cuts its tokens. No overflow is left to report."""
    if jax.default_backend() != "cpu":
        pytest.skip("XLA:GPU ends the process while it compiles this (jax 0.11.2)")
    mesh = helpers.mesh_of(**shape)
    with Group(mesh, tuple(shape), across_nodes=len(shape) > 1) as group:

        def sums(tokens: jax.Array, ids: jax.Array, weights: jax.Array, *matrices: jax.Array) -> jax.Array:
            by: dict[str, Any] = {"group": group, "implementation": implementation}
            return helpers.moe_sums(tokens[:0], ids[:0], weights[:0], *matrices, **by)

        spec = jax.P(tuple(shape))
        kept = jax.checkpoint(  # pyright: ignore[reportPrivateImportUsage]
            jax.shard_map(sums, mesh=mesh, in_specs=spec, out_specs=spec)
        )

        def loss(tokens: jax.Array, weights: jax.Array, ids: jax.Array, *matrices: jax.Array) -> jax.Array:
            return jnp.sum(kept(tokens, ids, weights, *matrices) ** 2)

        case = helpers.draw_case(rng, group.size, 3, 2, EXPERTS, 16)
        tokens, ids, weights = (x.reshape(-1, x.shape[-1]) for x in case)
        matrices = [rng.standard_normal((EXPERTS, 16, 16)).astype(np.float32) for _ in range(3)]
        lowered = jax.jit(jax.grad(loss, (0, 1, 3, 4, 5))).lower(tokens, weights, ids, *matrices)
        assert "callback" not in lowered.as_text()
        assert not any(np.any(x) for x in lowered.compile()(tokens, weights, ids, *matrices))
        group.check()


def test_float8_rows_of_no_tokens(implementation: Implementation, group: Group, rng: Rng) -> None:

    def body(tokens: jax.Array, ids: jax.Array) -> Any:
        options: dict[str, Any] = {"wire": "float8_rows", "capacity": 4}
        return dispatch(tokens[:0], ids[:0], group=group, num_experts=EXPERTS, implementation=implementation, **options)

    case = helpers.draw_case(rng, SIZE, tokens=1, top_k=2, experts=EXPERTS, hidden=256)
    rows = helpers.run(group, body, case.tokens, case.ids).rows
    np.testing.assert_array_equal(rows.values.astype(np.float32), np.zeros((SIZE, 4, 256)))
    np.testing.assert_array_equal(rows.scales, np.zeros((SIZE, 4, 2)))


@pytest.mark.matrix
@pytest.mark.parametrize("count", [0, -1, -helpers.BIG, 3, 8, helpers.BIG])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_ids_and_counts_beyond_all(
    count: int, dtype: Any, sharded: bool, implementation: Implementation, group: Group, rng: Rng
) -> None:
    """Ids of 64 bits must not wrap around to those of rows, and a count no array has counts what there is."""
    num_rows, entries = 33, 8
    info = np.iinfo(dtype)
    strange = [info.min, info.min + 1, -1, num_rows, num_rows + 1, info.max - 1, info.max]
    if dtype is np.int64:
        strange += [2**31, 2**32, 2**32 + 1, -(2**32), -(2**32) + 1]
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
