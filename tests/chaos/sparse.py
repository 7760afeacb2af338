"""Random programs of sparse_all_reduce."""

from collections.abc import Callable
from typing import Any

import helpers
import jax
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


class AllReduce(Program):
    """Rows of a table, of which only the first `count` count; some were ignored and dropped before."""

    def prepare(self, rng: Rng) -> Callable[..., Any]:
        self.entries = int(pick(rng, 0, 1, 2, 9, 24, 33, 65, 150))
        self.width = int(pick(rng, 1, 3, 4, 20, 64, 130))
        self.num_rows = int(pick(rng, 1, 2, 31, 32, 33, 100, 1000, 100_000))
        self.dtype = pick(rng, *helpers.DTYPES)
        most = max(1, min(self.num_rows, self.group.size * self.entries))
        self.exact = {"op": pick(rng, *sparse_cases.OPS), "sharded": bool(rng.random() < 0.5)}
        self.exact["capacity"] = int(pick(rng, most, most, rng.integers(1, most + 1), most + 5))
        self.overflow = pick(rng, "raise", "drop")
        keywords = self.exact | {"on_overflow": self.overflow, "method": pick(rng, "auto", "bitmap", "match")}
        self.options = {name: getattr(self, name) for name in ("entries", "width", "num_rows", "dtype")} | keywords

        def reduced(ids: jax.Array, values: jax.Array, *counts: jax.Array) -> SparseRows:
            count, ignored, dropped = counts
            rows = SparseRows(ids, values, count, self.num_rows, ignored, dropped)
            return sparse_all_reduce(rows, **self.by, **keywords)

        return reduced

    def check(self, rng: Rng) -> bool:
        size = self.group.size
        ids = draw_ids(rng, size, self.entries, self.num_rows)
        values = draw_floats(rng, (*ids.shape, self.width), self.dtype, rng.random() < 0.15)
        counts = np.full(size, self.entries, np.int32)
        if rng.random() < 0.3:
            counts = rng.integers(0, self.entries + 1, size).astype(np.int32)
        ignored, dropped = rng.integers(0, 3, (2, size)).astype(np.int32)
        operands = ids, values, counts, ignored, dropped
        beyond = np.arange(self.entries) >= counts[:, None]
        given = np.where(beyond, self.num_rows, ids).astype(np.int32)
        with np.errstate(invalid="ignore"):
            wanted = sparse_cases.expected(given, values, num_rows=self.num_rows, **self.exact)
        if self.overflow == "raise" and wanted.dropped.any():
            match = f"capacity is {self.exact['capacity']}"
            with helpers.expect_failure(self.group, CapacityError, match, self.implementation):
                found = helpers.fetch(self.run(*operands)).values
                assert np.isnan(helpers.wide(found)).all(), "values were delivered"
            return True
        actual = helpers.fetch(self.run(*operands))
        assert_same(actual.indices, wanted.indices, "indices")
        assert_same(actual.count, wanted.used, "count")
        all_ignored = wanted.ignored - beyond.sum() + ignored.sum()
        assert_same(actual.ignored, np.full_like(wanted.used, all_ignored), "ignored")
        assert_same(actual.dropped, wanted.dropped + dropped.sum(), "dropped")
        assert_near(actual.values, wanted.exact, wanted.magnitude, 1, "values")
        return False
