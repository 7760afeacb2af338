"""Random programs of moe_mlp."""

from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax.numpy as jnp
import numpy as np
import oracle
from helpers import Rng

from .compare import assert_near, draw_floats, pick
from .routed import Routed


class MoeMlp(Routed):
    """A mixture of gated MLPs, against every product in float64; NaN of a token stays in that token."""

    strange_weights = False  # infinity times a sum that is about 0 has the sign of its rounding

    def draw_options(self, rng: Rng) -> None:
        super().draw_options(rng)
        self.shape["experts"] = self.group.size * int(pick(rng, 1, 2, 3))
        if not self.wire:
            self.hidden = int(pick(rng, 4, 8, 24))
        self.strange_tokens = not self.wire
        self.width = int(pick(rng, 1, 8, 20))
        self.options |= self.shape | {"hidden": self.hidden, "width": self.width}
        for name in ("alignment", "num_experts", "expand"):
            del self.options[name], self.keywords[name]
        self.alignment = 1

    def function(self) -> Callable[..., Any]:
        return partial(helpers.moe_sums, **self.by, **self.keywords)

    def more(self, rng: Rng, case: helpers.Case) -> tuple[np.ndarray, ...]:
        size, local = self.group.size, self.shape["experts"] // self.group.size
        shapes = ((self.hidden, self.width), (self.hidden, self.width), (self.width, self.hidden))
        drawn = (draw_floats(rng, (size, local, *shape), np.float32) / shape[0] ** 0.5 for shape in shapes)
        return tuple(x.astype(self.dtype) for x in drawn)

    def assert_right(self, results: Any, case: helpers.Case, more: Any, expected: oracle.Expected) -> None:
        experts = [x.reshape(-1, *x.shape[2:]).astype(np.float64) for x in more]
        with np.errstate(all="ignore"):
            exact, magnitude, steps = self.exact(case, expected, experts)
        magnitude, steps = (np.where(np.isfinite(x), x, 1) for x in (magnitude, steps))
        floor = steps * float(jnp.finfo(self.dtype).smallest_subnormal)
        assert_near(results, exact, magnitude, 8, "moe_mlp", floor)

    def exact(
        self, case: helpers.Case, expected: oracle.Expected, experts: list[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The sums, how large their terms may be: |x| |gate| |x| |up| |down|, and what tiny values may lose.

        The latter counts steps of the dtype's subnormals: x gate and x up are off by one each, which is multiplied by
        the other, their product by one more, and what leaves the expert by another.
        """
        gate, up, down = experts
        local = gate.shape[0] // self.group.size
        out, sizes, steps = (np.zeros(case.tokens.shape) for _ in range(3))
        for source, token, k in zip(*np.nonzero(expected.targets >= 0), strict=True):
            rank, row = divmod(int(expected.targets[source, token, k]), self.capacity())
            expert = rank * local + int(np.searchsorted(np.cumsum(expected.group_sizes[rank]), row, side="right"))
            x, weight = expected.rows[rank, row].astype(np.float64), case.weights[source, token, k]
            gated = x @ gate[expert]
            inner = gated / (1 + np.exp(-gated))
            out[source, token] += weight * ((inner * (x @ up[expert])) @ down[expert])
            largest_gate, largest_up = (np.abs(x) @ np.abs(each[expert]) for each in (gate, up))
            sizes[source, token] += np.abs(weight) * ((largest_gate * largest_up) @ np.abs(down[expert]))
            steps[source, token] += np.abs(weight) * ((1 + largest_gate + largest_up) @ np.abs(down[expert]) + 1)
        return out, sizes, steps
