"""Losses, loads and the bias that balances against numpy; over devices, against the whole batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep import nn
from jax_ep.nn.balance import Score

SIZE, TOKENS, EXPERTS, K = 4, 20, 16, 4
zeros: Any = np.zeros


def no(value: Any) -> Any:
    """What types forbid."""
    return value


def test_losses(rng: np.random.Generator) -> None:
    logits = rng.standard_normal((TOKENS, EXPERTS)).astype(np.float32)
    ids = np.asarray(nn.softmax_top_k(logits, K).expert_ids)
    shares = np.array([(ids == e).sum() for e in range(EXPERTS)]) / ids.size
    probabilities = np.mean([np.exp(row) / np.exp(row).sum() for row in logits.astype(float)], axis=0)
    np.testing.assert_allclose(nn.balance_loss(logits, ids), EXPERTS * shares @ probabilities, rtol=1e-5)
    np.testing.assert_allclose(
        nn.balance_loss(jnp.zeros((16, EXPERTS)), np.arange(64).reshape(16, 4) % 16), 1, rtol=1e-6
    )
    exact = np.mean([np.log(np.exp(row.astype(np.float64)).sum()) ** 2 for row in logits.astype(float)])
    np.testing.assert_allclose(nn.z_loss(logits), exact, rtol=1e-5)


def test_loads() -> None:
    ids = np.array([[0, 1], [0, -1], [0, 7], [9, 2]], np.int32)  # -1 skips, 9 is no expert
    load = nn.expert_load(ids, 8)
    np.testing.assert_array_equal(load, [3, 1, 1, 0, 0, 0, 0, 1])
    stats = nn.load_stats(load)
    np.testing.assert_allclose(
        stats, [3 / (6 / 8), 0.5, -(0.5 * np.log(0.5) + 0.5 * np.log(1 / 6)) / np.log(8)], rtol=1e-5
    )
    np.testing.assert_allclose(nn.load_stats(load, ranks=2)[:2], [5 / 3, 0], rtol=1e-6)
    np.testing.assert_allclose(nn.load_stats(jnp.full(4, 7)), [1, 0, 1], rtol=1e-6)
    np.testing.assert_allclose(nn.load_stats(jnp.zeros(4)), [0, 1, 0], atol=1e-6)


def test_a_bias_balances(rng: np.random.Generator) -> None:
    """Skewed logits: in some steps the busiest expert has little more than the mean."""
    logits = (rng.standard_normal((512, EXPERTS)) + np.linspace(0, 2, EXPERTS)).astype(np.float32)

    @jax.jit
    def step(bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        load = nn.expert_load(nn.sigmoid_top_k(logits, K, bias=bias).expert_ids, EXPERTS)
        return nn.balanced_bias(bias, load, rate=1e-2), nn.load_stats(load).max_over_mean

    bias = jnp.zeros(EXPERTS)
    bias, before = step(bias)
    np.testing.assert_allclose(np.abs(bias), 0.01, rtol=1e-6)
    for _ in range(100):
        bias, _ = step(bias)
    after = step(bias)[1]
    assert before > 2
    assert after < 1.2


class Batch(NamedTuple):
    """Tokens of all devices: some skip experts, one has none, one names an expert twice and one that does not exist."""

    logits: Any
    ids: Any


def draw(rng: np.random.Generator) -> Batch:
    ids = rng.integers(-1, EXPERTS, (SIZE * TOKENS, K)).astype(np.int32)
    ids[5], ids[6], ids[7, 0] = -1, 2, EXPERTS
    return Batch(rng.standard_normal((SIZE * TOKENS, EXPERTS)), ids)


def counted(ids: np.ndarray) -> np.ndarray:
    return np.array([np.sum(ids == expert) for expert in range(EXPERTS)])


def balance(logits: np.ndarray, ids: np.ndarray, score: str) -> float:
    """Expert by expert, of the tokens that go anywhere."""
    powers = np.exp(logits[((ids >= 0) & (ids < EXPERTS)).any(axis=1)])
    scores = powers if score == "softmax" else powers / (1 + powers)
    probabilities = scores / scores.sum(axis=1, keepdims=True)
    counts = counted(ids)
    return EXPERTS * sum(counts[e] / counts.sum() * probabilities[:, e].mean() for e in range(EXPERTS))


def over_devices(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of shards along "ep", with check_vma: its result must be the same on all of them."""
    return jax.jit(jax.shard_map(function, mesh=helpers.mesh_of(ep=SIZE), in_specs=P("ep"), out_specs=P()))


def finite_differences(function: Callable[[np.ndarray], float], x: np.ndarray) -> np.ndarray:
    wanted = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        step = np.zeros(x.shape)
        step[place] = 1e-5
        wanted[place] = (function(x + step) - function(x - step)) / 2e-5
    return wanted


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_balance_over_devices(score: Score, rng: np.random.Generator) -> None:
    """The loss of the whole batch, and each device has the gradient of its own tokens in it."""
    batch = draw(rng)
    spread = over_devices(lambda x, ids: nn.balance_loss(x, ids, score=score, axis_name="ep"))
    value, gradient = jax.value_and_grad(spread)(jnp.asarray(batch.logits, jnp.float32), batch.ids)
    np.testing.assert_allclose(value, balance(*batch, score), rtol=1e-5)
    wanted = finite_differences(lambda x: balance(x, batch.ids, score), batch.logits)
    np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    load = over_devices(lambda ids: nn.expert_load(ids, EXPERTS, axis_name="ep"))(batch.ids)
    np.testing.assert_array_equal(load, counted(batch.ids))


def test_balance_per_sequence(rng: np.random.Generator) -> None:
    logits, ids = (x.reshape(SIZE, TOKENS, -1) for x in draw(rng))
    actual = jax.vmap(nn.balance_loss)(jnp.asarray(logits, jnp.float32), ids)
    np.testing.assert_allclose(actual, [balance(*pair, "softmax") for pair in zip(logits, ids, strict=True)], rtol=1e-5)


def test_z_loss_of_some_tokens(rng: np.random.Generator) -> None:
    logits = 3 * draw(rng).logits
    mask = rng.uniform(size=len(logits)) < 0.5
    mask[:TOKENS] = False  # a device without tokens
    squares = np.log(np.exp(logits).sum(axis=1)) ** 2
    spread = over_devices(lambda x, mask: nn.z_loss(x, mask, axis_name="ep"))
    np.testing.assert_allclose(spread(jnp.asarray(logits, jnp.float32), mask), squares[mask].mean(), rtol=1e-5)
    assert nn.z_loss(logits.astype(np.float32), np.zeros_like(mask)) == 0


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: nn.balance_loss(zeros((3, 4)), zeros((2, 1), int)),
            r"balance_loss: expert_ids must be of the 3 tokens of logits, got \(2, 1\)",
        ),
        (
            lambda: nn.balance_loss(zeros((3, 4)), zeros((3, 1), int), score="tanh"),  # pyright: ignore[reportArgumentType]
            "balance_loss: score must be one of",
        ),
        (lambda: nn.z_loss(zeros((3, 4)), zeros(4, bool)), r"z_loss: mask must have shape \[T\] = \(3,\), got \(4,\)"),
        (
            lambda: nn.balance_loss(zeros((3, 4)), zeros((3, 1))),
            "balance_loss: expert_ids must be of an integer dtype, got",
        ),
        (lambda: nn.z_loss(zeros(3)), r"z_loss: logits must have shape \[T, E\], got \(3,\)"),
        (lambda: nn.z_loss(zeros((3, 4)), zeros(3)), "z_loss: mask must be of dtype bool, got float64"),
        (lambda: nn.balanced_bias(zeros(3), zeros(4)), r"balanced_bias: load must have shape that of bias = \(3,\)"),
        (lambda: nn.balanced_bias(zeros(3), zeros(3), rate=no("0.1")), "balanced_bias: rate must be a number, got str"),
        (lambda: nn.balanced_bias(zeros(3, int), zeros(3)), "balanced_bias: bias must be of a float dtype, got int64"),
        (lambda: nn.expert_load(zeros((3, 2)), 4), "expert_load: expert_ids must be of an integer dtype, got float64"),
        (lambda: nn.expert_load(zeros((3, 2), int), -1), "expert_load: num_experts must be at least 1, got -1"),
        (lambda: nn.expert_load(zeros((3, 2), int), 2**31), r"expert_load: num_experts must be below 2\*\*31, got"),
        (
            lambda: nn.expert_load(zeros(3, int), 4, axis_name=no(0)),
            "expert_load: axis_name must be an axis of the mesh",
        ),
        (lambda: nn.load_stats(zeros(0)), r"load_stats: load must be of one expert at least, got \(0,\)"),
        (
            lambda: nn.load_stats(zeros(8, complex)),
            "load_stats: load must be of an integer or float dtype, got complex",
        ),
        (lambda: nn.load_stats(no([1, 2])), "load_stats: load must be an array, got list"),
        (lambda: nn.load_stats(zeros(8), ranks=3), "load_stats: ranks must divide the 8 experts, got 3"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{match}"):
        call()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint64])
def test_ids_of_any_integer_dtype(dtype: Any) -> None:
    """Also where it does not hold the number of experts."""
    ids = np.array([[0, 7], [7, -1 if dtype is np.int8 else 255]]).astype(dtype)
    wanted = np.bincount(ids[(ids >= 0) & (ids < 200)], minlength=200)
    np.testing.assert_array_equal(nn.expert_load(ids, 200), wanted)
    np.testing.assert_allclose(nn.balance_loss(zeros((2, 200)), ids), 1, rtol=1e-5)
