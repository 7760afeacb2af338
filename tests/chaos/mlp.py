"""Random programs of moe_mlp."""

from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
from helpers import Rng

from .compare import assert_near, pick
from .routed import Routed


class MoeMlp(Routed):
    """A mixture of gated MLPs, against every product in float64; NaN of a token stays in that token."""

    strange_weights = False  # infinity times a sum that is about 0 has the sign of its rounding

    def draw_options(self, rng: Rng) -> dict[str, Any]:
        options = super().draw_options(rng) | {"num_experts": self.group.size * int(pick(rng, 1, 2, 3)), "alignment": 1}
        self.strange_tokens, self.width = options["wire"] is None, int(pick(rng, 1, 8, 20))
        return options | ({"hidden": int(pick(rng, 4, 8, 24))} if self.strange_tokens else {})

    def function(self) -> Callable[..., Any]:
        own = {name: x for name, x in self.keywords.items() if name not in ("alignment", "num_experts", "expand")}
        return partial(helpers.moe_sums, **self.by, **own)

    def more(self, rng: Rng, case: helpers.Case) -> tuple[np.ndarray, ...]:
        return moe_oracle.draw_layer(rng, case.tokens, case.weights, self.options["num_experts"], self.width)[2:]

    def assert_right(self, results: Any, case: helpers.Case, more: Any, expected: oracle.Expected) -> None:
        gate, up, down = (x.reshape(-1, *x.shape[2:]).astype(np.float64) for x in more)
        # The sums, how large their terms may be, |x| |gate| |x| |up| |down|, and the steps of subnormals that tiny
        # values may lose: x gate and x up are off by one each, which is multiplied by the other, their product by one
        # more, and what leaves the expert by another.
        exact, magnitude, steps = (np.zeros(case.tokens.shape) for _ in range(3))
        rows = expected.rows.reshape(-1, case.tokens.shape[2]).astype(np.float64)
        for at in zip(*np.nonzero(expected.targets >= 0), strict=True):
            x, weight, expert = rows[expected.targets[at]], case.weights[at], case.ids[at]
            with np.errstate(all="ignore"):
                gated = x @ gate[expert]
                exact[at[:2]] += weight * ((gated / (1 + np.exp(-gated)) * (x @ up[expert])) @ down[expert])
                by_gate, by_up = (np.abs(x) @ np.abs(each[expert]) for each in (gate, up))
                magnitude[at[:2]] += np.abs(weight) * ((by_gate * by_up) @ np.abs(down[expert]))
                steps[at[:2]] += np.abs(weight) * ((1 + by_gate + by_up) @ np.abs(down[expert]) + 1)
        magnitude, steps = (np.where(np.isfinite(x), x, 1) for x in (magnitude, steps))
        floor = steps * float(jnp.finfo(self.dtype).smallest_subnormal)
        assert_near(results, exact, magnitude, 8, "moe_mlp", floor)
