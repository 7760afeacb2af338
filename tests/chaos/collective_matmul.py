"""Random programs of the collective matmuls."""

from collections.abc import Callable
from typing import Any

import helpers
import jax
import matmul_cases
import numpy as np
from helpers import Rng

from .compare import assert_near, draw_floats, pick
from .programs import Program


class CollectiveMatmul(Program):
    """`a @ b` with a collective, perhaps with a bias."""

    def prepare(self, rng: Rng) -> Callable[..., Any]:
        self.op = pick(rng, *matmul_cases.OPS)
        self.dtype = pick(rng, *helpers.DTYPES)
        m, k, n = (int(pick(rng, 1, 2, 5, 8, 16, 24, 40, 127, 129)) for _ in range(3))
        if self.op == "matmul_reduce_scatter":
            m *= self.group.size
        if not matmul_cases.served(self.group, self.implementation, (m, k, n), self.dtype):
            self.dtype, k, n = helpers.DTYPES[0], -(-k // 8) * 8, -(-n // 8) * 8
        self.shape = (m, k, n)
        self.result_dtype = pick(rng, None, helpers.DTYPES[2])
        self.bias = bool(rng.random() < 0.3)
        names = ("op", "dtype", "shape", "result_dtype", "bias")
        self.options = {name: getattr(self, name) for name in names}
        multiply = matmul_cases.OPS[self.op]
        keywords = self.by | {"preferred_element_type": self.result_dtype}

        def forward(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
            return multiply(a, b, bias=bias if self.bias else None, **keywords)

        return forward

    def check(self, rng: Rng) -> bool:
        size, (m, k, n) = self.group.size, self.shape
        strange = bool(rng.random() < 0.2)
        a, b = draw_floats(rng, (size, m, k), self.dtype, strange), draw_floats(rng, (size, k, n), self.dtype)
        with np.errstate(invalid="ignore"):
            exact = matmul_cases.exact(self.op, a, b)
            magnitude = matmul_cases.exact(self.op, np.abs(a), np.abs(b))
        each = 1 if self.op == "matmul_all_reduce" else size  # the bias of a sum is everybody's
        bias = np.broadcast_to(
            draw_floats(rng, (each if self.op == "all_gather_matmul" else 1, n), self.dtype), (size, n)
        )
        if self.bias:
            exact, magnitude = exact + bias[:, None].astype(np.float64), magnitude + np.abs(bias)[:, None]
        actual = helpers.fetch(self.run(a, b, bias))
        assert_near(actual, exact, magnitude, 2 + size, self.op)
        return False
