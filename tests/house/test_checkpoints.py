"""examples/models: what is saved and loaded, and which files are refused."""

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
from conftest import OpenGroup
from helpers import Rng
from model_cases import FIXTURES, checkpoint, config_of, families, loaded, model, of_each_family, run_of
from safetensors.numpy import load_file, save_file

import jax_ep

pytestmark = pytest.mark.usefixtures("native")


def test_experts_stay_in_float8(tmp_path: Path, open_group: OpenGroup) -> None:
    """The bits of the checkpoint, also after they are saved; what they compute is nearly what their values do. The
    config.json that is saved says which matrices are in float8, as transformers must know."""
    family, group = "deepseek_v3", open_group(2)
    config = config_of(family)
    exact, in_float8 = loaded(family, group), dataclasses.replace(config, float8=True)
    params = model.load(FIXTURES / family, in_float8, group, jnp.float32)
    for name in ("gate", "up", "down"):
        bits, values = (getattr(each["layers"]["experts"], name) for each in (params, exact))
        bits = jax.tree.map(lambda x: x[0], bits)
        np.testing.assert_array_equal(jax_ep.float8.dequantize(bits, jnp.float32), values[0])
    model.save(tmp_path, params, in_float8)
    assert families.config_of(tmp_path) == config
    assert helpers.bits(model.load(tmp_path, in_float8, group, jnp.float32)) == helpers.bits(params)
    quantization = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (quantization["quant_method"], quantization["weight_block_size"]) == ("fp8", [128, 128])
    header = checkpoint.Tensors(tmp_path).header
    for name, (*_, entry) in header.items():
        if name.endswith(".weight"):
            plain = name.removesuffix(".weight") in quantization["modules_to_not_convert"]
            assert plain == (entry["dtype"] != "F8_E4M3") == (name + "_scale_inv" not in header), name
    wanted, run = load_file(FIXTURES / family / "expected.safetensors"), run_of(group, moe={"precision": "float8"})
    logits, _ = jax.jit(lambda params, ids: model.logits(params, ids, in_float8, run))(params, wanted["ids"])
    assert helpers.relative(logits, wanted["logits"]) < 0.05


def test_the_last_blocks_of_a_matrix_in_float8_are_smaller(tmp_path: Path, rng: Rng) -> None:
    """As are those of DeepSeek-V3's kv_a_proj_with_mqa, with 576 rows. A part is read by itself."""
    values = rng.standard_normal((200, 300)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(1, 2, (2, 3)).astype(np.float32)
    save_file({"a": values, "a_scale_inv": scales}, tmp_path / "model.safetensors")
    wanted = values.astype(np.float32) * np.kron(scales, np.ones((128, 128), np.float32))[:200, :300]
    tensors = checkpoint.Tensors(tmp_path)
    for part in ((slice(0, 200), slice(0, 300)), (slice(100, 200), slice(120, 290))):
        np.testing.assert_array_equal(tensors.read("a", values.shape, part), wanted[part])
    with pytest.raises(ValueError, match=r"a_scale_inv must have shape \(1, 3\), got \(2, 3\)"):
        tensors.view("a_scale_inv", (1, 3), "F32")


@of_each_family
def test_a_checkpoint_that_was_saved(family: str, tmp_path: Path, open_group: OpenGroup) -> None:
    """The same config and bits, in the same shards and on one device; random weights have these shards, too."""
    config, group, alone = config_of(family), open_group(8), open_group(1)
    params = loaded(family, group)
    model.save(tmp_path, params, config)
    assert families.FAMILIES[family].from_json(tmp_path) == config
    again = model.load(tmp_path, config, group, jnp.float32)
    assert helpers.bits(again) == helpers.bits(model.load(tmp_path, config, alone, jnp.float32)) == helpers.bits(params)

    def described(params: Any) -> Any:
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), params)

    assert described(model.init(jax.random.key(0), config, group)) == described(again) == described(params)


@pytest.mark.parametrize(
    ("family", "change", "dtype", "match"),
    [
        ("qwen3_moe", {"num_hidden_layers": 1}, "float32", r"must have shape \(1, 64\) .* got float32\[2, 64\]"),
        ("qwen3_moe", {"num_hidden_layers": 3}, "float32", r"must have shape \(3, 64\) .* got float32\[2, 64\]"),
        ("qwen3_moe", {}, "int32", r"model.embed_tokens.weight .* dtypes \['float32', .*, got int32\[128, 64\]"),
        ("deepseek_v3", {"float8": True}, "float32", r"params must have the \d+ arrays of the model, got \d+"),
    ],
)
def test_parameters_of_another_config_are_not_saved(
    family: str, change: dict[str, Any], dtype: str, match: str, tmp_path: Path, open_group: OpenGroup
) -> None:
    """Layers would be left out, or the last one written twice."""
    params = jax.tree.map(lambda x: x.astype(dtype), loaded(family, open_group(1)))
    with pytest.raises(ValueError, match=match):
        model.save(tmp_path / "out", params, dataclasses.replace(config_of(family), **change))
    assert not (tmp_path / "out").exists()


def test_a_save_that_is_interrupted(tmp_path: Path, open_group: OpenGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of another checkpoint: nothing is loaded, instead of some tensors of each."""
    config, group = config_of("qwen3_moe"), open_group(1)
    old, new = (model.init(jax.random.key(seed), config, group) for seed in range(2))
    model.save(tmp_path, old, config)
    saved: list[Path] = []

    def save_one(tensors: Any, path: Path, **options: Any) -> None:
        if saved:
            raise KeyboardInterrupt
        save_file(tensors, path, **options)
        saved.append(path)

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.numpy.save_file", save_one)
        with pytest.raises(KeyboardInterrupt):
            model.save(tmp_path, new, config)
    with pytest.raises(FileNotFoundError):
        model.load(tmp_path, config, group, jnp.float32)
    (tmp_path / "model.safetensors").touch()  # of a third checkpoint, which transformers would prefer
    model.save(tmp_path, new, config)
    assert helpers.bits(model.load(tmp_path, config, group, jnp.float32)) == helpers.bits(new)
    assert not (tmp_path / "model.safetensors").exists()


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


@of_each_family
@pytest.mark.parametrize("wrong", WRONG)
def test_errors_of_tensors(family: str, wrong: str, tmp_path: Path, open_group: OpenGroup) -> None:
    change, match = WRONG[wrong]
    folder = spoiled(tmp_path, family, change)
    with pytest.raises(ValueError, match=match):
        model.load(folder, config_of(family), open_group(1))


@pytest.mark.parametrize("left", [0, 5, 1000, -1])
def test_a_file_that_was_cut_off(left: int, tmp_path: Path, open_group: OpenGroup) -> None:
    """In its length, its header or its last tensor."""
    folder = spoiled(tmp_path, "qwen3_moe", lambda entries: None)
    file = max(folder.glob("model-*.safetensors"))
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(ValueError, match=rf"{file}: must have \d+ bytes, got \d+; was it cut off"):
        model.load(folder, config_of("qwen3_moe"), open_group(1))


@of_each_family
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"attention_chunk": 5}, r"the fields \['attention_chunk'\] may change the computation, and are unknown"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"model_type": "llama"}, "model_type must be '.*', got 'llama'"),
        ({"vocab_size": None}, r"the fields \['vocab_size'\] are missing"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type must be 'default' or 'yarn', got 'longrope'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling.original_max_position_embeddings is missing, which rope_type 'yarn' needs",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 4096}},
            "rope_scaling.factor is missing, which rope_type 'yarn' needs",
        ),
        ({"rope_scaling": {"short_factor": 2}}, r"rope_scaling .* got \['short_factor'\]"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method must be .*, got .*awq"),
    ],
)
def test_errors_of_configs(family: str, change: dict[str, Any], match: str, tmp_path: Path) -> None:
    given = json.loads((FIXTURES / family / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps({name: x for name, x in given.items() if x is not None}))
    with pytest.raises(ValueError, match=match):
        families.FAMILIES[family].from_json(tmp_path)
