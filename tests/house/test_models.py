"""The models of examples/models: what transformers computes from the same checkpoints (tests/models), one device and
eight, checkpoints that are written and read again, and errors."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jax_ep
from jax_ep import Group
from jax_ep.__main__ import load as load_module

FIXTURES = Path(__file__).parents[1] / "models"
model, layers = (load_module("examples", f"models.{name}") for name in ("model", "layers"))
FAMILIES = {name: load_module("examples", f"models.{name}").Config for name in ("qwen3_moe", "gpt_oss", "deepseek_v3")}
SIZES = (1, 8)
STEPS = 20

pytestmark = pytest.mark.usefixtures("native")
families = pytest.mark.parametrize("family", FAMILIES)


def config_of(family: str) -> Any:
    return FAMILIES[family].from_json(FIXTURES / family)


def run_of(group: Group, **options: Any) -> Any:
    return layers.Run(group, dtype=jnp.float32, **options)


def loaded(family: str, group: Group) -> Any:
    return model.load(FIXTURES / family, config_of(family), group, jnp.float32)


def assert_near(found: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance), found, wanted)


@families
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


def test_sequences_that_outgrow_their_cache(open_group: Callable[..., Group]) -> None:
    family, group = "qwen3_moe", open_group(1)
    params, key = loaded(family, group), jax.random.key(0)
    prefill, step = model.decoder(config_of(family), run_of(group), 6)
    token, cache = prefill(params, np.ones((2, 5), np.int32), key)
    for fits in (True, False, False):
        token, cache = step(params, token, cache, key)
        assert (np.asarray(token) >= 0).all() if fits else (np.asarray(token) == -1).all()
    with pytest.raises(ValueError, match="ids must have at most length = 6 tokens, got 7"):
        prefill(params, np.ones((2, 7), np.int32), key)


def test_experts_stay_in_float8(tmp_path: Path, open_group: Callable[..., Group]) -> None:
    """The bits of the checkpoint, also after they are saved; what they compute is nearly what their values do."""
    family, group = "deepseek_v3", open_group(2)
    config = config_of(family)
    exact, in_float8 = loaded(family, group), dataclasses.replace(config, float8=True)
    params = model.load(FIXTURES / family, in_float8, group, jnp.float32)
    for name in ("gate", "up", "down"):
        bits, values = (getattr(each["layers"]["experts"], name) for each in (params, exact))
        bits = jax.tree.map(lambda x: x[0], bits)
        np.testing.assert_array_equal(jax_ep.float8.dequantize(bits, jnp.float32), values[0])
    model.save(tmp_path, params, in_float8)
    assert helpers.bits(model.load(tmp_path, in_float8, group, jnp.float32)) == helpers.bits(params)
    wanted, run = load_file(FIXTURES / family / "expected.safetensors"), run_of(group, moe={"precision": "float8"})
    logits, _ = jax.jit(lambda params, ids: model.logits(params, ids, in_float8, run))(params, wanted["ids"])
    assert helpers.relative(logits, wanted["logits"]) < 0.05


def test_the_last_blocks_of_a_matrix_in_float8_are_smaller(tmp_path: Path, rng: np.random.Generator) -> None:
    """As are those of DeepSeek-V3's kv_a_proj_with_mqa, with 576 rows. A part is read by itself."""
    values = rng.standard_normal((200, 300)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(1, 2, (2, 3)).astype(np.float32)
    save_file({"a": values, "a_scale_inv": scales}, tmp_path / "model.safetensors")
    wanted = values.astype(np.float32) * np.kron(scales, np.ones((128, 128), np.float32))[:200, :300]
    tensors = load_module("examples", "models.checkpoint").Tensors(tmp_path)
    for part in ((slice(0, 200), slice(0, 300)), (slice(100, 200), slice(120, 290))):
        np.testing.assert_array_equal(tensors.read("a", values.shape, part), wanted[part])
    with pytest.raises(ValueError, match=r"a_scale_inv must have shape \(1, 3\), got \(2, 3\)"):
        tensors.view("a_scale_inv", (1, 3), "F32")


def trained(family: str, group: Group, ids: np.ndarray, **options: Any) -> list[float]:
    """The losses of steps on the same sequences, from the weights of the checkpoint."""
    optax, training = pytest.importorskip("optax"), load_module("examples", "models.training")
    config, run, optimizer = config_of(family), run_of(group, **options), optax.adamw(1e-4)
    state = training.first_state(jax.random.key(0), config, optimizer, run)._replace(params=loaded(family, group))
    step, values = training.make_train_step(config, optimizer, run, state), []
    for _ in range(STEPS):
        state, metrics = step(state, ids[None])
        values.append(float(metrics.loss))
        assert metrics.dropped == 0
    group.check()
    return values


@families
def test_eight_devices_train_as_one(family: str, open_group: Callable[..., Group]) -> None:
    """Without and with recomputation of what is not kept, and for one family as two lines of four devices.

    Sequences are always the same. With others a router may be undecided between two experts, and a rounding decides.
    """
    ids = np.random.default_rng(0).integers(config_of(family).vocab_size, size=(8, 17), dtype=np.int32)
    mesh = helpers.mesh_of(data=2, ep=4) if family == "gpt_oss" else helpers.mesh_of(ep=8)
    one = trained(family, open_group(1), ids)
    eight = trained(family, open_group(mesh=mesh), ids, remat=layers.KEEP_EXCHANGES)
    assert one[-1] < one[0] - 0.5
    assert_near(eight, one)


@families
def test_a_checkpoint_that_was_saved(family: str, tmp_path: Path, open_group: Callable[..., Group]) -> None:
    """The same config and bits, in the same shards and on one device; random weights have these shards, too."""
    config, group, alone = config_of(family), open_group(8), open_group(1)
    params = loaded(family, group)
    model.save(tmp_path, params, config)
    assert FAMILIES[family].from_json(tmp_path) == config
    again = model.load(tmp_path, config, group, jnp.float32)
    assert helpers.bits(again) == helpers.bits(model.load(tmp_path, config, alone, jnp.float32)) == helpers.bits(params)

    def described(params: Any) -> Any:
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), params)

    assert described(model.init(jax.random.key(0), config, group)) == described(again) == described(params)


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


@families
@pytest.mark.parametrize("wrong", WRONG)
def test_errors_of_tensors(family: str, wrong: str, tmp_path: Path, open_group: Callable[..., Group]) -> None:
    change, match = WRONG[wrong]
    folder = spoiled(tmp_path, family, change)
    with pytest.raises(ValueError, match=match):
        model.load(folder, config_of(family), open_group(1))


@families
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
