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
from matmul_cases import OPS, Operands, assert_right, draw, exact, exact_gradients, program, pulled, served

import jax_ep
from jax_ep import Group, Implementation

BFLOAT16, FLOAT16, FLOAT32 = helpers.DTYPES
SHAPES = [(8, 8, 8), (40, 24, 16), (136, 40, 200), (264, 8, 264)]  # M, K, N
ODD_SHAPES = [(8, 1, 1), (16, 3, 5), (24, 129, 31)]  # no core takes them


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> str:
    return request.param


def check(op: str, group: Group, operands: Operands, implementation: Implementation, **options: Any) -> None:
    out = helpers.fetch(program(op, group, implementation=implementation, **options)(*operands))
    assert out.dtype == (options.get("preferred_element_type") or operands[0].dtype)
    assert_right(op, out, operands)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + ODD_SHAPES, ids=str)
def test_product(
    op: str,
    shape: tuple[int, int, int],
    dtype: np.dtype,
    implementation: Implementation,
    open_group: OpenGroup,
    rng: Rng,
) -> None:
    group = open_group(4 if len(jax.devices()) >= 4 else 2)
    operands = draw(rng, group.size, shape, dtype)
    if served(group, implementation, shape, dtype):
        check(op, group, operands, implementation)
    else:
        with pytest.raises(ValueError, match="multiples of 8"):
            program(op, group, implementation=implementation)(*operands)
        check(op, group, operands, "auto")


def test_float32_result(op: str, implementation: Implementation, group: Group, rng: Rng) -> None:
    check(op, group, draw(rng, group.size, (32, 16, 24), BFLOAT16), implementation, preferred_element_type=FLOAT32)


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
        (
            {"lhs": SQUARE[:m, :k], "rhs": SQUARE[:k, :n], "implementation": by},
            ValueError,
            f"{EMPTY}, got ({m}, {k}) and ({k}, {n})",
        )
        for m, k, n in ((0, 8, 8), (8, 0, 8), (8, 8, 0))
        for by in ("auto", "kernels", "xla")
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_wrong_arguments(op: str, changes: dict[str, Any], error: type[Exception], message: str, group: Group) -> None:
    arguments: dict[str, Any] = {"lhs": SQUARE, "rhs": SQUARE, "group": group}
    with pytest.raises(error, match=f"^{re.escape(f'{op}: {message}')}"):
        helpers.trace(group, lambda: OPS[op](**arguments | changes))


def test_rows_that_do_not_divide_and_calls_outside(group: Group) -> None:
    with pytest.raises(ValueError, match="multiple of the group's size"):
        helpers.trace(group, lambda: jax_ep.matmul_reduce_scatter(SQUARE[:7], SQUARE, group=group))
    with pytest.raises(ValueError, match=r"inside jax\.shard_map"):
        jax_ep.matmul_all_reduce(SQUARE, SQUARE, group=group)


def test_more_rows_than_kernels_count(group: Group) -> None:
    program = helpers.per_rank(lambda a, b: jax_ep.all_gather_matmul(a, b, group=group), group.mesh)
    a, b = jax.ShapeDtypeStruct((2, 2**30, 8), jnp.bfloat16), jax.ShapeDtypeStruct((2, 8, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"all_gather_matmul: lhs must have fewer than 2\*\*31 / 2 rows, got"):
        jax.eval_shape(program, a, b)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("dtype", "result_dtype"),
    [(BFLOAT16, BFLOAT16), (FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (FLOAT16, FLOAT32)],
    ids=str,
)
def test_gradients(
    op: str, dtype: np.dtype, result_dtype: np.dtype, implementation: Implementation, open_group: OpenGroup, rng: Rng
) -> None:
    group = open_group(4 if len(jax.devices()) >= 4 else 2)
    if not served(group, implementation, (8, 8), dtype):
        pytest.skip("kernels on a GPU take 16-bit operands alone")
    a, b = draw(rng, group.size, (32, 24, 40), dtype)
    above = rng.standard_normal(exact(op, a, b).shape).astype(result_dtype)

    gradients = pulled(op, group, preferred_element_type=result_dtype, implementation=implementation)
    actual = helpers.run(group, gradients, a, b, above)
    wanted = exact_gradients(op, a, b, above)
    magnitudes = exact_gradients(op, *(np.abs(x) for x in (a, b, above)))
    for mine, right, magnitude in zip(actual, wanted, magnitudes, strict=True):
        assert mine.dtype == dtype
        assert_near(mine, right, magnitude, 2 * group.size, op)


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
    ones = np.ones(out.shape, np.float32)
    a, b = a.astype(np.float32), b.astype(np.float32)
    np.testing.assert_allclose(helpers.wide(out), a @ b, rtol=0.01, atol=0.05)
    np.testing.assert_allclose(helpers.wide(d_a), ones @ b.T, rtol=0.01, atol=0.05)
    np.testing.assert_allclose(helpers.wide(d_b), a.T @ ones, rtol=0.01, atol=0.05)


def test_cotangents_are_summed_before_they_are_rounded(implementation: Implementation, group: Group) -> None:
    """The result is float32: what two ranks add to it would be lost in bfloat16. Without `check_vma` the op sums."""
    size = 8
    above = np.stack([np.full((size, size), x, np.float32) for x in (1 + 2**-9, -1)])

    def body(above: jax.Array) -> jax.Array:
        a, b = jnp.ones((size, size), BFLOAT16), jnp.eye(size, dtype=BFLOAT16)
        reduce = partial(
            jax_ep.matmul_all_reduce, group=group, preferred_element_type=FLOAT32, implementation=implementation
        )
        return jax.vjp(lambda a: reduce(a, b), a)[1](above[0])[0][None]

    mapped = jax.shard_map(body, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    actual = helpers.fetch(jax.jit(mapped)(above))
    np.testing.assert_array_equal(helpers.wide(actual), np.full((2, size, size), 2**-9, np.float32))
