"""Rows that no token goes to, behind those of the last expert: dispatch(zero_unused=False) leaves them as they are."""

import dataclasses
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import OpenGroup
from helpers import LATE_TOKENS, Case
from moe_oracle import Layer

from jax_ep import Dispatched, Group, Implementation, combine, dispatch, moe_mlp

SIZE, EXPERTS, TOP_K, HIDDEN = 4, 8, 2, 128
FLOAT8 = jnp.float8_e4m3fn


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results begin as NaN, so what no op writes can be told from what it does."""
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")


def used_rows(out: Dispatched) -> list[int]:
    return out.group_sizes.sum(axis=1).tolist()


@pytest.mark.parametrize("tokens", [5, LATE_TOKENS])
@pytest.mark.parametrize("alignment", [1, 4])
def test_only_the_unused_are_left(
    alignment: int, tokens: int, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    options: Any = {"num_experts": EXPERTS, "alignment": alignment}
    program = helpers.dispatch_combine(open_group(SIZE), implementation=implementation, zero_unused=False, **options)
    case = helpers.draw_case(rng, SIZE, tokens, TOP_K, EXPERTS, 16)
    out, combined = helpers.fetch(program(*case))
    expected = oracle.dispatch(*case, capacity=out.tokens.shape[1], **options)
    for rank, used in enumerate(used_rows(out)):
        np.testing.assert_array_equal(out.tokens[rank, :used], expected.tokens[rank, :used])
        left = out.tokens[rank, used:]
        assert left.size
        assert np.isnan(left).all() if implementation == "ffi" else not left.any()
    helpers.assert_combined(combined, expected.tokens, expected.targets, case.weights)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dequantize", [True, False])
def test_float8(dequantize: bool, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group, case = open_group(SIZE), helpers.draw_case(rng, SIZE, LATE_TOKENS, TOP_K, EXPERTS, HIDDEN)

    def arrived(zero_unused: bool) -> Dispatched:
        options: Any = {"wire_dtype": FLOAT8, "dequantize": dequantize, "zero_unused": zero_unused}
        program = helpers.per_rank(lambda *x: dispatch(*x, group=group, num_experts=EXPERTS, **options), group.mesh)
        return helpers.fetch(program(*case))

    def floats(rows: Any) -> Any:
        return [rows] if dequantize else [rows.values, rows.scales]

    left, zeroed = arrived(False), arrived(True)
    for ours, others in zip(floats(left.tokens), floats(zeroed.tokens), strict=True):
        for rank, used in enumerate(used_rows(zeroed)):
            assert helpers.bits(ours[rank, :used]) == helpers.bits(others[rank, :used])
            assert np.isnan(helpers.wide(ours[rank, used:])).all()
            assert not helpers.wide(others[rank, used:]).any()


@pytest.mark.parametrize("alignment", [1, 4])
def test_the_gradient_of_combine(
    alignment: int, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    """In rows that are used, and in weights, it is that of a dispatch that zeroes the others."""
    group, case = open_group(SIZE), helpers.draw_case(rng, SIZE, 6, TOP_K, EXPERTS, 16)
    where: Any = {"group": group, "implementation": implementation}

    def gradient(zero_unused: bool) -> Any:
        def of_rank(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
            options: Any = {"num_experts": EXPERTS, "alignment": alignment, "zero_unused": zero_unused}
            out = dispatch(tokens, ids, weights, **options, **where)

            def summed(rows: jax.Array, weights: jax.Array) -> jax.Array:
                return combine(rows, dataclasses.replace(out.routing, weights=weights), **where)

            _, pull = jax.vjp(summed, jnp.ones_like(out.tokens), out.routing.weights)
            return out, *pull(tokens)

        return helpers.fetch(helpers.per_rank(of_rank, group.mesh)(*case))

    (out, left, d_weights), (_, zeroed, others) = gradient(False), gradient(True)
    np.testing.assert_array_equal(d_weights, others)
    for rank, used in enumerate(used_rows(out)):
        np.testing.assert_array_equal(left[rank, :used], zeroed[rank, :used])
        assert not zeroed[rank, used:].any()


def layer_and_derivative(group: Group, layer: Layer, case: Case, way: str, precision: Any) -> Any:
    def of_rank(layer: Layer, ids: jax.Array) -> Any:
        def sums(x: Layer) -> jax.Array:
            return moe_mlp(x.tokens, ids, *x[1:], group=group, precision=precision)

        if way == "jvp":
            return jax.jvp(sums, (layer,), (layer,))
        out, pull = jax.vjp(jax.checkpoint(sums) if way == "checkpoint" else sums, layer)
        return out, pull(layer.tokens)

    return helpers.fetch(helpers.per_rank(of_rank, group.mesh)(layer, case.ids))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("way", ["vjp", "checkpoint", "jvp"])
@pytest.mark.parametrize("precision", [None, "float8"])
def test_a_layer_uses_none(
    precision: Any, way: str, open_group: OpenGroup, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they hold, most rows of worst-case capacity, changes no bit."""
    case = helpers.draw_case(rng, SIZE, 40, TOP_K, EXPERTS, HIDDEN, helpers.DTYPES[0])
    matrices = rng.standard_normal((3, SIZE, EXPERTS // SIZE, HIDDEN, HIDDEN)) / np.sqrt(HIDDEN)
    layer = Layer(case.tokens, case.weights, *matrices.astype(case.tokens.dtype))
    poisoned = layer_and_derivative(open_group(SIZE), layer, case, way, precision)
    assert all(np.isfinite(helpers.wide(x)).all() for x in jax.tree.leaves(poisoned))
    monkeypatch.delenv("JAX_EP_DEBUG_POISON")
    others = layer_and_derivative(open_group(SIZE), layer, case, way, precision)
    assert helpers.bits(others) == helpers.bits(poisoned)


@pytest.mark.usefixtures("native")
def test_a_search_for_nan_finds_none(open_group: OpenGroup, rng: np.random.Generator) -> None:
    """What a backward pass keeps are results of a program, too."""
    group, case = open_group(SIZE), helpers.draw_case(rng, SIZE, 40, TOP_K, EXPERTS, HIDDEN)
    matrices = np.ones((SIZE, EXPERTS // SIZE, HIDDEN, HIDDEN), case.tokens.dtype)

    def of_rank(tokens: jax.Array, ids: jax.Array, weights: jax.Array, matrix: jax.Array) -> jax.Array:
        return moe_mlp(tokens, ids, weights, matrix, matrix, matrix, group=group)

    program = helpers.per_rank(of_rank, group.mesh)
    with jax.debug_nans(True):
        out, pull = jax.vjp(lambda tokens: program(tokens, case.ids, case.weights, matrices), jnp.asarray(case.tokens))
        (gradient,) = pull(out)
    assert np.isfinite(np.asarray(gradient)).all()
