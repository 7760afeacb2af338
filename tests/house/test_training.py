"""Training of examples/models: the loss of the head, micro-batches, and training that goes on from a checkpoint."""

from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_ep import Group
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
