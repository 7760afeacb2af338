"""examples/models beside transformers, from the same checkpoints (tests/models): checkpoints, attention, training."""

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import moe_oracle
import numpy as np
import optax
import pytest
from conftest import OpenGroup
from helpers import Rng
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import jax_ep
from jax_ep import Group, MoeStats
from jax_ep.__main__ import load as load_module

FIXTURES = Path(__file__).parents[1] / "models"
checkpoint, families, layers, losses, model, training = (
    load_module("examples", f"models.{name}")
    for name in ("checkpoint", "families", "layers", "losses", "model", "training")
)
train_model, generate = (load_module("examples", name) for name in ("train_model", "generate"))
STEPS = 20
BATCH, HEADS, GROUPS, DIM = 2, 4, 2, 16  # of attention

pytestmark = pytest.mark.usefixtures("native")
COLLECTIVES = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|reduce-scatter)(?:-start)?\("
)
of_each_family = pytest.mark.parametrize("family", families.FAMILIES)


def config_of(family: str) -> Any:
    return families.config_of(FIXTURES / family)


def run_of(group: Group, **options: Any) -> Any:
    return layers.Run(group, dtype=jnp.float32, **options)


def loaded(family: str, group: Group) -> Any:
    return model.load(FIXTURES / family, config_of(family), group, jnp.float32)


def assert_near(found: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance), found, wanted)


@of_each_family
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.matrix(1)
def test_what_transformers_computes(family: str, size: int, open_group: OpenGroup) -> None:
    """Two sequences do not fill eight devices, which then share sequences by tokens, and single tokens as copies."""
    wanted, config, group = load_file(FIXTURES / family / "expected.safetensors"), config_of(family), open_group(size)
    params, run = loaded(family, group), run_of(group)
    logits, aux = jax.jit(lambda params, ids: model.logits(params, ids, config, run))(params, wanted["ids"])
    assert_near(logits, wanted["logits"])
    np.testing.assert_array_equal(np.sort(aux.expert_ids, axis=-1), wanted["expert_ids"])
    tokens = wanted["greedy"].shape[1]
    np.testing.assert_array_equal(model.generate(params, wanted["ids"], tokens, config, run), wanted["greedy"])


@of_each_family
def test_a_step_moves_no_weights(family: str, open_group: OpenGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA has no collectives at all if the devices divide the sequences, and else one sum for each mixture. The tokens
    are those of transformers."""
    monkeypatch.setenv("JAX_EP_DEBUG_CHECKS", "0")  # they compare ranks by collectives
    known, config, size = load_file(FIXTURES / family / "expected.safetensors"), config_of(family), 2
    group = open_group(size)
    run, sharded, key = run_of(group), loaded(family, group), jax.random.key(0)
    whole = model.for_generation(sharded, config, run)
    narrow = model.for_generation(sharded, config, dataclasses.replace(run, dtype=jnp.bfloat16))
    wanted = jax.tree.map(lambda one: jnp.dtype(one.fixed or jnp.bfloat16), config.layout())
    assert jax.tree.map(lambda x: x.dtype, narrow) == wanted
    mixtures = config.num_hidden_layers - getattr(config, "first_k_dense_replace", 0)
    prefill, step = model.decoder(config, run, known["ids"].shape[1] + 1)

    for batch, wanted, all_params in ((1, ["all-reduce"] * mixtures, (whole, sharded)), (2 * size, [], (whole,))):
        ids, greedy = (np.tile(known[name], (2, 1))[:batch] for name in ("ids", "greedy"))
        token, cache = prefill(whole, ids, key)
        np.testing.assert_array_equal(token, greedy[:, 0])
        for params in all_params:
            compiled = step.lower(params, token, cache, key).compile()
            found = COLLECTIVES.findall(compiled.as_text())
            assert "all-gather" in found if params is sharded else found == wanted
            after, _ = compiled(params, token, jax.tree.map(jnp.copy, cache), key)  # a step overwrites it
            np.testing.assert_array_equal(after, greedy[:, 1])


def test_a_prefill_gathers_a_layer_once(open_group: OpenGroup) -> None:
    """One sequence: its tokens before attention, and their heads after it."""
    config, run = config_of("qwen3_moe"), run_of(open_group(2))
    params = model.for_generation(loaded("qwen3_moe", run.group), config, run)
    prefill, _ = model.decoder(config, run, 32)
    text = prefill.lower(params, jnp.zeros((1, 32), jnp.int32), jax.random.key(0)).compile().as_text()
    in_layers = [line for line in text.splitlines() if "while/body" in line and COLLECTIVES.search(line)]
    assert sorted(COLLECTIVES.findall("\n".join(in_layers))) == ["all-gather", "all-to-all"]


def test_sequences_that_outgrow_their_cache(open_group: OpenGroup) -> None:
    family, group = "qwen3_moe", open_group(1)
    params, key = loaded(family, group), jax.random.key(0)
    prefill, step = model.decoder(config_of(family), run_of(group), 6)
    token, cache = prefill(params, np.ones((2, 5), np.int32), key)
    for fits in (True, False, False):
        token, cache = step(params, token, cache, key)
        assert (np.asarray(token) >= 0).all() if fits else (np.asarray(token) == -1).all()
    with pytest.raises(ValueError, match="ids must have at most length = 6 tokens, got 7"):
        prefill(params, np.ones((2, 7), np.int32), key)


@pytest.mark.parametrize(
    ("ids", "options", "match"),
    [
        ([[]], {}, r"decoder: ids must be \[B, T\] with at least one token, got \(1, 0\)"),
        ([1, 2], {}, r"decoder: ids must be \[B, T\] with at least one token, got \(2,\)"),
        ([[1, 128]], {}, r"generate: ids must be in \[0, 128\), got 1 to 128"),
        ([[-1, 2]], {}, r"generate: ids must be in \[0, 128\), got -1 to 2"),
        ([[1, 2]], {"tokens": 0}, "generate: tokens must be at least 1, got 0"),
        ([[1, 2]], {"temperature": -0.5}, "decoder: temperature must be at least 0, got -0.5"),
        ([[1, 2]], {"temperature": float("nan")}, "decoder: temperature must be at least 0, got nan"),
    ],
)
def test_what_generate_refuses(ids: Any, options: dict[str, Any], match: str, open_group: OpenGroup) -> None:
    config, run = config_of("qwen3_moe"), run_of(open_group(1))
    params = model.init(jax.random.key(0), config, run.group)
    with pytest.raises(ValueError, match=match):
        model.generate(params, jnp.asarray(ids, jnp.int32), config=config, run=run, **{"tokens": 2, **options})


@pytest.mark.parametrize("shape", [(2,), (8,), (4, 1)])
def test_tokens_of_other_sequences_than_the_cache(shape: tuple[int, ...], open_group: OpenGroup) -> None:
    """Two tokens would attend to heads of the first sequences as if these were theirs."""
    config, group, key = config_of("qwen3_moe"), open_group(1), jax.random.key(0)
    params = loaded("qwen3_moe", group)
    prefill, step = model.decoder(config, run_of(group), 6)
    _, cache = prefill(params, np.ones((4, 5), np.int32), key)
    with pytest.raises(ValueError, match=r"tokens must have the shape \(4,\) of the cache's sequences, got "):
        step(params, np.zeros(shape, np.int32), cache, key)


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


def losses_of(config: Any, optimizer: Any, run: Any, state: Any, batches: Any, **options: Any) -> list[float]:
    """The losses of a step for each batch. No token is dropped."""
    step, values = training.make_train_step(config, optimizer, run, state, **options), []
    for batch in batches:
        state, metrics = step(state, batch)
        values.append(float(metrics.loss))
        assert metrics.dropped == 0
    run.group.check()
    return values


def trained(family: str, group: Group, ids: np.ndarray, **options: Any) -> list[float]:
    """The losses of steps on the same sequences, from the weights of the checkpoint."""
    config, run, optimizer = config_of(family), run_of(group, **options), optax.adamw(1e-4)
    state = training.state_of(loaded(family, group), optimizer, run)
    return losses_of(config, optimizer, run, state, [ids[None]] * STEPS)


@of_each_family
def test_eight_devices_train_as_one(family: str, open_group: OpenGroup) -> None:
    """Sequences are always the same. With others, such as those of seed 0 on CPUs with AVX-512, a rounding decides
    between two experts, and losses differ by 1e-2. With these they differ by at most 2e-6 there."""
    ids = np.random.default_rng(3).integers(config_of(family).vocab_size, size=(8, 17), dtype=np.int32)
    mesh = helpers.mesh_of(data=2, ep=4) if family == "gpt_oss" else helpers.mesh_of(ep=8)
    one = trained(family, open_group(1), ids)
    eight = trained(family, open_group(mesh=mesh), ids, remat=layers.KEEP_EXCHANGES)
    assert one[-1] < one[0] - 0.5
    assert_near(eight, one)


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
    model.save(tmp_path, new, config)
    assert helpers.bits(model.load(tmp_path, config, group, jnp.float32)) == helpers.bits(new)


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
    with pytest.raises(ValueError, match=rf"{file}: must have \d+ bytes, got \d+; is it whole"):
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


def plain(q: Any, k: Any, v: Any, sinks: Any, window: int | None) -> jax.Array:
    """Causal attention: the softmax of a row has one more column for the sink."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("btnd,bsnd->bnts", q, k) * DIM**-0.5
    query, key = np.ogrid[: q.shape[1], : k.shape[1]]
    seen = (key <= query) & (key > query - (window or key.size))
    logits = jnp.where(seen, logits, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, column], axis=-1)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(logits, axis=-1)[..., : key.size], v)


def draw(rng: Rng, length: int) -> list[np.ndarray]:
    """q, k, v and sinks."""
    shapes = (HEADS, DIM), (GROUPS, DIM), (GROUPS, DIM)
    drawn = [rng.standard_normal((BATCH, length, *shape), np.float32) for shape in shapes]
    return [*drawn, rng.standard_normal(HEADS, np.float32)]


def with_gradients(function: Any, operands: list[Any], cotangent: np.ndarray) -> Any:
    def both(operands: list[Any], cotangent: Any) -> Any:
        out, pull = jax.vjp(function, *operands)
        return out, *pull(cotangent.astype(out.dtype))

    return helpers.fetch(jax.jit(both)(operands, cotangent))


CUDNN = pytest.mark.skipif(jax.default_backend() == "cpu", reason="cuDNN runs on GPUs")
HALF = [("cudnn", None), ("xla", None), ("xla", 128)]


@pytest.mark.parametrize(
    ("implementation", "window", "sinks", "length"),
    [
        *itertools.product([""], [None, 8], [False, True], [8, 21]),
        *(pytest.param(*each, True, 512, marks=CUDNN) for each in HALF),
    ],
)
def test_values_and_gradients_of_attention(
    implementation: str, window: int | None, sinks: bool, length: int, open_group: OpenGroup, rng: Rng
) -> None:
    """In float32; by an implementation in bfloat16, near what float32 gives for the same rounded operands."""
    operands: list[Any] = draw(rng, length)[: 3 + sinks]
    if implementation:
        operands = [jnp.asarray(x, jnp.bfloat16) for x in operands]
    how: Any = {"attention": implementation} if implementation else {"dtype": jnp.float32}
    run = layers.Run(open_group(1), **how)
    cotangent = rng.standard_normal(operands[0].shape, np.float32)

    def attend(q: Any, k: Any, v: Any, sinks: Any = None) -> jax.Array:
        return layers.attention(q, k, v, run, scale=DIM**-0.5, window=window, sinks=sinks)

    def exact(q: Any, k: Any, v: Any, sinks: Any = None) -> jax.Array:
        return plain(q, k, v, sinks, window)

    found = with_gradients(attend, operands, cotangent)
    wanted = with_gradients(exact, [x.astype(jnp.float32) for x in operands], cotangent)
    for name, one, other in zip(("out", "q", "k", "v", "sinks"), found, wanted, strict=False):
        if implementation:
            assert helpers.relative(one, np.asarray(other)) < 0.02, name
        else:
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_a_frequent_token_keeps_its_gradient(size: int, open_group: OpenGroup, rng: Rng) -> None:
    """A running sum in bfloat16 would stay near 256, because the next number there is 258."""
    run = layers.Run(open_group(size))
    ids = np.where(rng.random((2, 1024)) < 0.8, 3, rng.integers(8, size=(2, 1024)))
    table = jnp.zeros((8, 16), jnp.bfloat16)
    found = jax.jit(jax.grad(lambda table: layers.embed(table, jnp.asarray(ids), run).astype(jnp.float32).sum()))(table)
    counts = np.bincount(ids.ravel(), minlength=8)
    np.testing.assert_allclose(found.astype(jnp.float32), np.tile(counts[:, None], 16), rtol=2**-7)


@pytest.mark.parametrize("chunk", [2, 3, 100])
def test_the_loss_of_a_head(chunk: int, rng: Rng) -> None:
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


def test_devices_add_up_the_gradient_of_a_head_once(open_group: OpenGroup, rng: Rng) -> None:
    """As one device would compute it. Three chunks have one sum. One device has no targets."""
    mesh = open_group(2).mesh
    x, head = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 6, 5), (5, 9)))
    targets = jnp.asarray(rng.integers(-1, 9, size=(4, 6))).at[2:].set(-1)

    def mean(x: jax.Array, head: jax.Array) -> jax.Array:
        mapped = partial(losses.next_token_loss, chunk=2, axes=mesh.axis_names)
        specs = {"in_specs": (P("ep"), P(), P("ep")), "out_specs": P()}
        return jax.shard_map(mapped, mesh=mesh, **specs)(x, head, targets)

    lowered = jax.jit(jax.value_and_grad(mean, (0, 1))).lower(x, head)  # XLA's compilers join sums
    summed = re.findall(r"all_reduce.*?\}\) : \((.*?)\)", lowered.as_text(), re.DOTALL)
    assert sorted(summed) == ["tensor<5x9xf32>", "tensor<f32>", "tensor<i32>"]
    assert_near(lowered.compile()(x, head), jax.value_and_grad(losses.next_token_loss, (0, 1))(x, head, targets), 1e-6)


@pytest.mark.parametrize(("count", "unroll"), [(2, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize(
    ("remat", "times"), [("none", 1), ("attention", 1), ("exchanges", 1), ("products", 2), ("layers", 2)]
)
def test_what_a_policy_recomputes(count: int, unroll: int, remat: str, times: int, open_group: OpenGroup) -> None:
    """Layers, whose dispatch is in the program once, or again in the backward pass. XLA removes a loop of one turn."""
    config, group = dataclasses.replace(config_of("qwen3_moe"), num_hidden_layers=count), open_group(2)
    run = run_of(group, unroll=unroll, remat=layers.REMAT[remat])
    batch = jnp.zeros((2, 9), jnp.int32)

    def loss(params: Any) -> jax.Array:
        return training.loss_of(params, batch, config, run, balance=0, z=0)[0]

    params = model.init(jax.random.key(0), config, group)
    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text() or ""
    assert text.count('custom_call_target="jax_ep_dispatch"') == unroll * times


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "two": optax.multi_transform(
        {"adam": optax.adam(1e-2), "sgd": optax.sgd(1e-2, momentum=0.9)},
        lambda params: jax.tree.map(lambda x: "adam" if x.ndim > 3 else "sgd", params),
    ),
}


def test_16_bits_are_not_trained(open_group: OpenGroup) -> None:
    """Three steps of AdamW by 1e-5 would leave norms as they are."""
    params = model.load(FIXTURES / "qwen3_moe", config_of("qwen3_moe"), group := open_group(1))
    with pytest.raises(TypeError, match=r"state_of: params\['embedding'\] must be float32, got bfloat16"):
        training.state_of(params, optax.adamw(1e-5), run_of(group))


@pytest.mark.parametrize("shape", [(0, 2, 9), (1, 2, 1), (2, 9)])
def test_batches_of_no_tokens(shape: tuple[int, ...], open_group: OpenGroup) -> None:
    config, optimizer, run = config_of("qwen3_moe"), optax.sgd(1.0), run_of(open_group(1))
    state = training.first_state(jax.random.key(0), config, optimizer, run)
    step = training.make_train_step(config, optimizer, run, state)
    with pytest.raises(ValueError, match=r"train_step: batches must be \[M, B, S \+ 1\] tokens .*, got "):
        step(state, np.zeros(shape, np.int32))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_where_the_arrays_of_an_optimizer_lie(name: str, open_group: OpenGroup, rng: Rng) -> None:
    """Those with a parameter's shape lie where it does, also after a step."""
    config, optimizer, run = config_of("qwen3_moe"), OPTIMIZERS[name], run_of(open_group(2))
    tokens = rng.integers(config.vocab_size, size=(1, 2, 9), dtype=np.int32)
    state = training.first_state(jax.random.key(0), config, optimizer, run)
    step = training.make_train_step(config, optimizer, run, state)
    for after in (state, step(jax.tree.map(jnp.copy, state), tokens)[0]):
        matrices = [
            x for x in jax.tree.leaves(after.optimizer) if x.shape == state.params["layers"]["experts"].gate.shape
        ]
        assert matrices or name == "adafactor"
        assert {x.sharding for x in matrices} <= {state.params["layers"]["experts"].gate.sharding}


@pytest.mark.parametrize("padded", [False, True])
def test_micro_batches_are_one_batch(padded: bool, group: Group, rng: Rng) -> None:
    """Also if sequences of the first one end early."""
    config, optimizer, run = config_of("qwen3_moe"), optax.sgd(1.0), run_of(group)
    tokens = rng.integers(config.vocab_size, size=(2 * group.size, 13), dtype=np.int32)
    if padded:
        tokens[: group.size, 4:] = -1

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
def test_losses_of_200_steps(group: Group, rng: Rng) -> None:
    """In bfloat16 they stay within 1 % of those of dense experts in float32, on text of a chain of 4 successors."""
    config, optimizer = config_of("qwen3_moe"), optax.adamw(3e-4, b2=0.95)
    successors, steps, length = rng.integers(config.vocab_size, size=(config.vocab_size, 4)), 200, 64
    tokens = np.zeros((steps, 1, 8 * group.size, length + 1), np.int32)
    for i in range(length):
        drawn = rng.integers(4, size=tokens.shape[:-1])
        tokens[..., i + 1] = successors[tokens[..., i], drawn]

    def on(run: Any) -> np.ndarray:
        state = training.first_state(jax.random.key(0), config, optimizer, run)
        return np.array(losses_of(config, optimizer, run, state, tokens, balance=0))

    ours = on(layers.Run(group, dtype=jnp.bfloat16))
    dense = on(run_of(group, moe_mlp=dense_mixture))
    print("every 20th loss:", *(f"{x:.4f} ({y:.4f})" for x, y in zip(ours[::20], dense[::20], strict=True)))
    print(f"the last: {ours[-1]:.4f} ({dense[-1]:.4f}); largest difference {np.abs(ours / dense - 1).max():.2%}")
    assert dense[-1] < 0.8 * dense[0]
    np.testing.assert_allclose(ours, dense, rtol=0.01)


def test_the_command_that_generates(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = load_file(FIXTURES / "qwen3_moe" / "expected.safetensors")
    prompt, greedy = wanted["ids"][0], wanted["greedy"][0]
    options = ["--tokens", str(greedy.size), "--dtype", "float32"]
    assert generate.main([str(FIXTURES / "qwen3_moe"), " ".join(map(str, prompt)), *options]) == 0
    assert capsys.readouterr().out.split() == [str(token) for token in greedy]


def test_training_that_goes_on(rng: Rng, tmp_path: Path) -> None:
    """Four steps, and two with two more behind a checkpoint: the same weights."""
    rng.integers(128, size=4000, dtype=np.uint16).tofile(tmp_path / "tokens")
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text((FIXTURES / "qwen3_moe" / "config.json").read_text())

    def trained(out: str, steps: int) -> bytes:
        options = ["--dtype", "uint16", "--length", "16", "--sequences", "1", "--learning-rate", "1e-2"]
        folder = tmp_path / out
        files = map(str, (config, tmp_path / "tokens", "--out", folder, "--steps", steps))
        assert train_model.main([*files, *options]) == 0
        return b"".join(path.read_bytes() for path in sorted((folder / "model").glob("*.safetensors")))

    at_once = trained("at once", 4)
    assert trained("in two", 2) != at_once
    assert trained("in two", 4) == at_once
    assert (tmp_path / "at once" / "training.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("stored", "dtype", "match"),
    [
        ("uint16", "uint32", r"tokens: tokens must be below 128, got \d+; is --dtype right"),
        ("int16", "int16", r"tokens: tokens must not be negative, got -\d+; is --dtype right"),
        ("uint32", "float32", "--dtype must be of integers, got float32"),
    ],
)
def test_tokens_that_are_of_no_vocabulary(stored: str, dtype: str, match: str, rng: Rng, tmp_path: Path) -> None:
    """Floats of small integers would all become token 0."""
    tokens = rng.integers(128, size=4000) - (200 * (np.arange(4000) % 3 == 0) if stored == "int16" else 0)
    tokens.astype(stored).tofile(tmp_path / "tokens")
    with pytest.raises(ValueError, match=match):
        train_model.Tokens(tmp_path / "tokens", dtype, 0, 128).batch(0, 1, 1, 16)


@pytest.mark.parametrize("option", ["--sequences", "--length", "--micro-batches", "--keep-every"])
def test_options_of_training_that_are_zero(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_model.main([str(FIXTURES / "qwen3_moe"), str(tmp_path / "tokens"), option, "0"])
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


def test_training_that_misses_its_weights(rng: Rng, tmp_path: Path) -> None:
    """An index without the files that it names is an error, not the beginning of training from random weights."""
    rng.integers(128, size=4000, dtype=np.uint32).tofile(tmp_path / "tokens")
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "qwen3_moe", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(FileNotFoundError, match="safetensors"):
        train_model.main(
            [*map(str, (folder, tmp_path / "tokens", "--out", tmp_path / "out", "--length", 8, "--steps", 1))]
        )
