"""`RowOptimizer.step`, on a CPU also as GPUs compute it: sums, update and write in one kernel."""

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from embedding_oracle import KINDS, OPTIMIZERS, D, DenseTraining, V, dense_gradient, stepped
from helpers import DTYPES, Rng, bits, wide
from jax.sharding import PartitionSpec as P
from sparse_cases import dense
from test_pallas_kernels import H200, INTERPRET, lowered_for_h200
from test_sums import LENGTHS, assert_bits, starts_of, summed

from jax_ep import SparseRows, embedding
from jax_ep._kit import gemm
from jax_ep.pallas_kernels import trace_rows, update_rows


def draw_gradients(rng: Rng, steps: int, count: int) -> list[SparseRows]:
    """A gradient per step: duplicates, ids that name no row, entries past the count that would spoil everything."""
    ids = rng.choice([*range(0, V, 3), -1, V, V + 7, -V], (steps, count)).astype(np.int32)
    ids[1] = np.minimum(np.arange(count) * 2, V)  # sorted and different, as coalesce gives them
    values = rng.standard_normal((steps, count, D)).astype(np.float32)
    values[-1, count // 2 :] = np.nan
    counts = [*[count] * (steps - 1), count // 2]
    given = (map(jnp.asarray, each) for each in zip(ids, values, counts, strict=True))
    return [SparseRows(indices, values, count, V) for indices, values, count in given]


as_on_gpus = pytest.mark.parametrize("each_way", ["by kernels"], indirect=True)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=str)
def test_rows_and_states_of_every_shape(dtype: Any, rng: Rng) -> None:
    """Bit by bit. Long segments, gathered and weighted values, ids outside; all other rows keep their bits."""
    starts, entries, height = starts_of(LENGTHS), sum(LENGTHS), 40
    values = rng.integers(-9, 9, (entries, D)).astype(np.float32)
    order, weights = rng.integers(0, entries, entries), 2.0 ** rng.integers(-2, 3, entries).astype(np.float32)
    ids = rng.permutation(height)[: len(LENGTHS)]
    ids[[0, 4]] = -1, 2**32 + 1  # would be row 1 in 32 bits
    arrays = [
        rng.integers(-9, 9, (height, *sides)).astype(kind)
        for sides, kind in (((D,), dtype), ((D,), np.float32), ((1,), np.float32), ((), np.float32))
    ]

    def function(rows: list[jax.Array], scalars: list[jax.Array]) -> Any:
        total, table, kept, one, flat = rows
        mean = jnp.sum(total, axis=1, keepdims=True) / 4
        added = jnp.where(scalars[1], one + mean, 0)
        return [table + total.astype(dtype), kept + added, one + mean, flat + 2 * mean[:, 0]], [scalars[0] + 1]

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):

        @jax.jit
        def run(arrays: list[jax.Array], ids: jax.Array, order: jax.Array) -> Any:
            like = [jax.ShapeDtypeStruct((height, D), np.float32), *arrays]
            traced = trace_rows(function, D, like, [jnp.int32(3), ids[0] < 0])
            options: dict[str, Any] = {"order": order, "weights": weights, "interpret": INTERPRET}
            return update_rows(traced, arrays, ids, jnp.asarray(values), jnp.asarray(starts), **options), traced.results

        assert ids.dtype == order.dtype == np.int64
        found, (count,) = run([jnp.asarray(x) for x in arrays], ids, order)
    assert count == 4
    wanted = [x.copy() for x in arrays]
    for row, total in zip(ids, summed(values, starts, order, weights), strict=True):
        if 0 <= row < height:
            mean = total.sum() / np.float32(4)
            wanted[0][row] += total.astype(dtype)
            wanted[1][row] += arrays[2][row] + mean
            wanted[2][row] += mean
            wanted[3][row] += 2 * mean
    for actual, expected in zip(found, wanted, strict=True):
        assert_bits(actual, expected)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name: str, rng: Rng) -> None:
    """Against dense training, and `update` with `apply_updates`. Rows that no gradient names keep their bits."""
    optimizer, table = OPTIMIZERS[name](), jnp.asarray(rng.standard_normal((V, D), np.float32))
    gradients, oracle = draw_gradients(rng, 4, 30), DenseTraining(name, table)

    step = jax.jit(lambda *x: optimizer.step(*x), donate_argnums=(0, 1) if name in [*OPTIMIZERS][::2] else ())
    by_updates = jax.jit(partial(stepped, optimizer, False))
    before, untouched = helpers.fetch((table, optimizer.init(table))), np.ones(V, bool)
    traced = jax.make_jaxpr(step)(table, optimizer.init(table), gradients[0])
    assert ("pallas_call" in str(traced)) == bool(gemm.pallas_platforms())
    here = there = jax.tree.map(jnp.asarray, before)
    for gradient in gradients:
        there = by_updates(*jax.tree.map(jnp.copy, there), gradient)
        here = step(*here, gradient)
        dense, touched = dense_gradient(gradient)
        oracle.update(dense, touched)
        untouched &= ~touched
    assert 0 < untouched.sum() < V
    assert all(x.dtype in (jnp.float32, jnp.int32) for x in jax.tree.leaves((here, there)))  # no guard in a checkpoint
    everywhere = zip(*map(jax.tree.leaves, (here, there, oracle.leaves, before)), strict=True)
    for actual, other, dense, first in everywhere:
        np.testing.assert_allclose(actual, other, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(actual, dense, rtol=2e-5, atol=2e-6)
        if actual.ndim:
            assert bits(actual[untouched]) == bits(first[untouched])


@pytest.mark.matrix(1)
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_wide_ids_and_rates(name: str, dtype: Any, rng: Rng) -> None:
    """With int64 ids and a traced float64 rate all else stays in 32 bits: in a batch, also for a row of 70 entries."""
    ids = rng.integers(-2, V + 2, 100)
    ids[:70], ids[70] = 7, 2**32 + 1  # would be row 1 in 32 bits
    values, table = rng.standard_normal((2, 100, D)).astype(np.float32), rng.standard_normal((V, D)).astype(dtype)

    @jax.jit
    def train(table: jax.Array, ids: jax.Array, values: jax.Array, rate: jax.Array) -> Any:
        def of_one(values: jax.Array) -> Any:
            optimizer, gradient = OPTIMIZERS[name](rate), SparseRows.from_entries(ids, values, num_rows=V)
            state = optimizer.init(table)
            updates, after = optimizer.update(gradient, state, table)
            return optimizer.step(table, state, gradient), (embedding.apply_updates(table, updates), after), updates

        return jax.vmap(of_one)(values)

    with jax.enable_x64(True):
        *found, updates = helpers.fetch(train(table, ids, values, np.float64(0.1)))
        gradients = [SparseRows.from_entries(jnp.asarray(ids), jnp.asarray(x), num_rows=V) for x in values]
    assert (updates.indices.dtype, updates.values.dtype) == (np.int64, np.float32)
    unit = float(jnp.finfo(dtype).eps)
    for i, gradient in enumerate(gradients):
        oracle = DenseTraining(name, table)
        oracle.update(*dense_gradient(gradient))
        for ours in map(jax.tree.leaves, found):
            assert [x.dtype for x in ours] == [dtype, *(x.dtype for x in oracle.leaves[1:])]
            np.testing.assert_allclose(wide(ours[0][i]), oracle.table, rtol=max(unit, 1e-5), atol=max(unit, 5e-6))
            for actual, expected in zip(ours[1:], oracle.leaves[1:], strict=True):
                np.testing.assert_allclose(actual[i], expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("weighted", [False, True])
@as_on_gpus
def test_bags_share_their_cotangent(each_way: None, weighted: bool, rng: Rng) -> None:
    """No row per entry is computed: the program has no array [N, D]. A bag may leave out ids that the lookup reads."""
    table, ids = rng.standard_normal((V, D)).astype(np.float32), rng.integers(-1, V + 2, (7, 4))
    weights = 2.0 ** rng.integers(-2, 3, ids.shape).astype(np.float32)
    counted = np.where(rng.random(ids.shape) < 0.8, ids, -1)
    cotangent = rng.integers(-9, 9, (7, D)).astype(np.float32)
    optimizer = embedding.by_rows(optax.sgd(0.5))

    @jax.jit
    def step(table: jax.Array, ids: jax.Array, counted: jax.Array, weights: jax.Array, cotangent: jax.Array) -> Any:
        def loss(rows: jax.Array) -> jax.Array:
            return jnp.vdot(embedding.bag(rows, counted, weights if weighted else None), cotangent)

        return optimizer.step(table, optimizer.init(table), embedding.sparse_value_and_grad(loss)(table, ids)[1])[0]

    operands = [jnp.asarray(x) for x in (table, ids, counted, weights, cotangent)]
    by_entries = ((counted >= 0) * (weights if weighted else 1))[..., None] * cotangent[:, None]
    found = step(*operands)
    np.testing.assert_array_equal(found, table - np.float32(0.5 * dense(ids, by_entries, V)))
    assert f"f32[28,{D}]" not in str(step.lower(*operands).compile().as_text())


def of_largest(gradient: jax.Array, state: Any, table: Any = None) -> Any:
    """Half the sign of the largest value of each row, found by a sort: Pallas has none."""
    return -0.5 * jnp.sign(gradient) * (gradient >= jnp.sort(gradient, axis=1)[:, -1:]), state


@as_on_gpus
def test_what_pallas_does_not_compile_runs_by_xla(each_way: None, rng: Rng, caplog: pytest.LogCaptureFixture) -> None:
    transform: Any = SimpleNamespace(init=lambda table: (), update=of_largest)
    optimizer, ids = embedding.by_rows(transform), np.array([3, 9, 3, V], np.int32)
    values = rng.standard_normal((4, D)).astype(np.float32)
    gradient = SparseRows.from_entries(jnp.asarray(ids), jnp.asarray(values), num_rows=V)
    with caplog.at_level(logging.DEBUG, "jax_ep"):
        found, _ = optimizer.step(jnp.zeros((V, D)), (), gradient)
    assert [record.message for record in caplog.records if record.message.startswith("step: ")] == [
        f"step: XLA updates the rows of {(V, D)}, as Pallas does not compile sort"
    ]
    wanted = np.zeros((V, D))
    for row, total in ((3, values[0] + values[2]), (9, values[1])):
        wanted[row, total.argmax()] = -0.5 * np.sign(total.max())
    np.testing.assert_array_equal(found, wanted)


def twice(row: jax.Array) -> tuple[jax.Array, jax.Array]:
    return row, 2 * row


@pytest.mark.parametrize(
    ("what", "width", "function"),
    [
        ("cumsum", D, lambda rows, scalars: ([jnp.cumsum(rows[0], axis=1)], [])),
        ("reduce_max", D, lambda rows, scalars: ([rows[0] - rows[0].max(axis=1, keepdims=True)], [])),
        ("cond", D, lambda rows, scalars: (list(jax.lax.cond(True, twice, twice, rows[0]))[:1], [])),
        ("rows that are constant", D, lambda rows, scalars: ([jnp.float32(0)], [])),
        (r"an array \(1, 6\) that is the same for all rows", D, lambda rows, scalars: ([rows[0] * np.arange(6.0)], [])),
        ("a scalar that depends on rows", D, lambda rows, scalars: ([rows[0]], [rows[0].sum(axis=1)])),
        ("rows of 8193 columns", 8193, lambda rows, scalars: (rows, [])),
    ],
)
def test_what_a_kernel_cannot_compute(what: str, width: int, function: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"^{what}"):
        trace_rows(function, width, [jax.ShapeDtypeStruct((V, width), np.float32)], [])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"ids": jnp.arange(3)}, r"ids must have shape \[S\] = \(2,\), got \(3,\)"),
        ({"arrays": [jnp.zeros((V, D + 1))]}, r"arrays must be \[V, 6\], \[V, 1\] or \[V\] alike, got \(50, 7\)"),
        ({"weights": jnp.ones(3)}, r"weights must have shape \[M\] = \(50,\), got \(3,\)"),
        ({"order": jnp.arange(4)[None]}, r"order must have shape \[M\], got \(1, 4\)"),
    ],
)
def test_wrong_updates_are_named(change: dict[str, Any], match: str) -> None:
    table = jnp.zeros((V, D))
    traced = trace_rows(lambda rows, scalars: ([rows[0] + rows[1]], []), D, [table, table], [])
    given: dict[str, Any] = {"arrays": [table], "ids": jnp.arange(2), "values": table, "starts": jnp.arange(3)}
    with pytest.raises(ValueError, match=f"^update_rows: {match}"):
        update_rows(traced, **given | change)


@pytest.mark.parametrize(("entries", "rows"), [(0, 0), (0, 5), (5, 0), (5, 5)])
def test_empty_segments_update_their_rows(entries: int, rows: int) -> None:
    """By a sum of 0, also where no segment has entries, or no entry a row."""
    table = jnp.zeros((V, D))
    traced = trace_rows(lambda rows, scalars: ([rows[0] + rows[1] + 1], []), D, [table, table], [])
    ids, starts = jnp.array([3, 9, V]), jnp.array([0, 0, 0, entries])
    values, order = jnp.full((rows, D), 7.0), jnp.arange(entries)
    (found,) = update_rows(traced, [table], ids, values, starts, order=order, interpret=INTERPRET)
    np.testing.assert_array_equal(found, np.isin(np.arange(V), [3, 9])[:, None] * np.ones(D))


@pytest.mark.usefixtures("each_way")
def test_a_step_has_no_derivative() -> None:
    optimizer, table = embedding.by_rows(optax.sgd(0.1)), jnp.zeros((V, D))
    gradient = SparseRows.from_entries(jnp.zeros(3, jnp.int32), jnp.ones((3, D)), num_rows=V)
    with pytest.raises(TypeError, match=r"^step: has no derivative; call update and apply_updates"):
        jax.grad(lambda table: optimizer.step(table, optimizer.init(table), gradient)[0].sum())(table)


@pytest.mark.usefixtures("each_way")
def test_no_entries() -> None:
    optimizer, table = embedding.rowwise_adagrad(0.1), jnp.ones((V, D))
    nothing = SparseRows.from_entries(jnp.zeros(0, jnp.int32), jnp.zeros((0, D)), num_rows=V)
    before = table, optimizer.init(table)
    assert bits(jax.jit(lambda *x: optimizer.step(*x))(*before, nothing)) == bits(before)


@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("name", ["adamw", "rowwise_adagrad"])
def test_steps_lower_for_gpus_inside_shard_map(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Table and states are written in place; scalars of the state vary over no axis."""
    monkeypatch.setattr(gemm, "pallas_platforms", lambda: ("cuda", "rocm"))
    optimizer, height, ranks = OPTIMIZERS[name](), 1000, H200.size

    def step(table: jax.Array, state: Any, ids: jax.Array, values: jax.Array) -> Any:
        return optimizer.step(table, state, SparseRows.from_entries(ids, values, num_rows=height))

    table = jax.ShapeDtypeStruct((ranks * height, width), jnp.bfloat16)
    state = jax.eval_shape(optimizer.init, table)
    specs = jax.tree.map(lambda x: P("ep") if x.ndim else P(), state)
    entries = jax.ShapeDtypeStruct((4096,), jnp.int32), jax.ShapeDtypeStruct((4096, width), jnp.float32)
    in_specs = P("ep"), specs, P("ep"), P("ep")
    text = lowered_for_h200(step, (table, state, *entries), in_specs, in_specs[:2], donate_argnums=(0, 1))
    arrays = 1 + sum(x.ndim > 0 for x in jax.tree.leaves(state))
    assert text.count("xla.gpu.triton") == 5
    assert text.count("output_operand_alias<") == 2 * arrays


@pytest.mark.skipif(not gemm.pallas_platforms() or INTERPRET, reason="kernels update rows on GPUs alone")
def test_tables_of_more_than_2_31_values() -> None:
    height, entries = 2**31 // 64 + 1000, 20_009
    optimizer = embedding.rowwise_adagrad(0.1)
    ids = height - np.random.default_rng(0).zipf(1.5, entries).clip(1, 900)
    values = jax.random.normal(jax.random.key(0), (entries, 64))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(table: jax.Array, state: jax.Array) -> Any:
        rows = SparseRows.from_entries(jnp.asarray(ids, jnp.int32), values, num_rows=height)
        return optimizer.step(table, state, rows)

    table, state = step(jnp.zeros((height, 64), jnp.bfloat16), jnp.full((height, 1), 0.1))
    assert not table[:-1000].any()
    gradient = dense(ids - height + 1000, np.asarray(values), 1000)
    squares = 0.1 + (gradient**2).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(state[-1000:], squares, rtol=1e-4)
    np.testing.assert_allclose(wide(table[-1000:]), -0.1 * gradient / np.sqrt(squares), rtol=2.0**-6, atol=1e-4)
