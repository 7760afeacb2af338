"""Embedding tables trained with dense arithmetic: by optax, on the rows that a gradient names."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import wide
from sparse_cases import dense

from jax_ep import SparseRows, embedding

V, D = 50, 6  # of every table


def _dense_rowwise_adagrad() -> SimpleNamespace:
    def update(gradient: Any, squares: Any, table: Any = None) -> tuple[Any, Any]:
        squares = squares + (gradient**2).sum(1, keepdims=True) / gradient.shape[1]
        return -0.1 * gradient / jnp.sqrt(squares + 1e-7), squares

    return SimpleNamespace(init=lambda table: jnp.full((len(table), 1), 0.1), update=update)


DENSE: dict[str, Any] = {
    "sgd": optax.sgd,
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
    "adam": lambda rate: optax.adam(rate, b1=0.8, b2=0.9),
    "adamw": lambda rate: optax.adamw(rate, weight_decay=0.1),
    "adagrad": optax.adagrad,
    "adagrad from zero": lambda rate: optax.adagrad(rate, initial_accumulator_value=0.0),
    "lion": lambda rate: optax.lion(rate, weight_decay=0.1),
    "amsgrad": optax.amsgrad,
    "row clip": lambda rate: optax.chain(optax.clip(0.5), optax.centralize(), optax.sgd(rate)),
    "warmup": lambda rate: optax.adamw(optax.warmup_constant_schedule(0.0, rate, 2)),
    "inject_hyperparams": lambda rate: optax.inject_hyperparams(optax.adagrad)(optax.linear_schedule(rate, 0.0, 9)),
    "multi_transform": lambda rate: optax.multi_transform({"a": optax.rmsprop(rate), "b": optax.sgd(rate)}, "a"),
    "schedule": lambda rate: optax.rmsprop(optax.linear_schedule(rate, rate / 8, 3)),
    "rowwise_adagrad": lambda rate: _dense_rowwise_adagrad(),
}
OPTIMIZERS: dict[str, Any] = {name: lambda rate=0.1, of=of: embedding.by_rows(of(rate)) for name, of in DENSE.items()}
OPTIMIZERS["rowwise_adagrad"] = lambda rate=0.1: embedding.rowwise_adagrad(rate)
KINDS = ("sgd", "adamw", "schedule", "rowwise_adagrad")  # with no state, with scalars and the table, our own


def looked_up(table: Any, ids: Any) -> jax.Array:
    """Rows of the table; of ids that name none zeros."""
    rows = jnp.asarray(table)[jnp.clip(ids, 0, len(table) - 1)]
    return jnp.where(((ids >= 0) & (ids < len(table)))[..., None], rows, 0)


def stepped(optimizer: embedding.RowOptimizer, at_once: bool, table: jax.Array, state: Any, rows: SparseRows) -> Any:
    """Table and state after `step`, or after `update` and `apply_updates`."""
    if at_once:
        return optimizer.step(table, state, rows)
    updates, state = optimizer.update(rows, state, table)
    return embedding.apply_updates(table, updates), state


class DenseTraining:
    """Steps of an optimizer of `DENSE` with learning rate 0.1, in float32. Rows that no gradient names keep all."""

    def __init__(self, name: str, table: Any):
        self.optimizer, self.table = DENSE[name](0.1), jnp.asarray(wide(table), jnp.float32)
        self.state = self.optimizer.init(self.table)
        self.step = jax.jit(self._step)

    def update(self, gradient: Any, touched: np.ndarray) -> None:
        self.table, self.state = self.step(np.float32(gradient), touched, self.table, self.state)

    def _step(self, gradient: jax.Array, touched: jax.Array, table: Any, state: Any) -> Any:
        updates, new = self.optimizer.update(gradient, state, table)

        def kept(now: Any, before: Any) -> Any:
            return jnp.where(touched[:, None], now, before) if now.ndim else now

        return jax.tree.map(kept, (table + updates, new), (table, state))

    @property
    def leaves(self) -> list[Any]:
        return jax.tree.leaves((self.table, self.state))


def dense_gradient(rows: SparseRows) -> tuple[np.ndarray, np.ndarray]:
    """[V, D] and which rows were named [V]."""
    ids, values = (np.asarray(x)[: int(rows.count)] for x in (rows.indices, rows.values))
    return dense(ids, values, V), np.isin(np.arange(V), ids)
