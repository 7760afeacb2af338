"""`moe_mlp` against every expert computed for every token: values in numpy float64, gradients by plain JAX."""

from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import jax
import jax.extend
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from conftest import OpenGroup
from jax.sharding import PartitionSpec as P

from jax_ep import Group, Implementation, moe_mlp
from jax_ep.nn.layers import uses_fused_ops

SIZE, EXPERTS, TOKENS, TOP_K, HIDDEN, WIDTH = 4, 8, 6, 3, 16, 24


class Model(NamedTuple):
    tokens: Any  # [R * T, H]
    weights: Any  # [R * T, K]
    gate: Any  # [E, H, F]
    up: Any  # [E, H, F]
    down: Any  # [E, F, H]


def draw(rng: np.random.Generator, dtype: Any = np.float32) -> tuple[Model, np.ndarray]:
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    case.ids[0, 0] = -1
    case.ids[1] = np.where(case.ids[1] == 3, 4, case.ids[1])  # some tokens name an expert twice
    case.ids[2, :, 0] = 7
    tokens, ids, weights = (x.reshape(-1, x.shape[-1]) for x in case)
    shapes = ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
    matrices = ((rng.standard_normal((EXPERTS, *shape)) / shape[0] ** 0.5).astype(dtype) for shape in shapes)
    return Model(tokens.astype(dtype), weights, *matrices), ids


def exact(model: Model, ids: np.ndarray) -> np.ndarray:
    tokens, weights, gate, up, down = (np.asarray(x, np.float64) for x in model)
    out = np.zeros_like(tokens)
    for token, row in enumerate(tokens):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            if expert >= 0:
                gated = row @ gate[expert]
                out[token] += weight * ((gated / (1 + np.exp(-gated)) * (row @ up[expert])) @ down[expert])
    return out


def dense(model: Model, ids: Any) -> Any:
    """Every expert sees every token; a one-hot mask picks."""
    tokens, weights, gate, up, down = model
    gated, plain = (jnp.einsum("th,ehf->etf", tokens, matrices) for matrices in (gate, up))
    outputs = jnp.einsum("etf,efh->eth", jax.nn.silu(gated) * plain, down)
    return jnp.einsum("tke,tk,eth->th", jax.nn.one_hot(ids, EXPERTS), weights, outputs)


def draw_shared(rng: np.random.Generator, dtype: Any) -> tuple[np.ndarray, ...]:
    shapes = ((HIDDEN, 2 * WIDTH), (HIDDEN, 2 * WIDTH), (2 * WIDTH, HIDDEN))
    return tuple((rng.standard_normal(shape) / shape[0] ** 0.5).astype(dtype) for shape in shapes)


def sharded(group: Group, implementation: Implementation, **options: Any) -> Callable[..., Any]:
    """(Model, ids, shared or nothing) -> what the layer returns."""

    def layer(model: Model, ids: jax.Array, shared: Any = None) -> Any:
        tokens, weights, gate, up, down = model
        given = {"group": group, "implementation": implementation, "shared": shared} | options
        return moe_mlp(tokens, ids, weights, gate, up, down, **given)

    def call(model: Model, ids: jax.Array, *shared: Any) -> Any:
        specs = (P("ep"), P("ep"), *[P()] * len(shared))
        return jax.shard_map(layer, mesh=group.mesh, in_specs=specs, out_specs=P("ep"))(model, ids, *shared)

    return call


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_values(dtype: Any, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    model, ids = draw(rng, dtype)
    actual = helpers.fetch(jax.jit(sharded(open_group(SIZE), implementation))(model, ids))
    wanted = exact(model, ids)
    assert actual.dtype == np.dtype(dtype)
    assert not actual[0].any()  # a token that skips all its experts
    # Five roundings on the way: gate, up, their product, down and the sum.
    allowed = 8 * float(jnp.finfo(dtype).eps) * np.abs(wanted).max()
    np.testing.assert_allclose(actual.astype(np.float64), wanted, rtol=0, atol=allowed)


def test_gradients(implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    model, ids = draw(rng)
    target = rng.standard_normal(model.tokens.shape).astype(np.float32)
    layer = sharded(open_group(SIZE), implementation)
    actual = helpers.fetch(jax.jit(jax.grad(lambda m: jnp.sum(layer(m, ids) * target)))(model))
    wanted = jax.grad(lambda m: jnp.sum(dense(m, ids) * target))(model)
    for a, w in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(a, w, rtol=0, atol=1e-5 * float(np.abs(w).max()))


@pytest.mark.usefixtures("native")
def test_fused_or_not(open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Values have the same bits, gradients differ by rounding, with a shared expert too; names stand for functions."""
    group = open_group(SIZE)
    model, ids = draw(rng, ml_dtypes.bfloat16)
    shared = draw_shared(rng, model.tokens.dtype)
    target = rng.standard_normal(model.tokens.shape).astype(model.tokens.dtype)

    def results(**options: Any) -> Any:
        layer = sharded(group, "ffi", **options)

        def loss(model: Model, shared: Any) -> tuple[jax.Array, jax.Array]:
            out = layer(model, ids, shared)
            return jnp.sum(out * target), out

        gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(model, shared)
        return helpers.fetch((out, jax.tree.leaves(gradients)))

    (out, ours), (out_of_ops, wanted) = (
        results(fused=True, activation="gelu"),
        results(fused=False, activation=jax.nn.gelu),
    )
    assert helpers.bits(out) == helpers.bits(out_of_ops)
    for a, w in zip(ours, map(helpers.wide, wanted), strict=True):
        np.testing.assert_allclose(helpers.wide(a), w, rtol=0, atol=2**-5 * float(np.abs(w).max()))


@pytest.mark.parametrize("fused", [True, False])
def test_shared_expert(
    fused: bool, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    """Its matrices are the same on all ranks, so that their gradients add up."""
    model, ids = draw(rng)
    shared = draw_shared(rng, np.float32)
    layer = sharded(open_group(SIZE), implementation, fused=fused)

    def whole(model: Model, shared: tuple[Any, ...]) -> jax.Array:
        gate, up, down = shared
        return dense(model, ids) + (jax.nn.silu(model.tokens @ gate) * (model.tokens @ up)) @ down

    target = rng.standard_normal(model.tokens.shape).astype(np.float32)
    program = jax.jit(jax.value_and_grad(lambda m, s: jnp.sum(layer(m, ids, s) * target), argnums=(0, 1)))
    actual = helpers.fetch(program(model, shared))
    wanted = jax.value_and_grad(lambda m, s: jnp.sum(whole(m, s) * target), argnums=(0, 1))(model, shared)
    for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, w, rtol=0, atol=2e-5 * float(np.abs(w).max()))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("fused", [True, False])
def test_a_shared_expert_waits_for_no_rows(fused: bool, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """Nor do rows wait for it: neither's products come into the other's operands, until both are added."""
    model, ids = draw(rng)
    layer = sharded(open_group(SIZE), "ffi", fused=fused)
    traced = jax.make_jaxpr(layer)(model, ids, draw_shared(rng, np.float32))
    (body,) = (each.params["jaxpr"] for each in traced.eqns if each.primitive.name == "shard_map")
    behind: dict[Any, set[str]] = {}  # for every value, what it was made of
    dense_products = 0
    for equation in body.eqns:
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
    assert behind[body.outvars[0]] == {"exchange", "shared"}


@pytest.mark.parametrize("fused", [True, False])
def test_stats(fused: bool, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    model, ids = draw(rng)
    ids[3, :2] = EXPERTS, -7
    capacity = 8
    layer = sharded(
        open_group(SIZE), implementation, fused=fused, with_stats=True, capacity=capacity, on_overflow="drop"
    )
    out, stats = helpers.fetch(jax.jit(layer)(model, ids))
    valid = (ids >= 0) & (ids < EXPERTS)
    np.testing.assert_array_equal(stats.counts, np.bincount(ids[valid], minlength=EXPERTS))
    per_rank = (SIZE, TOKENS * TOP_K)
    np.testing.assert_array_equal(stats.invalid, (~valid & (ids != -1)).reshape(per_rank).sum(axis=1))
    expected = oracle.dispatch(
        *(np.asarray(x).reshape(SIZE, TOKENS, -1) for x in (model.tokens, ids, model.weights)),
        num_experts=EXPERTS,
        capacity=capacity,
    )
    assert expected.dropped.any()
    np.testing.assert_array_equal(stats.dropped, expected.dropped[:, 0])
    assert out.shape == model.tokens.shape


@pytest.mark.parametrize(
    ("fused", "by_xla", "wanted"),
    [
        ("auto", False, True),
        ("auto", True, False),
        *((each, xla, each) for each in (True, False) for xla in (True, False)),
    ],
)
def test_what_auto_takes(fused: Any, by_xla: bool, wanted: bool) -> None:
    assert uses_fused_ops(fused, by_xla=by_xla) is wanted


@pytest.mark.parametrize(
    ("name", "wrong", "match"),
    [
        ("fused", "always", "fused must be True, False or 'auto', got 'always'"),
        ("fused", 1, "fused must be True, False or 'auto', got 1"),
        ("with_stats", 1, "with_stats must be True or False, got 1"),
        ("activation", "swiglu", "activation must be one of 'silu', 'gelu', 'relu'; got 'swiglu'"),
        ("activation", None, "activation must be a function or one of 'silu', 'gelu', 'relu', got None"),
        ("shared", 7, r"shared must be None or \(gate, up, down\), got int"),
        ("shared", (np.zeros((HIDDEN, 8)),) * 2, r"shared must be None or \(gate, up, down\), got a tuple of 2"),
        ("shared", (np.zeros((HIDDEN, 8), np.float32),) * 3, r"shared\[2\] must have shape \[S, H\] = \(8, 16\)"),
        ("shared", (np.zeros((HIDDEN, 8), np.float16),) * 3, r"shared\[0\] must be of dtype float32, got float16"),
    ],
)
def test_wrong_options(name: str, wrong: Any, match: str, open_group: OpenGroup, rng: np.random.Generator) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^moe_mlp: {match}"):
        jax.eval_shape(sharded(open_group(SIZE), "xla", **{name: wrong}), *draw(rng))


@pytest.mark.parametrize(
    ("name", "wrong", "match"),
    [
        ("gate", np.zeros((8, HIDDEN + 1, WIDTH), np.float32), r"gate must have shape \[E / R, H, F\]"),
        ("gate", np.zeros((0, HIDDEN, WIDTH), np.float32), "gate must have at least one expert on every rank"),
        ("up", np.zeros((8, HIDDEN, WIDTH + 8), np.float32), r"up must have shape \[E / R, H, F\]"),
        ("down", np.zeros((8, HIDDEN, WIDTH), np.float32), r"down must have shape \[E / R, F, H\]"),
        ("up", np.zeros((8, HIDDEN, WIDTH), np.float16), "up must be of dtype float32, got float16"),
    ],
)
def test_wrong_matrices(
    name: str, wrong: np.ndarray, match: str, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    model, ids = draw(rng)
    with pytest.raises((ValueError, TypeError), match=f"moe_mlp: {match}"):
        jax.eval_shape(sharded(open_group(SIZE), "xla"), model._replace(**{name: wrong}), ids)
