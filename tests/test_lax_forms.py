"""ragged_all_to_all where it stands for `jax.lax`'s: the cases of JAX's own tests of it, and its derivatives."""

import itertools
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import OpenGroup, Rng
from jax.sharding import Mesh
from test_lax import ROWS, draw_slices, exchange

from jax_ep import Group, Implementation
from jax_ep.lax import ragged_all_to_all

SIZE = 4


def draw_rows(rng: Rng, count: int, *leading: int) -> np.ndarray:
    return rng.standard_normal((count, *leading, ROWS, 3)).astype(np.float32)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "parts", [((0, 1), (2, 3)), ((3, 1), (0, 2)), ((0,), (1,), (2,), (3,)), ((2, 0, 3, 1),)], ids=str
)
@pytest.mark.parametrize("each", [1, 2])
def test_axis_index_groups(
    parts: tuple[tuple[int, ...], ...], each: int, implementation: Implementation, group: Group, rng: Rng
) -> None:
    """Each part exchanges as a group of its own would, its ranks in the order given."""
    of_part = len(parts[0])
    operand, output = draw_rows(rng, 2, SIZE)
    slices = oracle.Slices(*(np.zeros((SIZE, of_part * each), np.int32) for _ in range(4)))
    wanted = np.empty_like(output)
    for part in map(list, parts):
        own = draw_slices(rng, each, of_part)
        for whole, mine in zip(slices, own, strict=True):
            whole[part] = mine
        wanted[part] = oracle.ragged_all_to_all(operand[part], output[part], own)
    body = exchange(group, implementation, axis_index_groups=parts)
    np.testing.assert_array_equal(helpers.fetch(helpers.per_rank(body, group.mesh)(operand, output, *slices)), wanted)


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        (((0, 1), (2,)), "^ragged_all_to_all: axis_index_groups must have parts of equal size, got"),
        (((0, 1), (1, 2)), "^ragged_all_to_all: axis_index_groups must name each of the 4 ranks in one part, got"),
        (((0, 1),), "^ragged_all_to_all: axis_index_groups must name each of the 4 ranks in one part, got"),
    ],
)
def test_wrong_groups(parts: Any, match: str, group: Group) -> None:
    rows, indices = np.zeros((SIZE, 3)), np.zeros((SIZE, 4), np.int32)
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(
            helpers.per_rank(exchange(group, "xla", axis_index_groups=parts), group.mesh), rows, rows, *[indices] * 4
        )


def test_more_slices_than_a_mailbox_holds(group: Group) -> None:
    rows, indices = np.zeros((SIZE, 3)), np.zeros((SIZE, SIZE * 4097), np.int32)
    with pytest.raises(ValueError, match=r"^ragged_all_to_all: input_offsets must have at most 4096 .*, got 4097"):
        jax.eval_shape(helpers.per_rank(exchange(group, "xla"), group.mesh), rows, rows, *[indices] * 4)


@pytest.mark.parametrize("name", oracle.Slices._fields)
@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (jnp.zeros(3), "must be integer type."),
        (jnp.zeros((1, 3), jnp.int32), "must be rank 1 with positive dimension size, but got shape (1, 3)"),
        (jnp.zeros(0, jnp.int32), "must be rank 1 with positive dimension size, but got shape (0,)"),
    ],
)
def test_what_jax_refuses_is_refused_in_its_words(name: str, wrong: jax.Array, what: str) -> None:
    """Before anything is asked of the mesh, as there; and the very words of the installed jax."""
    slices: dict[str, Any] = {each: jnp.zeros(3, jnp.int32) for each in oracle.Slices._fields} | {name: wrong}
    said = []
    for op in (ragged_all_to_all, jax.lax.ragged_all_to_all):
        with pytest.raises(ValueError, match=r"^ragged_all_to_all \w+ must be") as caught:
            jax.jit(op, static_argnames="axis_name").lower(jnp.zeros(6), jnp.zeros(7), **slices, axis_name="x")
        said.append(str(caught.value))
    assert said == [f"ragged_all_to_all {name} {what}"] * 2


@pytest.mark.parametrize(
    "in_axes", [0, 1, (0, 0, None, None, None, None), (None, None, 0, 0, 0, 0), (0, None, 0, 0, 0, 0)], ids=str
)
def test_vmap(in_axes: Any, implementation: Implementation, group: Group, rng: Rng) -> None:
    batch = 3
    operands = [*draw_rows(rng, 2, SIZE, batch)]
    drawn = [draw_slices(rng, 2) for _ in range(batch)]
    operands += [np.stack(x, axis=1) for x in zip(*drawn, strict=True)]
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * 6
    given = [x[:, 0] if axis is None else np.moveaxis(x, 1, 1 + axis) for x, axis in zip(operands, axes, strict=True)]
    body = jax.vmap(exchange(group, implementation), in_axes=in_axes)
    actual = helpers.fetch(helpers.per_rank(body, group.mesh)(*given))
    for i in range(batch):
        each = (x[:, 0 if axis is None else i] for x, axis in zip(operands, axes, strict=True))
        operand, output, *slices = each
        np.testing.assert_array_equal(actual[:, i], oracle.ragged_all_to_all(operand, output, oracle.Slices(*slices)))


def test_vmap_of_parts(implementation: Implementation, group: Group, rng: Rng) -> None:
    """`jax.lax`'s own refuses a batch where there are axis_index_groups."""
    batch = 2
    operand, output = draw_rows(rng, 2, SIZE, batch)
    drawn = [[draw_slices(rng, 1, 2) for _ in range(batch)] for _ in range(2)]  # for each part
    slices = [
        np.concatenate([np.stack([each[name] for each in part], axis=1) for part in drawn])
        for name in range(len(oracle.Slices._fields))
    ]
    body = jax.vmap(exchange(group, implementation, axis_index_groups=((0, 1), (2, 3))))
    actual = helpers.fetch(helpers.per_rank(body, group.mesh)(operand, output, *slices))
    for i, (part, ranks) in itertools.product(range(batch), enumerate((slice(0, 2), slice(2, 4)))):
        wanted = oracle.ragged_all_to_all(operand[ranks, i], output[ranks, i], drawn[part][i])
        np.testing.assert_array_equal(actual[ranks, i], wanted)


def test_tangents(implementation: Implementation, group: Group, rng: Rng) -> None:
    """It is linear: a tangent goes as the rows do. Its transpose belongs to it: <w, J v> = <J^T w, v>."""
    slices = draw_slices(rng, 2)
    operand, output, d_operand, d_output, cotangent = draw_rows(rng, 5, SIZE)

    def body(operand: Any, output: Any, d_operand: Any, d_output: Any, cotangent: Any, *slices: jax.Array) -> Any:
        def function(x: jax.Array, y: jax.Array) -> jax.Array:
            return exchange(group, implementation)(x, y, *slices)

        moved = jax.jvp(function, (operand, output), (d_operand, d_output))[1]
        linear = jax.linearize(function, operand, output)[1](d_operand, d_output)
        pulled = jax.vjp(function, operand, output)[1](cotangent)
        return moved, linear, pulled

    actual = helpers.per_rank(body, group.mesh)(operand, output, d_operand, d_output, cotangent, *slices)
    moved, linear, pulled = helpers.fetch(actual)
    np.testing.assert_array_equal(moved, oracle.ragged_all_to_all(d_operand, d_output, slices))
    np.testing.assert_array_equal(moved, linear)
    np.testing.assert_allclose(
        np.vdot(cotangent, moved), np.vdot(pulled[0], d_operand) + np.vdot(pulled[1], d_output), rtol=1e-4
    )


@pytest.mark.parametrize("each", [1, 2])
def test_the_gradient_of_a_row_that_is_sent_several_times(
    each: int, implementation: Implementation, group: Group, rng: Rng
) -> None:
    """It is the sum of all cotangents, as of any value that is used several times."""
    slices = draw_slices(rng, each)
    slices.input_offsets[:] = rng.integers(0, 3, slices.input_offsets.shape)  # on some ranks all begin near row 0
    slices.input_offsets[1] = draw_slices(rng, each).input_offsets[1]
    slices.input_offsets[1] = np.cumsum(slices.send_sizes[1]) - slices.send_sizes[1]  # on another none overlap
    operand, output, cotangent = draw_rows(rng, 3, SIZE)

    def body(operand: jax.Array, output: jax.Array, cotangent: jax.Array, *slices: jax.Array) -> Any:
        _, pull = jax.vjp(lambda x, y: exchange(group, implementation)(x, y, *slices), operand, output)
        return pull(cotangent)

    actual = helpers.fetch(helpers.per_rank(body, group.mesh)(operand, output, cotangent, *slices))
    for a, wanted in zip(actual, oracle.ragged_all_to_all_gradient(operand, cotangent, slices), strict=True):
        np.testing.assert_allclose(a, wanted, rtol=1e-6, atol=1e-6)


def test_a_group_over_another_axis(open_group: OpenGroup) -> None:
    group = open_group(mesh=Mesh(helpers.mesh_of(a=2, b=2).devices, ("dp", "ep")))
    rows, indices = np.zeros((2, 2, 3)), np.zeros((2, 2, 2), np.int32)
    body = exchange(group, "xla", axis_name="dp", group=group)
    with pytest.raises(ValueError, match=r"^ragged_all_to_all: axis_name must be that of group, 'ep', got 'dp'"):
        jax.eval_shape(helpers.per_rank(body, group.mesh), rows, rows, *[indices] * 4)
