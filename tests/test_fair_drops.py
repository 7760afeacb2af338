"""Who loses rows where a rank has too few: experts get max-min fair shares, and so do the source ranks of each."""

from typing import Any

import helpers
import jax
import numpy as np
import oracle
import pytest
from conftest import OpenGroup, Rng
from helpers import Case
from test_nodes import assert_flat, flat, over

from jax_ep import Implementation

DROP: dict[str, Any] = {"on_overflow": "drop"}
FEW, LATE = 40, helpers.LATE_TOKENS


def skewed(rng: Rng, size: int, tokens: int, top_k: int, experts: int, hidden: int = 16) -> Case:
    """Experts by Zipf's law, ranks that ask for much and for little; some ids are skipped, some invalid."""
    case = helpers.draw_case(rng, size, tokens, top_k, experts, hidden)
    zipf = 1 / np.arange(1, experts + 1)
    ids = rng.permutation(experts)[rng.choice(experts, size=case.ids.shape, p=zipf / zipf.sum())]
    skipped = rng.random(ids.shape) < rng.uniform(0, 0.7, (size, 1, 1))
    ids = np.where(skipped, -1, np.where(rng.random(ids.shape) < 0.02, experts + 3, ids))
    return case._replace(ids=ids.astype(np.int32))


def too_little_room(case: Case, *, num_experts: int, alignment: int = 1) -> int:
    """A capacity that suffices for the rank that is asked for least, if there are several, and not for all."""
    needed = oracle.dispatch(*case, num_experts=num_experts, capacity=0, alignment=alignment).needed
    least = int(needed.min()) if len(needed) > 1 else 0
    room = (least + int(needed.max())) // 2 // alignment * alignment
    assert least <= room < needed.max()
    return room


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("size", "tokens", "top_k", "experts", "alignment"),
    [
        (1, FEW, 3, 12, 4),
        (2, FEW, 3, 6, 1),
        (4, FEW, 3, 36, 8),
        (4, 500, 4, 20, 1),
        (8, FEW, 2, 72, 2),
        (2, LATE, 2, 10, 4),
        (4, LATE, 2, 12, 16),
        (8, 600, 2, 8, 1),
    ],
)
@pytest.mark.parametrize("expand", [True, False])
def test_skewed_routings(
    expand: bool,
    size: int,
    tokens: int,
    top_k: int,
    experts: int,
    alignment: int,
    implementation: Implementation,
    open_group: OpenGroup,
    rng: Rng,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where rows are not expanded, those that `indices` name."""
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    group, options = open_group(size), {"num_experts": experts, "alignment": alignment}
    case, other = (skewed(rng, size, tokens, top_k, experts) for _ in range(2))
    capacity = too_little_room(case, **options)
    by: dict[str, Any] = {"capacity": capacity, "implementation": implementation, "expand": expand}
    program = helpers.dispatch_combine(group, **by, **options, **DROP)
    assert helpers.assert_round_trip(helpers.fetch(program(*case)), case, **options).dropped.sum() > 0
    helpers.assert_round_trip(helpers.fetch(program(*other)), other, **options)
    group.check()


@pytest.mark.parametrize(("tokens", "alignment"), [(FEW, 8), (FEW, 1), (530, 10)])
def test_gradients(
    tokens: int,
    alignment: int,
    implementation: Implementation,
    open_group: OpenGroup,
    rng: Rng,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient of rows that experts made is zero in the padding, which lies elsewhere than where all fits."""
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    group, case = open_group(4), skewed(rng, 4, tokens, 2, 12)
    options: dict[str, Any] = {"num_experts": 12, "alignment": alignment}
    capacity = options["capacity"] = too_little_room(case, **options)
    cotangent = rng.standard_normal(case.tokens.shape).astype(np.float32)

    def pulled(tokens: jax.Array, ids: jax.Array, weights: jax.Array, more: jax.Array, cotangent: jax.Array) -> Any:
        def sums(tokens: jax.Array, weights: jax.Array, more: jax.Array) -> jax.Array:
            by: dict[str, Any] = {"implementation": implementation, "experts": lambda rows: rows + more}
            return helpers.round_trip(group, **by, **options, **DROP)(tokens, ids, weights)[1]

        return jax.vjp(sums, tokens, weights, more)[1](cotangent)

    nothing = np.zeros((4, capacity, case.tokens.shape[2]), np.float32)
    program = helpers.per_rank(pulled, group.mesh)
    d_tokens, d_weights, d_rows = helpers.fetch(program(*case, nothing, cotangent))
    expected = oracle.dispatch(*case, **options)
    kept = expected.targets >= 0
    assert expected.dropped.any()
    answered = (kept * case.weights).sum(axis=2, keepdims=True) * cotangent
    np.testing.assert_allclose(d_tokens, answered, rtol=1e-5, atol=1e-6)
    dots = (case.tokens * cotangent).sum(axis=2, keepdims=True)
    np.testing.assert_allclose(d_weights, kept * dots, rtol=1e-4, atol=1e-5)
    wanted = np.zeros_like(d_rows)
    for source, token, k in zip(*np.nonzero(kept), strict=True):
        rank, row = divmod(int(expected.targets[source, token, k]), capacity)
        wanted[rank, row] = case.weights[source, token, k] * cotangent[source, token]
    np.testing.assert_allclose(d_rows, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("nodes", "ranks", "experts"), [(2, 2, 12), (2, 4, 24)])
@pytest.mark.parametrize("alignment", [1, 4])
def test_across_nodes(
    nodes: int, ranks: int, experts: int, alignment: int, implementation: Implementation, rng: Rng
) -> None:
    """As in one group of all ranks; the experts of a node are no multiple of the ranks, so odd rows go elsewhere."""
    case = skewed(rng, nodes * ranks, FEW, 3, experts)
    options: dict[str, Any] = {"num_experts": experts, "alignment": alignment}
    options["capacity"] = too_little_room(case, **options)
    expected = oracle.dispatch(*case, **options)
    assert (experts // nodes) % (nodes * ranks) != 0
    assert expected.dropped.any()
    with over(nodes, ranks) as group:
        program = helpers.dispatch_combine(group, implementation=implementation, **options, **DROP)
        results = helpers.fetch(program(*helpers.on_mesh(group.mesh, case)))
        out, combined = helpers.by_rank(group.mesh, results)
        assert_flat(flat(out, group), expected)
        helpers.assert_combined(combined, expected.rows, expected.targets, case.weights, roundings=3)
