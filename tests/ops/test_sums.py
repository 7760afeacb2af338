"""Sums of rows by segment: the Pallas kernels against numpy in the same order of additions, so bit by bit."""

import itertools
from functools import partial
from itertools import starmap
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup
from helpers import Rng
from test_pallas_kernels import INTERPRET, lowered_for_h200

from jax_ep import Experts, Group, SparseRows, coalesce, embedding, moe_mlp, sparse_all_reduce
from jax_ep._kit import gemm
from jax_ep._kit.sums import sum_by_ids
from jax_ep.lax import ragged_dot
from jax_ep.pallas_kernels import Cut, SumTiling, counting_sort, places_in_sorted, runs_of_sorted, sum_segments

PART = 32
LENGTHS = (5, 0, 70, 33, 32, 31, 1, 100, 0, 64)


def in_parts(rows: np.ndarray) -> np.ndarray:
    """The sum of rows [n, D] in float32: parts of 32 in order, then the parts in order."""
    total = np.zeros(rows.shape[1], np.float32)
    for begin in range(0, len(rows), PART):
        part = np.zeros_like(total)
        for row in rows[begin : begin + PART].astype(np.float32):
            part = part + row
        total = total + part
    return total


def starts_of(lengths: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def assert_bits(found: Any, wanted: np.ndarray) -> None:
    """NaN are alike."""
    found, wanted = helpers.wide(found), helpers.wide(wanted)
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(np.where(nan, 0, found).view(np.int32), np.where(nan, 0, wanted).view(np.int32))


def summed(
    values: np.ndarray, starts: np.ndarray, order: Any = None, weights: Any = 1, groups: Any = None
) -> np.ndarray:
    """What `sum_segments` must return without a scale, in float32. Weights are powers of two: products are exact."""
    if order is not None:
        values = np.concatenate([values, np.zeros_like(values[:1])])[np.where(order < 0, len(values), order)]
    values = values.astype(np.float32) * np.reshape(weights, (-1, 1))
    sums = [in_parts(values[a:b]) for a, b in itertools.pairwise(starts.clip(0, len(values)))]
    if groups is None:
        return np.stack(sums)
    nothing = np.zeros(values.shape[1], np.float32)
    return np.stack([sum(sums[a:b], nothing) for a, b in itertools.pairwise(groups)])


@pytest.mark.parametrize("given", ["order", "scale", "order groups", "order groups scale"])
@pytest.mark.parametrize(
    ("lengths", "columns", "dtype"),
    [
        (LENGTHS, 7, np.float32),
        (LENGTHS * 2, 130, jnp.bfloat16),
        ((100,), 1, np.float16),  # one segment that holds everything
        ((1,) * 20, 3, np.float32),
        ((3, 1, 0, 5), 70, jnp.bfloat16),
    ],
    ids=str,
)
def test_sums_of_segments(lengths: tuple[int, ...], columns: int, dtype: Any, given: str, rng: Rng) -> None:
    """In an order with padding, from numbers that XLA treats specially; of groups segment after segment."""
    starts, entries = starts_of(lengths), sum(lengths)
    values = rng.standard_normal((entries, columns)).astype(dtype)
    values[:, 0] = -0.0
    values[3, -1], values[7, -1] = np.inf, np.nan
    groups = np.sort(np.array([0, 0, 1, 3, len(lengths) - 1, helpers.BIG], np.int32))
    options = {"order": rng.integers(-1, entries + 1, entries).astype(np.int32), "groups": groups}
    options = {name: x for name, x in options.items() if name in given}
    wanted = summed(values, starts, **options)
    scale = rng.standard_normal(len(wanted)).astype(np.float32)
    if "groups" in given:
        scale = np.exp2(np.round(scale))  # a power of two, so when it multiplies does not matter
    if "scale" in given:
        wanted, options = wanted * scale[:, None], options | {"scale": scale}
    tiling = SumTiling(Cut(4, 64, 3), Cut(2, 64, 4), Cut(4, 64, 2))
    sums = jax.jit(partial(sum_segments, tiling=tiling, interpret=INTERPRET))
    assert_bits(sums(values, starts, **options), wanted.astype(dtype))


def test_weights_wide_ids_and_batches(rng: Rng) -> None:
    """Bounds outside the entries are clamped."""
    values = rng.standard_normal((2, 50, 6)).astype(np.float32)
    order, starts = rng.permutation(50), np.array([-3, 1, 41, 41, 2**40])
    weights = 2.0 ** rng.integers(-2, 3, (2, 50)).astype(np.float32)

    def sums(values: jax.Array, weights: jax.Array) -> jax.Array:
        at = jnp.asarray(order), jnp.asarray(starts)
        assert {x.dtype for x in at} == {np.dtype(np.int64)}
        return sum_segments(values, at[1], order=at[0], weights=weights, dtype=np.float16, interpret=INTERPRET)

    with jax.enable_x64(True):
        found = jax.jit(jax.vmap(sums))(values, weights)
    for mine, x, its in zip(found, values, weights, strict=True):
        assert_bits(mine, summed(x, starts, order, its).astype(np.float16))


@pytest.mark.parametrize("shape", [(0, 4), (6, 0)], ids=str)
def test_nothing_to_add(shape: tuple[int, int]) -> None:
    found = sum_segments(jnp.zeros(shape), jnp.zeros(4, jnp.int32), interpret=INTERPRET)
    np.testing.assert_array_equal(found, np.zeros((3, shape[1])))


@pytest.mark.parametrize("columns", [1, 64, 1001, 8192])
def test_sums_and_runs_lower_for_gpus_inside_shard_map(columns: int) -> None:
    def body(values: jax.Array, order: jax.Array, weights: jax.Array) -> Any:
        starts = jnp.arange(5, dtype=jnp.int32) * 100  # varies over no axis, as the others do
        sums = sum_segments(values, starts, order=order, weights=weights, scale=weights[:4])
        groups = jnp.array([0, 2, 4], jnp.int32)
        of_groups = sum_segments(values, starts, order=order, groups=groups, scale=weights[:2])
        return sums, of_groups, runs_of_sorted(order, 7)[:2], places_in_sorted(starts, order)

    shapes = ((1024, columns), jnp.bfloat16), ((4096,), jnp.int32), ((4096,), jnp.float32)
    assert lowered_for_h200(body, starmap(jax.ShapeDtypeStruct, shapes)).count("xla.gpu.triton") >= 10


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_runs_of_sorted_ids(dtype: Any, rng: Rng) -> None:
    count, limit = 2500 if INTERPRET else 1_100_000, 999
    ids = np.sort(rng.integers(-20, limit + 20, (2, count)), axis=1).astype(dtype)
    ids[1, 5:] = limit  # fewer runs
    with jax.enable_x64(dtype == np.int64):
        find = partial(runs_of_sorted, limit=limit, interpret=INTERPRET)
        found = helpers.fetch(jax.jit(jax.vmap(find))(jnp.asarray(ids)))
    for own, starts, different, runs in zip(ids, *found, strict=True):
        wanted, firsts = np.unique(own, return_index=True)
        inside = (wanted >= 0) & (wanted < limit)
        more = count - inside.sum()
        np.testing.assert_array_equal(different, np.append(wanted[inside], [limit] * more))
        np.testing.assert_array_equal(starts, np.append(firsts[inside], [(own < limit).sum()] * (more + 1)))
        assert (different.dtype, starts.dtype, runs) == (dtype, np.int32, inside.sum())


@pytest.mark.parametrize(
    ("dtype", "of"),
    [(np.int32, np.uint16), (np.int64, np.int32), (np.int32, np.int32), (np.uint32, np.uint32)],
    ids=str,
)
@pytest.mark.parametrize("size", [0, 1, 1000, 1024])
def test_places_in_sorted(size: int, dtype: Any, of: Any, rng: Rng) -> None:
    union = np.sort(rng.integers(0, 700, (2, size)), axis=1).astype(of)
    ids = rng.integers(-3, 720, 300).astype(dtype)  # unsigned, three lie near 2^32
    with jax.enable_x64(dtype == np.int64):
        find = partial(places_in_sorted, interpret=INTERPRET)
        found = jax.jit(jax.vmap(find, in_axes=(0, None)))(jnp.asarray(union), jnp.asarray(ids))
    assert found.dtype == np.int32
    for own, places in zip(union, found, strict=True):
        np.testing.assert_array_equal(places, np.searchsorted(own.astype(np.int64), ids))


@pytest.mark.parametrize(("size", "groups"), [(1, 1), (8, 128), (64, 3), (300, 100), (2048, 7)])
def test_counting_sort(size: int, groups: int, rng: Rng) -> None:
    ids = rng.integers(-1, groups + 2, (2, size), dtype=np.int32)
    found = jax.jit(jax.vmap(partial(counting_sort, groups=groups, interpret=INTERPRET)))(ids)
    for own, place, order, sizes in zip(ids, *found, strict=True):
        inside = (own >= 0) & (own < groups)
        expected = np.argsort(np.where(inside, own, groups), kind="stable")
        np.testing.assert_array_equal(order, np.where(inside[expected], expected, -1))
        np.testing.assert_array_equal(place[inside], np.argsort(expected)[inside])
        assert (place[~inside] == -1).all()
        np.testing.assert_array_equal(sizes, np.bincount(own[inside], minlength=groups))


gradient_of, ADAGRAD = partial(SparseRows.from_entries, num_rows=99), embedding.rowwise_adagrad(0.1)
OPS = {
    "coalesce": lambda ids, rows: coalesce(gradient_of(ids, rows)).values,
    "add": lambda ids, rows: embedding.add(*[gradient_of(ids, rows)] * 2).values,
    "norm": lambda ids, rows: embedding.global_norm(gradient_of(ids, rows)),
    "todense": lambda ids, rows: gradient_of(ids, rows).todense(),
    "bag": lambda ids, rows: embedding.bag(rows, ids, bag_of=ids, num_bags=99, combiner="mean"),
    "rowwise_adagrad": lambda ids, rows: ADAGRAD.update(gradient_of(ids, rows), jnp.zeros((99, 1)))[0].values,
    "apply_updates": lambda ids, rows: embedding.apply_updates(jnp.ones((99, 64)), gradient_of(ids, rows)),
    "step": lambda ids, rows: ADAGRAD.step(jnp.ones((99, 64)), jnp.zeros((99, 1)), gradient_of(ids, rows)),
    "gathered rows": lambda ids, rows: jax.grad(
        lambda x: (ragged_dot(x, jnp.ones((2, 64, 16)), jnp.array([9, 20_000]), lhs_indices=ids) * rows[:, :16]).sum()
    )(rows[:99]),
}


@pytest.mark.skipif(not gemm.pallas_platforms(), reason="kernels sum on GPUs alone")
@pytest.mark.parametrize("name", OPS)
def test_ten_runs_give_the_same_bits(name: str, rng: Rng) -> None:
    ids, rows = rng.integers(0, 99, 20_009).astype(np.int32), rng.standard_normal((20_009, 64)).astype(np.float32)
    helpers.assert_same_bits_again(jax.jit(OPS[name]), (ids, rows), 9)


def reduced(group: Group, ids: jax.Array, rows: jax.Array) -> jax.Array:
    return sparse_all_reduce(gradient_of(ids, rows), group=group, capacity=128, implementation="xla").values


def gradients_of_biases(group: Group, ids: jax.Array, rows: jax.Array) -> Any:
    matrix = jnp.eye(64)[None]

    def loss(biases: Any) -> jax.Array:
        experts = Experts(gate=matrix, up=matrix, down=matrix, biases=biases)
        options: dict[str, Any] = {"group": group, "capacity": 20_009, "implementation": "xla"}
        return jnp.sum(moe_mlp(rows, ids[:, None] * 0, rows[:, :1], experts, **options)[0] ** 2)

    return jax.grad(loss)((rows[:1], rows[1:2], rows[2:3]))


@pytest.mark.skipif(not gemm.pallas_platforms(), reason="kernels sum on GPUs alone")
@pytest.mark.parametrize("op", [reduced, gradients_of_biases])
def test_ten_runs_of_a_group_give_the_same_bits(op: Any, open_group: OpenGroup, rng: Rng) -> None:
    group = open_group(1)
    ids = rng.integers(0, 99, (1, 20_009)).astype(np.int32)
    rows = rng.standard_normal((1, 20_009, 64)).astype(np.float32)
    helpers.assert_same_bits_again(helpers.per_rank(partial(op, group), group.mesh), (ids, rows), 9)


@pytest.mark.skipif(not gemm.pallas_platforms(), reason="kernels sum on GPUs alone")
def test_sums_of_more_than_2_31_values() -> None:
    rows, columns = 550_000, 4096
    values = jnp.broadcast_to((jnp.arange(rows) % 7).astype(jnp.bfloat16)[:, None], (rows, columns))
    order = jnp.arange(rows, dtype=jnp.int32)[::-1]
    starts = jnp.array([0, 3, 40, rows], jnp.int32)
    found = jax.jit(partial(sum_segments, dtype=np.float32))(values, starts, order=order)
    number = np.arange(rows)[::-1] % 7
    wanted = [number[a:b].sum() for a, b in ((0, 3), (3, 40), (40, rows))]
    np.testing.assert_array_equal(found, np.broadcast_to(np.array(wanted, np.float32)[:, None], (3, columns)))


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_by_ids_and_their_derivatives(weighted: bool, rng: Rng) -> None:
    """Under `jax.vmap`, too; ids outside are left out. The sum has a second derivative, by rows and weights."""
    ids, rows = rng.integers(-2, 9, 40), rng.standard_normal((2, 40, 3)).astype(np.float32)
    weights = rng.standard_normal(40).astype(np.float32) if weighted else np.ones(40, np.float32)
    matrix = (ids[:, None] == np.arange(7)).astype(np.float64)

    def sums(rows: jax.Array, weights: jax.Array) -> jax.Array:
        def of_one(x: jax.Array) -> jax.Array:
            return sum_by_ids(x, jnp.asarray(ids), 7, np.float32, weights if weighted else None)

        return jax.vmap(of_one)(rows)

    @jax.jit
    def derivatives(rows: jax.Array, weights: jax.Array, cotangent: jax.Array) -> Any:
        def pulled(weights: jax.Array) -> Any:
            found, pull = jax.vjp(sums, rows, weights)
            return jnp.vdot(pull(cotangent)[0], rows), (found, *pull(cotangent))

        mixed, first = jax.grad(pulled, has_aux=True)(weights)
        return *first, jax.jvp(sums, [rows, weights], [rows, weights])[1], mixed

    cotangent = rng.standard_normal((2, 7, 3)).astype(np.float32)
    found, by_rows, by_weights, tangent, mixed = derivatives(rows, weights, cotangent)
    np.testing.assert_allclose(found, np.einsum("ns,n,bnd->bsd", matrix, weights, rows), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_rows, np.einsum("ns,n,bsd->bnd", matrix, weights, cotangent), rtol=1e-6)
    np.testing.assert_allclose(tangent, (1 + weighted) * found, rtol=1e-5, atol=1e-5)
    wanted = weighted * np.einsum("ns,bnd,bsd->n", matrix, rows, cotangent)
    np.testing.assert_allclose(by_weights, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mixed, wanted, rtol=1e-5, atol=1e-5)
