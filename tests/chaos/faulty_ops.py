"""Every op with fixed operands and what it gives on all ranks: what the processes run while some are lost."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import matmul_cases
import numpy as np
import oracle
import sparse_cases

import jax_ep
from jax_ep import Group
from jax_ep.lax import ragged_all_to_all

from .ragged import slices_of

EXPERTS_EACH, ROWS = 2, 60


class Value(NamedTuple):
    """One array of a result, on all ranks."""

    exact: np.ndarray
    magnitude: np.ndarray
    roundings: float


class Op(NamedTuple):
    run: Any  # of jax.jit
    operands: list[np.ndarray]
    wanted: list[Value]  # of the leaves of the result, but for those beyond the last


def equal(*arrays: Any) -> list[Value]:
    wide = [helpers.wide(x) for x in arrays]
    return [Value(x, np.zeros(x.shape), 0) for x in wide]


def combined(outputs: np.ndarray, expected: oracle.Expected, case: helpers.Case, roundings: float) -> Value:
    """The sums of what experts made of the rows."""
    sums = oracle.combine(outputs, expected.targets, case.weights)
    return Value(sums, oracle.combine(np.abs(outputs), expected.targets, np.abs(case.weights)), roundings)


def draw_case(rng: helpers.Rng, size: int, tokens: int, hidden: int, dtype: Any = np.float32) -> helpers.Case:
    return helpers.draw_case(rng, size, tokens, 2, EXPERTS_EACH * size, hidden, np.dtype(dtype))


def round_trip(
    rng: helpers.Rng,
    group: Group,
    *,
    tokens: int = 37,
    hidden: int = 128,
    dtype: Any = np.float32,
    fp8: bool = False,
    alignment: int = 1,
    **options: Any,
) -> Op:
    size, experts = group.size, EXPERTS_EACH * group.size
    case = draw_case(rng, size, tokens, hidden, dtype)
    given = {"num_experts": experts, "capacity": options.pop("capacity", size * tokens * 2), "alignment": alignment}
    out = oracle.dispatch(*case, **given, fp8=fp8)
    options |= given | {"wire": "float8" if fp8 else None}
    routed = equal(*(getattr(out, name) for name in ("rows", "group_sizes", "targets", "row_of", "weights", "counts")))
    routed += equal(out.dropped, out.invalid)
    return Op(
        helpers.dispatch_combine(group, implementation="kernels", **options),
        [*case],
        [*routed, combined(out.rows, out, case, 1)],
    )


def float8_rows(rng: helpers.Rng, group: Group, *, tokens: int = 24, dtype: Any = np.float32) -> Op:
    """Rows that stay in float8, and combine of what they stand for."""
    size, experts = group.size, EXPERTS_EACH * group.size
    case = draw_case(rng, size, tokens, 256, dtype)
    capacity = size * tokens * 2
    expected = oracle.dispatch(*case, num_experts=experts, capacity=capacity, fp8=True)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        where: dict[str, Any] = {"group": group, "implementation": "kernels"}
        sent: dict[str, Any] = {"num_experts": experts, "capacity": capacity, "wire": "float8_rows"}
        out = jax_ep.dispatch(tokens, ids, weights, **where, **sent)
        values, scales = out.rows.values, out.rows.scales
        wide = values.astype(jnp.float32) * jnp.repeat(scales, oracle.FP8_BLOCK, axis=1)
        rows = wide.astype(tokens.dtype)
        return rows, jax_ep.combine(rows, out.routing, **where)

    wanted = [*equal(expected.rows), combined(expected.rows, expected, case, 4)]
    return Op(helpers.per_rank(body, group.mesh), [*case], wanted)


def products(rng: helpers.Rng, group: Group, *, tokens: int = 20, hidden: int = 16, width: int = 24) -> Op:
    """A dispatch, two grouped products, and combine; and a layer of the same experts."""
    size, experts = group.size, EXPERTS_EACH * group.size
    rows = rng.integers(-2, 3, (size, tokens, hidden)).astype(helpers.DTYPES[0])
    case = draw_case(rng, size, tokens, hidden)._replace(tokens=rows)
    shapes = ((size, EXPERTS_EACH, hidden, width), (size, EXPERTS_EACH, width, hidden))
    first, last = (rng.integers(-2, 3, shape).astype(rows.dtype) for shape in shapes)
    capacity = size * tokens * 2
    where: Any = {"group": group, "implementation": "kernels"}

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array, first: jax.Array, last: jax.Array) -> Any:
        rows, sizes, routing = jax_ep.dispatch(tokens, ids, weights, num_experts=experts, capacity=capacity, **where)
        inner = jax_ep.lax.ragged_dot(rows, first, sizes)
        sums = jax_ep.combine(jax_ep.lax.ragged_dot(inner, last, sizes), routing, **where)
        unit: Any = jax_ep.Experts(gate=None, up=first, down=last, activation=lambda x: x)
        layer, _ = jax_ep.moe_mlp(tokens, ids, weights, unit, capacity=capacity, **where)
        return inner, sizes, sums, layer

    expected = oracle.dispatch(*case, num_experts=experts, capacity=capacity)
    inner = oracle.grouped_product(expected, first)
    sums, sizes = (
        oracle.grouped_product(expected._replace(rows=f(inner)), f(last)).astype(np.float32)
        for f in (np.asarray, np.abs)
    )
    total = combined(sums, expected, case, 4)._replace(
        magnitude=oracle.combine(sizes, expected.targets, np.abs(case.weights))
    )
    wanted = [*equal(inner, expected.group_sizes), total, total]
    return Op(helpers.per_rank(body, group.mesh), [*case, first, last], wanted)


def gradients(rng: helpers.Rng, group: Group) -> Op:
    case = draw_case(rng, group.size, 20, 64)
    both = helpers.round_trip(group, experts=jnp.square, num_experts=EXPERTS_EACH * group.size)
    body = jax.grad(lambda *x: jnp.sum(both(*x)[1]), argnums=(0, 2))
    tokens, total = case.tokens.astype(np.float64), case.weights.sum(axis=2, keepdims=True)
    squares = np.broadcast_to((tokens**2).sum(axis=2, keepdims=True), case.weights.shape)
    wanted = [Value(2 * tokens * total, np.abs(2 * tokens * total), 4), Value(squares, squares, 4)]
    return Op(helpers.per_rank(body, group.mesh), [*case], wanted)


def scan(rng: helpers.Rng, group: Group) -> Op:
    """Ten layers in one program; on a GPU a captured graph."""
    case = draw_case(rng, group.size, 8, 32)
    both = helpers.round_trip(group, num_experts=EXPERTS_EACH * group.size)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (both(x, ids, weights)[1], None), tokens, length=10)[0]

    exact = case.tokens * case.weights.astype(np.float64).sum(axis=2, keepdims=True) ** 10
    return Op(helpers.per_rank(body, group.mesh), [*case], [Value(exact, np.abs(exact), 60)])


def sparse(
    rng: helpers.Rng,
    group: Group,
    *,
    num_rows: int = ROWS,
    entries: int = 50,
    width: int = 40,
    method: Any = "bitmap",
    **options: Any,
) -> Op:
    ids = sparse_cases.zipf(rng, group.size, entries, num_rows)
    values = sparse_cases.draw_values(rng, ids, width)
    options = {"capacity": num_rows} | options
    wanted = sparse_cases.expected(ids, values, num_rows=num_rows, **options)
    leaves = [*equal(wanted.indices), Value(wanted.exact, wanted.magnitude, 4), *equal(wanted.used)]
    program = sparse_cases.program(group, num_rows, method=method, implementation="kernels", **options)
    return Op(program, [ids, values], leaves)


def product(rng: helpers.Rng, group: Group, op: str, shape: tuple[int, int, int] | None = None) -> Op:
    operands = matmul_cases.draw(rng, group.size, shape or (16 * group.size, 32, 40), helpers.DTYPES[0])
    exact, magnitude = matmul_cases.exact(op, *operands), matmul_cases.exact(op, *(np.abs(x) for x in operands))
    return Op(
        matmul_cases.program(op, group, implementation="kernels"),
        [*operands],
        [Value(exact, magnitude, 1 + group.size)],
    )


def ragged(rng: helpers.Rng, group: Group) -> Op:
    size, rows = group.size, 8 * group.size
    slices = slices_of(rng, rng.integers(0, 8, (size, size, 1)), rows, rows)
    operand, output = rng.standard_normal((2, size, rows, 100)).astype(np.float32)

    def body(*operands: jax.Array) -> jax.Array:
        return ragged_all_to_all(*operands, axis_name="ep")

    wanted = equal(oracle.ragged_all_to_all(operand, output, slices))
    return Op(helpers.per_rank(body, group.mesh), [operand, output, *slices], wanted)


OPS: dict[str, Callable[[helpers.Rng, Group], Op]] = {
    "dispatch and combine": round_trip,
    "float8": partial(round_trip, tokens=64, dtype=helpers.DTYPES[0], fp8=True),
    "late tokens": partial(round_trip, tokens=helpers.LATE_TOKENS, dtype=helpers.DTYPES[0]),
    "gradients": gradients,
    "scan": scan,
    "sparse": sparse,
    "sparse, sharded": partial(sparse, sharded=True, op="mean_by_count"),
    **{op: partial(product, op=op) for op in matmul_cases.OPS},
    "ragged": ragged,
    "float8 rows": float8_rows,
    "products": products,
    "products, late tokens": partial(products, tokens=helpers.LATE_TOKENS),
}


def draw_ops(rng: helpers.Rng, group: Group, count: int) -> dict[str, Op]:
    names: Iterable[str] = rng.permutation(list(OPS))[:count].tolist()
    return {name: OPS[name](rng, group) for name in names}
