"""matmul_all_reduce, matmul_reduce_scatter and all_gather_matmul, and their gradients, against numpy in float64."""

import re
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chaos.compare import assert_near
from conftest import OpenGroup, Rng
from jax.sharding import AbstractMesh, PartitionSpec as P
from matmul_cases import OPS, Operands, assert_right, draw, exact, exact_gradients, program, served

import jax_ep
from jax_ep import Group, Implementation

BFLOAT16, FLOAT16, FLOAT32 = helpers.DTYPES
SHAPES = [(8, 8, 8), (40, 24, 16), (136, 40, 200), (264, 8, 264)]  # M, K, N
ODD_SHAPES = [(8, 1, 1), (16, 3, 5), (24, 129, 31)]  # no core takes them


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> str:
    return request.param


def check(op: str, group: Group, operands: Operands, implementation: Implementation) -> None:
    out = helpers.fetch(program(op, group, implementation=implementation)(*operands))
    assert out.dtype == operands[0].dtype
    assert_right(op, out, operands)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + ODD_SHAPES, ids=str)
def test_product(
    op: str, shape: Any, dtype: np.dtype, implementation: Implementation, open_group: OpenGroup, rng: Rng
) -> None:
    group = open_group(min(4, helpers.largest_size()))
    operands = draw(rng, group.size, shape, dtype)
    if served(group, implementation, shape, dtype):
        check(op, group, operands, implementation)
    else:
        with pytest.raises(ValueError, match="multiples of 8"):
            program(op, group, implementation=implementation)(*operands)
        check(op, group, operands, "auto")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("dtype", "result"),
    [(BFLOAT16, BFLOAT16), (FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (FLOAT16, FLOAT32)],
    ids=str,
)
def test_product_and_gradients(
    op: str, dtype: np.dtype, result: np.dtype, implementation: Implementation, open_group: OpenGroup, rng: Rng
) -> None:
    group = open_group(min(4, helpers.largest_size()))
    if not served(group, implementation, (8, 8), dtype):
        pytest.skip("kernels on a GPU take 16-bit operands alone")
    operands = draw(rng, group.size, (32, 24, 40), dtype)
    given = *operands, rng.standard_normal(exact(op, *operands).shape).astype(result)
    multiply = partial(OPS[op], group=group, preferred_element_type=result, implementation=implementation)

    def both(a: jax.Array, b: jax.Array, above: jax.Array) -> Any:
        out, pull = jax.vjp(lambda a, b: helpers.vary(multiply(a, b)), a, b)
        return out, *pull(above)

    out, *gradients = helpers.run(group, both, *given)
    assert [x.dtype for x in (out, *gradients)] == [result, dtype, dtype]
    assert_right(op, out, operands)
    wanted, magnitudes = (exact_gradients(op, *each) for each in (given, [np.abs(x) for x in given]))
    for mine, right, magnitude in zip(gradients, wanted, magnitudes, strict=True):
        assert_near(mine, right, magnitude, 2 * group.size, op)


def test_a_hundred_runs_give_the_same_bits(
    op: str, implementation: Implementation, open_group: OpenGroup, rng: Rng
) -> None:
    group = open_group(helpers.largest_size())
    operands = draw(rng, group.size, (264, 64, 72), BFLOAT16)
    first = helpers.assert_same_bits_again(program(op, group, implementation=implementation), operands, 99)
    if op == "matmul_all_reduce" and implementation == "kernels":
        for rank in range(group.size):
            np.testing.assert_array_equal(helpers.wide(first[rank]), helpers.wide(first[0]))


def test_all_three_in_a_row_and_independent(group: Group, rng: Rng, native: None) -> None:
    """Many in one program, which XLA may run in any order, beside its own collectives."""
    a, b = draw(rng, group.size, (64, 16, 16), BFLOAT16)

    def body(a: jax.Array, b: jax.Array) -> Any:
        kinds = [OPS[name](a * i, b, group=group, implementation="kernels") for i in range(1, 5) for name in OPS]
        varying = [x if i % 3 else jax.lax.pcast(x, "ep", to="varying") for i, x in enumerate(kinds)]
        return varying, jax.lax.pcast(jax.lax.psum(a, "ep"), "ep", to="varying")

    run = helpers.per_rank(body, group.mesh)
    for _ in range(20):
        products, _ = helpers.fetch(run(a, b))
        for index, product in enumerate(products):
            name, scale = list(OPS)[index % 3], 1 + index // 3
            scaled = (a.astype(np.float32) * scale).astype(BFLOAT16)
            assert_near(product, exact(name, scaled, b), exact(name, np.abs(scaled), np.abs(b)), 4, name)


EMPTY, RESULT = "lhs and rhs must not be empty", "preferred_element_type"
SQUARE, NARROW, MESH = jnp.zeros((8, 8)), jnp.zeros((8, 8), BFLOAT16), AbstractMesh((2,), ("ep",))
NARROWS = {"lhs": NARROW, "rhs": NARROW}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"group": MESH}, TypeError, "group must be an open jax_ep.Group(mesh, axis_name), got AbstractMesh"),
    ({"lhs": [[1.0]]}, TypeError, "lhs must be an array, got list"),
    ({"lhs": jnp.zeros(8)}, ValueError, "lhs must have shape [M, K]"),
    ({"rhs": "b"}, TypeError, "rhs must be an array, got str"),
    ({"rhs": jnp.zeros((4, 8))}, ValueError, "rhs must have shape [K, N]"),
    ({"rhs": NARROW}, TypeError, "rhs must be of dtype float32"),
    ({"bias": [0.0] * 8}, TypeError, "bias must be an array, got list"),
    ({"bias": jnp.zeros(4)}, ValueError, "bias must have shape"),
    ({"bias": jnp.zeros(8, complex)}, TypeError, "bias must be of dtype bfloat16, float16, float32, got complex64"),
    ({RESULT: "foo"}, TypeError, f"{RESULT} must be a dtype or None, got 'foo'"),
    ({RESULT: BFLOAT16}, TypeError, f"{RESULT} must be float32"),
    (NARROWS | {RESULT: FLOAT16}, TypeError, f"{RESULT} must be bfloat16 or float32, got float16"),
    ({"implementation": "nccl"}, ValueError, "implementation must be one of"),
    *(
        ({"lhs": a, "rhs": b, "implementation": by}, ValueError, f"{EMPTY}, got {a.shape} and {b.shape}")
        for a, b in ((SQUARE[:0], SQUARE), (SQUARE[:, :0], SQUARE[:0]), (SQUARE, SQUARE[:, :0]))
        for by in ("auto", "kernels", "xla")
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_wrong_arguments(op: str, changes: dict[str, Any], error: type[Exception], message: str, group: Group) -> None:
    arguments: dict[str, Any] = {"lhs": SQUARE, "rhs": SQUARE, "group": group}
    with pytest.raises(error, match=f"^{re.escape(f'{op}: {message}')}"):
        helpers.trace(group, lambda: OPS[op](**arguments | changes))


def test_rows_that_do_not_fit_and_calls_outside(group: Group) -> None:
    with pytest.raises(ValueError, match="multiple of the group's size"):
        helpers.trace(group, lambda: jax_ep.matmul_reduce_scatter(SQUARE[:7], SQUARE, group=group))
    with pytest.raises(ValueError, match=r"inside jax\.shard_map"):
        jax_ep.matmul_all_reduce(SQUARE, SQUARE, group=group)
    many, b = jax.ShapeDtypeStruct((2, 2**30, 8), jnp.bfloat16), jax.ShapeDtypeStruct((2, 8, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"all_gather_matmul: lhs must have fewer than 2\*\*31 / 2 rows, got"):
        jax.eval_shape(program("all_gather_matmul", group), many, b)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_result_of_an_all_reduce_is_everybodys(
    check_vma: bool, implementation: Implementation, group: Group, rng: Rng
) -> None:
    """Its type says so, and its gradient too."""
    a, b = rng.standard_normal((24, 32)).astype(FLOAT16), rng.standard_normal((32, 16)).astype(FLOAT16)
    reduce = partial(jax_ep.matmul_all_reduce, group=group, implementation=implementation)
    specs = (P(None, "ep"), P("ep"))
    sharded = jax.shard_map(reduce, mesh=group.mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    out, pull = jax.vjp(jax.jit(sharded), a, b)
    d_a, d_b = helpers.fetch(pull(jnp.ones_like(out)))
    ones, a, b = np.ones(out.shape, np.float32), a.astype(np.float32), b.astype(np.float32)
    for mine, right in ((out, a @ b), (d_a, ones @ b.T), (d_b, a.T @ ones)):
        np.testing.assert_allclose(helpers.wide(mine), right, rtol=0.01, atol=0.05)


def test_cotangents_are_summed_before_they_are_rounded(implementation: Implementation, group: Group) -> None:
    """The result is float32: what two ranks add to it would be lost in bfloat16. Without `check_vma` the op sums."""
    a, b = jnp.ones((8, 8), BFLOAT16), jnp.eye(8, dtype=BFLOAT16)
    above = np.stack([np.full((8, 8), x, np.float32) for x in (1 + 2**-9, -1)])
    options: dict[str, Any] = {"preferred_element_type": FLOAT32, "implementation": implementation}

    def body(above: jax.Array) -> jax.Array:
        return jax.vjp(lambda a: jax_ep.matmul_all_reduce(a, b, group=group, **options), a)[1](above)[0]

    actual = helpers.fetch(helpers.per_rank(body, group.mesh, check_vma=False)(above))
    np.testing.assert_array_equal(helpers.wide(actual), np.full((2, 8, 8), 2**-9, np.float32))
