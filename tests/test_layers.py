"""`moe_mlp` against the oracle, and against the chain of ops that it stands for, differentiated by JAX.

Sums have the bits of the chain. Gradients have as many roundings or fewer, so they are as near to the exact ones.
"""

from typing import Any

import helpers
import jax
import jax.extend
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
import pytest
from conftest import OpenGroup
from helpers import DTYPES
from jax.sharding import PartitionSpec as P
from layer_cases import (
    EXPERTS,
    HIDDEN,
    ROUTINGS,
    ROWS,
    SIZE,
    TOKENS,
    TOP_K,
    WIDTH,
    Body,
    assert_near,
    assert_same_bits,
    chain,
    draw,
    everything,
    layer_of,
    one_expert_gets_all,
    with_gradient,
    zipf,
)
from moe_oracle import Layer

from jax_ep import CapacityError, Experts, Gated, Implementation, moe_mlp


def test_values(implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(SIZE)
    program = with_gradient(group, layer_of(group, implementation, capacity=ROWS))
    for change in ROUTINGS:
        layer, case, cotangent = draw(rng, np.float32)
        change(case, rng)
        exact = moe_oracle.gated_experts(layer, case.ids, cotangent)
        assert_near(helpers.fetch(program(layer, case.ids, cotangent)), exact, 1e-5)


def test_bfloat16(implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Five roundings on the way: gate, up, their product, down and the sum."""
    group = open_group(SIZE)
    layer, case, cotangent = draw(rng, DTYPES[0])
    case.ids[0, 0] = -1
    out = helpers.fetch(helpers.per_rank(layer_of(group, implementation), group.mesh)(*case, *layer[2:]))
    assert out.dtype == DTYPES[0]
    assert not out[0, 0].any()  # a token that skips all its experts
    assert_near(out, moe_oracle.gated_experts(layer, case.ids, cotangent)[0], 8 * float(jnp.finfo(DTYPES[0]).eps))


@pytest.mark.optimized
@pytest.mark.usefixtures("native")
def test_float8_wire(open_group: OpenGroup, rng: np.random.Generator) -> None:
    group, dtype = open_group(SIZE), DTYPES[0]
    programs = [with_gradient(group, form(group, "ffi", wire="float8")) for form in (layer_of, chain)]
    layer, case, cotangent = draw(rng, dtype, hidden=128)
    ours, wanted = (helpers.fetch(program(layer, case.ids, cotangent)) for program in programs)
    assert_same_bits(ours[0], wanted[0])
    assert_near(ours[1], jax.tree.map(helpers.wide, wanted[1]), 8 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("capacity", [None, 6])
def test_no_tokens(
    capacity: int | None, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    group = open_group(SIZE)
    layer = layer_of(group, implementation, capacity=capacity)

    def of_none(tokens: jax.Array, ids: jax.Array, weights: jax.Array, *matrices: jax.Array) -> jax.Array:
        # Emptied inside: jaxlib 0.10 and 0.11 may fail, or crash, when they compile a shard_map with empty operands.
        out = layer(tokens[:0], ids[:0], weights[:0], *matrices)
        assert out.shape == (0, HIDDEN)
        return jnp.concatenate([out, tokens[:1]])

    model, case, cotangent = draw(rng, np.float32)
    _, gradient = helpers.fetch(with_gradient(group, of_none)(model, case.ids, cotangent[:, :1]))
    np.testing.assert_array_equal(gradient.tokens[:, :1], cotangent[:, :1])
    assert not any(x.any() for x in (gradient.tokens[:, 1:], *gradient[1:]))


def test_too_many_rows(implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(SIZE)
    program = helpers.per_rank(layer_of(group, implementation, capacity=5), group.mesh)
    layer, case, _ = draw(rng, np.float32)
    one_expert_gets_all(case, rng)
    with helpers.expect_failure(group, CapacityError, "capacity", implementation):
        out = helpers.fetch(program(*case, *layer[2:]))
        assert not np.isfinite(out[out != 0]).any()
    case.ids[:] = -1
    case.ids[:, 0, 0] = range(SIZE)  # the group remains usable
    assert np.isfinite(helpers.fetch(program(*case, *layer[2:]))).all()


def under_scan(layer: Body) -> Body:
    def network(tokens: Any, ids: Any, weights: Any, *matrices: Any) -> jax.Array:
        def step(x: Any, _: None) -> tuple[jax.Array, None]:
            return layer(x, ids, weights, *matrices), None

        return jax.lax.scan(step, tokens, length=2)[0]

    return network


@pytest.mark.optimized
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_mesh_of_two_axes(check_vma: bool, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Experts are the same along the other axis, so their gradients add up over it."""
    group = open_group(mesh=helpers.mesh_of(dp=2, ep=SIZE))
    specs = Layer(P(("dp", "ep")), P(("dp", "ep")), P("ep"), P("ep"), P("ep"))  # pyright: ignore[reportCallIssue]

    def gradients(form: Any) -> Any:
        def layer(model: Layer, ids: jax.Array) -> jax.Array:
            body = under_scan(form(group, "ffi"))
            return body(model.tokens[0], ids[0], model.weights[0], *(x[0] for x in model[2:]))[None]

        mapped = jax.shard_map(
            layer, mesh=group.mesh, in_specs=(specs, P(("dp", "ep"))), out_specs=P(("dp", "ep")), check_vma=check_vma
        )
        return jax.jit(jax.value_and_grad(lambda model, ids, target: jnp.sum(mapped(model, ids) * target)))

    case = helpers.draw_case(rng, 2 * SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    matrices = draw(rng, np.float32)[0][2:]
    target = rng.standard_normal(case.tokens.shape).astype(np.float32)
    model = Layer(case.tokens, case.weights, *matrices)
    ours, wanted = (helpers.fetch(gradients(form)(model, case.ids, target)) for form in (layer_of, chain))
    assert_same_bits(ours[0], wanted[0])
    assert_near(ours[1], wanted[1], 1e-5)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("form", ["silu", "biased", "of the user", "two matrices"])
def test_rows_are_not_kept(form: str, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """What the backward pass of a layer holds: each token where it landed, and the products before the unit."""
    group, held = open_group(SIZE), []
    gated, two = Gated(lambda gate, up: jnp.tanh(gate) * (up + 1)), form == "two matrices"

    def layer(model: Layer, ids: jax.Array) -> jax.Array:
        biases = (model.gate[:, 0], model.up[:, 0], model.down[:, 0]) if form == "biased" else None
        gate = None if two else model.gate
        activation: Any = gated if form in ("biased", "of the user") else "silu"
        experts = Experts(gate, model.up, model.down, biases=biases, activation=activation)
        return moe_mlp(model.tokens, ids, model.weights, experts, group=group, capacity=ROWS)[0]

    def body(model: Layer, ids: jax.Array) -> jax.Array:
        out, pull = jax.vjp(lambda m: layer(m, ids), model)
        held.extend(x.shape for x in jax.tree.leaves(pull))
        return out

    drawn, case, _ = draw(rng, np.float32)
    jax.eval_shape(helpers.per_rank(body, group.mesh), drawn, case.ids)
    assert held.count((SIZE * TOKENS, HIDDEN)) == 1
    assert held.count((ROWS, HIDDEN)) == 0
    assert held.count((ROWS, WIDTH)) == (1 if two else 2)


def assert_as_near(ours: Layer, others: Layer, exact: Layer) -> None:
    """Ours is off by as many roundings as the chain, or fewer, of values whose mantissas are distributed otherwise."""
    mine, theirs = (moe_oracle.errors(x, exact) for x in (ours, others))
    print("errors", mine, "and of the chain", theirs)
    assert all(a <= 1.15 * b for a, b in zip(mine, theirs, strict=True))


@pytest.mark.optimized
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_against_the_chain(dtype: np.dtype, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Large enough that chance makes little of the errors."""
    group, tokens = open_group(SIZE), 64
    capacity = SIZE * tokens * TOP_K
    ours, others = (with_gradient(group, form(group, "ffi", capacity=capacity)) for form in (layer_of, chain))
    for change in ROUTINGS:
        print(change.__name__)
        layer, case, cotangent = draw(rng, dtype, hidden=96, tokens=tokens, width=80)
        change(case, rng)
        sums, gradient = helpers.fetch(ours(layer, case.ids, cotangent))
        sums_of_chain, gradient_of_chain = helpers.fetch(others(layer, case.ids, cotangent))
        assert_same_bits(sums, sums_of_chain)
        assert_as_near(gradient, gradient_of_chain, moe_oracle.gated_experts(layer, case.ids, cotangent)[1])


@pytest.mark.usefixtures("native")
def test_runs_have_the_same_bits(open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(SIZE)
    program = with_gradient(group, layer_of(group, "ffi", capacity=ROWS))
    layer, case, cotangent = draw(rng, DTYPES[0])
    everything(case, rng)
    first, *others = (helpers.fetch(program(layer, case.ids, cotangent)) for _ in range(5))
    for other in others:
        assert_same_bits(other, first)


def draw_shared(rng: np.random.Generator) -> list[np.ndarray]:
    """Of twice the width; the same on all ranks."""
    shapes = ((HIDDEN, 2 * WIDTH), (HIDDEN, 2 * WIDTH), (2 * WIDTH, HIDDEN))
    drawn = ((rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32) for shape in shapes)
    return [np.broadcast_to(x, (SIZE, *x.shape)) for x in drawn]


@pytest.mark.usefixtures("native")
def test_a_shared_expert_waits_for_no_rows(open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Nor do rows wait for it: neither's products come into the other's operands, until both are added."""
    group = open_group(SIZE)
    layer, case, _ = draw(rng, np.float32)

    def body(model: Layer, shared: list[Any], ids: jax.Array) -> jax.Array:
        return layer_of(group, "ffi", shared=Experts(*shared))(model.tokens, ids, *model[1:])

    traced = jax.make_jaxpr(helpers.per_rank(body, group.mesh))(layer, draw_shared(rng), case.ids)
    (jitted,) = traced.eqns
    (mapped,) = (each.params["jaxpr"] for each in jitted.params["jaxpr"].eqns if each.primitive.name == "shard_map")
    behind: dict[Any, set[str]] = {}  # for every value, what it was made of
    dense_products = 0
    for equation in mapped.eqns:
        inputs = [behind.get(x, set()) for x in equation.invars if not isinstance(x, jax.extend.core.Literal)]
        made_of = set().union(*inputs)
        text = str(equation)
        if "ffi_call" in text:
            assert "shared" not in made_of
            made_of = made_of | {"exchange"}
        elif "dot_general[" in text and "ragged" not in text:
            assert "exchange" not in made_of
            made_of, dense_products = made_of | {"shared"}, dense_products + 1
        behind |= dict.fromkeys(equation.outvars, made_of)
    assert dense_products == 3
    assert behind[mapped.outvars[0]] == {"exchange", "shared"}


def test_stats(implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group, capacity = open_group(SIZE), 8
    layer, case, _ = draw(rng, np.float32)
    zipf(case, rng)
    case.ids[0, 3, :2] = EXPERTS, -7

    def body(model: Layer, ids: jax.Array) -> Any:
        options: dict[str, Any] = {"capacity": capacity, "on_overflow": "drop", "implementation": implementation}
        return moe_mlp(model.tokens, ids, model.weights, Experts(*model[2:]), group=group, **options)

    out, stats = helpers.fetch(helpers.per_rank(body, group.mesh)(layer, case.ids))
    valid = (case.ids >= 0) & (case.ids < EXPERTS)
    np.testing.assert_array_equal(stats.counts.reshape(-1), np.bincount(case.ids[valid], minlength=EXPERTS))
    np.testing.assert_array_equal(stats.invalid[:, 0], (~valid & (case.ids != -1)).sum(axis=(1, 2)))
    expected = oracle.dispatch(*case, num_experts=EXPERTS, capacity=capacity)
    assert expected.dropped.any()
    np.testing.assert_array_equal(stats.dropped, expected.dropped)
    assert out.shape == layer.tokens.shape
