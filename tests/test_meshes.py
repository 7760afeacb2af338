"""Meshes with further axes, and operands that do not vary over every axis."""

import re
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import OpenGroup
from jax.sharding import Mesh, PartitionSpec as P

from jax_ep import Implementation, combine, dispatch, matmul_all_reduce
from jax_ep.lax import ragged_all_to_all

EXPERTS, TOKENS, TOP_K, HIDDEN = 8, 5, 2, 16
MESHES: list[dict[str, int]] = [{"dp": 2, "ep": 4}, {"ep": 2, "dp": 2}, {"ep": 4, "dp": 2}, {"dp": 2, "ep": 2, "tp": 2}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_one_group_for_each_line(
    axes: dict[str, int], implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    mesh = helpers.mesh_of(**axes)
    group = open_group(mesh=mesh)
    program = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation=implementation)
    size, place = axes["ep"], list(axes).index("ep")
    lines = [helpers.draw_case(rng, size, TOKENS, TOP_K, EXPERTS, HIDDEN) for _ in range(mesh.size // size)]
    others = [axes[name] for name in axes if name != "ep"]

    def spread(*ranks: np.ndarray) -> np.ndarray:  # one array [R, ...] a line -> the mesh's axes in front
        return np.moveaxis(np.stack(ranks).reshape(*others, *ranks[0].shape), len(others), place)

    def line(x: np.ndarray, index: int) -> np.ndarray:
        return np.moveaxis(x, place, len(others)).reshape(-1, size, *x.shape[len(axes) :])[index]

    results = helpers.fetch(program(*(spread(*operand) for operand in zip(*lines, strict=True))))
    for index, case in enumerate(lines):
        actual: Any = jax.tree.map(lambda x, index=index: line(x, index), results)
        helpers.assert_round_trip(actual, case, num_experts=EXPERTS)


def test_ranks_follow_the_mesh_not_the_device_ids(
    implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    size = min(4, helpers.largest_size())
    mesh = Mesh(np.array(jax.devices()[: -size - 1 : -1]), ("ep",))
    program = helpers.dispatch_combine(open_group(mesh=mesh), num_experts=EXPERTS, implementation=implementation)
    case = helpers.draw_case(rng, size, TOKENS, TOP_K, EXPERTS, HIDDEN)
    helpers.assert_round_trip(helpers.fetch(program(*case)), case, num_experts=EXPERTS)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("op", ["dispatch", "the gradient of dispatch", "ragged_all_to_all", "matmul_all_reduce"])
def test_devices_in_another_order(op: str, open_group: OpenGroup) -> None:
    """No type tells them apart, so nothing would, until results are wrong: refused when the op is lowered."""
    group = open_group(2)
    other = Mesh(group.mesh.devices[::-1], group.mesh.axis_names)
    tokens, ids = jnp.zeros((2, 8, 16), jnp.bfloat16), jnp.zeros((2, 8, 2), jnp.int32)

    def routed(tokens: jax.Array, ids: jax.Array) -> jax.Array:
        return dispatch(tokens, ids, group=group, num_experts=EXPERTS, implementation="ffi").rows

    def exchanged(tokens: jax.Array, ids: jax.Array) -> jax.Array:
        return ragged_all_to_all(tokens, tokens, *[ids[:2, 0]] * 4, axis_name="ep")

    def multiplied(tokens: jax.Array, ids: jax.Array) -> jax.Array:
        return matmul_all_reduce(tokens, tokens.T, group=group, implementation="ffi")

    bodies: dict[str, Any] = {
        "dispatch": routed,
        "the gradient of dispatch": jax.grad(lambda tokens, ids: routed(tokens, ids).sum()),
        "ragged_all_to_all": exchanged,
        "matmul_all_reduce": multiplied,
    }
    jax.jit(helpers.per_rank(bodies[op], group.mesh)).lower(tokens, ids)
    here, wanted = ([device.id for device in mesh.devices.flat] for mesh in (other, group.mesh))
    message = f"{op.split()[-1]}: the devices of this jax.shard_map are {here}, the group's are {wanted}"
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.jit(helpers.per_rank(bodies[op], other)).lower(tokens, ids)


@pytest.mark.matrix
@pytest.mark.parametrize("axes", [{"ep": 4}, {"dp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("unvarying", ["tokens", "ids", "weights", "tokens ids weights"])
def test_operands_equal_on_all_ranks(
    unvarying: str,
    axes: dict[str, int],
    implementation: Implementation,
    open_group: OpenGroup,
    rng: np.random.Generator,
) -> None:
    """`check_vma=True` knows them as unvarying; values and gradients are those of operands that are repeated."""
    mesh = helpers.mesh_of(**axes)
    group = open_group(mesh=mesh)
    case = helpers.draw_case(rng, axes["ep"], TOKENS, TOP_K, EXPERTS, HIDDEN)._asdict()
    shared = unvarying.split()
    specs = {name: P() if name in shared else P("ep") for name in case}
    operands = {name: x[0] if name in shared else np.concatenate(x) for name, x in case.items()}

    def body(tokens: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
        out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, implementation=implementation)
        return combine(out.rows**2, out.routing, group=group, implementation=implementation)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(specs["tokens"], specs["weights"], specs["ids"]), out_specs=P(mesh.axis_names)
    )

    def loss(tokens: jax.Array, weights: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        combined = mapped(tokens, weights, ids)
        return combined.sum(), combined

    program = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (d_tokens, d_weights), combined = helpers.fetch(program(operands["tokens"], operands["weights"], operands["ids"]))

    repeated = {name: np.broadcast_to(x[:1], x.shape) if name in shared else x for name, x in case.items()}
    layout = oracle.dispatch(*repeated.values(), num_experts=EXPERTS, capacity=axes["ep"] * TOKENS * TOP_K)
    exact = oracle.combine(layout.rows**2, layout.targets, repeated["weights"])
    for line in combined.reshape(-1, *exact.shape):
        np.testing.assert_allclose(line, exact, rtol=1e-5, atol=1e-6)

    copies = mesh.size // axes["ep"]
    total = repeated["weights"].sum(axis=2, keepdims=True)
    exact_d_tokens = copies * 2 * repeated["tokens"] * total
    exact_d_weights = np.broadcast_to(
        copies * (repeated["tokens"] ** 2).sum(axis=2, keepdims=True), repeated["weights"].shape
    )
    for name, actual, wanted in (("tokens", d_tokens, exact_d_tokens), ("weights", d_weights, exact_d_weights)):
        summed = wanted.sum(axis=0) if name in shared else np.concatenate(wanted)
        np.testing.assert_allclose(actual, summed, rtol=1e-5, atol=1e-5)


def test_axes_in_another_order_are_refused(open_group: OpenGroup) -> None:
    """Axes and sizes are equal, but ranks would be other devices than the group takes them for."""
    group, other = open_group(mesh=helpers.mesh_of(dp=2, ep=4)), helpers.mesh_of(ep=4, dp=2)
    tokens, ids = np.zeros((4, 2, TOKENS, HIDDEN), np.float32), np.zeros((4, 2, TOKENS, TOP_K), np.int32)
    route = partial(dispatch, group=group, num_experts=EXPERTS)
    with pytest.raises(ValueError, match=r"^dispatch: the mesh .* is {'ep': 4, 'dp': 2}, .* is {'dp': 2, 'ep': 4}"):
        jax.eval_shape(helpers.per_rank(route, other), tokens, ids)
    rows, indices = np.zeros((4, 2, 6, 3), np.float32), np.zeros((4, 2, 4), np.int32)
    exchange = partial(ragged_all_to_all, axis_name="ep")
    with pytest.raises(ValueError, match=r"^ragged_all_to_all: no open .* of a mesh {'ep': 4, 'dp': 2}"):
        jax.eval_shape(helpers.per_rank(exchange, other), rows, rows, *[indices] * 4)
