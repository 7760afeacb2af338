"""Random programs of sparse_all_reduce."""

from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import sparse_cases
from helpers import BIG, Rng

from jax_ep import CapacityError, SparseRows, sparse_all_reduce

from .compare import assert_near, assert_same, draw_floats, pick
from .programs import Program


def draw_ids(rng: Rng, size: int, entries: int, num_rows: int) -> np.ndarray:
    draws = [sparse_cases.uniform, sparse_cases.zipf, sparse_cases.empty_on_some, sparse_cases.all_duplicates]
    if num_rows >= 2:
        draws.append(sparse_cases.out_of_range)
    if entries <= num_rows:
        draws.append(sparse_cases.identical)
    if size * entries <= num_rows:
        draws.append(sparse_cases.disjoint)
    ids = pick(rng, *draws)(rng, size, entries, num_rows)
    if rng.random() < 0.3:
        strange = rng.choice(np.array([-1, -BIG - 1, num_rows, BIG], np.int32), ids.shape)
        ids = np.where(rng.random(ids.shape) < 0.3, strange, ids)
    return ids.astype(np.int32)


class Entries(Program):
    """Rows of a table, of which only the first `count` count; some were ignored and dropped before."""

    def draw_shape(self, rng: Rng) -> None:
        self.entries = int(pick(rng, 0, 1, 2, 9, 24, 33, 65, 150))
        self.width = int(pick(rng, 1, 3, 4, 20, 64, 130))
        self.num_rows = int(pick(rng, 1, 2, 31, 32, 33, 100, 1000, 100_000))
        self.dtype = pick(rng, *helpers.DTYPES)
        most = max(1, min(self.num_rows, self.group.size * self.entries))
        self.capacity = int(pick(rng, most, most, rng.integers(1, most + 1), most + 5))
        self.options = {name: getattr(self, name) for name in ("entries", "width", "num_rows", "dtype", "capacity")}

    def draw(self, rng: Rng, strange: bool = True) -> tuple[np.ndarray, ...]:
        """Ids, values, how many entries of every rank count, and those ignored and dropped before."""
        size = self.group.size
        ids = draw_ids(rng, size, self.entries, self.num_rows)
        values = draw_floats(rng, (*ids.shape, self.width), self.dtype, strange and rng.random() < 0.15)
        counts = np.full(size, self.entries, np.int32)
        if rng.random() < 0.3:
            counts = rng.integers(0, self.entries + 1, size).astype(np.int32)
        before = rng.integers(0, 3, (2, size)).astype(np.int32)
        return ids, values, counts, *before

    def wanted(self, ids: np.ndarray, values: np.ndarray, counts: np.ndarray, **options: Any) -> sparse_cases.Expected:
        beyond = np.arange(self.entries) >= counts[:, None]
        given = np.where(beyond, self.num_rows, ids).astype(np.int32)
        with np.errstate(invalid="ignore"):
            found = sparse_cases.expected(given, values, num_rows=self.num_rows, capacity=self.capacity, **options)
        return found._replace(ignored=found.ignored - int(beyond.sum()))

    def assert_reduced(self, actual: SparseRows, wanted: sparse_cases.Expected, ignored: Any, dropped: Any) -> None:
        assert_same(actual.indices, wanted.indices, "indices")
        assert_same(actual.count, wanted.used, "count")
        assert_same(actual.ignored, np.full_like(wanted.used, wanted.ignored) + ignored, "ignored")
        assert_same(actual.dropped, wanted.dropped + dropped, "dropped")
        assert_near(actual.values, wanted.exact, wanted.magnitude, 1, "values")


class AllReduce(Entries):
    def prepare(self, rng: Rng) -> Callable[..., Any]:
        self.draw_shape(rng)
        self.op, self.sharded = pick(rng, "sum", "mean", "mean_by_count"), bool(rng.random() < 0.5)
        self.overflow = pick(rng, "raise", "drop")
        keywords = {"op": self.op, "sharded": self.sharded, "on_overflow": self.overflow}
        keywords |= {"method": pick(rng, "auto", "bitmap", "match"), "capacity": self.capacity}
        self.options |= keywords

        def reduced(ids: jax.Array, values: jax.Array, *counts: jax.Array) -> SparseRows:
            count, ignored, dropped = counts
            rows = SparseRows(ids, values, count, self.num_rows, ignored, dropped)
            return sparse_all_reduce(rows, **self.by, **keywords)

        return reduced

    def check(self, rng: Rng) -> bool:
        ids, values, counts, ignored, dropped = self.draw(rng)
        wanted = self.wanted(ids, values, counts, op=self.op, sharded=self.sharded)
        if self.overflow == "raise" and wanted.dropped.any():
            with helpers.expect_failure(self.group, CapacityError, f"capacity is {self.capacity}", self.implementation):
                found = helpers.fetch(self.run(ids, values, counts, ignored, dropped)).values
                assert np.isnan(helpers.wide(found)).all(), "values were delivered"
            return True
        actual = helpers.fetch(self.run(ids, values, counts, ignored, dropped))
        self.assert_reduced(actual, wanted, ignored.sum(), dropped.sum())
        return False


class AllReduceGradient(Entries):
    """Every rank has a loss of its own; of what is dropped there is no gradient."""

    def prepare(self, rng: Rng) -> Callable[..., Any]:
        self.draw_shape(rng)
        self.op, self.sharded = pick(rng, "sum", "mean", "mean_by_count"), bool(rng.random() < 0.5)
        self.num_rows, self.dtype = min(self.num_rows, 1000), helpers.DTYPES[2]
        keywords: dict[str, Any] = {"op": self.op, "sharded": self.sharded, "capacity": self.capacity}
        keywords["method"] = pick(rng, "bitmap", "match")
        self.options |= {"num_rows": self.num_rows, "dtype": self.dtype} | keywords

        def gradient(ids: jax.Array, values: jax.Array, above: jax.Array) -> jax.Array:
            def loss(values: jax.Array) -> jax.Array:
                rows = SparseRows.from_entries(ids, values, num_rows=self.num_rows)
                out = sparse_all_reduce(rows, on_overflow="drop", **self.by, **keywords)
                return jnp.sum(above.at[out.indices].get(mode="fill", fill_value=0) * out.values)

            return jax.grad(loss)(values)

        return gradient

    def check(self, rng: Rng) -> bool:
        ids, values, counts, *_ = self.draw(rng, strange=False)
        wanted = self.wanted(ids, values, np.full_like(counts, self.entries), op=self.op, sharded=self.sharded)
        above = rng.standard_normal((self.group.size, self.num_rows, self.width)).astype(np.float32)
        actual = helpers.fetch(self.run(ids, values, above))
        cotangents, sizes = np.zeros((2, self.num_rows, self.width))  # of each row, from the ranks that hold it
        for rank, used in enumerate(wanted.used):
            held = wanted.indices[rank, :used]
            cotangents[held] += above[rank, held]
            sizes[held] += np.abs(above[rank, held])
        exact, magnitude = (sparse_cases.gradient(ids, each, self.op) for each in (cotangents, sizes))
        assert_near(actual, exact, magnitude, 2, "gradient")
        return False
