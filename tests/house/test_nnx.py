"""The Flax NNX example: values of its layer, what it keeps and where, and training that goes on from a checkpoint."""

from pathlib import Path
from types import ModuleType
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest

from jax_ep import Group, Implementation
from jax_ep.__main__ import load

BATCH, STEPS = 32, 3
SMALL = {"d_model": 16, "d_expert": 24, "layers": 2, "context": 4}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("examples", "nnx_moe")


def opened(fsdp: int, ep: int) -> Group:
    return Group(helpers.mesh_of(fsdp=fsdp, ep=ep), "ep", timeout=30)


def text(step: int) -> np.ndarray:
    """The letters of the alphabet again and again, from somewhere on."""
    start = np.random.default_rng(step).integers(26, size=(BATCH, 1))
    return ord("a") + (start + np.arange(SMALL["context"] + 1)) % 26


def test_values_of_a_layer(example: ModuleType, implementation: Implementation, rng: helpers.Rng) -> None:
    config = example.Config(implementation=implementation, **SMALL)
    x = rng.standard_normal((BATCH, config.d_model)).astype(np.float32)
    with opened(2, 2) as group, jax.set_mesh(group.mesh):
        layer = example.nnx.jit(lambda: example.MoeMlp(config, group, example.nnx.Rngs(0)))()
        out, _ = helpers.fetch(example.nnx.jit(lambda layer, x: layer(x))(layer, x))
        router, *matrices = (np.asarray(each[...]) for each in (layer.router, layer.gate, layer.up, layer.down))
    ids, weights = moe_oracle.routed((x @ router).astype(np.float64), config.top_k)
    expected, _ = moe_oracle.gated_experts(
        moe_oracle.Layer(*(each[None] for each in (x, weights, *matrices))), ids[None], np.zeros_like(x)[None]
    )
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-5)


def spread(state: Any, example: ModuleType) -> dict[str, int]:
    """For every matrix of the experts and each of its moments, how many shards it has."""
    leaves = jax.tree_util.tree_leaves_with_path(example.nnx.to_pure_dict(example.nnx.state(state)))
    named = {jax.tree_util.keystr(path): x for path, x in leaves}
    return {
        name: x.size // x.addressable_shards[0].data.size
        for name, x in named.items()
        if any(f"['layers']['{matrix}']" in name for matrix in ("gate", "up", "down"))
    }


@pytest.mark.usefixtures("native")
def test_training_goes_on_from_a_checkpoint(example: ModuleType, tmp_path: Path) -> None:
    """With the same bits on the same mesh; on one device, by XLA alone, with the losses of four. XLA adds up the
    gradients of embeddings in any order on a GPU."""
    config, saved = example.Config(**SMALL), tmp_path / "checkpoint"
    first, more = range(STEPS), range(STEPS, 2 * STEPS)
    with opened(2, 2) as group:
        state = example.create(config, group)
        before = example.train(state, group, text, first)
        example.save(saved, state)
        losses = example.train(state, group, text, more)
        resumed = example.resume(saved, config, group)
        assert example.train(resumed, group, text, more) == losses
        for found, wanted in zip(*(jax.tree.leaves(example.nnx.state(each)) for each in (resumed, state)), strict=True):
            if jax.default_backend() == "gpu" and jnp.issubdtype(found.dtype, jnp.floating):
                np.testing.assert_allclose(helpers.wide(found), helpers.wide(wanted), rtol=1e-4, atol=1e-6)
            else:
                assert helpers.bits(found) == helpers.bits(wanted)
        assert [*spread(state, example).values()] == [*spread(resumed, example).values()] == [4] * 9
    assert losses[-1] < before[0]

    with opened(1, 1) as group:
        alone = example.resume(saved, example.Config(implementation="xla", **SMALL), group)
        np.testing.assert_allclose(example.train(alone, group, text, more), losses, rtol=1e-5)


@pytest.mark.usefixtures("native")
def test_the_backward_pass_repeats_no_exchange(example: ModuleType) -> None:
    """The layers are one loop: one dispatch forward, and none backward but the exchange of gradients."""
    with opened(2, 2) as group, jax.set_mesh(group.mesh):
        state = example.nnx.eval_shape(lambda: example.drawn(example.Config(**SMALL), group, 0))
        program = example.train_step.lower(*state, jax.ShapeDtypeStruct((BATCH, SMALL["context"] + 1), np.int32))
        assert program.as_text().count("@jax_ep_dispatch(") == 1
