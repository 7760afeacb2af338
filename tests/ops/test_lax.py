"""ragged_all_to_all, with the semantics of `jax.lax.ragged_all_to_all`, against the oracle."""

import inspect
import itertools
import re
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from chaos.ragged import slices_of
from conftest import OpenGroup, Rng
from jax.sharding import Mesh

from jax_ep import Group, Implementation, InvalidRoutingError
from jax_ep.lax import ragged_all_to_all

SIZE, ROWS = 4, 40
OUTSIDE = "ragged_all_to_all: .* a slice lies outside its buffer or"


@pytest.fixture
def program(group: Group, implementation: Implementation) -> Any:
    return helpers.per_rank(exchange(group, implementation), group.mesh)


def exchange(over: Group, implementation: Implementation, **options: Any) -> Any:
    def body(operand: jax.Array, output: jax.Array, *slices: jax.Array) -> jax.Array:
        given: dict[str, Any] = {"axis_name": over.axis_name, "implementation": implementation} | options
        return ragged_all_to_all(operand, output, *slices, **given)

    return body


def draw_slices(rng: Rng, each: int, size: int = SIZE, dtype: Any = np.int32) -> oracle.Slices:
    """`each` slices from every rank to every rank, a third of them empty."""
    return slices_of(rng, rng.integers(0, 3, (size, size, each)), ROWS, ROWS, dtype)


def draw_rows(rng: Rng, count: int, *leading: int) -> np.ndarray:
    return rng.standard_normal((count, *leading, ROWS, 3)).astype(np.float32)


def test_signature_is_that_of_jax() -> None:
    ours, theirs = (list(inspect.signature(f).parameters) for f in (ragged_all_to_all, jax.lax.ragged_all_to_all))
    assert ours == [*theirs, "group", "implementation"]


ALL_DTYPES = sorted({np.dtype(x) for x in vars(jnp).values() if isinstance(x, type(jnp.int8))}, key=str)
NOT_GATHERED_BY_XLA = ("float8_e3m4", "float8_e4m3")  # jaxlib 0.11.2
NARROW = [dtype for dtype in ALL_DTYPES if re.fullmatch(r"u?int[124]|float[46]_\w+", str(dtype))]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("dtype", [dtype for dtype in ALL_DTYPES if dtype not in NARROW], ids=str)
def test_rows_arrive_bit_by_bit(dtype: np.dtype, implementation: Implementation, program: Any, rng: Rng) -> None:
    """In slices of several numbers, and rows of several shapes."""
    if jax.default_backend() == "gpu" and implementation == "xla" and str(dtype) in NOT_GATHERED_BY_XLA:
        pytest.skip("XLA has no all-gather of this dtype on GPUs")
    for each, row in ((1, (5,)), (2, ()), (3, (2, 7))):
        slices = draw_slices(rng, each, dtype=np.uint32 if each == 3 else np.int32)
        operand, output = rng.integers(0, 100, (2, SIZE, ROWS, *row)).astype(dtype)
        with jax.enable_x64(True):
            actual = helpers.fetch(program(operand, output, *slices))
        assert actual.dtype == dtype
        assert actual.tobytes() == oracle.ragged_all_to_all(operand, output, slices).tobytes()


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", ["operand", "output"])
def test_narrow_dtypes_are_refused(dtype: np.dtype, name: str, program: Any) -> None:
    """Some platforms pack them, so that they have no bytes of their own."""
    arrays = {"operand": np.zeros((SIZE, ROWS), np.int8), "output": np.zeros((SIZE, ROWS), np.int8)}
    arrays[name] = arrays[name].astype(dtype)
    message = f"^ragged_all_to_all: {name} must be of a dtype of whole bytes, such as int8, got {dtype}"
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(program, *arrays.values(), *[np.zeros((SIZE, SIZE), np.int32)] * 4)


@pytest.mark.parametrize("dtype", ["object", "U3", "M8[s]", "i4,f4"])
def test_dtypes_of_numpy_alone_are_refused(dtype: str, group: Group, implementation: Implementation) -> None:
    rows, indices = np.zeros(ROWS, dtype), np.zeros(SIZE, np.int32)
    with pytest.raises(TypeError, match=r"^ragged_all_to_all: operand must be of a dtype that jax has, got "):
        helpers.trace(group, lambda: exchange(group, implementation)(rows, rows, *[indices] * 4))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("dtype", [np.float64, np.int64])
@pytest.mark.parametrize("check_vma", [True, False])
def test_constants_of_numpy_become_what_jax_has(
    dtype: Any, check_vma: bool, group: Group, implementation: Implementation
) -> None:
    rows, slices = np.arange(ROWS, dtype=dtype), np.zeros(SIZE, np.int64)

    def body(x: jax.Array) -> jax.Array:
        return x + exchange(group, implementation)(rows, rows, *[slices] * 4)[0]

    program = helpers.per_rank(body, group.mesh, check_vma=check_vma)
    np.testing.assert_array_equal(helpers.fetch(program(np.ones(SIZE, np.int32))), np.ones(SIZE))


def test_keys_of_random_numbers(program: Any, rng: Rng) -> None:
    slices = draw_slices(rng, each=1)
    operand, output = jax.random.split(jax.random.key(0), (2, SIZE, ROWS))
    actual = jax.random.key_data(program(operand, output, *slices))
    operand, output = (np.asarray(jax.random.key_data(keys)) for keys in (operand, output))
    np.testing.assert_array_equal(helpers.fetch(actual), oracle.ragged_all_to_all(operand, output, slices))


def test_operands_are_not_changed(group: Group, implementation: Implementation, rng: Rng) -> None:
    """The native call writes into the buffer of `output`: it must be a copy when `output` is used again."""
    slices = draw_slices(rng, each=1)
    operand, output = draw_rows(rng, 2, SIZE)

    def body(operand: jax.Array, output: jax.Array, *slices: jax.Array) -> tuple[jax.Array, jax.Array]:
        return exchange(group, implementation)(operand, output, *slices), output * 2

    on_device = jax.device_put(output)
    _, doubled = helpers.run(group, body, operand, on_device, *slices)
    np.testing.assert_array_equal(doubled, output * 2)
    np.testing.assert_array_equal(on_device, output)


@pytest.mark.parametrize(("sent", "received"), [(0, 3), (3, 0)])
def test_no_rows(sent: int, received: int, group: Group, implementation: Implementation) -> None:
    """To send, or to write: nothing changes, and gradients are those of the output."""

    def body(operand: jax.Array, output: jax.Array) -> Any:
        nothing = [jnp.zeros(SIZE, jnp.int32)] * 4
        result, pull = jax.vjp(lambda *rows: exchange(group, implementation)(*rows, *nothing), operand, output)
        return result, *pull(result)

    operand, output = np.ones((SIZE, sent, 2), np.float32), np.full((SIZE, received, 2), 2, np.float32)
    found = helpers.fetch(helpers.per_rank(body, group.mesh)(operand, output))
    for actual, wanted in zip(found, (output, 0 * operand, output), strict=True):
        np.testing.assert_array_equal(actual, wanted, strict=True)


# Of the slices from rank 1 to rank 2, what is changed: as sent, or as expected.
SPOILT: dict[str, dict[str, int]] = {
    "before operand": {"input_offsets": -1},
    "beyond operand": {"input_offsets": ROWS + 1},
    "before output": {"output_offsets": -1},
    "beyond output": {"output_offsets": ROWS + 1},
    "far beyond output": {"output_offsets": helpers.BIG},
    "negative size": {"send_sizes": -1, "recv_sizes": -1},
    "more sent than expected": {"recv_sizes": 0},
    "less sent than expected": {"recv_sizes": 2},
}
SPOILT |= {  # and not wrapped around to numbers that would do
    f"{name} + {beyond}": {name: (1 if "sizes" in name else ROWS) + beyond}
    for name, beyond in itertools.product(oracle.Slices._fields, (2**32, -(2**32), 2**62))
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", SPOILT)
def test_bad_slices_are_reported_and_the_group_goes_on(
    name: str, implementation: Implementation, group: Group, program: Any, rng: Rng
) -> None:
    wide = max(map(abs, SPOILT[name].values())) >= 2**31
    good = draw_slices(rng, each=1, dtype=np.int64 if wide else np.int32)
    good.send_sizes[1, 2] = good.recv_sizes[2, 1] = 1
    good.input_offsets[1, 2] = good.output_offsets[1, 2] = ROWS  # one row, behind all others
    operand, output = rng.standard_normal((2, SIZE, ROWS + 1, 3)).astype(np.float32)
    bad = oracle.Slices(*(x.copy() for x in good))
    for field, value in SPOILT[name].items():
        getattr(bad, field)[(2, 1) if field == "recv_sizes" else (1, 2)] = value
    with jax.enable_x64(wide):
        with helpers.expect_failure(group, InvalidRoutingError, OUTSIDE, implementation):
            actual = helpers.fetch(program(operand, output, *bad))
            assert np.isnan(actual[2]).all()
        group.check()  # reported once
        actual = helpers.fetch(program(operand, output, *good))
    np.testing.assert_array_equal(actual, oracle.ragged_all_to_all(operand, output, good))


def test_no_rank_delivers_what_another_did_not_send(
    implementation: Implementation, group: Group, program: Any, rng: Rng
) -> None:
    operand, output = rng.integers(0, 100, (2, SIZE, ROWS, 3)).astype(np.int32)
    bad = draw_slices(rng, each=1)
    bad.send_sizes[1, 2] = bad.recv_sizes[2, 1] = 1
    bad.input_offsets[1, 2] = ROWS
    result = program(operand, output, *bad)
    for shard in result.addressable_shards:
        with helpers.awaiting_failure(group, "InvalidRoutingError: ragged_all_to_all: .* outside", implementation):
            np.testing.assert_array_equal(shard.data, np.full_like(shard.data, -1))
    with pytest.raises(InvalidRoutingError, match=OUTSIDE):
        group.check()


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_constant_indices_beyond_32_bits(dtype: Any, group: Group, implementation: Implementation) -> None:
    """The indices are numpy's, whose arrays jax would narrow without a word."""
    offsets, ones, ranks = np.zeros(SIZE, dtype), np.ones(SIZE, dtype), np.arange(SIZE, dtype=dtype)
    offsets[0] = 2**32 if np.iinfo(dtype).bits == 64 else 2**32 - 1

    def body(operand: jax.Array) -> jax.Array:
        return exchange(group, implementation)(operand, operand, offsets, ones, ranks, ones)

    with helpers.expect_failure(group, InvalidRoutingError, OUTSIDE, implementation):
        helpers.run(group, body, np.ones((SIZE, ROWS), np.float32))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "parts", [((0, 1), (2, 3)), ((3, 1), (0, 2)), ((0,), (1,), (2,), (3,)), ((2, 0, 3, 1),)], ids=str
)
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("batched", [False, True])
def test_axis_index_groups(
    parts: tuple[tuple[int, ...], ...], each: int, batched: bool, implementation: Implementation, group: Group, rng: Rng
) -> None:
    """Each part exchanges as a group of its own would, its ranks in the order given. `jax.lax`'s own has no batches."""
    batch, of_part = 2 if batched else 1, len(parts[0])
    operand, output = draw_rows(rng, 2, SIZE, batch)
    slices = oracle.Slices(*(np.zeros((SIZE, batch, of_part * each), np.int32) for _ in range(4)))
    wanted = np.empty_like(output)
    for i, part in itertools.product(range(batch), map(list, parts)):
        own = draw_slices(rng, each, of_part)
        for whole, mine in zip(slices, own, strict=True):
            whole[part, i] = mine
        wanted[part, i] = oracle.ragged_all_to_all(operand[part, i], output[part, i], own)
    body = exchange(group, implementation, axis_index_groups=parts)
    given = operand, output, *slices
    if batched:
        np.testing.assert_array_equal(helpers.run(group, jax.vmap(body), *given), wanted)
    else:
        np.testing.assert_array_equal(helpers.run(group, body, *(x[:, 0] for x in given)), wanted[:, 0])


IN_ONE_PART = "axis_index_groups must name each of the 4 ranks in one part, got"


@pytest.mark.parametrize(
    ("rows", "entries", "parts", "match"),
    [
        (3, SIZE, ((0, 1), (2,)), "axis_index_groups must have parts of equal size, got"),
        *((3, SIZE, parts, IN_ONE_PART) for parts in (((0, 1), (1, 2)), ((0, 1),))),
        (3, SIZE + 1, None, "input_offsets must have a multiple of the group's size 4 entries, got 5"),
        (3, SIZE * 4097, None, "input_offsets must have at most 4096 .*, got 4097"),
        (2**31 - 1, SIZE, None, r"operand must have at most 2146435071 rows, got \(2147483"),
    ],
)
def test_wrong_shapes(rows: int, entries: int, parts: Any, match: str, group: Group) -> None:
    operand, indices = jax.ShapeDtypeStruct((SIZE, rows), np.int8), np.zeros((SIZE, entries), np.int32)
    program = helpers.per_rank(exchange(group, "xla", axis_index_groups=parts), group.mesh)
    with pytest.raises(ValueError, match=f"^ragged_all_to_all: {match}"):
        jax.eval_shape(program, operand, operand, *[indices] * 4)


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
    actual = helpers.run(group, jax.vmap(exchange(group, implementation), in_axes=in_axes), *given)
    for i in range(batch):
        operand, output, *slices = (x[:, 0 if axis is None else i] for x, axis in zip(operands, axes, strict=True))
        np.testing.assert_array_equal(actual[:, i], oracle.ragged_all_to_all(operand, output, oracle.Slices(*slices)))


def test_a_group_over_another_axis(open_group: OpenGroup) -> None:
    group = open_group(mesh=Mesh(helpers.mesh_of(a=2, b=2).devices, ("dp", "ep")))
    rows, indices = np.zeros((2, 2, 3)), np.zeros((2, 2, 2), np.int32)
    body = exchange(group, "xla", axis_name="dp", group=group)
    with pytest.raises(ValueError, match=r"^ragged_all_to_all: axis_name must be that of group, 'ep', got 'dp'"):
        jax.eval_shape(helpers.per_rank(body, group.mesh), rows, rows, *[indices] * 4)
