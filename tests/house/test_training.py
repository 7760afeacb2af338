"""Training of examples/models: the loss of the head, micro-batches, and training that goes on from a checkpoint."""

from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_ep import Group, MoeStats
from jax_ep.__main__ import load as load_module

FIXTURE = Path(__file__).parents[1] / "models" / "qwen3_moe"
layers, losses, training, qwen3_moe = (
    load_module("examples", f"models.{name}") for name in ("layers", "losses", "training", "qwen3_moe")
)
train_model, generate = (load_module("examples", name) for name in ("train_model", "generate"))


@pytest.mark.parametrize("chunk", [2, 3, 100])
def test_the_loss_of_a_head(chunk: int, rng: np.random.Generator) -> None:
    """Its value and gradients in float64; a negative target does not count."""
    x, head = (rng.standard_normal(shape) for shape in ((10, 6), (6, 9)))
    targets = rng.integers(9, size=10)
    targets[[0, 7]] = -1

    def loss(x: jax.Array, head: jax.Array) -> jax.Array:
        return 3 * losses.next_token_loss(x, head, jnp.asarray(targets).reshape(2, 5), chunk)

    narrow = jnp.asarray(x.reshape(2, 5, 6), jnp.float32), jnp.asarray(head, jnp.float32)
    value, (d_x, d_head) = jax.jit(jax.value_and_grad(loss, (0, 1)))(*narrow)
    chances = np.exp(x @ head)
    chances /= chances.sum(axis=1, keepdims=True)
    counted = targets >= 0
    slope = 3 * (chances - np.eye(9)[targets]) * counted[:, None] / counted.sum()
    np.testing.assert_allclose(value, -3 * np.log(chances[counted, targets[counted]]).mean(), rtol=1e-5)
    np.testing.assert_allclose(d_x.reshape(10, 6), slope @ head.T, atol=1e-6)
    np.testing.assert_allclose(d_head, x.T @ slope, atol=1e-6)
    with pytest.raises(TypeError, match="x must be bfloat16 or float32, got float16"):
        jax.eval_shape(loss, *(each.astype(np.float16) for each in narrow))


@pytest.mark.usefixtures("native")
def test_micro_batches_are_one_batch(group: Group, rng: np.random.Generator) -> None:
    optax = pytest.importorskip("optax")
    config, optimizer = qwen3_moe.Config.from_json(FIXTURE), optax.sgd(1.0)
    run = layers.Run(group, dtype=jnp.float32)
    tokens = rng.integers(config.vocab_size, size=(2 * group.size, 13), dtype=np.int32)

    def after_a_step(batches: np.ndarray) -> Any:
        state = training.first_state(jax.random.key(0), config, optimizer, run)
        state, metrics = training.make_train_step(config, optimizer, run, state, balance=0)(state, batches)
        assert int(state.step) == 1
        return helpers.fetch((state.params, metrics))

    whole, cut = after_a_step(tokens[None]), after_a_step(tokens.reshape(2, group.size, -1))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), whole, cut)
    np.testing.assert_allclose(whole[1].load.sum(axis=-1), 1, rtol=1e-6)


def dense_mixture(tokens: Any, ids: Any, weights: Any, experts: Any, *, group: Group, **_: Any) -> Any:
    """As `jax_ep.moe_mlp`: each rank has all experts, which compute all tokens in float32."""
    every = jax.tree.map(lambda x: jax.lax.all_gather(x, group.axis_name, tiled=True).astype(np.float32), experts)
    wide = tokens.astype(np.float32), weights.astype(np.float32), every.gate, every.up, every.down
    sums = moe_oracle.sums(moe_oracle.Layer(*(x[None] for x in wide)), (None, None, None), ids[None])[0]
    nothing = jnp.zeros_like(ids, shape=1)
    load = jnp.zeros_like(ids, shape=experts.down.shape[0])
    return sums.astype(tokens.dtype), MoeStats(load, nothing, nothing)


@pytest.mark.nightly
@pytest.mark.usefixtures("native")
def test_losses_of_200_steps(group: Group, rng: np.random.Generator) -> None:
    """In bfloat16 they stay within 1 % of those of dense experts in float32, on text of a chain of 4 successors."""
    optax = pytest.importorskip("optax")
    config, optimizer = qwen3_moe.Config.from_json(FIXTURE), optax.adamw(3e-4, b2=0.95)
    successors, steps, length = rng.integers(config.vocab_size, size=(config.vocab_size, 4)), 200, 64
    tokens = np.zeros((steps, 1, 8 * group.size, length + 1), np.int32)
    for i in range(length):
        drawn = rng.integers(4, size=tokens.shape[:-1])
        tokens[..., i + 1] = successors[tokens[..., i], drawn]

    def losses_of(run: Any) -> np.ndarray:
        state = training.first_state(jax.random.key(0), config, optimizer, run)
        step, found = training.make_train_step(config, optimizer, run, state, balance=0), []
        for batch in tokens:
            state, metrics = step(state, batch)
            found.append(float(metrics.loss))
        return np.array(found)

    ours = losses_of(layers.Run(group, dtype=jnp.bfloat16))
    dense = losses_of(layers.Run(group, dtype=jnp.float32, moe_mlp=dense_mixture))
    print("every 20th loss:", *(f"{x:.4f} ({y:.4f})" for x, y in zip(ours[::20], dense[::20], strict=True)))
    print(f"the last: {ours[-1]:.4f} ({dense[-1]:.4f}); largest difference {np.abs(ours / dense - 1).max():.2%}")
    assert dense[-1] < 0.8 * dense[0]
    np.testing.assert_allclose(ours, dense, rtol=0.01)


@pytest.mark.usefixtures("native")
def test_the_command_that_generates(capsys: pytest.CaptureFixture[str]) -> None:
    """Of numbers of tokens, without a tokenizer: what transformers generates (tests/models)."""
    wanted = load_file(FIXTURE / "expected.safetensors")
    prompt, greedy = wanted["ids"][0], wanted["greedy"][0]
    options = ["--tokens", str(greedy.size), "--dtype", "float32"]
    assert generate.main([str(FIXTURE), " ".join(map(str, prompt)), *options]) == 0
    assert capsys.readouterr().out.split() == [str(token) for token in greedy]


@pytest.mark.usefixtures("native")
def test_training_that_goes_on(rng: np.random.Generator, tmp_path: Path) -> None:
    """Four steps, and two with two more behind a checkpoint: the same weights."""
    pytest.importorskip("optax")
    rng.integers(128, size=4000, dtype=np.uint16).tofile(tmp_path / "tokens")
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text((FIXTURE / "config.json").read_text())

    def trained(out: str, steps: int, dtype: str = "uint16") -> bytes:
        options = ["--dtype", dtype, "--length", "16", "--sequences", "1", "--learning-rate", "1e-2"]
        folder = tmp_path / out
        files = map(str, (config, tmp_path / "tokens", "--out", folder, "--steps", steps))
        assert train_model.main([*files, *options]) == 0
        return b"".join(path.read_bytes() for path in sorted((folder / "model").glob("*.safetensors")))

    at_once = trained("at once", 4)
    assert trained("in two", 2) != at_once
    assert trained("in two", 4) == at_once
    with pytest.raises(ValueError, match=r"tokens: tokens must be below 128, got \d+; is --dtype right"):
        trained("wrong", 1, "uint32")
    assert (tmp_path / "at once" / "training.png").stat().st_size > 1000
