"""Embedding tables trained with dense arithmetic, in numpy and float64."""

import numpy as np
from helpers import wide

from jax_ep import SparseRows

V, D = 50, 6  # of every table


class DenseOptimizer:
    """The optimizer of that name with learning rate 0.1: dense arithmetic, kept for the touched rows."""

    def __init__(self, name: str, table: np.ndarray):
        self.name, self.table, self.updates = name, table.astype(np.float64), 0
        start = 0.0 if name == "adagrad from zero" else 0.1
        self.squares = np.full((V, 1 if name == "rowwise_adagrad" else D), start)
        self.first, self.second = np.zeros((V, D)), np.zeros((V, D))

    def update(self, gradient: np.ndarray, touched: np.ndarray) -> None:
        self.updates += 1
        keep = [array.copy() for array in (self.table, self.squares, self.first, self.second)]
        if self.name == "sgd":
            self.table -= 0.1 * gradient
        elif self.name == "lazy_adam":
            self.first = 0.8 * self.first + 0.2 * gradient
            self.second = 0.9 * self.second + 0.1 * gradient**2
            corrected = self.second / (1 - 0.9**self.updates)
            self.table -= 0.1 * self.first / (1 - 0.8**self.updates) / (np.sqrt(corrected) + 1e-8)
        else:
            square = gradient**2
            self.squares += square.mean(1, keepdims=True) if self.name == "rowwise_adagrad" else square
            with np.errstate(divide="ignore", invalid="ignore"):
                self.table -= np.where(self.squares > 0, 0.1 * gradient / np.sqrt(self.squares + 1e-7), 0)
        for now, before in zip((self.table, self.squares, self.first, self.second), keep, strict=True):
            now[~touched] = before[~touched]


def state_of(oracle: DenseOptimizer) -> list[np.ndarray]:
    if oracle.name == "lazy_adam":
        return [np.array(oracle.updates), oracle.first, oracle.second]
    return [] if oracle.name == "sgd" else [oracle.squares]


def dense_gradient(rows: SparseRows, step: int) -> tuple[np.ndarray, np.ndarray]:
    """[V, D] and which rows were named [V]."""
    gradient, touched = np.zeros((V, D)), np.zeros(V, bool)
    for i in range(int(rows.count[step])):
        row = int(rows.indices[step, i])
        if 0 <= row < V:
            gradient[row] += wide(rows.values)[step, i]
            touched[row] = True
    return gradient, touched
