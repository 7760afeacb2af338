"""Axes that are left to the compiler, equal sub-meshes, meshes without devices, with further axes, or in another order;
test_matrix.py has groups over two axes, and operands that are the same on all ranks."""

import re
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import OpenGroup, Rng
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from mismatch_cases import dispatched, exchanged, multiplied

from jax_ep import Group, Implementation, dispatch
from jax_ep.lax import ragged_all_to_all

EXPERTS, TOKENS, TOP_K, HIDDEN, SIZE = 8, 5, 2, 16, 4
BOTH = ("context", "expert")


def over(mesh: Mesh, axes: Any, **options: Any) -> Group:
    return Group(mesh, axes, timeout=30, **options)


def drawn(rng: Rng, size: int) -> helpers.Case:
    return helpers.draw_case(rng, size, TOKENS, TOP_K, EXPERTS, HIDDEN)


def test_a_tuple_of_one_axis_is_that_axis(implementation: Implementation) -> None:
    rows, indices = np.zeros((SIZE * 3, 2), np.float32), np.zeros(SIZE * SIZE, np.int32)
    with over(helpers.mesh_of(ep=SIZE), ("ep",)) as group:
        assert group.axis_name == "ep"
        for axes in ("ep", ("ep",)):
            body = partial(ragged_all_to_all, axis_name=axes, implementation=implementation)
            program = helpers.sharded(group.mesh, body, P(axes), P(axes))
            np.testing.assert_array_equal(helpers.fetch(program(rows, rows, *[indices] * 4)), rows)


@pytest.mark.parametrize(
    ("axes", "error", "match"),
    [
        (("context", "tp"), ValueError, r"axis_name must name axes of the mesh, .*, got \('context', 'tp'\)"),
        (("expert", "expert"), ValueError, r"axis_name must name each axis once, got \('expert', 'expert'\)"),
        ((), TypeError, "axis_name must be an axis of the mesh or a tuple of axes, got tuple"),
        (5, TypeError, "axis_name must be an axis of the mesh or a tuple of axes, got int"),
    ],
)
def test_wrong_axes(axes: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"^Group: {match}"):
        Group(helpers.mesh_of(context=1, expert=1), axes)


def test_axes_left_to_the_compiler(implementation: Implementation, rng: Rng) -> None:
    """No type says how they shard an operand, so they are refused; a shard_map inside over them says it."""
    mesh = helpers.mesh_of(dp=2, ep=2)
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    cases = [drawn(rng, 2) for _ in range(2)]
    operands = [np.concatenate(np.stack(x, axis=1).reshape(2, 2 * TOKENS, -1)) for x in zip(*cases, strict=True)]
    with over(mesh, "ep") as group:
        both = helpers.round_trip(group, num_experts=EXPERTS, implementation=implementation)

        def partly(body: Any) -> Any:
            return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"}))

        way_out = r"a second jax\.shard_map inside, with axis_names={'dp'}.*; for a gradient both need check_vma=False"
        with pytest.raises(
            ValueError, match=rf"^dispatch: every mesh axis must be manual .*\['dp'\] are not: .*{way_out}"
        ):
            jax.eval_shape(partly(both), *operands)

        def nested(*here: jax.Array) -> Any:
            return jax.shard_map(both, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})(*here)

        results = helpers.fetch(partly(nested)(*operands))
    for index, case in enumerate(cases):
        actual: Any = jax.tree.map(lambda x, i=index: x.reshape(2, 2, -1, *x.shape[1:])[:, i], results)
        helpers.assert_round_trip(actual, case, num_experts=EXPERTS)


def test_equal_sub_meshes(implementation: Implementation, rng: Rng) -> None:
    """Types cannot tell them apart, so a call of the lax op names its group."""
    devices = helpers.mesh_of(ep=SIZE).devices
    halves = [Mesh(devices[i : i + 2], ("ep",)) for i in (0, 2)]
    slices = oracle.Slices(
        *(np.array(x, np.int32) for x in ([[0, 1]] * 2, [[1, 1]] * 2, [[0, 0], [1, 1]], [[1, 1]] * 2))
    )
    rows = rng.standard_normal((2, 2, 3)).astype(np.float32)
    with over(halves[0], "ep") as first, over(halves[1], "ep") as second:

        def exchange(mesh: Mesh, group: Group | None) -> Any:
            def body(rows: jax.Array, *slices: jax.Array) -> jax.Array:
                options: dict[str, Any] = {"axis_name": "ep", "group": group, "implementation": implementation}
                return ragged_all_to_all(rows, jnp.zeros_like(rows), *slices, **options)

            return helpers.per_rank(body, mesh)

        for mesh, group in zip(halves, (first, second), strict=True):
            actual = helpers.fetch(exchange(mesh, group)(rows, *slices))
            np.testing.assert_array_equal(actual, oracle.ragged_all_to_all(rows, np.zeros_like(rows), slices))
        with pytest.raises(ValueError, match=r"^ragged_all_to_all: 2 open jax_ep\.Groups .* or pass group="):
            jax.eval_shape(exchange(halves[0], None), rows, *slices)
        if implementation == "kernels":
            with pytest.raises(ValueError, match=r"^ragged_all_to_all: the devices of jax\.shard_map must be"):
                exchange(halves[1], first).lower(rows, *slices)


def test_a_mesh_without_devices(implementation: Implementation, rng: Rng) -> None:
    """A shard_map over an AbstractMesh finds the group by its axes and sizes."""
    case, mesh, indices = drawn(rng, SIZE), helpers.mesh_of(ep=SIZE), np.zeros((SIZE, SIZE), np.int32)
    with pytest.raises(TypeError, match=r"^Group: mesh must have devices, got an AbstractMesh"):
        Group(mesh.abstract_mesh, "ep")  # pyright: ignore[reportArgumentType]
    with over(mesh, "ep") as group, jax.set_mesh(mesh):
        both = helpers.round_trip(group, num_experts=EXPERTS, implementation=implementation)
        exchange = partial(ragged_all_to_all, axis_name="ep", implementation=implementation)
        abstract: Any = mesh.abstract_mesh
        results = helpers.fetch(helpers.per_rank(both, abstract)(*case))
        same = helpers.fetch(helpers.per_rank(exchange, abstract)(case.tokens, case.tokens, *[indices] * 4))
    np.testing.assert_array_equal(same, case.tokens)
    helpers.assert_round_trip(results, case, num_experts=EXPERTS)


MESHES: list[tuple[dict[str, int], Any]] = [
    *(({"dp": 2, "ep": 4}, "ep"), ({"ep": 2, "dp": 2}, "ep"), ({"ep": 4, "dp": 2}, "ep")),
    ({"dp": 2, "ep": 2, "tp": 2}, "ep"),
    *(({"data": lines, "context": 2, "expert": 2}, axes) for lines, axes in ((1, BOTH), (2, BOTH), (2, BOTH[::-1]))),
]


@pytest.mark.parametrize(("shape", "axes"), MESHES, ids=str)
def test_one_group_for_each_line(shape: dict[str, int], axes: Any, implementation: Implementation, rng: Rng) -> None:
    """Ranks are numbered as `jax.lax.axis_index` does, and `PartitionSpec`: the last axis of a tuple runs fastest.

    They follow the mesh, and not the ids of the devices, which are in another order here.
    """
    mesh, names = Mesh(helpers.mesh_of(**shape).devices[::-1], list(shape)), list(shape)
    along = [names.index(axis) for axis in ([axes] if isinstance(axes, str) else axes)]
    order = [*(i for i in range(len(names)) if i not in along), *along]  # of lines, then of ranks
    with over(mesh, axes) as group:
        assert (group.axis_name, group.size) == (axes, np.prod([mesh.devices.shape[i] for i in along]))
        program = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation=implementation)
        count = mesh.size // group.size
        lines = [drawn(rng, group.size) for _ in range(count)]

        def spread(*ranks: np.ndarray) -> np.ndarray:  # [R, ...] of each line -> the mesh's axes in front
            by_axis = np.concatenate(ranks).reshape(*(mesh.devices.shape[i] for i in order), *ranks[0].shape[1:])
            return by_axis.transpose(*np.argsort(order), *range(len(order), by_axis.ndim))

        results = helpers.fetch(program(*map(spread, *lines)))

    def line(x: np.ndarray, index: int) -> np.ndarray:
        by_axis = x.transpose(*order, *range(len(order), x.ndim))
        return by_axis.reshape(count, group.size, *x.shape[len(order) :])[index]

    for index, case in enumerate(lines):
        actual: Any = jax.tree.map(lambda x, index=index: line(x, index), results)
        helpers.assert_round_trip(actual, case, num_experts=EXPERTS)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("op", "gradient"), [(dispatched, False), (dispatched, True), (exchanged, False), (multiplied, False)]
)
def test_devices_in_another_order(op: Any, gradient: bool, open_group: OpenGroup) -> None:
    """No type tells them apart, so nothing would, until results are wrong: refused when the op is lowered."""
    group, x = open_group(2), jnp.zeros((2, 8, 16), jnp.bfloat16)
    other = Mesh(group.mesh.devices[::-1], group.mesh.axis_names)
    body = jax.grad(lambda x: op(group, x).sum()) if gradient else partial(op, group)
    jax.jit(helpers.per_rank(body, group.mesh)).lower(x)
    here, wanted = ([device.id for device in mesh.devices.flat] for mesh in (other, group.mesh))
    name = {exchanged: "ragged_all_to_all", multiplied: "matmul_all_reduce"}.get(op, "dispatch")
    message = f"{name}: the devices of jax.shard_map must be the group's in this order, {wanted}, got {here}"
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.jit(helpers.per_rank(body, other)).lower(x)


def test_axes_in_another_order_are_refused(open_group: OpenGroup) -> None:
    """Axes and sizes are equal, but ranks would be other devices than the group takes them for."""
    group, other = open_group(mesh=helpers.mesh_of(dp=2, ep=4)), helpers.mesh_of(ep=4, dp=2)
    tokens, ids = np.zeros((4, 2, TOKENS, HIDDEN), np.float32), np.zeros((4, 2, TOKENS, TOP_K), np.int32)
    route = partial(dispatch, group=group, num_experts=EXPERTS)
    with pytest.raises(ValueError, match=r"^dispatch: the mesh .* order, {'dp': 2, 'ep': 4}, got {'ep': 4, 'dp': 2}"):
        jax.eval_shape(helpers.per_rank(route, other), tokens, ids)
    rows, indices = np.zeros((4, 2, 6, 3), np.float32), np.zeros((4, 2, 4), np.int32)
    exchange = partial(ragged_all_to_all, axis_name="ep")
    with pytest.raises(ValueError, match=r"^ragged_all_to_all: no open .* of a mesh {'ep': 4, 'dp': 2}"):
        jax.eval_shape(helpers.per_rank(exchange, other), rows, rows, *[indices] * 4)
