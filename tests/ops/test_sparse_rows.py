"""SparseRows, coalesce and arithmetic on gradients; what sparse_all_reduce says to bad arguments."""

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sparse_cases as cases
from embedding_oracle import stepped
from helpers import DTYPES, Rng
from jax.experimental.sparse import BCOO
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_ep import CapacityError, Group, Implementation, SparseRows, coalesce, embedding, sparse_all_reduce
from jax_ep.ops.sparse.api import choose_method

V, D = 12, 3
unchecked: Any = optax  # its types know no SparseRows
wrongly: Any = SparseRows  # its functions with arguments that no type checker lets pass
IDS = jnp.asarray([3, 1, 3, -1, V], jnp.int32)


def rows_of(values: jax.Array) -> SparseRows:
    return SparseRows.from_entries(IDS, values, num_rows=V)


VALUES = jnp.arange(15.0).reshape(5, D) - 7
ROWS = rows_of(VALUES)


@pytest.mark.matrix(1)
@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("draw", cases.DRAWS)
@pytest.mark.parametrize("capacity", [None, 4, 60])
def test_coalesce(capacity: int | None, draw: str, dtype: np.dtype, rng: Rng) -> None:
    ids = cases.DRAWS[draw](rng, 2, 40, 100)
    values = cases.draw_values(rng, ids, 5, dtype)
    options: dict[str, Any] = {"capacity": capacity, "on_overflow": "drop"}
    run = jax.jit(lambda i, v: coalesce(SparseRows.from_entries(i, v, num_rows=100), **options))
    actual = jax.tree.map(lambda x: x[None], run(ids[0], values[0]))
    wanted = cases.expected(ids[:1], values[:1], num_rows=100, capacity=capacity or 40)
    cases.assert_reduced(actual, wanted, dtype)


def test_coalesce_twice_changes_nothing_and_counts_once() -> None:
    """Of numpy's arrays, too; and of no entries."""
    rows = wrongly.from_entries(np.array([5, 3, -1, 5, 100, 9], np.int32), np.ones((6, D), np.float32), num_rows=V)
    once = coalesce(rows, capacity=2, on_overflow="drop")
    np.testing.assert_array_equal(once.indices, [3, 5])
    np.testing.assert_array_equal(once.values[:, 0], [1, 2])
    assert (int(once.ignored), int(once.dropped)) == (2, 1)
    assert helpers.bits(coalesce(once)) == helpers.bits(once)
    assert coalesce(SparseRows(IDS[:0], VALUES[:0], jnp.int32(0), V)).indices.shape == (0,)


def test_gradient_of_coalesce(rng: Rng) -> None:
    ids = jnp.asarray([5, 3, -1, 5, 100, 9])
    weights = jnp.asarray(rng.standard_normal((V, D)), jnp.float32)

    def loss(values: jax.Array) -> jax.Array:
        rows = coalesce(SparseRows.from_entries(ids, values, num_rows=V))
        return jnp.sum(weights.at[rows.indices].get(mode="fill", fill_value=0) * rows.values)

    wanted = cases.gradient(np.asarray(ids)[None], np.asarray(weights), "sum")[0]
    np.testing.assert_allclose(jax.grad(loss)(jnp.zeros((6, D))), wanted, rtol=1e-6)


def test_dense_and_bcoo(rng: Rng) -> None:
    ids = cases.out_of_range(rng, 1, 30, V)[0]
    values = rng.standard_normal((30, D)).astype(np.float32)
    rows = SparseRows.from_entries(jnp.asarray(ids), jnp.asarray(values), num_rows=V)
    for each in (rows, rows.to_bcoo(), SparseRows.from_bcoo(rows.to_bcoo())):
        np.testing.assert_allclose(each.todense(), cases.dense(ids, values, V), atol=1e-5)
    fewer = SparseRows(rows.indices, rows.values, jnp.int32(7), V)  # what lies behind `count` is padding
    np.testing.assert_allclose(fewer.todense(), cases.dense(ids[:7], values[:7], V), atol=1e-5)


def test_choice_of_method() -> None:
    assert choose_method(5_000_000, 4, 50_000, 8192) == "bitmap"
    assert choose_method(2**25, 1, 1, 1) == "bitmap"  # 4 MiB
    assert choose_method(2**25 + 8, 1, 1, 1) == "match"
    assert choose_method(2**30, 4, 50_000, 8192) == "bitmap"  # 128 MiB beside 1.6 GB
    assert choose_method(2**30, 4, 5_000, 8192) == "match"


def reduce(group: Group, rows: Any = ROWS, capacity: Any = 8, **options: Any) -> SparseRows:
    return sparse_all_reduce(rows, group=group, capacity=capacity, **options)


ONE, add_up = SparseRows(IDS, VALUES, jnp.int32(1), V), cast(Any, coalesce)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rows": (IDS, VALUES)}, TypeError, "rows must be SparseRows, got tuple"),
        ({"rows": VALUES}, TypeError, "rows must be SparseRows, got float32[5,3]"),
        ({"rows": replace(ONE, indices=IDS[None])}, ValueError, "indices must have shape [N]"),
        ({"rows": replace(ONE, values=VALUES[0])}, ValueError, "values must have shape [N, D]"),
        ({"rows": replace(ONE, values=VALUES[1:])}, ValueError, "values must have as many rows as"),
        ({"rows": replace(ONE, indices=IDS * 1.0)}, TypeError, "indices must be of dtype int32, int"),
        ({"rows": replace(ONE, values=IDS[:, None])}, TypeError, "values must be of dtype bfloat16"),
        ({"rows": replace(ONE, values=VALUES[:, :0])}, ValueError, "values must have at least one col"),
        ({"rows": replace(ONE, num_rows=0)}, ValueError, "num_rows must be at least 1, got 0"),
        ({"rows": replace(ONE, num_rows=2**31)}, ValueError, "num_rows must be below 2**31"),
        ({"rows": replace(ONE, count=IDS)}, ValueError, "count must have shape [] = ()"),
        ({"rows": replace(ONE, count=jnp.float32(1))}, TypeError, "count must be of dtype int32, got flo"),
        ({"rows": replace(ROWS, ignored=IDS)}, ValueError, "ignored must have shape [] = ()"),
        ({"rows": replace(ROWS, dropped=None)}, TypeError, "dropped must be an array, got NoneType"),
        ({"rows": replace(ROWS, dropped=jnp.uint32(1))}, TypeError, "dropped must be of dtype int32, got uint32"),
        ({"rows": jax.tree.map(lambda _: object(), ROWS)}, TypeError, "indices must be an array, got object"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
        ({"capacity": 2.0}, TypeError, "capacity must be a Python int"),
        ({"capacity": 2**31}, ValueError, "capacity and the indices of all ranks must be below 2**31"),
        ({"op": "max"}, ValueError, "op must be one of 'sum', 'mean', 'mean_by_count'; got 'max'"),
        ({"sharded": 1}, TypeError, "sharded must be True or False, got 1"),
        ({"method": "sort"}, ValueError, "method must be one of 'auto', 'bitmap', 'match'; got 'sort'"),
        ({"on_overflow": "clip"}, ValueError, "on_overflow must be one of 'raise', 'drop'; got 'clip'"),
        ({"implementation": "gpu"}, ValueError, "implementation must be one of"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str, group: Group) -> None:
    with pytest.raises(error, match="^sparse_all_reduce: " + re.escape(message)):
        helpers.trace(group, lambda: reduce(group, **options))


def test_where_it_may_be_called(implementation: Implementation, group: Group) -> None:
    with pytest.raises(ValueError, match=r"^sparse_all_reduce: must be called inside jax\.shard_map"):
        reduce(group, implementation=implementation)


REFUSED: list[tuple[Any, str]] = [
    (lambda: wrongly.from_entries([1], VALUES[:1], num_rows=V), "SparseRows: indices must be an array, got list"),
    (lambda: wrongly.from_entries(IDS, 1.0, num_rows=V), "SparseRows: values must be an array, got float"),
    (lambda: wrongly.from_bcoo(VALUES), "SparseRows.from_bcoo: matrix must be BCOO, got float32[5,3]"),
    (lambda: wrongly.from_bcoo(BCOO.fromdense(jnp.eye(3))), "SparseRows.from_bcoo: matrix must have n_batch, n_sparse"),
    (
        lambda: embedding.add(ROWS, replace(ROWS, values=VALUES[:, :2])),
        "add: b must be of a table of 12 x 3 as a is, got 12 x 2",
    ),
    (lambda: embedding.add(ROWS, VALUES), "add: b must be SparseRows, got float32[5,3]"),
    (lambda: embedding.scale(ROWS, cast(Any, None)), "scale: factor must be a number, got NoneType"),
    (
        lambda: embedding.global_norm(VALUES, axis_name="ep"),
        "global_norm: must be called inside jax.shard_map over axis 'ep'",
    ),
    (lambda: add_up((IDS, VALUES)), "coalesce: rows must be SparseRows, got tuple"),
    (lambda: add_up(ONE, capacity=0), "coalesce: capacity must be at least 1, got 0"),
    (lambda: add_up(ONE, capacity=2**31), "coalesce: capacity must be below 2**31, got 2147483648"),
    (lambda: add_up(replace(ONE, values=VALUES > 0)), "coalesce: values must be of dtype"),
    (lambda: replace(ONE, indices=IDS * 1.0).todense(), "SparseRows.todense: indices must be of dtype int32, int64"),
    (lambda: jax.tree.map(lambda x: x[None], ONE).to_bcoo(), "SparseRows.to_bcoo: indices must have shape [N], got (1"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        call()


def on_ranks(function: Callable[[Any], Any], check_vma: bool) -> Callable[[Any], Any]:
    return helpers.sharded(helpers.mesh_of(ep=1), function, P(), P(), check_vma)


ON_LEAVES: dict[str, Callable[[SparseRows], Any]] = {
    "sum": lambda g: jax.tree.map(jnp.add, g, g),
    "double": lambda g: jax.tree.map(lambda x: x * 2, g),
    "half": lambda g: jax.tree.map(lambda x: x / 2, g),
    "cast": lambda g: jax.tree.map(lambda x: x.astype(jnp.bfloat16), g),
    "global_norm": optax.tree.norm,
    "clip": lambda g: unchecked.clip_by_global_norm(1.0).update(g, optax.EmptyState()),
    "accumulate": lambda g: optax.tree.add(g, g),
    "psum": on_ranks(lambda g: jax.lax.psum(g, "ep"), True),
    "pmean": on_ranks(lambda g: jax.lax.pmean(g, "ep"), False),
}


@pytest.mark.parametrize("name", ON_LEAVES)
def test_arithmetic_on_leaves_is_refused(name: str) -> None:
    for refused in (ON_LEAVES[name], jax.jit(ON_LEAVES[name]).lower):
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            refused(ROWS)


PASSED: dict[str, Callable[[SparseRows], SparseRows]] = {
    "jit": jax.jit(lambda g: g),
    "carry": lambda g: jax.lax.scan(lambda c, _: (coalesce(coalesce(c)), None), coalesce(g), length=2)[0],
    "stack": lambda g: jax.tree.map(lambda x: x[1], jax.lax.scan(lambda c, _: (c, g), 0, length=2)[1]),
    "while": lambda g: jax.lax.while_loop(lambda c: c.values[0, 0] > 0, lambda c: embedding.scale(c, -1), g),
    "cond": lambda g: jax.lax.cond(g.count > 0, lambda x: x, lambda x: embedding.scale(x, 2), g),
    "vmap": lambda g: jax.tree.map(lambda x: x[1], jax.vmap(lambda x: rows_of(g.values + x))(jnp.arange(2) - 1.0)),
    "shard_map": on_ranks(lambda g: g, True),
    "varying": on_ranks(lambda g: jax.lax.psum(jax.lax.pcast(g, "ep", to="varying").values, "ep") * 0 + g.values, True),
    "device_put": lambda g: jax.device_put(g, NamedSharding(helpers.mesh_of(ep=1), P())),
    "remat": lambda g: jax.checkpoint(lambda x: rows_of(x))(g.values),
    "vjp": lambda g: rows_of(jax.vjp(lambda x: x.values, g)[1](g.values)[0].values),
    "grad": lambda g: rows_of(jax.grad(lambda x: jnp.sum(x.values**2) / 2, allow_int=True)(g).values),
    "custom_vjp": lambda g: rows_of(jax.grad(lambda w: half_of_squares(rows_of(w)))(g.values)),
    "jvp": lambda g: jax.jvp(rows_of, (g.values,), (g.values,))[0],
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "export": lambda g: jax.tree.unflatten(jax.tree.structure(g), exported(jax.tree.leaves(g))),
}


@jax.custom_vjp
def half_of_squares(rows: SparseRows) -> jax.Array:
    return jnp.sum(rows.values**2) / 2


half_of_squares.defvjp(
    lambda rows: (half_of_squares(rows), rows),
    lambda rows, cotangent: (wrongly(None, cotangent * rows.values, None, V, None, None, None),),
)


def exported(leaves: list[jax.Array]) -> Any:
    program = jax.export.export(jax.jit(lambda x: x))(leaves)
    return jax.export.deserialize(program.serialize()).call(leaves)


@pytest.mark.parametrize("name", PASSED)
def test_what_passes(name: str) -> None:
    out = PASSED[name](ROWS)
    if isinstance(out, SparseRows):
        assert (out.num_rows, out.guard.dtype) == (V, ROWS.guard.dtype)
        np.testing.assert_array_equal(out.todense(), ROWS.todense())
    else:
        np.testing.assert_array_equal(out, ROWS.values)


def test_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = pytest.importorskip("orbax.checkpoint")
    state = {"table": jnp.ones((V, D)), "accumulated": coalesce(ROWS, capacity=8)}
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", state)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        restored = checkpointer.restore(tmp_path / "step", shapes)
    np.testing.assert_array_equal(restored["accumulated"].todense(), ROWS.todense())
    assert restored["accumulated"].guard.dtype == ROWS.guard.dtype


def draw(rng: Rng, entries: int, dtype: Any = np.float32) -> SparseRows:
    ids = rng.integers(-2, V + 2, entries).astype(np.int32)
    values = rng.standard_normal((entries, D)).astype(dtype)
    values[-1] = np.nan  # behind the count
    none = jnp.int32(0)
    return SparseRows(jnp.asarray(ids), jnp.asarray(values), jnp.int32(entries - 1), V, none, none)


def test_sums_are_those_of_dense_gradients(rng: Rng) -> None:
    a, b = ({"table": draw(rng, n), "bias": jnp.asarray(rng.standard_normal(4))} for n in (9, 14))
    add = jax.jit(embedding.add, static_argnames="capacity")
    total = add(a, b)
    np.testing.assert_allclose(total["table"].todense(), a["table"].todense() + b["table"].todense(), atol=1e-5)
    np.testing.assert_array_equal(total["bias"], a["bias"] + b["bias"])
    outside = sum(int(np.sum((x.indices[:-1] < 0) | (x.indices[:-1] >= V))) for x in (a["table"], b["table"]))
    assert int(total["table"].ignored) == outside
    again = add(total["table"], a["table"])
    assert int(again.ignored) == outside + int(a["table"].count_outside())
    small = embedding.add(a["table"], b["table"], capacity=2, on_overflow="drop")
    assert int(small.dropped) == int(total["table"].count) - 2


def test_accumulation_in_a_scan(rng: Rng) -> None:
    """Four micro-batches; a tree of zeros is an empty sum."""
    parts = [draw(rng, 10) for _ in range(4)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    zero = jax.tree.map(jnp.zeros_like, jax.jit(coalesce, static_argnames="capacity")(parts[0], capacity=V))
    total, _ = jax.lax.scan(lambda c, x: (embedding.add(c, x, capacity=V), None), zero, stacked)
    np.testing.assert_allclose(total.todense(), sum(x.todense() for x in parts), atol=1e-5)
    assert int(total.ignored) == sum(int(x.count_outside()) for x in parts)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_multiples_and_norms(rng: Rng, dtype: Any) -> None:
    rows, bias = draw(rng, 30, dtype), jnp.asarray(rng.standard_normal(4))
    whole = cases.dense(np.asarray(rows.indices)[:-1], np.asarray(rows.values)[:-1], V)
    norm = np.sqrt(np.sum(whole**2) + np.sum(np.asarray(bias) ** 2))
    tree = (rows, bias)
    global_norm = jax.jit(embedding.global_norm)
    np.testing.assert_allclose(global_norm(tree), norm, rtol=1e-6)
    np.testing.assert_allclose(global_norm(jax.jit(coalesce)(draw(rng, 1))), 0)
    tripled = embedding.scale(tree, jnp.float32(3))
    assert tripled[0].values.dtype == dtype
    np.testing.assert_allclose(global_norm(tripled), 3 * norm, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-6)
    for limit in (norm / 2, 2 * norm):
        clipped, clipped_bias = jax.jit(embedding.clip_by_global_norm)(tree, limit)
        expected, _ = unchecked.clip_by_global_norm(limit).update((jnp.asarray(whole), bias), optax.EmptyState())
        np.testing.assert_allclose(clipped.todense(), expected[0], atol=0.05 if dtype == jnp.bfloat16 else 1e-5)
        np.testing.assert_allclose(clipped_bias, expected[1], rtol=1e-5)
    np.testing.assert_allclose(embedding.scale(bias, 2**31), np.asarray(bias) * 2.0**31, rtol=1e-6)
    np.testing.assert_array_equal(embedding.clip_by_global_norm(bias, 2**31), bias)


@pytest.mark.parametrize("check_vma", [True, False])
def test_norms_over_ranks(rng: Rng, check_vma: bool) -> None:
    """Every rank has rows of its own, of constant values, and all have one array: with check_vma=True only ids vary."""
    size, limit = 2, 0.5
    ids = rng.integers(0, V, (size, 5)).astype(np.int32)
    values, bias = rng.standard_normal((5, D)).astype(np.float32), np.array([3, 4], np.float32)
    sums = np.stack([cases.dense(own, values, V) for own in ids])
    of_ranks = np.sum(sums**2, axis=(1, 2))
    norm = np.sqrt(of_ranks.sum() + np.sum(bias**2) * (1 if check_vma else size))

    def norms(ids: jax.Array, axis_name: Any) -> Any:
        tree = (SparseRows.from_entries(ids, jnp.asarray(values), num_rows=V), jnp.asarray(bias))
        rows, clipped = embedding.clip_by_global_norm(tree, limit, axis_name=axis_name)
        return embedding.global_norm(tree, axis_name=axis_name)[None], rows.todense(), clipped[None]

    def on_ranks(axis_name: Any) -> Any:
        of_axis = partial(norms, axis_name=axis_name)
        return helpers.sharded(helpers.mesh_of(ep=size), of_axis, P("ep"), P("ep"), check_vma)(ids.ravel())

    found, rows, clipped = on_ranks("ep")
    np.testing.assert_allclose(found, [norm] * size, rtol=1e-6)
    np.testing.assert_allclose(rows.reshape(sums.shape), sums * limit / norm, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(clipped, [bias * limit / norm] * size, rtol=1e-5)
    np.testing.assert_allclose(on_ranks(())[0], np.sqrt(of_ranks + np.sum(bias**2)), rtol=1e-6)
    if check_vma:
        message = r"^clip_by_global_norm: axis_name must be given, as tree varies over the mesh axes \('ep',\): "
        with pytest.raises(ValueError, match=message):
            on_ranks(None)


@pytest.mark.parametrize(("op", "reduced"), [("add", partial(embedding.add, ROWS)), ("coalesce", coalesce)])
def test_an_overflow(op: str, reduced: Callable[..., SparseRows]) -> None:
    """The program fails; where groups are open, whose other ranks may go on, `check` raises the typed error."""

    def run(values: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
        rows = reduced(rows_of(values), capacity=1, **options)
        return rows.values, rows.dropped[None]

    message = f"{op}: the result needs 2 rows but capacity is 1; raise the capacity or pass on_overflow='drop'"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(run)(VALUES))
    kept, dropped = jax.jit(lambda values: run(values, on_overflow="drop"))(VALUES)
    assert (np.isfinite(kept).all(), int(dropped[0])) == (True, 1)
    mesh = helpers.mesh_of(ep=2)
    with Group(mesh, "ep") as group:
        spoiled, _ = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P("ep")))(VALUES)
        assert np.isnan(spoiled).all()
        jax.effects_barrier()
        with pytest.raises(CapacityError, match=f"^{message}"):
            group.check()
        group.check()


@pytest.mark.usefixtures("strict")
def test_strict_promotion_of_wide_operands() -> None:
    with jax.enable_x64(True):
        rows = SparseRows.from_entries(IDS.astype(np.int64), VALUES.astype(jnp.bfloat16), num_rows=V)
        total = embedding.add(embedding.scale(rows, np.float64(2)), ROWS, capacity=V)
        total = embedding.clip_by_global_norm(total, np.float64(1e9))
        assert (total.indices.dtype, total.values.dtype) == (np.int64, jnp.bfloat16)
        table = jnp.zeros((V, D), jnp.bfloat16)
        for optimizer in (embedding.rowwise_adagrad(np.float64(0.1)), embedding.by_rows(optax.sgd(0.1))):
            table, _ = stepped(optimizer, False, table, optimizer.init(table), total)
        stacked = embedding.stacked_ids(IDS, np.int64(V))
        bags = embedding.bag(embedding.lookup(table, IDS), IDS, combiner="mean", bag_of=IDS, num_bags=V)
        dense = total.todense()
    np.testing.assert_array_equal(stacked, [3, 1, 3, -1, -1])
    np.testing.assert_allclose(dense, 3 * ROWS.todense(), rtol=0.01)
    np.testing.assert_allclose(bags[3], helpers.wide(table)[3], rtol=0.01)
