"""matmul_all_reduce, matmul_reduce_scatter and all_gather_matmul against numpy in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import Group, PeerTimeoutError

BFLOAT16, FLOAT16, FLOAT32 = helpers.DTYPES
OPS: dict[str, Callable[..., jax.Array]] = {
    "matmul_all_reduce": jax_ep.matmul_all_reduce,
    "matmul_reduce_scatter": jax_ep.matmul_reduce_scatter,
    "all_gather_matmul": jax_ep.all_gather_matmul,
}
SHAPES = [(8, 8, 8), (40, 24, 16), (136, 40, 200), (264, 8, 264)]  # M, K, N
ODD_SHAPES = [(8, 1, 1), (16, 3, 5), (24, 129, 31)]  # no core takes them

Operands = tuple[np.ndarray, np.ndarray]


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> str:
    return request.param


def draw(rng: np.random.Generator, size: int, shape: tuple[int, int, int], dtype: np.dtype) -> Operands:
    m, k, n = shape
    return rng.standard_normal((size, m, k)).astype(dtype), rng.standard_normal((size, k, n)).astype(dtype)


def exact(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """On all ranks, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    if op == "all_gather_matmul":
        return np.concatenate(a) @ b
    total = np.einsum("rmk,rkn->mn", a, b)
    if op == "matmul_all_reduce":
        return np.broadcast_to(total, (len(a), *total.shape))
    return total.reshape(len(a), -1, total.shape[1])


def exact_gradients(op: str, a: np.ndarray, b: np.ndarray, above: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`above`: the cotangents on all ranks; of the result of an all-reduce every rank has one of its own."""
    a, b, above = (x.astype(np.float64) for x in (a, b, above))
    if op == "all_gather_matmul":
        d_rows = np.einsum("rmn,rkn->mk", above, b)
        return d_rows.reshape(a.shape), np.einsum("mk,rmn->rkn", np.concatenate(a), above)
    total = above.sum(axis=0) if op == "matmul_all_reduce" else np.concatenate(above)
    return np.einsum("mn,rkn->rmk", total, b), np.einsum("rmk,mn->rkn", a, total)


def assert_near(actual: Any, wanted: np.ndarray, magnitude: np.ndarray, roundings: int) -> None:
    """Within so many roundings to the dtype of the result, and the rounding of float32 sums."""
    unit = roundings * float(jnp.finfo(actual.dtype).eps) + 64 * 2.0**-23
    error = np.abs(np.asarray(actual, np.float64) - wanted)
    allowed = unit * magnitude + float(jnp.finfo(actual.dtype).smallest_subnormal)
    assert np.all(error <= allowed), f"{error.max()} at {np.unravel_index(error.argmax(), error.shape)}"


def assert_right(op: str, actual: Any, operands: Operands) -> None:
    magnitude = exact(op, *(np.abs(x) for x in operands))
    assert_near(actual, exact(op, *operands), magnitude, roundings=1 + len(operands[0]))


def program(op: str, group: Group, **options: Any) -> Callable[..., Any]:
    return helpers.per_rank(partial(OPS[op], group=group, **options), group.mesh)


def check(op: str, group: Group, operands: Operands, implementation: str, **options: Any) -> None:
    out = helpers.fetch(program(op, group, implementation=implementation, **options)(*operands))
    assert out.dtype == (options.get("out_dtype") or operands[0].dtype)
    assert_right(op, out, operands)


def served(group: Group, implementation: str, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Kernels on a GPU take 16-bit operands and multiples of 8 alone."""
    multiples = all(size % 8 == 0 for size in shape[1:])
    return implementation == "xla" or group.platform == "cpu" or (dtype != FLOAT32 and multiples)


@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + ODD_SHAPES, ids=str)
def test_product(
    op: str,
    shape: tuple[int, int, int],
    dtype: np.dtype,
    implementation: str,
    open_group: OpenGroup,
    rng: np.random.Generator,
) -> None:
    group = open_group(4 if len(jax.devices()) >= 4 else 2)
    operands = draw(rng, group.size, shape, dtype)
    if served(group, implementation, shape, dtype):
        check(op, group, operands, implementation)
    else:
        with pytest.raises(ValueError, match="multiples of 8"):
            program(op, group, implementation=implementation)(*operands)
        check(op, group, operands, "auto")


@pytest.mark.parametrize("size", helpers.SIZES)
def test_sizes_of_groups(
    op: str, size: int, implementation: str, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    check(op, open_group(size), draw(rng, size, (48, 32, 40), BFLOAT16), implementation)


def test_float32_result_and_bias(op: str, implementation: str, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(2)
    a, b = draw(rng, group.size, (32, 16, 24), BFLOAT16)
    check(op, group, (a, b), implementation, out_dtype=FLOAT32)
    bias = rng.standard_normal(24).astype(BFLOAT16)

    def body(a: jax.Array, b: jax.Array) -> jax.Array:
        return OPS[op](a, b, group=group, bias=jnp.asarray(bias), implementation=implementation)

    out = helpers.fetch(helpers.per_rank(body, group.mesh)(a, b))
    magnitude = exact(op, np.abs(a), np.abs(b)) + np.abs(bias).astype(np.float64)
    assert_near(out, exact(op, a, b) + bias.astype(np.float64), magnitude, roundings=2 + group.size)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_gradients(
    op: str, dtype: np.dtype, implementation: str, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    group = open_group(4 if len(jax.devices()) >= 4 else 2)
    if not served(group, implementation, (8, 8), dtype):
        pytest.skip("kernels on a GPU take 16-bit operands alone")
    a, b = draw(rng, group.size, (32, 24, 40), dtype)
    above = rng.standard_normal(exact(op, a, b).shape).astype(dtype)

    def pulled(a: jax.Array, b: jax.Array, above: jax.Array) -> Any:
        def varying(a: jax.Array, b: jax.Array) -> jax.Array:
            out = OPS[op](a, b, group=group, implementation=implementation)
            return jax.lax.pcast(out, "ep", to="varying") if op == "matmul_all_reduce" else out

        return jax.vjp(varying, a, b)[1](above)

    actual = helpers.fetch(helpers.per_rank(pulled, group.mesh)(a, b, above))
    wanted = exact_gradients(op, a, b, above)
    magnitudes = exact_gradients(op, *(np.abs(x) for x in (a, b, above)))
    for mine, right, magnitude in zip(actual, wanted, magnitudes, strict=True):
        assert mine.dtype == dtype
        assert_near(mine, right, magnitude, roundings=2 * group.size)


@pytest.mark.parametrize("check_vma", [True, False])
def test_two_layers_of_tensor_parallelism(
    check_vma: bool, implementation: str, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    """Values and gradients of a block with sharded weights are those of one device."""
    group = open_group(2)
    x, up, down = (rng.standard_normal(shape).astype(FLOAT16) for shape in ((32, 16), (16, 64), (64, 16)))

    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = jnp.tanh(jax_ep.all_gather_matmul(x, up, group=group, implementation=implementation))
        return jax_ep.matmul_reduce_scatter(hidden, down, group=group, implementation=implementation)

    specs = (P("ep"), P(None, "ep"), P("ep"))
    sharded = jax.shard_map(block, mesh=group.mesh, in_specs=specs, out_specs=P("ep"), check_vma=check_vma)

    def loss(function: Callable[..., jax.Array], *operands: Any) -> jax.Array:
        return (function(*operands).astype(jnp.float32) ** 2).sum()

    def single(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jnp.tanh(x @ up) @ down

    wide = [operand.astype(np.float32) for operand in (x, up, down)]
    wanted = jax.grad(partial(loss, single), argnums=(0, 1, 2))(*wide)
    actual = helpers.fetch(jax.jit(jax.grad(partial(loss, sharded), argnums=(0, 1, 2)))(x, up, down))
    for mine, right in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(mine.astype(np.float32), right, rtol=0.05, atol=0.02 * float(np.abs(right).max()))


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_result_of_an_all_reduce_is_everybodys(
    check_vma: bool, implementation: str, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    """Its type says so, and its gradient too."""
    group = open_group(2)
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


def test_a_hundred_runs_give_the_same_bits(
    op: str, implementation: str, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    group = open_group(helpers.largest_size())
    operands = draw(rng, group.size, (264, 64, 72), BFLOAT16)
    run = program(op, group, implementation=implementation)
    first = helpers.fetch(run(*operands))
    if op == "matmul_all_reduce" and implementation == "ffi":
        for rank in range(group.size):
            np.testing.assert_array_equal(helpers.wide(first[rank]), helpers.wide(first[0]))
    for _ in range(99):
        assert helpers.fetch(run(*operands)).tobytes() == first.tobytes()


def test_all_three_in_a_row_and_independent(open_group: OpenGroup, rng: np.random.Generator, native: None) -> None:
    """Many in one program, which XLA may run in any order, beside its own collectives."""
    group = open_group(2)
    a, b = draw(rng, group.size, (64, 16, 16), BFLOAT16)

    def body(a: jax.Array, b: jax.Array) -> Any:
        kinds = [OPS[name](a * i, b, group=group, implementation="ffi") for i in range(1, 5) for name in OPS]
        varying = [x if i % 3 else jax.lax.pcast(x, "ep", to="varying") for i, x in enumerate(kinds)]
        return varying, jax.lax.pcast(jax.lax.psum(a, "ep"), "ep", to="varying")

    run = helpers.per_rank(body, group.mesh)
    for _ in range(20):
        products, _ = helpers.fetch(run(a, b))
        for index, product in enumerate(products):
            name, scale = list(OPS)[index % 3], 1 + index // 3
            scaled = (a.astype(np.float32) * scale).astype(BFLOAT16)
            assert_near(product, exact(name, scaled, b), exact(name, np.abs(scaled), np.abs(b)), roundings=4)


def test_a_stalled_rank_is_named(op: str, native: None, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(2, timeout=0.5)
    operands = draw(rng, group.size, (264, 16, 24), BFLOAT16)
    run = program(op, group, implementation="ffi")
    helpers.fetch(run(*operands))
    assert group._native is not None
    group._native.stall(1, "protocol")
    with helpers.expect_failure(group, PeerTimeoutError, "rank 1"):
        assert np.isnan(helpers.wide(helpers.fetch(run(*operands))[0])).all()


def test_bad_operands_are_refused(open_group: OpenGroup) -> None:
    group = open_group(2)
    a, b = jnp.zeros((2, 8, 8)), jnp.zeros((2, 8, 8))

    def expect(error: type[Exception], match: str, *operands: jax.Array, name: str = "matmul_all_reduce", **o: Any):
        with pytest.raises(error, match=match):
            program(name, group, **o)(*operands)

    expect(ValueError, r"b must have shape \[K, N\]", a, jnp.zeros((2, 4, 8)))
    expect(ValueError, r"a must have shape \[M, K\]", jnp.zeros((2, 8)), b)
    expect(TypeError, "b must be of dtype float32", a, b.astype(jnp.bfloat16))
    expect(TypeError, "out_dtype must be float32", a, b, out_dtype=jnp.bfloat16)
    for m, k, n in ((0, 8, 8), (8, 0, 8), (8, 8, 0)):
        for name in OPS:
            for implementation in ("auto", "ffi", "xla"):
                expect(
                    ValueError,
                    rf"^{name}: a and b must not be empty, got \({m}, {k}\) and \({k}, {n}\)",
                    jnp.zeros((2, m, k)),
                    jnp.zeros((2, k, n)),
                    name=name,
                    implementation=implementation,
                )
    expect(ValueError, "bias must have shape", a, b, bias=jnp.zeros(4))
    expect(ValueError, "implementation must be one of", a, b, implementation="nccl")
    expect(ValueError, "multiple of the group's size", a[:, :7], b, name="matmul_reduce_scatter")
    with pytest.raises(ValueError, match=r"inside jax\.shard_map"):
        jax_ep.matmul_all_reduce(a[0], b[0], group=group)
