"""Routers against numpy, token by token."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
            lambda x: nn.softmax_top_k(x, 4, renormalize=no_bool),
            "^softmax_top_k: renormalize must be True or False, got",
        ),
    ],
)
def test_what_routers_refuse(call: Any, match: str, logits: np.ndarray) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        call(jnp.asarray(logits))
