"""Random programs of ragged_all_to_all, and slices that it must refuse."""

from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import ml_dtypes
import numpy as np
import oracle
from helpers import BIG, Rng

from jax_ep import InvalidRoutingError
from jax_ep.lax import ragged_all_to_all

from .compare import assert_same, pick
from .programs import Program

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int16, np.int32, np.uint32)


def place(rng: Rng, sizes: np.ndarray, rows: int) -> np.ndarray:
    """Offsets for slices of these sizes among so many rows: in random order, with gaps, never overlapping."""
    gaps = rng.multinomial(rows - sizes.sum(), np.ones(len(sizes) + 1) / (len(sizes) + 1))
    offsets, end = np.empty_like(sizes), 0
    for gap, i in zip(gaps, rng.permutation(len(sizes)), strict=False):
        offsets[i] = end + gap
        end = offsets[i] + sizes[i]
    return offsets


def slices_of(rng: Rng, sizes: np.ndarray, rows: int, result_rows: int, dtype: Any = np.int32) -> oracle.Slices:
    """Slices of these sizes [from, to, which] among so many rows."""
    size, _, each = sizes.shape
    received = sizes.swapaxes(0, 1)
    arrives = np.array([place(rng, x.reshape(-1), result_rows).reshape(size, each) for x in received])
    slices = oracle.Slices(
        input_offsets=np.array([place(rng, x.reshape(-1), rows) for x in sizes]),
        send_sizes=sizes.reshape(size, -1),
        output_offsets=arrives.swapaxes(0, 1).reshape(size, -1),
        recv_sizes=received.reshape(size, -1),
    )
    return oracle.Slices(*(np.ascontiguousarray(x, dtype) for x in slices))


def fit(sizes: np.ndarray, rows: int, axes: tuple[int, ...]) -> np.ndarray:
    """[R, R, S]: the same sizes, halved until no rank has more than so many rows."""
    while (sizes.sum(axis=axes) > rows).any():
        sizes = sizes // 2
    return sizes


class Ragged(Program):
    """With a part of the slices empty or crowded."""

    def prepare(self, rng: Rng) -> Callable[..., Any]:
        self.implementation = "kernels"  # what the op chooses
        self.each = int(pick(rng, 1, 1, 2, 3, 7))
        self.rows, self.result_rows = (int(pick(rng, 1, 2, 7, 40, 40, 200)) for _ in range(2))
        self.row: tuple[int, ...] = pick(rng, (), (1,), (3,), (2, 7), (64,), (5, 1, 3))
        self.dtype = np.dtype(pick(rng, *DTYPES))
        names = ("each", "rows", "result_rows", "row", "dtype")
        self.options = {name: getattr(self, name) for name in names}
        return partial(ragged_all_to_all, axis_name=self.group.axis_name)

    def draw_slices(self, rng: Rng) -> oracle.Slices:
        size, each = self.group.size, self.each
        sizes = rng.integers(0, pick(rng, 2, 4, 50), (size, size, each))  # from, to, which
        if rng.random() < 0.3:
            sizes[:, rng.integers(size)] *= 5
        if rng.random() < 0.3:
            sizes *= rng.random(sizes.shape) < 0.3
        sizes = fit(fit(sizes, self.rows, (1, 2)), self.result_rows, (0, 2))
        return slices_of(rng, sizes, self.rows, self.result_rows)

    def spoil(self, rng: Rng, slices: oracle.Slices) -> bool:
        """Makes one slice that is not empty wrong; whether there was one."""
        filled = np.argwhere(slices.send_sizes > 0)
        if not len(filled):
            return False
        rank, i = filled[rng.integers(len(filled))]
        far = pick(rng, -1, -BIG - 1, BIG, BIG - int(slices.send_sizes[rank, i]), 2**20, self.rows + self.result_rows)
        which = pick(rng, slices.input_offsets, slices.output_offsets, slices.send_sizes, slices.recv_sizes)
        which[rank, i] = far
        return True

    def check(self, rng: Rng) -> bool:
        slices = self.draw_slices(rng)
        shape = (self.group.size, self.rows, *self.row)
        result_shape = (self.group.size, self.result_rows, *self.row)
        operand = rng.integers(0, 100, shape).astype(self.dtype)
        output = rng.integers(0, 100, result_shape).astype(self.dtype)
        if rng.random() < 0.2 and self.spoil(rng, slices):
            with helpers.expect_failure(self.group, InvalidRoutingError, "ragged_all_to_all", "kernels"):
                helpers.fetch(self.run(operand, output, *slices))
            return True
        actual = helpers.fetch(self.run(operand, output, *slices))
        assert_same(actual, oracle.ragged_all_to_all(operand, output, slices), "result")
        return False
