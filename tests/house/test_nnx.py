"""The layer of Flax NNX: values and shards. The example: training that goes on from a checkpoint."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest
from flax import nnx
from helpers import Rng
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jax_ep import Group, Implementation
from jax_ep.__main__ import load
from jax_ep.integrations.nnx import MoeMlp
from jax_ep.nn.balance import Score

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


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("made", ["eagerly", "in jit"])
@pytest.mark.matrix(1)
def test_values_of_a_layer(
    axis_type: AxisType, score: Score, made: str, implementation: Implementation, rng: Rng
) -> None:
    mesh = helpers.mesh_of(fsdp=2, ep=2)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(axis_type,) * 2)
    x = rng.standard_normal((8, 4, 16)).astype(np.float32)
    with Group(mesh, "ep", timeout=30) as group:

        def make() -> MoeMlp:
            options = {"group": group, "fsdp": "fsdp", "implementation": implementation}
            return MoeMlp(16, 24, 8, 2, score=score, router_options={"scale": 2.0}, rngs=nnx.Rngs(0), **options)

        layer = nnx.jit(make)() if made == "in jit" else make()
        parameters = layer.router, layer.gate, layer.up, layer.down
        assert [each[...].size // each[...].addressable_shards[0].data.size for each in parameters] == [2, 4, 4, 4]
        placed = jax.device_put(x, NamedSharding(mesh, P("ep")))  # the layer shards it over both axes
        out, aux = helpers.fetch(nnx.jit(lambda layer, x: layer(x))(layer, placed))
        router, *matrices = (np.asarray(each[...]) for each in parameters)
    tokens = x.reshape(1, -1, 16)
    ids, weights = moe_oracle.routed((tokens[0] @ router).astype(np.float64), 2, score)
    operands = moe_oracle.Layer(tokens, 2 * weights[None], *(each[None] for each in matrices))
    expected, _ = moe_oracle.gated_experts(operands, ids[None], np.zeros_like(tokens))
    np.testing.assert_allclose(out, expected[0].reshape(x.shape), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(aux.load, np.bincount(ids.ravel(), minlength=8))
    assert aux.dropped == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_experts": 7}, "num_experts"),
        ({"score": "tanh"}, "score"),
        ({"fsdp": "ep"}, "fsdp must be another axis"),
        ({"fsdp": "rows"}, "fsdp must be another axis"),
        ({"shared_tokens": True}, r"options must be .*, got \['shared_tokens'\]"),
        ({"capacity_facto": 2.0}, r"options must be .*, got \['capacity_facto'\]"),
        ({"group": None}, "group"),
    ],
)
def test_arguments_are_checked(given: dict[str, Any], message: str) -> None:
    with opened(1, 2) as group, pytest.raises((ValueError, TypeError), match=f"MoeMlp: {message}"):
        MoeMlp(16, 24, **{"num_experts": 8, "top_k": 2, "group": group, "rngs": nnx.Rngs(0)} | given)


def test_activations_are_checked() -> None:
    with opened(1, 2) as group:
        layer = MoeMlp(16, 24, 8, 2, group=group, rngs=nnx.Rngs(0))
        for shape in ((3, 4, 16), (4, 4, 8), (16,)):
            with pytest.raises(ValueError, match=r"MoeMlp: x must .*, 16\] where B is a multiple of the 2"):
                layer(jnp.zeros(shape))


def shards(state: Any) -> list[int]:
    """Of every matrix of the experts and each of its moments, how many there are."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(state)))
    named = re.compile(r".*\['layers'\]\['(gate|up|down)'\]")
    return [
        x.size // x.addressable_shards[0].data.size for path, x in leaves if named.match(jax.tree_util.keystr(path))
    ]


@pytest.mark.usefixtures("native")
def test_training_goes_on_from_a_checkpoint(example: ModuleType, tmp_path: Path) -> None:
    """With the same bits on the same mesh, but on a GPU, where XLA adds up the gradients of embeddings in any order."""
    config, saved = example.Config(**SMALL), tmp_path / "checkpoint"
    first, more = range(STEPS), range(STEPS, 2 * STEPS)
    with opened(2, 2) as group:
        state = example.create(config, group)
        before = example.train(state, group, text, first)
        example.save(saved, state)
        losses = example.train(state, group, text, more)
        resumed = example.resume(saved, config, group)
        assert example.train(resumed, group, text, more) == losses
        for found, wanted in zip(*(jax.tree.leaves(nnx.state(each)) for each in (resumed, state)), strict=True):
            if jax.default_backend() == "gpu" and jnp.issubdtype(found.dtype, jnp.floating):
                np.testing.assert_allclose(helpers.wide(found), helpers.wide(wanted), rtol=1e-4, atol=1e-6)
            else:
                assert helpers.bits(found) == helpers.bits(wanted)
        assert shards(state) == shards(resumed) == [4] * 9
    assert losses[-1] < before[0]

    with opened(1, 1) as group:
        alone = example.resume(saved, example.Config(implementation="xla", **SMALL), group)
        np.testing.assert_allclose(example.train(alone, group, text, more), losses, rtol=1e-5)


@pytest.mark.usefixtures("native")
def test_the_backward_pass_repeats_no_exchange(example: ModuleType) -> None:
    """The layers are one loop: one dispatch forward, and none backward but the exchange of gradients."""
    with opened(2, 2) as group, jax.set_mesh(group.mesh):
        state = nnx.eval_shape(lambda: example.drawn(example.Config(**SMALL), group, 0))
        program = example.train_step.lower(*state, jax.ShapeDtypeStruct((BATCH, SMALL["context"] + 1), np.int32))
        assert program.as_text().count("@jax_ep_dispatch(") == 1
