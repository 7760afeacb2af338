"""Random programs of dispatch_ragged_dot, and of ragged_dot_combine behind it."""

from typing import Any

import helpers
import jax
import numpy as np
import oracle

import jax_ep
from jax_ep import Group, Implementation

from .compare import assert_near, assert_same, pick
from .programs import compiled
from .routed import Routed


class Fused(Routed):
    """Whole numbers, so that the first product is exact in any order."""

    strange_tokens = False

    def __init__(self, rng: np.random.Generator, group: Group, implementation: Implementation):
        super().__init__(rng, group, implementation)
        self.wire, self.alignment = False, 1
        self.hidden, self.width, self.columns = (int(pick(rng, 8, 16, 24)) for _ in range(3))
        for name in ("alignment", "wire_dtype"):
            del self.keywords[name], self.options[name]
        self.options |= {"hidden": self.hidden, "width": self.width, "columns": self.columns, "dtype": self.dtype}

        def both(tokens: jax.Array, ids: jax.Array, weights: jax.Array, first: jax.Array, last: jax.Array) -> Any:
            where: Any = {"group": group, "implementation": implementation}
            inner, out = jax_ep.dispatch_ragged_dot(tokens, ids, weights, first, **where, **self.keywords)
            combined = jax_ep.ragged_dot_combine(inner, last, out.routing, **where)
            return inner, out, combined

        self.run = compiled(both, group)

    def whole(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        return rng.integers(-2, 3, shape).astype(self.dtype)

    def check(self, rng: np.random.Generator) -> bool:
        case, size = self.draw(rng), self.group.size
        case = case._replace(tokens=self.whole(rng, *case.tokens.shape))
        local = self.shape["experts"] // size
        first = self.whole(rng, size, local, self.hidden, self.width)
        last = self.whole(rng, size, local, self.width, self.columns)
        expected = self.expected(case, self.capacity())
        if self.overflows(expected):
            with self.expect_overflow(expected):
                helpers.fetch(self.run(*case, first, last))
            return True
        inner, out, combined = helpers.fetch(self.run(*case, first, last))
        helpers.assert_dispatched(out, expected)
        wanted = oracle.grouped_product(expected, first)
        assert_same(helpers.wide(inner), helpers.wide(wanted), "the product of what was dispatched")
        sums, most = (
            helpers.wide(oracle.grouped_product(expected._replace(tokens=x), y))
            for x, y in ((wanted, last), (np.abs(wanted), np.abs(last)))
        )
        exact = oracle.combine(sums, expected.targets, case.weights)
        magnitude = oracle.combine(most, expected.targets, np.abs(case.weights))
        assert_near(combined, exact, magnitude, 4, "ragged_dot_combine")
        return False
