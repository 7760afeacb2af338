"""Sparse gradients and the row-wise optimizers, against jax.grad of dense tables and dense updates in numpy."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import OpenGroup
from embedding_oracle import DENSE, KINDS, OPTIMIZERS, D, DenseTraining, V, dense_gradient, looked_up, stepped
from helpers import Rng, bits, fetch, largest_size, mesh_of, sharded, wide
from jax.sharding import PartitionSpec as P

from jax_ep import Implementation, SparseRows, embedding, sparse_all_reduce
from jax_ep.embedding import sparse_value_and_grad


def loss(rows: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(rows.astype(jnp.float32) * weights) ** 2)


def dense_loss(table: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    return loss(looked_up(table, ids), weights)


def draw(rng: Rng, *shape: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A table, ids with many duplicates and some that name no row, and weights."""
    table = rng.standard_normal((V, D), np.float32)
    ids = rng.choice([*range(0, V, 3), -1, V, V + 7, -V], shape).astype(np.int32)
    return jnp.asarray(table), jnp.asarray(ids), jnp.asarray(rng.standard_normal((*shape, D), np.float32))


@pytest.mark.parametrize("shape", [(), (1,), (40,), (5, 8), (0,)])
def test_the_gradient_of_a_table(rng: Rng, shape: tuple[int, ...]) -> None:
    table, ids, weights = draw(rng, *shape)
    value, gradient = jax.jit(sparse_value_and_grad(loss))(table, ids, weights)
    expected, expected_gradient = jax.jit(jax.value_and_grad(dense_loss))(table, ids, weights)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_array_equal(gradient.indices, np.ravel(ids))
    assert wrongly.lookup(table, np.asarray(ids)[()]).shape == (*shape, D)  # of numpy's ids, too
    assert (gradient.num_rows, int(gradient.count)) == (V, np.size(ids))
    np.testing.assert_allclose(gradient.todense(), expected_gradient, rtol=1e-5, atol=1e-6)


def test_further_arguments_and_auxiliary_results(rng: Rng) -> None:
    """One argument or several, in any order, and keywords: as `jax.value_and_grad` takes them."""
    table, ids, weights = draw(rng, 30)
    ids = ids.at[0].set(3)

    def scaled(rows: jax.Array, weights: jax.Array, *, scale: float) -> jax.Array:
        return scale * loss(rows, weights)

    def with_aux(rows: jax.Array, scale: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        return scale * loss(rows, weights), rows[0]

    value, one = jax.jit(sparse_value_and_grad(scaled, 1))(table, ids, weights, scale=3.0)
    both = jax.jit(sparse_value_and_grad(with_aux, (2, 1), has_aux=True))
    (same, aux), several = both(table, ids, jnp.float32(3), weights)
    dense = jax.jit(jax.value_and_grad(lambda t, w, s: s * dense_loss(t, ids, w), (0, 1, 2)))
    expected, gradients = dense(table, weights, 3.0)
    np.testing.assert_array_equal(aux, table[3])
    np.testing.assert_allclose((value, same), (expected, expected), rtol=1e-6)
    for found in (one, several):
        for actual, wanted in zip((found[0].todense(), *found[1:]), gradients, strict=False):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=3e-6)  # the loss is scaled by 3


def test_several_tables_and_several_lookups_in_one(rng: Rng) -> None:
    table, ids, _ = draw(rng, 12)
    small = jnp.asarray(rng.standard_normal((4, D), np.float32))
    both, indices = {"words": table, "tags": small}, {"words": {"left": ids, "right": ids[::2]}, "tags": ids[:6] % 4}

    def score(rows: dict[str, Any]) -> jax.Array:
        return jnp.sum(rows["words"]["left"][:6] * rows["words"]["right"] * rows["tags"])

    def dense(tables: dict[str, jax.Array]) -> jax.Array:
        words = looked_up(tables["words"], ids)
        return jnp.sum(words[:6] * words[::2] * tables["tags"][indices["tags"]])

    gradient = jax.jit(sparse_value_and_grad(score))(both, indices)[1]
    for name, expected in jax.jit(jax.grad(dense))(both).items():
        np.testing.assert_allclose(gradient[name].todense(), expected, rtol=1e-5, atol=1e-6)


NOT_BY_ROWS: dict[str, Callable[[Any], Any]] = {  # of a learning rate
    "lamb": optax.lamb,
    "lars": optax.lars,
    "novograd": optax.novograd,
    "scheduled lamb": lambda rate: optax.lamb(optax.warmup_constant_schedule(0.0, rate, 2)),
    "multi_transform of lamb": lambda rate: optax.multi_transform({"a": optax.lamb(rate)}, "a"),
    "clip_by_block_rms": lambda rate: optax.chain(optax.clip_by_block_rms(100.0), optax.sgd(rate)),
    "scale_by_trust_ratio": lambda rate: optax.chain(optax.scale_by_trust_ratio(), optax.sgd(rate)),
    "apply_if_finite": lambda rate: optax.apply_if_finite(optax.adam(rate), 3),
    "clip_by_global_norm": lambda rate: optax.chain(optax.clip_by_global_norm(100.0), optax.adam(rate)),
    "MultiSteps": lambda rate: optax.MultiSteps(optax.sgd(rate), 2),
    "many MultiSteps": lambda rate: optax.MultiSteps(optax.adam(rate), 100),
    "apply_every": lambda rate: optax.chain(optax.adam(rate), optax.apply_every(2)),
}


@pytest.mark.parametrize("name", NOT_BY_ROWS)
def test_what_does_not_treat_every_row_by_itself(name: str) -> None:
    """It is refused by `init`: before a program runs, and in a program with the learning rate of each call."""
    why = r"^by_rows: optimizer must treat every row by itself, as optax\.adam does, got one "
    keeps = name in ("MultiSteps", "many MultiSteps", "apply_every")
    why += "that keeps gradients back" if keeps else "whose update of"
    for traced in (False, True):
        trace = jax.jit(lambda rate: embedding.by_rows(NOT_BY_ROWS[name](rate)).init(TABLE)).lower
        with pytest.raises(TypeError, match=why):
            trace(0.1) if traced else embedding.by_rows(NOT_BY_ROWS[name](0.1)).init(TABLE)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_learning_rate_of_each_rank(check_vma: bool) -> None:
    def step(rate: jax.Array) -> jax.Array:
        optimizer = embedding.by_rows(optax.sgd(rate[0]))
        updates, _ = optimizer.update(dataclasses.replace(ROWS, values=ROWS.values + 1), optimizer.init(TABLE), TABLE)
        return updates.values[:1]

    mapped = jax.shard_map(step, mesh=mesh_of(ep=2), in_specs=P("ep"), out_specs=P("ep"), check_vma=check_vma)
    for run in (mapped, jax.jit(mapped)):
        np.testing.assert_allclose(run(jnp.arange(2.0)), [[0] * D, [-3] * D])


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_nothing_as_high_as_the_table_is_built(name: str, at_once: bool) -> None:
    optimizer, table = OPTIMIZERS[name](), jax.ShapeDtypeStruct((100_000, 64), jnp.float32)
    ids, weights = jax.ShapeDtypeStruct((128,), jnp.int32), jax.ShapeDtypeStruct((128, 64), jnp.float32)

    def step(table: jax.Array, state: Any, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        return stepped(optimizer, at_once, table, state, sparse_value_and_grad(loss)(table, ids, weights)[1])

    state = jax.eval_shape(optimizer.init, table)
    program = jax.jit(step, donate_argnums=(0, 1)).lower(table, state, ids, weights).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= 4 * 100_000 * 64
    assert memory.temp_size_in_bytes < 400_000  # not even one value per row


def test_updates_with_duplicates(rng: Rng) -> None:
    """They are added up in float32: in bfloat16 256 + 1 is 256. Differentiable in the table and in the updates."""
    ids, table = jnp.full(1000, 3, jnp.int32), jnp.zeros((V, D), jnp.bfloat16)

    def updated(table: jax.Array, values: jax.Array) -> jax.Array:
        return embedding.apply_updates(table, SparseRows.from_entries(ids, values, num_rows=V))

    found, pull = jax.vjp(updated, table, jnp.ones((1000, D)))
    np.testing.assert_array_equal(wide(found), np.where(np.arange(V)[:, None] == 3, 1000, np.zeros((V, D))))
    cotangent = rng.standard_normal((V, D)).astype(jnp.bfloat16)
    for actual, expected in zip(pull(jnp.asarray(cotangent)), (cotangent, cotangent[ids]), strict=True):
        np.testing.assert_array_equal(wide(actual), wide(expected))


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("x64", [False, True])
def test_ids_beyond_32_bits(x64: bool) -> None:
    """They name no row and no bag, and are not cut to 32 bits; without x64 jax has them only from numpy."""
    table, ids = jnp.arange(1.0, V + 1)[:, None], np.array([2**32, 2**32 + 1, 5 - 2**40, -(2**32), 1])
    with jax.enable_x64(x64):
        given: Any = jnp.asarray(ids) if x64 else ids
        np.testing.assert_array_equal(wrongly.lookup(table, given)[:, 0], [0, 0, 0, 0, 2])
        value, gradient = sparse_value_and_grad(jnp.sum)(table, given)
        assert value == 2
        np.testing.assert_array_equal(gradient.todense()[:, 0], np.arange(V) == 1)
        dense = jax.grad(lambda table: jnp.sum(wrongly.lookup(table, given)))(table)
        np.testing.assert_array_equal(dense[:, 0], np.arange(V) == 1)
        bags = wrongly.bag(jnp.ones((5, 1)), np.zeros(5, int), bag_of=given, num_bags=3)
        np.testing.assert_array_equal(bags[:, 0], [0, 1, 0])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_of_one_value(shape: tuple[int, ...]) -> None:
    """Its gradient is a reshaped constant."""
    gradient = jax.jit(sparse_value_and_grad(lambda rows: rows.reshape(())))(TABLE[:, :1], jnp.full(shape, 3))[1]
    np.testing.assert_array_equal(gradient.values, [[1]])


@pytest.mark.parametrize("name", KINDS)
def test_tables_and_states_of_numpy(name: str, rng: Rng) -> None:
    """As `shard_table` and checkpoints give them: lookups and steps outside of `jax.jit` take them, too."""
    optimizer, (table, ids, weights) = OPTIMIZERS[name](), draw(rng, 20)
    found = wanted = (table, optimizer.init(table))
    for _ in range(2):
        table, state = jax.tree.map(np.asarray, found)
        value, gradient = sparse_value_and_grad(loss)(table, np.asarray(ids), weights)
        np.testing.assert_array_equal(value, loss(wrongly.lookup(table, ids), weights))
        dense = sparse_value_and_grad(loss)(wanted[0], ids, weights)[1]
        apart = stepped(optimizer, False, wanted[0], wanted[1], dense)
        assert bits(stepped(optimizer, False, table, state, gradient)) == bits(apart)
        found = stepped(optimizer, True, table, state, gradient)
        wanted = stepped(optimizer, True, wanted[0], wanted[1], dense)
        assert bits(found) == bits(wanted)
        if jax.default_backend() == "cpu":  # on GPUs the kernel of `step` may add up a row in another order
            assert bits(apart) == bits(found)


@pytest.mark.matrix
@pytest.mark.parametrize("ids", [[3, 7, 3, -1, V], [3, 7, 9, V, V]], ids=["mixed", "sorted and different"])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.usefixtures("each_way")
def test_derivatives_of_a_clipped_step(name: str, ids: list[int], rng: Rng) -> None:
    """In the gradient's values, the table and the state, forward, backward and of second order."""
    table, values = rng.standard_normal((V, D), np.float32), rng.standard_normal((5, D), np.float32)
    optimizer, dense, norm = OPTIMIZERS[name](), DENSE[name](0.1), optax.clip_by_global_norm(1.0)
    rows, state = np.array(ids, np.int32), optimizer.init(jnp.asarray(table))

    def ours(values: jax.Array, table: jax.Array, state: Any) -> jax.Array:
        gradient = SparseRows.from_entries(jnp.asarray(rows), values, num_rows=V)
        return jnp.sum(
            jnp.sin(stepped(optimizer, False, table, state, embedding.clip_by_global_norm(gradient, 1.0))[0])
        )

    def theirs(values: jax.Array, table: jax.Array, state: Any) -> jax.Array:
        gradient = jnp.zeros((V, D)).at[np.where(rows >= 0, rows, V)].add(values, mode="drop")
        updates, _ = dense.update(norm.update(gradient, optax.EmptyState())[0], state, table)
        return jnp.sum(jnp.sin(table + updates))

    def derivatives(f: Any) -> Any:
        gradient, operands = jax.grad(f, argnums=(0, 1, 2), allow_int=True), (jnp.asarray(values), jnp.asarray(table))
        bent = jax.grad(lambda values: jnp.sum(gradient(values, operands[1], state)[0] ** 2))(operands[0])
        moved = jax.jvp(lambda *x: f(*x, state), operands, operands)
        return [x for x in jax.tree.leaves((gradient(*operands, state), bent, moved)) if x.dtype == np.float32]

    found, wanted = (jax.jit(partial(derivatives, f))() for f in (ours, theirs))
    for actual, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "adam"])
def test_duplicates_of_half_precision_add_up_in_float32(name: str) -> None:
    rows = SparseRows.from_entries(jnp.full(257, 3), jnp.ones((257, D), jnp.bfloat16), num_rows=V)  # it has no 257
    optimizer, oracle = OPTIMIZERS[name](), DenseTraining(name, np.zeros((V, D)))
    _, state = optimizer.update(rows, optimizer.init(TABLE))
    oracle.update(*dense_gradient(rows))
    for actual, expected in zip(jax.tree.leaves(state), oracle.leaves[1:], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_data_parallel_training(
    rng: Rng, open_group: OpenGroup, implementation: Implementation, name: str, check_vma: bool
) -> None:
    """Steps on every rank's part of a batch are steps on the whole batch, and leave all ranks the same table."""
    group, optimizer, steps = open_group(largest_size()), OPTIMIZERS[name](), 3
    table, ids, weights = draw(rng, steps, group.size, 10)
    ids = jnp.where(ids < V - 9, ids, V)  # some rows that nobody names

    def train(table: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        def step(carry: tuple[Any, Any], batch: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            value, gradient = sparse_value_and_grad(loss)(carry[0], *batch)
            gradient = sparse_all_reduce(gradient, group=group, capacity=V, implementation=implementation)
            return stepped(optimizer, False, *carry, gradient), jax.lax.psum(value, group.axis_name)

        return jax.lax.scan(step, (table, optimizer.init(table)), (ids[:, 0], weights[:, 0]))

    axis = P(None, group.axis_name)
    results = sharded(group.mesh, train, (P(), axis, axis), P(), check_vma)(table, ids, weights)
    for x in jax.tree.leaves(results):
        assert len(set(bits([shard.data for shard in x.addressable_shards]))) == 1
    (trained, state), losses = fetch(results)

    oracle, named = DenseTraining(name, table), np.zeros(V, bool)
    for i in range(steps):
        value, gradient = jax.value_and_grad(dense_loss)(oracle.table, ids[i], weights[i])
        np.testing.assert_allclose(losses[i], value, rtol=1e-4)
        touched = np.isin(np.arange(V), ids[i])
        oracle.update(gradient, touched)
        named |= touched
    assert not named.all()
    for actual, dense in zip(jax.tree.leaves((trained, state)), oracle.leaves, strict=True):
        np.testing.assert_allclose(actual, dense, rtol=2e-4, atol=2e-5)
    assert bits(trained[~named]) == bits(np.asarray(table)[~named])


TABLE, IDS = jnp.zeros((V, D)), jnp.zeros(3, jnp.int32)
ROWS = SparseRows.from_entries(IDS, jnp.zeros((3, D)), num_rows=V)
ADAGRAD = embedding.by_rows(optax.adagrad(0.1))
STATE = ADAGRAD.init(TABLE)
NARROW = jax.tree.map(lambda x: x[:, 1:] if x.ndim else x, STATE)
OF_GRADIENT = f"must have shape [V, D] of the gradient = ({V}, {D})"
FACTORED = embedding.by_rows(optax.scale_by_factored_rms(min_dim_size_to_factor=2))
NEEDS_MORE = embedding.by_rows(optax.contrib.reduce_on_plateau())
wrongly: Any = embedding  # its functions with arguments that no type checker lets pass
of, update = wrongly.sparse_value_and_grad, wrongly.by_rows(optax.adagrad(0.1)).update

REFUSED: dict[str, list[tuple[Callable[[], Any], type[Exception], str]]] = {
    "sparse_value_and_grad": [
        (lambda: of(jnp.sum)(1.0, IDS), TypeError, "table must be an array, got float"),
        (lambda: of(jnp.sum)(TABLE[:, 0], IDS), ValueError, "table must have shape [V, D], got (50,)"),
        (lambda: of(jnp.sum)(TABLE, [1, 2]), TypeError, "ids must be an array, got int"),
        (lambda: of(jnp.sum)(TABLE, jnp.zeros(3)), TypeError, "ids must be of dtype int32, int64, got float32"),
        (lambda: of(jnp.sum)(TABLE, None), ValueError, "ids must hold an array at least for every table, got None"),
        (lambda: of(jnp.sum, (0, 1)), ValueError, "argnums must be at least 1, after the rows; got (0, 1)"),
        (lambda: of(jnp.sum, 0), ValueError, "argnums must be at least 1, after the rows; got (0,)"),
        (lambda: of(jnp.sum, None), TypeError, "argnums must be an int or a sequence of them, got None"),
    ],
    "lookup": [
        (lambda: wrongly.lookup(TABLE, [1]), TypeError, "ids must be an array, got list"),
        (lambda: wrongly.lookup(TABLE[:0], IDS), ValueError, "table must have at least one row, got (0, 6)"),
    ],
    "apply_updates": [
        (lambda: wrongly.apply_updates(TABLE, TABLE), TypeError, "updates must be SparseRows, got float32[50,6]"),
        (lambda: wrongly.apply_updates(TABLE.astype(int), ROWS), TypeError, "table must be of a float dtype"),
        (lambda: wrongly.apply_updates(TABLE[1:], ROWS), ValueError, f"table {OF_GRADIENT}, got (49, 6)"),
    ],
    "stacked_ids": [
        (lambda: wrongly.stacked_ids([IDS] * 3, [2**30] * 3), ValueError, "the sum of num_rows must be below 2**31"),
        (lambda: wrongly.stacked_ids(1.0, 3), TypeError, "ids must be an array, got float"),
        (lambda: wrongly.stacked_ids(IDS, 0), ValueError, "num_rows must be at least 1, got 0"),
    ],
    "bag": [
        (lambda: wrongly.bag(TABLE[:3], IDS, bag_of=IDS, num_bags=2.0), TypeError, "num_bags must be a Python int"),
        (lambda: wrongly.bag(TABLE[:3], IDS, bag_of=IDS * 0.5, num_bags=2), TypeError, "bag_of must be of an integer"),
        (lambda: wrongly.bag(TABLE[0], IDS[0]), ValueError, "ids must have shape [..., L], got ()"),
        (lambda: wrongly.bag(TABLE, IDS), ValueError, "rows must have shape [..., L, D] for ids"),
        (lambda: wrongly.bag(TABLE[:3], IDS, IDS[:2]), ValueError, "weights must have shape that of ids = "),
        (lambda: wrongly.bag(TABLE[:3], IDS, num_bags=3), ValueError, "num_bags must be given with bag_of and not"),
        (lambda: wrongly.bag(TABLE[:3], IDS, combiner="max"), ValueError, "combiner must be one of 'sum', 'mean', "),
    ],
    "rowwise_adagrad": [(lambda: wrongly.rowwise_adagrad("0.1"), TypeError, "learning_rate must be a number, got str")],
    "by_rows": [
        (lambda: wrongly.by_rows(0.1), TypeError, "optimizer must have init and update, as optax has them, got float"),
        (lambda: FACTORED.init(TABLE), TypeError, "optimizer must keep scalars and arrays of a row per row of the tab"),
        (lambda: NEEDS_MORE.init(TABLE), TypeError, "optimizer must update a table [V, D] by its gradient; "),
    ],
    "init": [(lambda: ADAGRAD.init(TABLE[:, 0]), ValueError, "table must have shape [V, D], got (50,)")],
    "update": [
        (lambda: update(TABLE, TABLE), TypeError, "gradient must be SparseRows, got float32[50,6]"),
        (lambda: update({"a": ROWS, "b": TABLE}, {}), TypeError, "gradient must be SparseRows, got float32[50,6]"),
        (lambda: update({}, {}), TypeError, "gradient must hold SparseRows, got dict"),
        (lambda: update([ROWS], TABLE), ValueError, "state and table must have the structure of gradient: "),
        (lambda: update(ROWS, TABLE), ValueError, "state must be that of init, PyTreeDef"),
        (lambda: update(ROWS, NARROW), ValueError, "state must have shape that of init = (50, 6), got (50, 5)"),
        (lambda: update(ROWS, STATE, TABLE[1:]), ValueError, f"table {OF_GRADIENT}, got"),
    ],
    "step": [
        (lambda: ADAGRAD.step(TABLE, STATE, TABLE), TypeError, "gradient must be SparseRows, got float32[50,6]"),
        (lambda: ADAGRAD.step(TABLE, TABLE, ROWS), ValueError, "state must be that of init, PyTreeDef"),
        (lambda: ADAGRAD.step(TABLE.astype(int), STATE, ROWS), TypeError, "table must be of a float dtype"),
        (lambda: ADAGRAD.step(TABLE[1:], STATE, ROWS), ValueError, f"table {OF_GRADIENT}, got"),
    ],
}


@pytest.mark.parametrize(
    ("op", "call", "error", "message"), [(op, *case) for op, cases in REFUSED.items() for case in cases]
)
def test_what_is_refused(op: str, call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(f'{op}: {message}')}"):
        call()
