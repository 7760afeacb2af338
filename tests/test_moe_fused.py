"""dispatch_ragged_dot and ragged_dot_combine against numpy, and against the chain of unfused ops where it has more."""

from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax
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
    fused,
    one_expert_gets_all,
    with_gradient,
    zipf,
)
from moe_oracle import Layer

from jax_ep import CapacityError, Group, Implementation, dispatch, dispatch_ragged_dot, lax, moe_mlp, ragged_dot_combine


def test_values(implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(SIZE)
    program = with_gradient(group, fused(group, implementation, capacity=ROWS))
    for change in ROUTINGS:
        layer, case, cotangent = draw(rng, np.float32)
        change(case, rng)
        exact = moe_oracle.gated_experts(layer, case.ids, cotangent)
        assert_near(helpers.fetch(program(layer, case.ids, cotangent)), exact, 1e-5)


def test_drops(implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group, capacity = open_group(SIZE), 7
    program = with_gradient(group, fused(group, implementation, capacity=capacity, on_overflow="drop"))
    layer, case, cotangent = draw(rng, np.float32)
    zipf(case, rng)
    expected = oracle.dispatch(*case, num_experts=EXPERTS, capacity=capacity)
    assert expected.dropped.any()
    kept = np.where(expected.targets >= 0, case.ids, -1)
    exact = moe_oracle.gated_experts(layer, kept, cotangent)
    assert_near(helpers.fetch(program(layer, case.ids, cotangent)), exact, 1e-5)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [DTYPES[0], DTYPES[2]], ids=str)
def test_float8_wire(dtype: np.dtype, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(SIZE)
    options = {"wire_dtype": jnp.float8_e4m3fn}
    programs = [with_gradient(group, form(group, "ffi", **options)) for form in (fused, chain)]
    layer, case, cotangent = draw(rng, dtype, hidden=128)
    ours, wanted = (helpers.fetch(program(layer, case.ids, cotangent)) for program in programs)
    assert_same_bits(ours[0], wanted[0])
    assert_near(ours[1], jax.tree.map(helpers.wide, wanted[1]), 8 * float(jnp.finfo(dtype).eps))
    if dtype == np.float32:
        rounded = np.array([[oracle.through_fp8(row)[0] for row in rank] for rank in layer.tokens])
        exact = moe_oracle.gated_experts(layer._replace(tokens=rounded), case.ids, cotangent)
        assert_near(ours, exact, 1e-5)


def test_one_right_operand(implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """What was dispatched is dispatch's; the product and the sums are numpy's."""
    group = open_group(SIZE)
    _, case, _ = draw(rng, np.float32)
    everything(case, rng)
    first, second = (
        rng.standard_normal((SIZE, EXPERTS // SIZE, *shape)).astype(np.float32)
        for shape in ((HIDDEN, WIDTH), (WIDTH, HIDDEN + 2))
    )

    def both(tokens: Any, ids: Any, weights: Any, first: Any, second: Any) -> Any:
        options: dict[str, Any] = {"group": group, "implementation": implementation}
        out, dispatched = dispatch_ragged_dot(
            tokens, ids, weights, first, num_experts=EXPERTS, capacity=ROWS, **options
        )
        return out, dispatched, ragged_dot_combine(out, second, dispatched.routing, **options)

    out, dispatched, combined = helpers.fetch(helpers.per_rank(both, group.mesh)(*case, first, second))
    expected = oracle.dispatch(*case, num_experts=EXPERTS, capacity=ROWS)
    helpers.assert_dispatched(dispatched, expected)
    ends = np.cumsum(expected.group_sizes, axis=1)
    products, answers = np.zeros((SIZE, ROWS, WIDTH)), np.zeros((SIZE, ROWS, HIDDEN + 2))
    for rank, expert in np.ndindex(*ends.shape):
        rows = slice(ends[rank, expert] - expected.group_sizes[rank, expert], ends[rank, expert])
        products[rank, rows] = expected.tokens[rank, rows].astype(float) @ first[rank, expert]
        answers[rank, rows] = products[rank, rows] @ second[rank, expert]
    assert not out[products == 0].any()
    assert_near(out, products, 1e-6)
    assert_near(combined, oracle.combine(answers, expected.targets, case.weights), 1e-6)


@pytest.mark.parametrize("capacity", [None, 6])
def test_no_tokens(
    capacity: int | None, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    group = open_group(SIZE)
    layer = fused(group, implementation, capacity=capacity)

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
    program = helpers.per_rank(fused(group, implementation, capacity=5), group.mesh)
    layer, case, _ = draw(rng, np.float32)
    one_expert_gets_all(case, rng)
    with helpers.expect_failure(group, CapacityError, "capacity", implementation):
        out = helpers.fetch(program(case.tokens, case.ids, *layer[1:]))
        assert not np.isfinite(out[out != 0]).any()
    case.ids[:] = -1
    case.ids[:, 0, 0] = range(SIZE)  # the group remains usable
    assert np.isfinite(helpers.fetch(program(case.tokens, case.ids, *layer[1:]))).all()


@pytest.mark.usefixtures("native")
def test_rows_have_other_uses(open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Gradients pass through everything that is returned, and through a function of the user's with its parameters."""
    group = open_group(SIZE)

    def loss(form: str, model: Layer, slope: jax.Array, ids: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"group": group, "num_experts": EXPERTS}

        def bent(x: jax.Array) -> jax.Array:
            return jnp.tanh(slope * x)

        if form == "fused":
            out, (rows, _, routing) = dispatch_ragged_dot(
                model.tokens, ids, model.weights, (model.gate, model.up), activation=bent, **options
            )
        else:
            rows, sizes, routing = dispatch(model.tokens, ids, model.weights, **options)
            out = bent(lax.ragged_dot(rows, model.gate, sizes)) * lax.ragged_dot(rows, model.up, sizes)
        return jnp.sum(out**2) + jnp.sum(rows**3) + jnp.sum(routing.weights**2)

    def both(model: Layer, slope: jax.Array, ids: jax.Array) -> Any:
        return [jax.value_and_grad(partial(loss, form), argnums=(0, 1))(model, slope, ids) for form in ("fused", "not")]

    layer, case, _ = draw(rng, np.float32)
    slope = rng.uniform(0.5, 1.5, (SIZE, WIDTH)).astype(np.float32)
    ours, wanted = helpers.fetch(helpers.per_rank(both, group.mesh)(layer, slope, case.ids))
    assert all(np.abs(x).sum() > 0 for x in (*ours[1][0][:4], ours[1][1]))
    assert_near(ours, wanted, 1e-6)


@pytest.mark.parametrize(
    ("given", "function"), [("gelu", jax.nn.gelu), ("relu", jax.nn.relu), (jnp.tanh, jnp.tanh), (jax.nn.gelu, None)]
)
def test_activations(given: Any, function: Any, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(2)
    layer, case, cotangent = (jax.tree.map(lambda x: x[:2], x) for x in draw(rng, DTYPES[0]))
    layer = layer._replace(**{k: np.concatenate(2 * [getattr(layer, k)], 1) for k in ("gate", "up", "down")})
    ours = with_gradient(group, fused(group, "auto", given))(layer, case.ids, cotangent)
    wanted = with_gradient(group, chain(group, "auto", function or given))(layer, case.ids, cotangent)
    ours, wanted = helpers.fetch(ours), helpers.fetch(wanted)
    assert_same_bits(ours[0], wanted[0])
    assert_near(ours[1], jax.tree.map(helpers.wide, wanted[1]), 8 * float(jnp.finfo(DTYPES[0]).eps))


def under_checkpoint(layer: Body) -> Body:
    return jax.checkpoint(layer)  # pyright: ignore[reportPrivateImportUsage]


def under_scan(layer: Body) -> Body:
    def network(tokens: Any, ids: Any, weights: Any, *matrices: Any) -> jax.Array:
        def step(x: Any, _: None) -> tuple[jax.Array, None]:
            return layer(x, ids, weights, *matrices), None

        return jax.lax.scan(step, tokens, length=2)[0]

    return network


def in_one_op(group: Group, implementation: Implementation) -> Body:
    def layer(tokens: Any, ids: Any, weights: Any, *matrices: Any) -> jax.Array:
        return moe_mlp(tokens, ids, weights, *matrices, group=group, implementation=implementation)

    return layer


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("form", [fused, in_one_op])
@pytest.mark.parametrize(("wrap", "check_vma"), [(under_checkpoint, True), (under_scan, True), (under_scan, False)])
def test_in_a_mesh_of_two_axes(
    wrap: Callable[[Body], Body], check_vma: bool, form: Any, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    """Experts are the same along the other axis, so their gradients add up over it."""
    group = open_group(mesh=helpers.mesh_of(dp=2, ep=SIZE))
    specs = Layer(P(("dp", "ep")), P(("dp", "ep")), P("ep"), P("ep"), P("ep"))  # pyright: ignore[reportCallIssue]

    def gradients(form: Any) -> Any:
        def layer(model: Layer, ids: jax.Array) -> jax.Array:
            body = wrap(form(group, "ffi"))
            return body(model.tokens[0], ids[0], model.weights[0], *(x[0] for x in model[2:]))[None]

        mapped = jax.shard_map(
            layer, mesh=group.mesh, in_specs=(specs, P(("dp", "ep"))), out_specs=P(("dp", "ep")), check_vma=check_vma
        )
        return jax.jit(jax.value_and_grad(lambda model, ids, target: jnp.sum(mapped(model, ids) * target)))

    case = helpers.draw_case(rng, 2 * SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    matrices = draw(rng, np.float32)[0][2:]
    target = rng.standard_normal(case.tokens.shape).astype(np.float32)
    model = Layer(case.tokens, case.weights, *matrices)
    ours, wanted = (helpers.fetch(gradients(form)(model, case.ids, target)) for form in (form, chain))
    assert_same_bits(ours[0], wanted[0])
    assert_near(ours[1], wanted[1], 1e-5)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("in_one_op", [False, True])
def test_rows_are_kept_once(in_one_op: bool, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """What the backward pass of a layer holds: rows, both products, and, of two ops, what the activation makes."""
    group, held = open_group(SIZE), []

    def layer(tokens: Any, ids: Any, weights: Any, *matrices: Any) -> jax.Array:
        if in_one_op:
            return moe_mlp(tokens, ids, weights, *matrices, group=group, capacity=ROWS)
        return fused(group, "ffi", capacity=ROWS)(tokens, ids, weights, *matrices)

    def body(model: Layer, ids: jax.Array) -> jax.Array:
        out, pull = jax.vjp(lambda m: layer(m.tokens, ids, *m[1:]), model)
        held.extend(x.shape for x in jax.tree.leaves(pull))
        return out

    drawn, case, _ = draw(rng, np.float32)
    jax.eval_shape(helpers.per_rank(body, group.mesh), drawn, case.ids)
    assert held.count((ROWS, HIDDEN)) == 1
    assert held.count((ROWS, WIDTH)) == (2 if in_one_op else 3)


@pytest.mark.usefixtures("native")
def test_both_halves_in_one_op(open_group: OpenGroup, rng: np.random.Generator) -> None:
    """The bits of the two ops one after the other, and their gradients up to rounding."""
    group = open_group(SIZE)

    def in_one_op(tokens: Any, ids: Any, weights: Any, *matrices: Any) -> jax.Array:
        return moe_mlp(tokens, ids, weights, *matrices, group=group, capacity=ROWS)

    layer, case, cotangent = draw(rng, DTYPES[0])
    everything(case, rng)
    forms = (in_one_op, fused(group, "ffi", capacity=ROWS))
    ours, wanted = (helpers.fetch(with_gradient(group, form)(layer, case.ids, cotangent)) for form in forms)
    assert_same_bits(ours[0], wanted[0])
    assert_near(ours[1], jax.tree.map(helpers.wide, wanted[1]), 8 * float(jnp.finfo(DTYPES[0]).eps))


@pytest.mark.parametrize(("alignment", "capacity"), [(1, 7), (4, 8), (4, None)])
def test_group_sizes_of_a_routing(
    alignment: int,
    capacity: int | None,
    implementation: Implementation,
    open_group: OpenGroup,
    rng: np.random.Generator,
) -> None:
    group = open_group(SIZE)
    options: dict[str, Any] = {"alignment": alignment, "capacity": capacity, "on_overflow": "drop"}

    def both(tokens: Any, ids: Any, weights: Any) -> Any:
        out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, implementation=implementation, **options)
        return out.group_sizes, out.routing.group_sizes

    sizes, derived = helpers.fetch(helpers.per_rank(both, group.mesh)(*draw(rng, np.float32)[1]))
    assert derived.dtype == sizes.dtype == np.int32
    np.testing.assert_array_equal(derived, sizes)
