"""Gradients of a mixture of experts against those of a dense one-hot formulation in float32."""

from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup
from jax.sharding import PartitionSpec as P

from jax_ep import Group, Implementation, combine, dispatch

SIZE, EXPERTS, TOKENS, TOP_K, HIDDEN, WIDTH = 4, 8, 6, 3, 16, 24

Layer = Callable[..., jax.Array]


class Model(NamedTuple):
    """What is differentiated; the matrices of every layer are stacked."""

    tokens: Any  # [R * T, H]
    weights: Any  # [R * T, K]
    up: Any  # [layers, E, H, F]
    down: Any  # [layers, E, F, H]


class Setting(NamedTuple):
    model: Model
    ids: np.ndarray  # [R * T, K]
    target: np.ndarray  # [R * T, H]


def draw_setting(rng: np.random.Generator, layers: int = 1) -> Setting:
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    case.ids[:, 0, 0] = -1
    case.ids[1, :, 1] = case.ids[1, :, 0]  # one expert twice
    case.ids[2] = 7  # all tokens of a rank on one expert
    case.ids[3, 2] = EXPERTS
    tokens, ids, weights = (x.reshape(-1, x.shape[-1]) for x in case)
    up = rng.standard_normal((layers, EXPERTS, HIDDEN, WIDTH)).astype(np.float32) / HIDDEN**0.5
    down = rng.standard_normal((layers, EXPERTS, WIDTH, HIDDEN)).astype(np.float32) / WIDTH**0.5
    return Setting(Model(tokens, weights, up, down), ids, rng.standard_normal(tokens.shape).astype(np.float32))


def dense_layer(tokens: Any, weights: Any, up: Any, down: Any, ids: Any) -> Any:
    """Every expert sees every token; a one-hot mask picks. An id without an expert picks none."""
    outputs = jnp.einsum("etf,efh->eth", jnp.tanh(jnp.einsum("th,ehf->etf", tokens, up)), down)
    return tokens + jnp.einsum("tke,tk,eth->th", jax.nn.one_hot(ids, EXPERTS), weights, outputs)


def sparse_layer(group: Group, implementation: Implementation) -> Layer:
    def layer(tokens: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array, ids: jax.Array) -> jax.Array:
        out = dispatch(
            tokens,
            ids,
            weights,
            group=group,
            num_experts=EXPERTS,
            capacity=SIZE * TOKENS * TOP_K,
            implementation=implementation,
        )
        inner = jnp.tanh(jax.lax.ragged_dot(out.rows, up, out.group_sizes))
        outputs = jax.lax.ragged_dot(inner, down, out.group_sizes)
        return tokens + combine(outputs, out.routing, group=group, implementation=implementation)

    return layer


def one_after_another(layer: Layer) -> Layer:
    def network(tokens: Any, weights: Any, up: Any, down: Any, ids: Any, on: Any) -> Any:
        for index in range(up.shape[0]):
            tokens = layer(tokens, weights, up[index], down[index], ids)
        return tokens

    return network


def under_scan(layer: Layer) -> Layer:
    def network(tokens: Any, weights: Any, up: Any, down: Any, ids: Any, on: Any) -> Any:
        return jax.lax.scan(lambda x, w: (layer(x, weights, *w, ids), None), tokens, (up, down))[0]

    return network


def under_cond(layer: Layer) -> Layer:
    """`on` is the same on all ranks; both of its values must give the right gradient."""

    def network(tokens: Any, weights: Any, up: Any, down: Any, ids: Any, on: Any) -> Any:
        return jax.lax.cond(on, layer, lambda tokens, *_: tokens, tokens, weights, up[0], down[0], ids)

    return network


def sharded_loss(group: Group, network: Layer, check_vma: bool) -> Callable[..., jax.Array]:
    mapped = jax.shard_map(
        network,
        mesh=group.mesh,
        in_specs=(P("ep"), P("ep"), P(None, "ep"), P(None, "ep"), P("ep"), P()),
        out_specs=P("ep"),
        check_vma=check_vma,
    )
    return lambda model, ids, target, on: jnp.sum(mapped(*model, ids, on) * target)


def dense_loss(model: Model, ids: Any, target: Any, on: Any) -> jax.Array:
    return jnp.sum(one_after_another(dense_layer)(*model, ids, on) * target) if on else jnp.sum(model.tokens * target)


def assert_close(actual: Any, wanted: Any) -> None:
    """1e-5 of the largest value of each array."""
    for a, w in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(a, w, rtol=0, atol=1e-5 * max(float(np.abs(w).max()), 1e-6))


@pytest.mark.matrix
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize(("wrap", "layers"), [(one_after_another, 1), (under_scan, 3), (under_cond, 1)])
def test_against_dense(
    wrap: Callable[[Layer], Layer],
    layers: int,
    check_vma: bool,
    implementation: Implementation,
    open_group: OpenGroup,
    rng: np.random.Generator,
) -> None:
    group = open_group(SIZE)
    model, ids, target = draw_setting(rng, layers)
    program = jax.jit(
        jax.value_and_grad(sharded_loss(group, wrap(sparse_layer(group, implementation)), check_vma=check_vma))
    )
    for on in (True, False) if wrap is under_cond else (True,):
        value, gradient = helpers.fetch(program(model, ids, target, on))
        wanted_value, wanted = jax.value_and_grad(dense_loss)(model, ids, target, on)
        np.testing.assert_allclose(value, wanted_value, rtol=1e-5, atol=1e-4)
        assert_close(gradient, wanted)


def test_second_order(implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator) -> None:
    """With elementwise experts tanh(scale * row): `jax.lax.ragged_dot` has no second derivative."""
    group = open_group(SIZE)
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    tokens, ids, weights = (jnp.asarray(x.reshape(-1, x.shape[-1])) for x in case)
    scales = rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)

    def sparse(tokens: jax.Array, weights: jax.Array, scales: jax.Array) -> jax.Array:
        def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array, scales: jax.Array) -> jax.Array:
            out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, implementation=implementation)
            row_scales = jnp.repeat(scales, out.group_sizes, axis=0, total_repeat_length=out.rows.shape[0])
            return combine(jnp.tanh(row_scales * out.rows), out.routing, group=group, implementation=implementation)

        mapped = jax.shard_map(body, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"))
        return jnp.sum(mapped(tokens, ids, weights, scales) ** 2)

    def dense(tokens: jax.Array, weights: jax.Array, scales: jax.Array) -> jax.Array:
        return jnp.sum(jnp.einsum("tk,tkh->th", weights, jnp.tanh(scales[ids] * tokens[:, None])) ** 2)

    def steepness(loss: Layer) -> Layer:
        def squared(*model: jax.Array) -> jax.Array:
            return sum((jnp.sum(g**2) for g in jax.grad(loss, argnums=(0, 1, 2))(*model)), start=jnp.zeros(()))

        return squared

    second = helpers.fetch(jax.jit(jax.grad(steepness(sparse), argnums=(0, 1, 2)))(tokens, weights, scales))
    assert_close(second, jax.grad(steepness(dense), argnums=(0, 1, 2))(tokens, weights, scales))


@pytest.mark.parametrize(
    ("ids_dtype", "weights_dtype"), [(np.int8, jnp.bfloat16), (np.uint32, np.float16), (np.int64, np.float64)]
)
def test_ids_and_weights_are_cast(
    ids_dtype: Any, weights_dtype: Any, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    """The gradient comes in the dtype of the weights; an id beyond int32 is invalid, and not wrapped around."""
    group = open_group(SIZE)
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    ids = case.ids.astype(ids_dtype)
    if np.iinfo(ids_dtype).max > 2**31:
        ids[0, 0, 0] = 2**32 - 1  # -1 in 32 bits
    wide = case.weights.astype(weights_dtype)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        def routed(weights: jax.Array) -> Any:
            out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, implementation=implementation)
            sums = combine(out.rows, out.routing, group=group, implementation=implementation)
            return sums.sum(), out.routing.invalid

        return *jax.grad(routed, has_aux=True)(weights), weights

    with jax.enable_x64(True):
        gradient, invalid, weights = helpers.fetch(helpers.per_rank(body, group.mesh)(case.tokens, ids, wide))
    assert gradient.dtype == weights.dtype == weights_dtype
    assert invalid.sum() == (np.iinfo(ids_dtype).max > 2**31)
    wanted = np.broadcast_to(case.tokens.sum(axis=2, keepdims=True), gradient.shape) * (ids < EXPERTS)
    np.testing.assert_allclose(helpers.wide(gradient), wanted, rtol=1e-2, atol=1e-2)
