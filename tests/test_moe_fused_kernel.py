"""dispatch_ragged_dot(implementation="fused") against numpy, and to the bit against the chain of ops."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from conftest import OpenGroup
from fused_cases import EXPERTS, TOP_K, WIDTH, assert_right, draw, product_of, program
from helpers import DTYPES

from jax_ep import CapacityError, dispatch_ragged_dot
from jax_ep._core import ffi, gemm
from jax_ep.ops.moe_fused.types import ACTIVATIONS

ON_GPU = ffi.library_name(jax.devices()[0]) != "cpu"

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(ON_GPU and not gemm.has_gemm(), reason="needs GPUs with the GEMM core, or CPUs"),
]

# Few tokens; more than set off before their rows are known; and in between. Last, one expert a rank.
SHAPES = [(1, 6), (1, 600), (2, 6), (2, helpers.LATE_TOKENS), (4, 6), (4, 600), (EXPERTS, 6)]


@pytest.mark.parametrize(("size", "tokens"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES[:2] if ON_GPU else DTYPES, ids=str)
def test_values(dtype: np.dtype, size: int, tokens: int, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Many calls of one program: nothing of a call remains for the next."""
    group, capacity = open_group(size), size * tokens * TOP_K
    call = program(group, capacity=capacity)
    for _ in range(3):
        case, rhs = draw(rng, size, tokens, dtype)
        out, dispatched = helpers.fetch(call(*case, rhs))
        assert_right(out, dispatched, case, rhs)
        assert out.dtype == dtype


@pytest.mark.parametrize("routing", ["one expert gets all", "everything is skipped", "one expert gets nothing"])
def test_skewed(routing: str, open_group: OpenGroup, rng: np.random.Generator) -> None:
    size, tokens = 2, 300
    group, capacity = open_group(size), size * tokens * TOP_K
    case, rhs = draw(rng, size, tokens, np.dtype(ml_dtypes.bfloat16))
    if routing == "one expert gets nothing":
        case.ids[case.ids == 1] = 2
    else:
        case.ids[:] = 5 if routing == "one expert gets all" else -1
    out, dispatched = helpers.fetch(program(group, capacity=capacity)(*case, rhs))
    assert_right(out, dispatched, case, rhs)


@pytest.mark.parametrize("capacity", [None, 6])
def test_no_tokens(capacity: int | None, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(1)
    case, rhs = draw(rng, 1, 4, np.dtype(ml_dtypes.bfloat16))

    def of_none(tokens: Any, ids: Any, rhs: Any) -> Any:
        # Emptied inside: jaxlib 0.10 and 0.11 may fail, or crash, when they compile a shard_map with empty operands.
        out, dispatched = dispatch_ragged_dot(
            tokens[:0],
            ids[:0],
            None,
            rhs,
            group=group,
            num_experts=EXPERTS,
            capacity=capacity,
            implementation="fused",
        )
        assert out.shape == (capacity or 0, WIDTH)
        return jnp.concatenate([out, jnp.ones_like(rhs[0, :1])]), dispatched.group_sizes

    out, sizes = helpers.fetch(helpers.per_rank(of_none, group.mesh)(case.tokens, case.ids, rhs))
    assert not sizes.any()
    assert not helpers.wide(out[:, :-1]).any()
    assert helpers.wide(out[:, -1]).all()


@pytest.mark.parametrize("pair", [False, True])
def test_bits_and_gradients_of_the_chain(pair: bool, open_group: OpenGroup, rng: np.random.Generator) -> None:
    size, tokens = 2, 40
    group = open_group(size)
    case, gate = draw(rng, size, tokens, np.dtype(ml_dtypes.bfloat16))
    up = rng.integers(-2, 3, gate.shape).astype(gate.dtype)

    def loss(implementation: Any, tokens: Any, weights: Any, gate: Any, up: Any, ids: Any) -> Any:
        out, dispatched = dispatch_ragged_dot(
            tokens,
            ids,
            weights,
            (gate, up) if pair else gate,
            activation="silu" if pair else None,
            group=group,
            num_experts=EXPERTS,
            implementation=implementation,
        )
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(dispatched.routing.weights**2), out

    def both(*operands: Any) -> Any:
        way = jax.value_and_grad(loss, argnums=(1, 2, 3, 4), has_aux=True)
        return [way(implementation, *operands) for implementation in ("fused", "ffi")]

    ours, wanted = helpers.fetch(helpers.per_rank(both, group.mesh)(case.tokens, case.weights, gate, up, case.ids))
    assert all(np.abs(helpers.wide(x)).sum() > 0 for x in ours[1][:3])
    rounded = pair and not ON_GPU  # a CPU's activation is not XLA's
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        mine, theirs = helpers.wide(mine), helpers.wide(theirs)
        bound = 0.02 * np.abs(theirs).max() if rounded else 0
        np.testing.assert_allclose(mine, theirs, rtol=0.02 if rounded else 0, atol=bound)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("pair", [False, True])
def test_gated_units(activation: Any, pair: bool, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Against float64, with gate and up in two arrays and in one; and gradients, for which both products are kept."""
    group = open_group(2)
    case, gate = draw(rng, 2, helpers.LATE_TOKENS, np.dtype(ml_dtypes.bfloat16))
    up = rng.integers(-2, 3, gate.shape).astype(gate.dtype)
    rhs = (gate, up) if pair else np.concatenate([gate, up], axis=3)
    capacity = 2 * helpers.LATE_TOKENS * TOP_K

    def unit(tokens: Any, ids: Any, weights: Any, rhs: Any) -> Any:
        where: dict[str, Any] = {"group": group, "num_experts": EXPERTS, "implementation": "fused"}

        def loss(rhs: Any) -> Any:
            out, _ = dispatch_ragged_dot(tokens, ids, weights, rhs, activation=activation, capacity=capacity, **where)
            return jnp.sum(out.astype(jnp.float32)), out

        return jax.grad(loss, has_aux=True)(rhs)

    gradients, out = helpers.fetch(helpers.per_rank(unit, group.mesh)(*case, rhs))
    expected = oracle.dispatch(*case, num_experts=EXPERTS, capacity=capacity)
    of_gate, of_up = (product_of(expected, each).astype(np.float64) for each in (gate, up))
    wanted = np.asarray(ACTIVATIONS[activation](jnp.asarray(of_gate, jnp.float32)), np.float64) * of_up
    np.testing.assert_allclose(helpers.wide(out), wanted, rtol=0.02, atol=0.02)
    assert all(
        np.isfinite(helpers.wide(x)).all() and np.abs(helpers.wide(x)).sum() > 0 for x in jax.tree.leaves(gradients)
    )


def test_drops(open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Whatever is dropped: the rows that arrive are multiplied, and there are as many as find room."""
    size, capacity = 2, 100
    group = open_group(size)
    case, rhs = draw(rng, size, 60, np.dtype(ml_dtypes.bfloat16))
    out, dispatched = helpers.fetch(program(group, capacity=capacity, on_overflow="drop")(*case, rhs))
    assert dispatched.routing.dropped.any()
    for rank in range(size):
        assert dispatched.group_sizes[rank].sum() == min(capacity, dispatched.routing.counts[rank].sum())
    arrived = oracle.dispatch(*case, num_experts=EXPERTS, capacity=capacity)
    arrived = arrived._replace(tokens=dispatched.tokens, group_sizes=dispatched.group_sizes)
    np.testing.assert_array_equal(helpers.wide(out), helpers.wide(product_of(arrived, rhs)))


def test_too_many_rows(open_group: OpenGroup, rng: np.random.Generator) -> None:
    group, capacity = open_group(2), 50
    call = program(group, capacity=capacity)
    case, rhs = draw(rng, 2, 40, np.dtype(ml_dtypes.bfloat16))
    with helpers.expect_failure(group, CapacityError, "capacity"):
        out, dispatched = helpers.fetch(call(*case, rhs))
        helpers.assert_nothing_delivered(dispatched)
        assert np.isnan(helpers.wide(out)).all()
    case.ids[:, 10:] = -1  # the group remains usable
    out, _ = helpers.fetch(call(*case, rhs))
    expected = oracle.dispatch(*case, num_experts=EXPERTS, capacity=capacity)
    np.testing.assert_array_equal(helpers.wide(out), helpers.wide(product_of(expected, rhs)))


def test_no_wire_in_float8(open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(2)
    tokens = np.zeros((2, 4, 128), ml_dtypes.bfloat16)
    rhs = np.zeros((2, EXPERTS // 2, 128, WIDTH), ml_dtypes.bfloat16)
    case = helpers.draw_case(rng, 2, 4, TOP_K, EXPERTS, 128)._replace(tokens=tokens)
    message = "^dispatch_ragged_dot: wire_dtype must be None where implementation='fused', got float8_e4m3fn"
    with pytest.raises(ValueError, match=message):
        program(group, wire_dtype=jnp.float8_e4m3fn)(*case, rhs)


def test_no_columns(open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(2)
    case, rhs = draw(rng, 2, 4, np.dtype(ml_dtypes.bfloat16))
    message = (
        "^dispatch_ragged_dot: the columns of rhs must be a positive multiple of . where implementation='fused', got"
    )
    with pytest.raises(ValueError, match=message):
        program(group)(*case, rhs[..., :0])
