"""Routers against numpy, token by token."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep import nn

TOKENS, EXPERTS, K = 20, 16, 4
no_int: Any = 2.0
no_number: Any = None
no_bool: Any = "no"


@pytest.fixture
def logits(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((TOKENS, EXPERTS)).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_top_k(renormalize: bool, logits: np.ndarray) -> None:
    routed = helpers.fetch(jax.jit(lambda x: nn.softmax_top_k(x, K, renormalize=renormalize))(logits))
    for row, ids, weights in zip(logits, *routed, strict=True):
        wanted = np.argsort(-row)[:K]
        np.testing.assert_array_equal(ids, wanted)
        exact = softmax(row)[wanted]
        np.testing.assert_allclose(weights, exact / exact.sum() if renormalize else exact, rtol=1e-5)


@pytest.mark.parametrize(("groups", "top_groups", "best_of_group"), [(1, None, 2), (4, 2, 2), (4, 1, 1), (8, 3, 2)])
def test_sigmoid_top_k(
    groups: int, top_groups: int | None, best_of_group: int, logits: np.ndarray, rng: np.random.Generator
) -> None:
    bias = rng.standard_normal(EXPERTS).astype(np.float32)
    options: dict[str, Any] = {"groups": groups, "top_groups": top_groups, "best_of_group": best_of_group, "scale": 2.5}
    routed = helpers.fetch(jax.jit(lambda x: nn.sigmoid_top_k(x, K, bias=bias, **options))(logits))
    for row, ids, weights in zip(logits, *routed, strict=True):
        scores = sigmoid(row)
        biased = (scores + bias).reshape(groups, -1)
        goodness = np.sort(biased, axis=1)[:, ::-1][:, :best_of_group].sum(axis=1)
        kept = np.argsort(-goodness)[: top_groups or groups]
        biased[np.setdiff1d(np.arange(groups), kept)] = -np.inf
        wanted = np.argsort(-biased.reshape(-1))[:K]
        np.testing.assert_array_equal(ids, wanted)
        np.testing.assert_allclose(weights, 2.5 * scores[wanted] / scores[wanted].sum(), rtol=1e-5)
        assert len({expert // (EXPERTS // groups) for expert in ids}) <= (top_groups or groups)


def test_softmax_in_groups(logits: np.ndarray) -> None:
    """As DeepSeek-V2 routes: the best expert of a device says what the device is worth, and weights are scaled."""
    options: dict[str, Any] = {"groups": 4, "top_groups": 2, "renormalize": False, "scale": 16.0}
    routed = helpers.fetch(jax.jit(lambda x: nn.softmax_top_k(x, K, **options))(logits))
    for row, ids, weights in zip(logits, *routed, strict=True):
        members = [list(range(4 * group, 4 * group + 4)) for group in range(4)]
        best = sorted(members, key=lambda each: -max(row[e] for e in each))[:2]
        wanted = sorted(best[0] + best[1], key=lambda e: -row[e])[:K]
        np.testing.assert_array_equal(ids, wanted)
        np.testing.assert_allclose(weights, 16 * softmax(row)[wanted], rtol=1e-5)


def test_weights_follow_the_logits_and_not_the_bias(logits: np.ndarray) -> None:
    def total(logits: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(nn.sigmoid_top_k(logits, K, bias=bias, renormalize=False).weights)

    by_logits, by_bias = jax.grad(total, argnums=(0, 1))(jnp.asarray(logits), jnp.zeros(EXPERTS))
    chosen = np.argsort(-logits, axis=1)[:, :K]
    wanted = np.zeros_like(logits)
    np.put_along_axis(wanted, chosen, np.take_along_axis(sigmoid(logits) * (1 - sigmoid(logits)), chosen, 1), 1)
    np.testing.assert_allclose(by_logits, wanted, rtol=1e-4, atol=1e-6)
    assert not by_bias.any()


def rounded(ids: np.ndarray, weights: np.ndarray, multiple: int) -> np.ndarray:
    """Which assignments are left, expert by expert. The first K columns are chosen; the greatest weights go first."""
    left = np.zeros(ids.shape, bool)
    for expert in range(EXPERTS):
        places = sorted(map(tuple, np.argwhere(ids == expert)), key=lambda at: (at[1] >= K, -weights[at], at))
        count = sum(at[1] < K for at in places)
        down = count // multiple * multiple
        goes_up = 2 * (count - down) >= multiple and len(places) >= down + multiple
        for at in places[: down + multiple if goes_up else down]:
            left[at] = True
    return left


@pytest.mark.parametrize(
    ("devices", "multiple", "more", "renormalize"),
    [(None, 8, 2, True), (4, 8, 1, False), (4, 3, EXPERTS - K, True), (None, 64, 2, False)],
)
def test_round_tokens(
    devices: int | None, multiple: int, more: int, renormalize: bool, rng: np.random.Generator
) -> None:
    """Counts are multiples over all devices, the least weights move, and gradients are those of the weights that are
    left. Some ids are no experts."""
    x = (rng.standard_normal((160, EXPERTS)) + np.linspace(0, 1, EXPERTS)).astype(np.float32)
    by = rng.standard_normal((160, K + more)).astype(np.float32)
    no_expert = rng.random(by.shape) < 0.03
    routed = helpers.fetch(nn.softmax_top_k(x, K + more, renormalize=renormalize))
    ids = np.where(no_expert, rng.choice([-1, EXPERTS, helpers.BIG], by.shape), routed.expert_ids)
    axis = "ep" if devices else None

    def sums(x: jax.Array, by: jax.Array, ids: jax.Array) -> tuple[jax.Array, nn.Routed]:
        weights = nn.softmax_top_k(x, K + more, renormalize=renormalize).weights
        out = nn.round_tokens(
            nn.Routed(ids, weights), K, EXPERTS, multiple=multiple, renormalize=renormalize, axis_name=axis
        )
        return (out.weights * by).sum(axis=1), out

    body: Any = jax.jit(sums)
    if devices:
        body = jax.jit(jax.shard_map(sums, mesh=helpers.mesh_of(ep=devices), in_specs=P("ep"), out_specs=P("ep")))
    _, pull, found = jax.vjp(lambda x: body(x, by, ids), x, has_aux=True)
    found = helpers.fetch(found)

    there = rounded(ids, routed.weights, multiple) | (ids < 0) | (ids >= EXPERTS)
    np.testing.assert_array_equal(found.expert_ids, np.where(there, ids, -1))
    before, after = (np.asarray(nn.expert_load(each, EXPERTS)) for each in (ids[:, :K], found.expert_ids))
    assert not (after % multiple).any()
    assert (np.abs(after - before) < multiple).all()
    assert (after < before).any()
    assert (after > before).any() or multiple == 64

    def dense(x: jax.Array) -> jax.Array:
        """The same weights, out of the probabilities of all experts."""
        of_chosen = jnp.take_along_axis(jax.nn.softmax(x), routed.expert_ids, axis=1)
        total = of_chosen.sum(axis=1, keepdims=True) if renormalize else 1.0
        left = jnp.where(there, of_chosen, 0) / total
        return left / jnp.where(there.any(axis=1), left.sum(axis=1), 1)[:, None] if renormalize else left

    with jax.enable_x64():
        exact, d_exact = jax.vjp(dense, x.astype(np.float64))
        wanted = d_exact(jnp.asarray(by.astype(np.float64)))[0]
    np.testing.assert_allclose(found.weights, exact, rtol=1e-5, atol=1e-7)
    gradient = pull(np.ones(len(x), np.float32))[0]
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-6)


def test_no_tokens_to_round() -> None:
    routed = nn.round_tokens(nn.Routed(jnp.zeros((0, 3), jnp.int32), jnp.zeros((0, 3))), 2, EXPERTS)
    assert routed.expert_ids.shape == routed.weights.shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: nn.softmax_top_k(x, 17), r"^softmax_top_k: top_k must be in \[1, E = 16\], got 17"),
        (lambda x: nn.softmax_top_k(x[0], 1), r"^softmax_top_k: logits must have shape \[T, E\], got \(16,\)"),
        (lambda x: nn.softmax_top_k(x, no_int), "^softmax_top_k: top_k must be a Python int"),
        (lambda x: nn.softmax_top_k(x.astype(int), 1), "^softmax_top_k: logits must be of dtype .*, got int32"),
        (lambda x: nn.softmax_top_k(x, 4, groups=4, best_of_group=0), "^softmax_top_k: best_of_group must be at least"),
        (lambda x: nn.sigmoid_top_k(x, 4, groups=3), "^sigmoid_top_k: groups must divide the 16 experts, got 3"),
        (lambda x: nn.sigmoid_top_k(x, 4, bias=jnp.zeros(3)), r"^sigmoid_top_k: bias must have shape \[E\] = \(16,\)"),
        (lambda x: nn.sigmoid_top_k(x, 4, bias=jnp.zeros(16, int)), "^sigmoid_top_k: bias must be of dtype float32"),
        (
            lambda x: nn.within_top_groups(x, 4, 4, 5),
            "^within_top_groups: top_groups must be at most the 4 groups, .* 5",
        ),
        (lambda x: nn.within_top_groups(x, 0, 4, 1), "^within_top_groups: top_k must be at least 1, got 0"),
        (lambda x: nn.within_top_groups(x[0], 1, 4, 1), r"^within_top_groups: scores must have shape \[T, E\], got"),
        (
            lambda x: nn.sigmoid_top_k(x, 4, groups=8, top_groups=1),
            "top_groups must be .* that they hold top_k = 4 .* got 1",
        ),
        (lambda x: nn.sigmoid_top_k(x, 4, scale=no_number), "^sigmoid_top_k: scale must be a number, got NoneType"),
        (
            lambda x: nn.round_tokens(nn.softmax_top_k(x, 4), 5, 16),
            r"^round_tokens: top_k must be in \[1, K = 4\], got 5",
        ),
        (
            lambda x: nn.round_tokens(nn.Routed(x.astype(int), x[:1]), 1, 16),
            r"^round_tokens: routed\.weights must have shape \[T, K\] = \(20, 16\), got",
        ),
        (
            lambda x: nn.round_tokens(nn.softmax_top_k(x, 4), 1, 16, multiple=0),
            "^round_tokens: multiple must be at least 1, got 0",
        ),
        (
            lambda x: nn.softmax_top_k(x, 4, renormalize=no_bool),
            "^softmax_top_k: renormalize must be True or False, got",
        ),
    ],
)
def test_what_routers_refuse(call: Any, match: str, logits: np.ndarray) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        call(jnp.asarray(logits))
