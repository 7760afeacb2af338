"""Optimizers of tables with sparse gradients: they read and write only the rows that a gradient names."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_ep import pallas_kernels
from jax_ep._kit import checks, gemm, vary
from jax_ep._kit.batches import by_kernel_on_gpus
from jax_ep._kit.linear import linear, without_gradient
from jax_ep._kit.sums import sorted_with_order
from jax_ep.ops.sparse.coalesce import with_different_ids
from jax_ep.ops.sparse.types import Scalar, Shared, SparseRows, Tree, check_sparse_rows, check_table, is_sparse_rows

T = TypeVar("T")  # a pytree
_TRIAL_COUNTS = np.arange(1, 1025)  # of an optimizer's steps; at 0 some means start
_LOGGER = logging.getLogger("jax_ep")
_NO_DERIVATIVE = "step: has no derivative; call update and apply_updates where one is needed"
_BY_ITSELF = "by_rows: optimizer must treat every row by itself, as optax.adam does, got one"


class _Layout(NamedTuple):
    """Which leaves of a table's state have a row per row of the table. The others are scalars."""

    structure: Any
    has_rows: list[bool]

    def split(self, state: Tree) -> tuple[list[jax.Array], list[jax.Array]]:
        leaves = list(zip(self.structure.flatten_up_to(state), self.has_rows, strict=True))
        return [x for x, has_rows in leaves if has_rows], [x for x, has_rows in leaves if not has_rows]

    def join(self, rows: Iterable[jax.Array], scalars: Iterable[jax.Array]) -> Tree:
        of_rows, others = iter(rows), iter(scalars)
        return self.structure.unflatten(next(of_rows if has_rows else others) for has_rows in self.has_rows)


class _Plain(NamedTuple):
    init: Callable[[jax.Array], jax.Array]
    update: Callable[..., tuple[jax.Array, jax.Array]]


class Transform(Protocol):
    """An optax optimizer, as `by_rows` needs it."""

    @property
    def init(self) -> Callable[..., Tree]: ...
    @property
    def update(self) -> Callable[..., tuple[Tree, Tree]]: ...


class RowOptimizer(NamedTuple):
    """`state = init(table)`; `table, state = step(table, state, gradient)`. States are float32.

    `step` computes the same as `update` and `apply_updates`, and has no derivative. It writes in place if table and
    state are donated to the jitted program or carried by a loop. Otherwise each is copied once. On GPUs one kernel adds
    up the gradients of a row, computes the update and writes the row.

    Gradients may have duplicates. `update` checks the ids, and calls `coalesce` unless they are sorted and different,
    as `coalesce` and `sparse_all_reduce` return them. It needs the table if the optimizer does, for example for weight
    decay. Updates are float32.
    """

    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]
    step: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


def by_rows(optimizer: Transform) -> RowOptimizer:
    """An optax optimizer of tables whose gradients are `SparseRows`, with its schedules and its weight decay.

    On the rows that a gradient names it does what `optimizer` does to a dense table. All other rows and their state
    keep their bits: momentum, means and weights do not decay (as in `torch.optim.SparseAdam`). Counters of steps count
    every call.

    Every table is a separate parameter with its own state. So clip by the norm of all gradients before, with
    `clip_by_global_norm`.

    Args:
      optimizer: one that treats rows independently: sgd with or without momentum, adam, adamw, adagrad, lion, rmsprop,
        with schedules, `inject_hyperparams`, `multi_transform`, and chains of them. `init` tries it on a small table.
        It rejects optimizers that read a whole table, such as adafactor, lamb, muon, `apply_if_finite` and
        `clip_by_global_norm`, and those that keep gradients for a later step, such as `MultiSteps` and `apply_every`:
        add gradients up with `add` instead.

    Raises:
      TypeError: `optimizer` is not a pair of init and update; or, by `init`, it does not treat rows independently, or
        its state has arrays without a row per row of the table.
    """
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        got = checks.describe(optimizer)
        raise TypeError(f"by_rows: optimizer must have init and update, as optax has them, got {got}")
    was_tried = False

    def init(table: Tree) -> Tree:
        def of_one(one: jax.Array) -> Tree:
            check_table("init", one)
            _state_types(optimizer, *one.shape)
            return optimizer.init(one.astype(jnp.float32))

        nonlocal was_tried
        state = jax.tree.map(of_one, table)
        was_tried = was_tried or _check_by_trial(optimizer)
        return state

    def checked(op: str, rows: SparseRows, state: Tree, table: jax.Array | None) -> _Layout:
        shape = rows.height, rows.values.shape[1]
        structure, types = _state_types(optimizer, *shape)
        leaves, found = jax.tree.flatten(state)
        if found != structure:
            raise ValueError(f"{op}: state must be that of init, {structure}, got {found}")
        for x, (expected, _) in zip(leaves, types, strict=True):
            checks.check_array(op, "state", x, "that of init", shape=expected)
        if table is not None:
            checks.check_array(op, "table", table, "[V, D] of the gradient", np.floating, shape=shape)
        return _Layout(structure, [by_row for _, by_row in types])

    def update_one(rows: SparseRows, state: Tree, table: jax.Array | None = None) -> tuple[SparseRows, Tree]:
        layout = checked("update", rows, state, table)
        state, table = jax.tree.map(jnp.asarray, (state, table))  # a checkpoint may restore them as numpy arrays
        rows = with_different_ids(rows)
        places = rows.places

        def read(x: jax.Array) -> jax.Array:
            return x.at[places].get(mode="fill", fill_value=0, indices_are_sorted=True)

        def written(x: jax.Array, y: jax.Array) -> jax.Array:
            return x.at[places].set(y.astype(x.dtype), mode="drop", indices_are_sorted=True)

        table = None if table is None else read(table).astype(jnp.float32)
        whole, scalars = layout.split(state)
        updates, new = optimizer.update(rows.values, layout.join(map(read, whole), scalars), table)
        named, counted = layout.split(new)
        state = layout.join(map(written, whole, named), map(_as_type, counted, scalars))
        return replace(rows, values=jnp.where(rows.present[:, None], updates.astype(jnp.float32), 0)), state

    def update(gradient: Tree, state: Tree, table: Tree = None) -> tuple[Tree, Tree]:
        return _per_table("update", update_one, gradient, state, *([] if table is None else [table]))

    def step_one(rows: SparseRows, state: Tree, table: jax.Array) -> tuple[jax.Array, Tree]:
        layout = checked("step", rows, state, table)

        def by_xla(table: jax.Array, state: Tree, ids: jax.Array, values: jax.Array) -> tuple[jax.Array, Tree]:
            updates, state = update_one(SparseRows.from_entries(ids, values, num_rows=rows.height), state, table)
            return apply_updates(table, updates), state

        def of_row(
            operands: Sequence[jax.Array], scalars: Sequence[jax.Array]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            gradient, table, *states = operands
            updates, new = optimizer.update(gradient, layout.join(states, scalars), table.astype(jnp.float32))
            named, counted = layout.split(new)
            return [table + updates.astype(jnp.float32).astype(table.dtype), *named], [*map(_as_type, counted, scalars)]

        operands = jax.tree.map(jnp.asarray, (table, state, rows.values, rows._shared))
        table, state, values, shared = without_gradient(_NO_DERIVATIVE, operands)
        if not gemm.pallas_platforms():
            return by_xla(table, state, rows.places, values)
        try:
            whole, scalars = layout.split(state)
            gradient = jax.ShapeDtypeStruct(table.shape, np.float32)
            function = pallas_kernels.trace_rows(of_row, table.shape[1], [gradient, table, *whole], scalars)
        except NotImplementedError as reason:
            _LOGGER.debug("step: XLA updates the rows of %s, as Pallas does not compile %s", table.shape, reason)
            return by_xla(table, state, rows.places, values)

        def one_by_one(table: jax.Array, state: Tree, ids: jax.Array, values: jax.Array, *_: Tree) -> list[jax.Array]:
            table, state = by_xla(table, state, ids, values)
            return [table, *layout.split(state)[0]]

        def at_once(
            table: jax.Array,
            state: Tree,
            ids: jax.Array,
            values: jax.Array,
            shared: Shared | None,
            scalars: Tree,
            interpret: bool,
        ) -> list[jax.Array]:
            ids, order = sorted_with_order(ids.astype(jnp.int32))
            starts, different, _ = pallas_kernels.runs_of_sorted(ids, rows.height, interpret=interpret)
            options: dict[str, Any] = {"order": order, "interpret": interpret}
            if shared is not None:
                values = shared.rows
                options |= {"order": shared.place[order], "weights": shared.weights[order]}
            arrays, of_row = [table, *layout.split(state)[0]], function._replace(scalars=scalars)
            return pallas_kernels.update_rows(of_row, arrays, different, values, starts, **options)

        operands = table, state, rows.places, values, shared, function.scalars
        table, *whole = by_kernel_on_gpus(at_once, one_by_one)(*operands)
        return table, layout.join(whole, function.results)

    def step(table: Tree, state: Tree, gradient: Tree) -> tuple[Tree, Tree]:
        return _per_table("step", step_one, gradient, state, table)

    return RowOptimizer(init, update, step)


def rowwise_adagrad(learning_rate: Scalar, *, initial_accumulator: float = 0.1, eps: float = 1e-7) -> RowOptimizer:
    """Adagrad with one accumulator per row, of the mean square of its gradient: its state is [V, 1] per table.

    The optimizer of large recommendation models (Mudigere et al. 2022, "Software-hardware co-design for fast and
    scalable training of deep learning recommendation models"). optax has the others: see `by_rows`.

    Raises:
      TypeError: the learning rate is not a number.
    """
    checks.check_number("rowwise_adagrad", "learning_rate", learning_rate)
    learning_rate = jnp.asarray(learning_rate, jnp.float32)

    def init(table: jax.Array) -> jax.Array:
        return jnp.full_like(table[:, :1], initial_accumulator)

    def update(gradient: jax.Array, squares: jax.Array, table: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        squares = squares + jnp.mean(gradient**2, axis=1, keepdims=True)
        scale = jnp.where(squares > 0, jax.lax.rsqrt(squares + eps), 0)
        return -learning_rate * scale * gradient, squares

    return by_rows(_Plain(init, update))


def apply_updates(table: T, updates: Tree) -> T:
    """Adds the rows of `updates` to a table [V, D], in the table's dtype. Duplicates are added up in float32 first.

    Raises:
      ValueError: the updates are for a table of another shape.
      TypeError: updates are not SparseRows.
    """
    op = "apply_updates"

    def apply(table: jax.Array, rows: SparseRows) -> jax.Array:
        check_sparse_rows(op, "updates", rows)
        shape = rows.height, rows.values.shape[1]
        checks.check_array(op, "table", table, "[V, D] of the gradient", np.floating, shape=shape)

        def forward(ids: jax.Array, operands: tuple[jax.Array, jax.Array]) -> jax.Array:
            table, values = operands
            added = with_different_ids(SparseRows.from_entries(ids, values, num_rows=rows.height))
            return table.at[added.indices].add(added.values.astype(table.dtype), mode="drop", indices_are_sorted=True)

        def back(ids: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
            return cotangent, cotangent.at[ids].get(mode="fill", fill_value=0).astype(rows.values.dtype)

        ids, table, values = vary.vary_alike(None, rows.places, table, rows.values)
        return linear(forward, back, ids, (table, values))

    return jax.tree.map(apply, table, updates)


def _state_types(optimizer: Transform, height: int, width: int) -> tuple[Any, list[tuple[tuple[int, ...], bool]]]:
    """The structure of the state of a table, and of each leaf its shape and whether it has a row per row of the table.

    A leaf has a row per row if its height follows the table's: `init` is traced for tables of V and of V + 1 rows.
    """
    tables = (jax.ShapeDtypeStruct((height + more, width), jnp.float32) for more in (0, 1))
    here, taller = (jax.tree.flatten(jax.eval_shape(optimizer.init, table)) for table in tables)
    types: list[tuple[tuple[int, ...], bool]] = []
    for x, y in zip(here[0], taller[0], strict=True):
        by_row = x.shape[:1] == (height,) and y.shape == (height + 1, *x.shape[1:])
        if not by_row and (x.ndim or y.ndim or not isinstance(x.dtype, np.dtype)):
            raise TypeError(
                f"by_rows: optimizer must keep scalars and arrays of a row per row of the table, got {x.dtype}{x.shape}"
            )
        types.append((x.shape, by_row))
    return here[1], types


def _check_by_trial(optimizer: Transform) -> bool:
    """Raises TypeError if a trial on a table of four rows shows that `optimizer` does not treat rows independently.

    Returns whether it could be tried.

    An optimizer mixes rows if changing other rows changes the first row or a scalar of the state. It keeps gradients if
    counters in its state decide whether an array of the state is reset. `ensure_compile_time_eval` gives concrete
    values where `init` is traced, except if jax.shard_map runs without jax.jit, or a value that varies over its axes is
    traced. Then nothing is tried.
    """
    rng, shape = np.random.default_rng(0), (4, 8)
    structure, types = _state_types(optimizer, *shape)
    has_rows = [by_row for _, by_row in types]

    def first_state(table: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(optimizer.init(table))

    def step(gradient: jax.Array, table: jax.Array, *state: jax.Array) -> list[jax.Array]:
        updates, new = optimizer.update(gradient, structure.unflatten(state), table)
        return [updates, *(y.astype(x.dtype) for x, y in zip(state, structure.flatten_up_to(new), strict=True))]

    def draw() -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    def once(table: jax.Array) -> Tree:
        return optimizer.update(table, optimizer.init(table), table)

    try:
        values = jax.make_jaxpr(once)(jax.ShapeDtypeStruct(shape, np.float32)).consts
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(f"by_rows: optimizer must update a table [V, D] by its gradient; {error}") from error
    if any(jax.typeof(x).manual_axis_type.varying for x in values):
        return False
    with jax.ensure_compile_time_eval():
        table, gradient = draw(), draw()
        state: list[jax.Array] = _concrete(first_state, table)(table)
        run = _concrete(step, gradient, table, *state)
        is_first = np.arange(len(table))[:, None] == 0
        for size in (1e-3, 1, 1e3, 1e6):  # norms on both sides of the limit of a clip
            gradient = size * draw()
            updates, *after = run(gradient, table, *state)
            if isinstance(updates, Tracer):
                return False
            for other in (size, np.nan):
                others = (jnp.where(is_first, x, other * draw()) for x in (gradient, table))
                for x, y, by_row in zip([updates, *after], run(*others, *state), [True, *has_rows], strict=True):
                    if not np.array_equal(*((x[0], y[0]) if by_row else (x, y)), equal_nan=True):
                        raise TypeError(
                            f"{_BY_ITSELF} whose update of a row depends on other rows, as optax.lamb's does"
                        )
            table, state = (table + updates).astype(jnp.float32), after

        is_counter = [x.ndim == 0 and jnp.issubdtype(x.dtype, np.integer) for x in state]
        if not any(is_counter):
            return True
        at = [_TRIAL_COUNTS.astype(x.dtype) if counts else x for x, counts in zip(state, is_counter, strict=True)]
        every = jax.jit(jax.vmap(run, in_axes=(None, None, *(0 if counts else None for counts in is_counter))))
        expected = every(gradient, table, *at)
        for i in (i for i, by_row in enumerate(has_rows) if by_row):
            other = at[i] + jnp.asarray(1e18 if jnp.issubdtype(at[i].dtype, np.floating) else 1, at[i].dtype)
            held = expected[i + 1] != every(gradient, table, *at[:i], other, *at[i + 1 :])[i + 1]
            remembers = np.asarray(held).reshape(len(_TRIAL_COUNTS), -1).any(axis=1)
            if remembers.any() and not remembers.all():
                raise TypeError(f"{_BY_ITSELF} that keeps gradients back for later steps, as optax.MultiSteps does")
    return True


def _concrete(function: Callable[..., T], *operands: jax.Array) -> Callable[..., T]:
    """`function` of arrays of these types. Traced values in its closure, such as a learning rate, become 0.5."""
    traced = jax.make_jaxpr(function)(*operands)
    values = [np.full(x.shape, 0.5).astype(x.dtype) if isinstance(x, Tracer) else x for x in traced.consts]
    return jax.jit(jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, values)))


def _as_type(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.astype(like.dtype)


def _per_table(op: str, step: Callable[..., tuple[Tree, ...]], gradient: Tree, *others: Tree) -> tuple[Tree, ...]:
    """`step(rows, *others)` of every table: a tree of each of its results."""
    leaves, structure = jax.tree.flatten(gradient, is_leaf=is_sparse_rows)
    if not leaves:
        raise TypeError(f"{op}: gradient must hold SparseRows, got {checks.describe(gradient)}")
    for rows in leaves:
        check_sparse_rows(op, "gradient", rows)
    try:
        flat = [structure.flatten_up_to(other) for other in others]
    except ValueError as error:
        raise ValueError(f"{op}: state and table must have the structure of gradient: {error}") from None
    results = [step(*one) for one in zip(leaves, *flat, strict=True)]
    return tuple(structure.unflatten(one) for one in zip(*results, strict=True))
