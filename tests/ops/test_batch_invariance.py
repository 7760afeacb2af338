"""What the bits of a token's results depend on, as docs/versions.md says: not on the other tokens of a batch."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup, Rng
from moe_oracle import draw_layer

from jax_ep import Implementation

EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS, PROBES = 8, 3, 128, 192, 24, 5


@pytest.mark.optimized
@pytest.mark.matrix(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32], ids=["bfloat16", "float32"])
def test_a_token_among_other_tokens(
    dtype: Any, implementation: Implementation, open_group: OpenGroup, rng: Rng
) -> None:
    """The layer's sums and the gradients of tokens and weights, of a few tokens of the last rank."""
    group = open_group(min(4, helpers.largest_size()))
    mine = helpers.draw_case(rng, 1, PROBES, TOP_K, EXPERTS, HIDDEN, dtype)
    _, _, *matrices = draw_layer(rng, np.zeros((group.size, 0, HIDDEN), dtype), mine.weights, EXPERTS, WIDTH)

    def program(capacity_factor: float | None = None) -> Any:
        def layer(tokens: Any, ids: Any, weights: Any, by: Any, *matrices: Any) -> Any:
            def sums(tokens: jax.Array, weights: jax.Array) -> jax.Array:
                options: Any = {"group": group, "implementation": implementation, "capacity_factor": capacity_factor}
                return helpers.moe_sums(tokens, ids, weights, *matrices, **options)

            out, pull = jax.vjp(sums, tokens, weights)
            return out, *pull(by)

        return helpers.per_rank(layer, group.mesh)

    def results(program: Any, seed: int, tokens: int, places: list[int]) -> list[bytes]:
        others = np.random.default_rng(seed)
        case = helpers.draw_case(others, group.size, tokens, TOP_K, EXPERTS, HIDDEN, dtype)
        operands = (*case, others.standard_normal(case.tokens.shape).astype(dtype))
        for x, of_mine in zip(operands, (*mine, mine.tokens[:, ::-1]), strict=True):
            x[-1, places] = of_mine[0]
        return helpers.bits([x[-1, places] for x in helpers.fetch(program(*operands, *matrices))])

    usual, first = program(), [*range(PROBES)]
    expected = results(usual, 1, TOKENS, first)
    changed = {
        "other tokens": results(usual, 2, TOKENS, first),
        "positions": results(usual, 1, TOKENS, [17, 3, 23, 8, 4]),
        "capacity": results(program(2.5), 2, TOKENS, first),
        "T": results(usual, 2, 3 * TOKENS + 1, first),
    }
    same = {name: [x == y for x, y in zip(expected, found, strict=True)] for name, found in changed.items()}
    same["T"].pop()  # XLA's sum for the gradient of a weight depends on the shape
    if implementation == "xla" and jax.default_backend() == "gpu":
        del same["T"]  # XLA may choose another product
        for found in same.values():
            found.pop(1)  # XLA's scatter sums a token's gradient in the order in which rows arrive
    assert all(map(all, same.values())), f"sums, gradients of tokens, of weights: {same}"
