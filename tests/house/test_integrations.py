"""examples/integrations.py in MaxText, tunix and EasyDeL, from their wheels: values and gradients are theirs. And the
layer of Flax NNX: values and shards, and training that goes on from a checkpoint."""

import inspect
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest
import upstream
import yaml
from flax import nnx
from flax.linen import spmd
from helpers import Rng
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jax_ep import Experts, Group, Implementation
from jax_ep.__main__ import load
from jax_ep.integrations.nnx import MoeMlp
from jax_ep.nn.balance import Score

B, S, D, F, E, K = 8, 4, 128, 128, 16, 4
example, nnx_example = (load("examples", name) for name in ("integrations", "nnx_moe"))
BATCH, STEPS = 32, 3
SMALL = {"d_model": 16, "d_expert": 24, "layers": 2, "context": 4}


class Bare:
    """A module of a class of theirs with these attributes, without what its constructor needs."""

    def __init__(self, of: type, **attributes: Any):
        vars(self).update(attributes, of=of, sown={})

    def __getattr__(self, name: str) -> Any:
        return inspect.getattr_static(self.of, name).__get__(self)

    def sow(self, _: Any, name: str, value: Any) -> None:
        self.sown[name] = value


def draw(rng: Rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def draw_experts(rng: Rng) -> list[np.ndarray]:
    return [draw(rng, E, *shape) / shape[0] ** 0.5 for shape in ((D, F), (D, F), (F, D))]


def assert_alike(found: Any, wanted: Any, unit: float = 2e-5) -> None:
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, wanted)
    moe_oracle.assert_near(found, wanted, unit)


def with_gradients(function: Any, *operands: Any) -> Any:
    """The results, and the gradients of a sum of squares of them; None stays None."""

    def value(operands: Any) -> Any:
        results = function(*operands)
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(results)), results

    return helpers.fetch(jax.jit(jax.grad(value, has_aux=True))(operands))


DEEPSEEK: dict[str, Any] = {"model_name": "deepseek3-671b", "decoder_block": "DEEPSEEK"}
DEEPSEEK |= {"routed_bias": True, "routed_score_func": "sigmoid"}
GPT_OSS: dict[str, Any] = {"decoder_block": "GPT_OSS", "mlp_bias": True, "mlp_activations_limit": 7.0}
MAXTEXT: dict[str, dict[str, Any]] = {
    "qwen3": {"norm_topk_prob": True, "decoder_block": "QWEN3_MOE", "options": {"capacity_factor": 4.0}},
    "deepseek3": DEEPSEEK | {"n_routing_groups": 4, "topk_routing_group": 2, "moe_use_megatron_seq_aux_loss": True},
    "gpt_oss": GPT_OSS | {"routed_bias": True, "gradient_accumulation_steps": 2, "axis": "tensor"},
    "decoding": {"batch": 1, "load_balance_loss_weight": 0.0},
    "uneven over experts": {"batch": 6},
    "uneven over both axes": {"batch": 3, "axis": "fsdp"},
    "float8": {"options": {"precision": "float8"}},
    "context": {"axis": "context"},
    "explicit": {"axis": "fsdp", "axis_types": AxisType.Explicit},
}


def maxtext_layer(
    moe: ModuleType,
    batch: int = B,
    options: Any = None,
    decoder_block: str = "MIXTRAL",
    axis: str = "data",
    axis_types: AxisType = AxisType.Auto,
    **config: Any,
) -> Bare:
    """Args: `axis`, the first one of its mesh [2, 4]; the second is "expert"."""
    file = zipfile.ZipFile(upstream.wheel("maxtext", "0.2.5"))
    given = yaml.safe_load(file.read("maxtext/configs/base.yml"))
    rules = given["logical_axis_rules"]
    given |= {"model_name": "mixtral", "model_call_mode": "train", "matmul_precision": "highest", "num_experts": E}
    given |= {"routed_bias_update_rate": 0.01, "routed_scaling_factor": 2.5, "load_balance_loss_weight": 0.1}
    given |= {"moe_log_max_load_ratio": True, "log_required_ragged_buffer_factor": True, "moe_dropless_fallback": None}
    block = moe.ctypes.DecoderBlockType[decoder_block]
    settings = SimpleNamespace(**given | config | {"decoder_block": block, "shard_mode": None})
    own = {"num_experts_per_tok": K, "dtype": jnp.dtype("float32"), "activation_fn": jax.nn.silu, "num_experts": E}
    nothing = dict.fromkeys(("rngs", "quant", "per_expert_scale", "wi_kernel_axes", "wo_kernel_axes"))
    alone = {"get_context_partition_and_sub_seq": lambda length: (1, length), "is_hash_routing": False}
    mesh = helpers.mesh_of(**{axis: 2, "expert": 4})
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(axis_types,) * 2)

    def shard(x: jax.Array, spec: P) -> jax.Array:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec)) if axis_types == AxisType.Explicit else x

    def mesh_axes(names: tuple[str | None, ...]) -> P:
        found = spmd.logical_to_mesh_axes(names, [(name, tuple(np.atleast_1d(axes))) for name, axes in rules])
        return P(*(tuple(a for a in part or () if a in mesh.axis_names) or None for part in found or ()))

    places = {"_logical_to_mesh_axes": mesh_axes, "_maybe_shard_with_pspec": shard, "mesh": mesh}
    places |= {"_maybe_shard_with_logical": lambda x, *_: x}
    return Bare(moe.RoutedMoE, config=settings, **places, **own, **nothing, **alone)


def maxtext_operands(layer: Bare, rng: Rng, batch: int = B) -> tuple[Any, ...]:
    """Of `sparse_matmul`; logits are not those of the inputs."""
    logits = draw(rng, batch, S, E)
    scores = jax.nn.sigmoid(logits) if layer.config.routed_score_func else None
    biases = [draw(rng, E, n) for n in (F, F, D)] if layer.config.mlp_bias else [None] * 3
    biased = logits if scores is None else scores + draw(rng, E) / 10
    return draw(rng, batch, S, D), biased, scores, *draw_experts(rng), *biases


@pytest.fixture
def moe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    real = ("maxtext.layers.moe", "maxtext.common.common_types")
    module = upstream.load(upstream.wheel("maxtext", "0.2.5"), real, ("aqt", "qwix", "tokamax"))
    monkeypatch.setattr(module.RoutedMoE, "sparse_matmul", module.RoutedMoE.sparse_matmul)  # is put back
    module.max_utils.is_eval.return_value = False
    decoder = SimpleNamespace(get_remat_policy=lambda self: self.policy)
    monkeypatch.setitem(sys.modules, "maxtext.layers.nnx_decoders", ModuleType("nnx_decoders"))
    vars(sys.modules["maxtext.layers.nnx_decoders"])["NNXDecoder"] = decoder
    vars(module)["decoder"] = decoder
    return module


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", MAXTEXT)
def test_maxtext(name: str, rng: Rng, moe: ModuleType) -> None:
    layer = maxtext_layer(moe, **MAXTEXT[name])
    operands = maxtext_operands(layer, rng, MAXTEXT[name].get("batch", B))
    wanted = with_gradients(layer.dense_matmul, *operands)
    with Group(layer.mesh, "expert", timeout=30) as group:
        example.patch("maxtext", group, **MAXTEXT[name].get("options", {}))
        with jax.set_mesh(layer.mesh):
            found = with_gradients(layer.sparse_matmul, *operands)
        group.check()
    if name == "float8":  # both factors of every product are rounded, also in the sums that are the cotangent
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert np.linalg.norm(mine - theirs) < 0.12 * np.linalg.norm(theirs)
    else:
        assert_alike(found, wanted)
    assert (wanted[1][1] is None) == (name == "decoding")
    assert (wanted[1][2] is None) == (not layer.config.routed_bias)
    assert set(layer.sown) == {"moe_has_overflow", "moe_max_load_ratio", "moe_required_rbf"}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("force_dropless", [False, True])
@pytest.mark.parametrize("batch", [B, 1])
def test_maxtext_obeys_ragged_buffer_factor(force_dropless: bool, batch: int, rng: Rng, moe: ModuleType) -> None:
    """A buffer for the fullest rank drops nothing, one with a row less does; what is sown tells the factor."""
    layer = maxtext_layer(moe, batch)
    operands = maxtext_operands(layer, rng, batch)
    ids = np.argsort(-operands[1])[..., :K].reshape(2 if batch > 1 else 1, -1)  # of each line
    most = max(np.bincount(line // (E // 4), minlength=4).max() for line in ids)
    even = ids.shape[1] / 4
    wanted = helpers.fetch(jax.jit(layer.dense_matmul)(*operands))
    with Group(layer.mesh, "expert", timeout=30) as group:
        example.patch("maxtext", group)
        for rows in (most, most - 1):
            vars(layer).update(ragged_buffer_factor_override=rows / even, force_dropless=force_dropless)
            found, sown = jax.jit(lambda *operands: (layer.sparse_matmul(*operands), layer.sown))(*operands)
            assert np.any(sown["moe_has_overflow"]) == (rows < most and not force_dropless)
            assert sown["moe_max_load_ratio"] == sown["moe_required_rbf"] == np.float32(most / even)
            if not np.any(sown["moe_has_overflow"]):
                assert_alike(found, wanted)
            layer.sown.clear()


@pytest.mark.parametrize("axis", ["data", "fsdp", "fsdp_transpose", "tensor", "tensor_sequence", "context"])
def test_maxtext_shares_work(axis: str, rng: Rng, moe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, work = maxtext_layer(moe, axis=axis), []

    def counted(tokens: jax.Array, ids: Any, weights: Any, experts: Experts, **options: Any) -> Any:
        work.append(tokens.shape[0] * experts.down.shape[1])
        return moe_mlp(tokens, ids, weights, experts, **options)

    moe_mlp = example.jax_ep.moe_mlp
    monkeypatch.setattr(example.jax_ep, "moe_mlp", counted)
    with Group(layer.mesh, "expert", timeout=30) as group:
        example.patch("maxtext", group)
        jax.eval_shape(layer.sparse_matmul, *maxtext_operands(layer, rng))
    assert work == [B * S * F // 8]


@pytest.mark.parametrize(
    ("config", "quant", "message"),
    [
        ({"quantization": "int8"}, object(), "quantization='int8' with use_qwix_quantization=true alone"),
        ({"moe_dropless_fallback": "layer"}, None, "moe_dropless_fallback='step', got 'layer'"),
    ],
)
def test_maxtext_refuses(config: dict[str, Any], quant: Any, message: str, rng: Rng, moe: ModuleType) -> None:
    layer = maxtext_layer(moe, **config)
    vars(layer)["quant"] = quant
    with pytest.raises(NotImplementedError, match=message):
        example.maxtext(layer, *maxtext_operands(layer, rng), group=None)


@pytest.mark.optimized
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("kept", "calls"), [((), 2), (("moe_x_sorted", "moe_mlpwi_0"), 1)])
def test_maxtext_keeps_by_its_names(kept: tuple[str, ...], calls: int, rng: Rng, moe: ModuleType) -> None:
    layer = maxtext_layer(moe)
    vars(layer)["policy"] = jax.checkpoint_policies.save_only_these_names(*kept)
    with Group(layer.mesh, "expert", timeout=30) as group:
        example.patch("maxtext", group)
        policy = moe.decoder.get_remat_policy(layer)
        block = jax.checkpoint(layer.sparse_matmul, policy=policy)
        loss = jax.value_and_grad(lambda *operands: jnp.sum(block(*operands)[0] ** 2), argnums=(0, 3, 4, 5))
        text = str(jax.jit(loss).lower(*maxtext_operands(layer, rng)).compile().as_text())
    assert text.count('custom_call_target="jax_ep_dispatch"') == calls


def test_patch_applies(tmp_path: Path) -> None:
    """docs/maxtext.patch, of at most 70 lines, to the released tree; it calls what the example has."""
    patch = Path("docs/maxtext.patch")
    text = patch.read_text()
    assert text.count("\n") <= 70
    assert all(hasattr(example, name) for name in re.findall(r"jax_ep_moe\.(?!py)(\w+)", text))
    zipfile.ZipFile(upstream.wheel("maxtext", "0.2.5")).extractall(tmp_path / "src")
    subprocess.run(["git", "apply", patch.resolve()], cwd=tmp_path, check=True, timeout=60)
    assert "use_jax_ep" in (tmp_path / "src/maxtext/configs/base.yml").read_text()


@pytest.mark.parametrize("project", ["maxtext", "easydel"])
def test_signatures(project: str, moe: ModuleType) -> None:
    method = moe.RoutedMoE.sparse_matmul
    if project == "easydel":
        method = easydel().BaseMoeModule._sparse_moe_call
    theirs, ours = (inspect.signature(f).parameters for f in (method, getattr(example, project)))
    assert [(p.name, p.kind, p.default) for p in theirs.values()] == [
        (p.name, p.kind, p.default) for p in ours.values() if p.name not in ("group", "options")
    ]


@pytest.mark.usefixtures("native")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what tunix imports
def test_tunix(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the layer itself computes on a CPU: all tokens by all experts."""
    pytest.importorskip("jax.experimental.shard_map")  # it imports this
    file = upstream.wheel("google-tunix", "0.1.7")
    model = upstream.load(
        file, ("tunix.models.qwen3.model", "tunix.generate.mappings"), ("jaxtyping", "huggingface_hub", "safetensors")
    )
    shardings = SimpleNamespace(exp_weight_edf=(None,) * 3, exp_weight_efd=(None,) * 3, act_btd=(None,) * 3)
    sizes = {"num_experts_per_tok": K, "num_experts": E, "embed_dim": D, "hidden_dim": F}
    config = SimpleNamespace(**sizes, shd_config=shardings, dtype=jnp.float32, param_dtype=jnp.float32)
    x = draw(rng, B, S, D)
    with Group(helpers.mesh_of(fsdp=2, ep=4), "ep", timeout=30) as group:
        with jax.set_mesh(group.mesh):
            graph, state = nnx.split(model.MoELayer(config, rngs=nnx.Rngs(0)))

        def layer(state: Any, x: Any) -> Any:
            return nnx.merge(graph, state)(x)

        wanted = with_gradients(layer, state, x)
        monkeypatch.setattr(model.MoELayer, "__call__", model.MoELayer.__call__)  # is put back
        example.patch("tunix", group)
        found = with_gradients(layer, state, x)
    assert_alike(found, wanted)


def easydel() -> ModuleType:
    folder = "easydel.layers.moe."
    real = (folder + "_moe_module", folder + "_communication_utils")
    return upstream.load(upstream.wheel("easydel", "0.3.0"), real, ("eformer", "ejkernel", "jaxtyping"))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("biases", "batch"), [(False, B), (True, 6)])
def test_easydel(biases: bool, batch: int, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    moe = easydel()
    axes = {moe.DP: "dp", moe.EP: "ep", moe.TP: "tp"}
    one = helpers.mesh_of(dp=1, ep=1, tp=1)
    config = SimpleNamespace(use_expert_tensor_mode=False, moe_force_xla_gmm=True, use_ring_of_experts=False)
    router = jnp.asarray(draw(rng, D, E))
    layer = Bare(
        moe.BaseMoeModule,
        moe_hooks=moe.MoeFusedHooks(select_hook=normalized),
        dtype=jnp.dtype("float32"),
        config=config,
        mesh=one,
        auto_expert_mesh=one,
        partition_manager=SimpleNamespace(resolve=lambda **_: P()),
        get_moe_spec=lambda *_, **__: P("ep"),
        n_routed_experts=E,
        num_experts_per_tok=K,
    )
    monkeypatch.setattr(moe, "resolve_eformer_axis", lambda axis, _: axes[axis])
    monkeypatch.setattr(moe, "grouped_matmul", lambda x, w, sizes, **_: jax.lax.ragged_dot(x, w, sizes))
    operands = (draw(rng, batch, S, D), *draw_experts(rng), *([draw(rng, E, n) for n in (F, F, D)] if biases else []))

    def call(x: Any, *given: Any) -> Any:
        return layer._sparse_moe_call(x, lambda x: x @ router, *given, act_fn=jax.nn.silu)

    wanted = with_gradients(call, *operands)
    monkeypatch.setattr(moe.BaseMoeModule, "_sparse_moe_call", None)  # is put back
    with Group(helpers.mesh_of(dp=2, ep=4, tp=1), "ep", timeout=30) as group:
        example.patch("easydel", group)
        found = with_gradients(call, *operands)
        vars(layer)["moe_hooks"] = moe.MoeFusedHooks(output_weights_hook=jnp.abs)
        with pytest.raises(NotImplementedError, match="takes no output_weights_hook"):
            call(*operands)
    assert_alike(found, wanted)


def normalized(scores: jax.Array, _: Any, k: int) -> tuple[jax.Array, jax.Array]:
    weights, ids = jax.lax.top_k(scores, k)
    return weights / weights.sum(axis=-1, keepdims=True), ids


def opened(fsdp: int, ep: int) -> Group:
    return Group(helpers.mesh_of(fsdp=fsdp, ep=ep), "ep", timeout=30)


def text(step: int) -> np.ndarray:
    """The letters of the alphabet again and again, from somewhere on."""
    start = np.random.default_rng(step).integers(26, size=(BATCH, 1))
    return ord("a") + (start + np.arange(SMALL["context"] + 1)) % 26


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("made", ["eagerly", "in jit"])
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.matrix(1)
def test_values_of_a_layer(
    axis_type: AxisType, score: Score, made: str, use_bias: bool, implementation: Implementation, rng: Rng
) -> None:
    mesh = helpers.mesh_of(fsdp=2, ep=2)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(axis_type,) * 2)
    x = rng.standard_normal((8, 4, 16)).astype(np.float32)
    with Group(mesh, "ep", timeout=30) as group:

        def make() -> MoeMlp:
            options = {"group": group, "fsdp": "fsdp", "implementation": implementation, "use_bias": use_bias}
            return MoeMlp(16, 24, 8, 2, score=score, router_options={"scale": 2.0}, rngs=nnx.Rngs(0), **options)

        layer = nnx.jit(make)() if made == "in jit" else make()
        parameters = layer.router, layer.gate, layer.up, layer.down
        assert [each[...].size // each[...].addressable_shards[0].data.size for each in parameters] == [2, 4, 4, 4]
        biases = [layer.router_bias, layer.gate_bias, layer.up_bias, layer.down_bias]
        for each, parts in zip(biases, (1, 2, 2, 2), strict=True):
            if each is not None:
                assert not each[...].any()
                each[...] = jax.device_put(draw(rng, *each[...].shape), each[...].sharding)
                assert each[...].size // each[...].addressable_shards[0].data.size == parts
        placed = jax.device_put(x, NamedSharding(mesh, P("ep")))  # the layer shards it over both axes
        out, aux = helpers.fetch(nnx.jit(lambda layer, x: layer(x))(layer, placed))
        router, *matrices = (np.asarray(each[...]) for each in parameters)
        router_bias, gate, up, down = (None if each is None else np.asarray(each[...])[None] for each in biases)
    tokens = x.reshape(1, -1, 16)
    logits = tokens[0] @ router + (0 if router_bias is None else router_bias)
    ids, weights = moe_oracle.routed(logits.astype(np.float64), 2, score)
    operands = moe_oracle.Layer(tokens, 2 * weights[None], *(each[None] for each in matrices))
    expected, _ = moe_oracle.gated_experts(operands, ids[None], np.zeros_like(tokens), (gate, up, down))[:2]
    np.testing.assert_allclose(out, expected[0].reshape(x.shape), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(aux.load, np.bincount(ids.ravel(), minlength=8))
    assert aux.dropped == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_experts": 7}, "num_experts"),
        *(({name: 8.0}, f"{name} must be a Python int") for name in ("hidden", "width", "num_experts", "top_k")),
        *(({name: 0}, f"{name} must be at least 1") for name in ("hidden", "width", "num_experts", "top_k")),
        ({"hidden": 15, "fsdp": "fsdp"}, "hidden must be a multiple of the 2 devices along fsdp, got 15"),
        ({"score": "tanh"}, "score"),
        ({"use_bias": 1}, "use_bias"),
        ({"fsdp": "ep"}, "fsdp must be another axis"),
        ({"fsdp": "rows"}, "fsdp must be another axis"),
        *(
            ({name: None}, rf"options must be .*, got \['{name}'\]")
            for name in (
                "shared_tokens",
                "shared_experts",
                "capacity_facto",
                "tokens",
                "expert_ids",
                "weights",
                "experts",
            )
        ),
        ({"group": None}, "group"),
    ],
)
def test_arguments_are_checked(given: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"hidden": 16, "width": 24, "num_experts": 8, "top_k": 2}
    with opened(2, 2) as group, pytest.raises((ValueError, TypeError), match=f"MoeMlp: {message}"):
        MoeMlp(**sizes | {"group": group, "rngs": nnx.Rngs(0)} | given)


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
def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """With the same bits on the same mesh, but on a GPU, where XLA adds up the gradients of embeddings in any order."""
    config, saved = nnx_example.Config(**SMALL), tmp_path / "checkpoint"
    first, more = range(STEPS), range(STEPS, 2 * STEPS)
    with opened(2, 2) as group:
        state = nnx_example.create(config, group)
        before = nnx_example.train(state, group, text, first)
        nnx_example.save(saved, state)
        losses = nnx_example.train(state, group, text, more)
        resumed = nnx_example.resume(saved, config, group)
        assert nnx_example.train(resumed, group, text, more) == losses
        for found, wanted in zip(*(jax.tree.leaves(nnx.state(each)) for each in (resumed, state)), strict=True):
            if jax.default_backend() == "gpu" and jnp.issubdtype(found.dtype, jnp.floating):
                np.testing.assert_allclose(helpers.wide(found), helpers.wide(wanted), rtol=1e-4, atol=1e-6)
            else:
                assert helpers.bits(found) == helpers.bits(wanted)
        assert shards(state) == shards(resumed) == [4] * 9
    assert losses[-1] < before[0]

    with opened(1, 1) as group:
        alone = nnx_example.resume(saved, nnx_example.Config(implementation="xla", **SMALL), group)
        np.testing.assert_allclose(nnx_example.train(alone, group, text, more), losses, rtol=1e-5)


@pytest.mark.usefixtures("native")
def test_the_backward_pass_repeats_no_exchange() -> None:
    """The layers are one loop: one dispatch forward, and none backward but the exchange of gradients."""
    with opened(2, 2) as group, jax.set_mesh(group.mesh):
        state = nnx.eval_shape(lambda: nnx_example.drawn(nnx_example.Config(**SMALL), group, 0))
        program = nnx_example.train_step.lower(*state, jax.ShapeDtypeStruct((BATCH, SMALL["context"] + 1), np.int32))
        assert program.as_text().count("@jax_ep_dispatch(") == 1
