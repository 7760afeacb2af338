"""The models of examples/models: what transformers computes from the same checkpoints (tests/models), one device and
eight, checkpoints that are written and read again, and errors."""

import json
import shutil
from collections.abc import Callable
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

FIXTURES = Path(__file__).parent / "models"
model, layers = (load_module("examples", f"models.{name}") for name in ("model", "layers"))
FAMILIES = {name: load_module("examples", f"models.{name}").Config for name in ("qwen3_moe", "gpt_oss", "deepseek_v3")}
SIZES = (1, 8)
STEPS = 20

pytestmark = [pytest.mark.usefixtures("native"), pytest.mark.parametrize("family", FAMILIES)]


def config_of(family: str) -> Any:
    return FAMILIES[family].from_json(FIXTURES / family)


def run_of(group: Group, **options: Any) -> Any:
    return layers.Run(group, dtype=jnp.float32, **options)


def loaded(family: str, group: Group) -> Any:
    return model.load(FIXTURES / family, config_of(family), group, jnp.float32)


def assert_near(found: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance), found, wanted)


@pytest.mark.parametrize("size", SIZES)
def test_what_transformers_computes(family: str, size: int, open_group: Callable[..., Group]) -> None:
    """Logits, routers' choices, and greedy tokens of a prompt by its cache. Two sequences do not fill eight devices,
    which then share sequences by tokens, and single tokens as copies."""
    wanted, config, group = load_file(FIXTURES / family / "expected.safetensors"), config_of(family), open_group(size)
    params, run = loaded(family, group), run_of(group)
    logits, aux = jax.jit(lambda params, ids: model.logits(params, ids, config, run))(params, wanted["ids"])
    assert_near(logits, wanted["logits"])
    np.testing.assert_array_equal(np.sort(aux.expert_ids, axis=-1), wanted["expert_ids"])
    tokens = wanted["greedy"].shape[1]
    np.testing.assert_array_equal(model.generate(params, wanted["ids"], tokens, config, run), wanted["greedy"])


def trained(family: str, group: Group, ids: np.ndarray, **options: Any) -> list[float]:
    """The losses of steps on the same sequences, from the weights of the checkpoint."""
    optax = pytest.importorskip("optax")
    config, run, optimizer = config_of(family), run_of(group, **options), optax.adamw(1e-3)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        def loss(params: Any) -> Any:
            return model.loss(params, ids, config, run, chunk=10)

        (value, aux), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value, aux.dropped

    params = loaded(family, group)
    state, values = optimizer.init(params), []
    for _ in range(STEPS):
        params, state, value, dropped = step(params, state)
        values.append(float(value))
        assert not np.any(dropped)
    group.check()
    return values


def test_eight_devices_train_as_one(family: str, rng: np.random.Generator, open_group: Callable[..., Group]) -> None:
    """With and without recomputation of what is not kept."""
    ids = rng.integers(config_of(family).vocab_size, size=(8, 16), dtype=np.int32)
    one, eight = trained(family, open_group(1), ids), trained(family, open_group(8), ids, remat=layers.KEEP_EXCHANGES)
    assert one[-1] < one[0] - 1
    assert_near(eight, one)


@pytest.mark.parametrize("size", SIZES)
def test_a_checkpoint_that_was_saved(family: str, size: int, tmp_path: Path, open_group: Callable[..., Group]) -> None:
    """The same config and the same bits, in the same shards."""
    config, group = config_of(family), open_group(size)
    params = loaded(family, group)
    model.save(tmp_path, params, config)
    assert FAMILIES[family].from_json(tmp_path) == config
    again = model.load(tmp_path, config, group, jnp.float32)
    assert helpers.bits(again) == helpers.bits(params)
    assert jax.tree.map(lambda x: x.sharding, again) == jax.tree.map(lambda x: x.sharding, params)
    drawn = model.init(jax.random.key(0), config, group)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), drawn) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), params
    )


def spoiled(folder: Path, family: str, header: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of the checkpoint in which `header` has changed the header of the file with NORM."""
    shutil.copytree(FIXTURES / family, folder / family)
    index = json.loads((folder / family / "model.safetensors.index.json").read_text())
    file = folder / family / index["weight_map"][NORM]
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8:end])
    header(entries)
    text = json.dumps(entries).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])
    return folder / family


NORM = "model.layers.1.input_layernorm.weight"
WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda entries: entries.pop(NORM), f"the tensor {NORM} is missing"),
    "shape": (lambda entries: entries[NORM].update(shape=[2, 32]), rf"{NORM} must have shape \(\d+,\), got \(2, 32\)"),
    "dtype": (lambda entries: entries[NORM].update(dtype="I16"), f"{NORM} must have one of the dtypes .*, got I16"),
    "unknown": (
        lambda entries: entries.update({"model.extra": entries[NORM]}),
        r"no parameter of the model has the tensors \['model.extra'\]",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_of_tensors(family: str, wrong: str, tmp_path: Path, open_group: Callable[..., Group]) -> None:
    change, match = WRONG[wrong]
    folder = spoiled(tmp_path, family, change)
    with pytest.raises(ValueError, match=match):
        model.load(folder, config_of(family), open_group(1))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"attention_chunk": 5}, r"the fields \['attention_chunk'\] may change the computation, and are unknown"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"model_type": "llama"}, "model_type must be '.*', got 'llama'"),
        ({"vocab_size": None}, r"the fields \['vocab_size'\] are missing"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type must be 'default' or 'yarn', got 'longrope'"),
        ({"rope_scaling": {"short_factor": 2}}, r"rope_scaling .* got \['short_factor'\]"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method must be .*, got .*awq"),
    ],
)
def test_errors_of_configs(family: str, change: dict[str, Any], match: str, tmp_path: Path) -> None:
    given = json.loads((FIXTURES / family / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps({name: x for name, x in given.items() if x is not None}))
    with pytest.raises(ValueError, match=match):
        FAMILIES[family].from_json(tmp_path)
