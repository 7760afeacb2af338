"""Embedding tables that train with sparse gradients, in plain JAX over `SparseRows`: the code of `jax_ep.embedding`."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._kit import checks
from jax_ep.ops.sparse.coalesce import with_different_ids
from jax_ep.ops.sparse.types import INDEX_DTYPES, Scalar, SparseRows, Tree, check_sparse_rows


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of `table` [V, D] for `ids` [...] int32 or int64: [..., D]. An id outside [0, V) reads zeros.

    Raises:
      ValueError, TypeError: the table is not [V, D], or the ids are no array of int32 or int64.
    """
    return _lookup("lookup", table, ids)


def _lookup(op: str, table: jax.Array, ids: jax.Array) -> jax.Array:
    _check_table(op, table)
    checks.check_dtype(op, "ids", ids, INDEX_DTYPES)
    return table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _check_table(op: str, table: jax.Array) -> None:
    checks.check_rank(op, "table", table, 2, "[V, D]")
    if not len(table):
        raise ValueError(f"{op}: table must have at least one row, got {table.shape}")


def sparse_value_and_grad(
    loss: Callable[..., Any], argnums: int | Sequence[int] = (), *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` for a loss of embedding rows: the gradient of a table is `SparseRows`, never a table.

    Inside `jax.shard_map`, `loss` is the loss of one rank, and the gradient is this rank's part: let
    `sparse_all_reduce(..., op="sum")` or "mean" do what `jax.lax.psum` or `pmean` would do to the loss. The gradients
    of `argnums` are those of `jax.grad` there, which sums them over the ranks if check_vma=True.

    Args:
      loss: `loss(rows, *args)` gives a scalar, or (scalar, aux) with `has_aux`; `rows` is [..., D] for ids [...].
      argnums: position or positions of further arguments of `loss` to differentiate by; position 0 is `rows`.
      has_aux: as in `jax.value_and_grad`.

    Returns:
      A function of (table, ids, *args) and of the loss' keywords that gives (value, gradient). `table` is [V, D]; `ids`
      is int32 or int64 of any shape, and an id outside [0, V) reads zeros and has no gradient. The gradient has an
      entry for every id, in the order of `ids`: N = ids.size. With `argnums` it is a tuple: `SparseRows`, then a dense
      gradient per position.
      `table` may be a pytree of tables, and for every table `ids` may be a pytree: `rows` has the structure of `ids`,
      the gradient that of `table`, and a table's entries come one array of ids after the other.

    Raises:
      ValueError, TypeError: a table is not [V, D], ids are no int32 or int64, structures differ, argnums has 0.
    """
    op = "sparse_value_and_grad"
    further = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    if not all(isinstance(n, int) for n in further):
        raise TypeError(f"{op}: argnums must be an int or a sequence of them, got {argnums!r}")
    if any(n < 1 for n in further):
        raise ValueError(f"{op}: argnums must be at least 1, after the rows; got {further}")
    differentiated = jax.value_and_grad(loss, argnums=(0, *further), has_aux=has_aux)

    def value_and_grad(table: Tree, ids: Tree, *args: Any, **keywords: Any) -> tuple[Any, Any]:
        def look_up(one: jax.Array, its_ids: Tree) -> Tree:
            if not jax.tree.leaves(its_ids):
                raise ValueError(f"{op}: ids must hold an array at least for every table, got {its_ids!r}")
            return jax.tree.map(partial(_lookup, op, one), its_ids)

        rows = jax.tree.map(look_up, table, ids)
        value, (by_row, *others) = differentiated(rows, *args, **keywords)
        gradient = jax.tree.map(_sparse_gradient, table, ids, by_row)
        return value, (gradient, *others) if further else gradient

    return value_and_grad


def _sparse_gradient(table: jax.Array, ids: Tree, gradients: Tree) -> SparseRows:
    """The entries of all lookups in one table."""
    indices = [x.ravel() for x in jax.tree.leaves(ids)]
    values = [x.reshape(-1, table.shape[1]) for x in jax.tree.leaves(gradients)]
    return SparseRows.from_entries(jnp.concatenate(indices), jnp.concatenate(values), num_rows=table.shape[0])


class RowOptimizer(NamedTuple):
    """`state = init(table)`; `updates, state = update(gradient, state)`; states and updates are float32.

    `update` takes gradients with or without duplicates. It checks the ids, and calls `coalesce` unless they are sorted
    and different, as those of `coalesce` and `sparse_all_reduce` are.
    """

    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any], tuple[Tree, Any]]


def apply_updates(table: Tree, updates: Tree) -> Tree:
    """Adds the rows of `updates` to those of the table [V, D], in the table's dtype; duplicates add up.

    Raises:
      ValueError: the table has not the shape that the updates were made for.
      TypeError: updates are no SparseRows.
    """
    op = "apply_updates"

    def apply(table: jax.Array, rows: SparseRows) -> jax.Array:
        check_sparse_rows(op, "updates", rows)
        _check_height(op, "table", table, rows)
        return table.at[rows.masked_indices].add(rows.values.astype(table.dtype), mode="drop")

    return jax.tree.map(apply, table, updates)


def sgd(learning_rate: Scalar) -> RowOptimizer:
    """Stochastic gradient descent. It has no state, and takes rows with duplicates."""
    checks.check_number("sgd", "learning_rate", learning_rate)

    def step(rows: SparseRows) -> tuple[SparseRows]:
        return (_with_values(rows, -learning_rate * rows.values.astype(jnp.float32)),)

    return RowOptimizer(lambda table: (), lambda gradient, state: (*_per_table(step, gradient), state))


def adagrad(learning_rate: Scalar, *, initial_accumulator: float = 0.1, eps: float = 1e-7) -> RowOptimizer:
    """Adagrad (Duchi et al. 2011) with the formula of `optax.adagrad`. Its state is [V, D] per table."""
    checks.check_number("adagrad", "learning_rate", learning_rate)

    def init(table: Tree) -> Tree:
        return _states(lambda x: jnp.full_like(x, initial_accumulator, jnp.float32), table)

    return RowOptimizer(init, partial(_adagrad_update, learning_rate, eps, lambda squares: squares))


def rowwise_adagrad(learning_rate: Scalar, *, initial_accumulator: float = 0.1, eps: float = 1e-7) -> RowOptimizer:
    """Adagrad with one accumulator per row, of the mean square of its gradient: its state is [V, 1] per table.

    The optimizer of large recommendation models (Mudigere et al. 2022, "Software-hardware co-design for fast and
    scalable training of deep learning recommendation models").
    """
    checks.check_number("rowwise_adagrad", "learning_rate", learning_rate)

    def init(table: Tree) -> Tree:
        return _states(lambda x: jnp.full_like(x[:, :1], initial_accumulator, jnp.float32), table)

    row_mean = partial(jnp.mean, axis=1, keepdims=True)
    return RowOptimizer(init, partial(_adagrad_update, learning_rate, eps, row_mean))


def _adagrad_update(
    learning_rate: Scalar, eps: float, reduce: Callable[[jax.Array], jax.Array], gradient: Tree, state: Tree
) -> tuple[Tree, Tree]:
    def step(rows: SparseRows, accumulator: jax.Array) -> tuple[SparseRows, jax.Array]:
        rows = with_different_ids(rows)
        squares = _read(accumulator, rows) + reduce(rows.values**2)
        scale = jnp.where(squares > 0, jax.lax.rsqrt(squares + eps), 0)
        return _with_values(rows, -learning_rate * scale * rows.values), _write(accumulator, rows, squares)

    return _per_table(step, gradient, state)


class LazyAdamState(NamedTuple):
    updates: jax.Array  # int32 scalar: how many there were
    first: Tree  # [V, D] per table: running mean of the gradient
    second: Tree  # [V, D] per table: running mean of its square


def lazy_adam(learning_rate: Scalar, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> RowOptimizer:
    """Adam (Kingma and Ba 2015) whose means neither decay nor move a row while no gradient names it.

    The bias correction counts all updates, as in `torch.optim.SparseAdam` and TensorFlow Addons' `LazyAdam`. If every
    gradient names every row, it is `optax.adam`.
    """
    checks.check_number("lazy_adam", "learning_rate", learning_rate)

    def init(table: Tree) -> LazyAdamState:
        zeros = partial(_states, lambda x: jnp.zeros_like(x, jnp.float32))
        return LazyAdamState(jnp.zeros((), jnp.int32), zeros(table), zeros(table))

    def update(gradient: Tree, state: LazyAdamState) -> tuple[Tree, LazyAdamState]:
        if not isinstance(state, LazyAdamState):
            raise TypeError(f"update: state must be a LazyAdamState, got {checks.describe(state)}")
        updates = state.updates + 1
        count = updates.astype(jnp.float32)
        first_weight, second_weight = 1 - b1**count, 1 - b2**count  # of all gradients so far

        def step(rows: SparseRows, first: jax.Array, second: jax.Array) -> tuple[SparseRows, jax.Array, jax.Array]:
            rows = with_different_ids(rows)
            mean = b1 * _read(first, rows) + (1 - b1) * rows.values
            square = b2 * _read(second, rows) + (1 - b2) * rows.values**2
            direction = mean / first_weight / (jnp.sqrt(square / second_weight) + eps)
            moved = _with_values(rows, -learning_rate * direction)
            return moved, _write(first, rows, mean), _write(second, rows, square)

        moved, first, second = _per_table(step, gradient, state.first, state.second)
        return moved, LazyAdamState(updates, first, second)

    return RowOptimizer(init, update)


def _per_table(step: Callable[..., tuple[Any, ...]], gradient: Tree, *states: Tree) -> tuple[Any, ...]:
    """`step(rows, *states)` of every table: a tree of each of its results."""
    leaves, structure = jax.tree.flatten(gradient, is_leaf=lambda x: isinstance(x, SparseRows))
    if not leaves:
        raise TypeError(f"update: gradient must hold SparseRows, got {checks.describe(gradient)}")
    for rows in leaves:
        check_sparse_rows("update", "gradient", rows)
    try:
        flat = [structure.flatten_up_to(state) for state in states]
    except ValueError as error:
        raise ValueError(f"update: state must have the structure of gradient: {error}") from None
    results = [step(*one) for one in zip(leaves, *flat, strict=True)]
    return tuple(structure.unflatten(one) for one in zip(*results, strict=True))


def _states(of_table: Callable[[jax.Array], jax.Array], table: Tree) -> Tree:
    """`of_table` of every table."""
    for one in jax.tree.leaves(table):
        _check_table("init", one)
    return jax.tree.map(of_table, table)


def _with_values(rows: SparseRows, values: jax.Array) -> SparseRows:
    """The updates in float32, also if the learning rate is float64."""
    return dataclasses.replace(rows, values=values.astype(jnp.float32))


def _read(state: jax.Array, rows: SparseRows) -> jax.Array:
    _check_height("update", "state", state, rows)
    return state.at[rows.indices].get(mode="fill", fill_value=0, indices_are_sorted=True)


def _write(state: jax.Array, rows: SparseRows, values: jax.Array) -> jax.Array:
    return state.at[rows.indices].set(values.astype(state.dtype), mode="drop", indices_are_sorted=True)


def _check_height(op: str, name: str, array: jax.Array, rows: SparseRows) -> None:
    checks.check_rank(op, name, array, 2, "[V, D]")
    if array.shape[0] != rows.num_rows or array.shape[1] not in (1, rows.values.shape[1]):
        raise ValueError(
            f"{op}: {name} must have the rows of a table of {rows.num_rows} x {rows.values.shape[1]}, got {array.shape}"
        )
