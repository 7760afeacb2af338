"""Random programs of dispatch_ragged_dot, in one kernel or as a chain, and of ragged_dot_combine behind it."""

from typing import Any

import fused_cases
import helpers
import jax
import numpy as np
import oracle

import jax_ep
from jax_ep import Group, Implementation
from jax_ep._core import gemm

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
        one_kernel = implementation == "ffi" and rng.random() < 0.6
        if group.platform != "cpu":
            one_kernel = one_kernel and gemm.has_gemm()
            self.dtype = pick(rng, *helpers.DTYPES[:2]) if one_kernel else self.dtype
        for name in ("alignment", "wire_dtype"):
            del self.keywords[name], self.options[name]
        self.options |= {"hidden": self.hidden, "width": self.width, "columns": self.columns, "dtype": self.dtype}
        self.options["one_kernel"] = one_kernel

        def both(tokens: jax.Array, ids: jax.Array, weights: jax.Array, first: jax.Array, last: jax.Array) -> Any:
            inner, out = jax_ep.dispatch_ragged_dot(
                tokens,
                ids,
                weights,
                first,
                group=group,
                implementation="fused" if one_kernel else implementation,
                **self.keywords,
            )
            combined = jax_ep.ragged_dot_combine(inner, last, out.routing, group=group, implementation=implementation)
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
        wanted = fused_cases.product_of(expected, first)
        assert_same(helpers.wide(inner), helpers.wide(wanted), "the product of what was dispatched")
        sums, most = (
            helpers.wide(fused_cases.product_of(expected._replace(tokens=x), y))
            for x, y in ((wanted, last), (np.abs(wanted), np.abs(last)))
        )
        exact = oracle.combine(sums, expected.targets, case.weights)
        magnitude = oracle.combine(most, expected.targets, np.abs(case.weights))
        assert_near(combined, exact, magnitude, 4, "ragged_dot_combine")
        return False
