"""Layers of other projects: examples/integrations.py in MaxText, tunix and EasyDeL, whose code comes from their wheels;
and MaxText's layer by its own steps and in four lines. Values and gradients are theirs, or those of experts one by one.
"""

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import layer_cases
import moe_oracle
import numpy as np
import pytest
import upstream
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_ep import Experts, Group
from jax_ep.__main__ import load

B, S, D, F, E, K = 8, 4, 128, 128, 16, 4
example = load("examples", "integrations")


class Bare:
    """A module of a class of theirs with these attributes, without what its constructor needs."""

    def __init__(self, of: type, **attributes: Any):
        vars(self).update(attributes, of=of, sown={})

    def __getattr__(self, name: str) -> Any:
        return inspect.getattr_static(self.of, name).__get__(self)

    def sow(self, _: Any, name: str, value: Any) -> None:
        self.sown[name] = value


def draw(rng: helpers.Rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def draw_experts(rng: helpers.Rng) -> list[np.ndarray]:
    return [draw(rng, E, *shape) / shape[0] ** 0.5 for shape in ((D, F), (D, F), (F, D))]


def assert_alike(found: Any, wanted: Any, unit: float = 2e-5) -> None:
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, wanted)
    layer_cases.assert_near(found, wanted, unit)


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
    "qwen3": {"norm_topk_prob": True, "decoder_block": "QWEN3_MOE", "options": {"capacity": B * S * K}},
    "deepseek3": DEEPSEEK | {"n_routing_groups": 4, "topk_routing_group": 2, "moe_use_megatron_seq_aux_loss": True},
    "gpt_oss": GPT_OSS | {"routed_bias": True, "gradient_accumulation_steps": 2},
    "decoding": {"batch": 2, "load_balance_loss_weight": 0.0},
    "float8": {"options": {"precision": "float8"}},
}


def maxtext_layer(
    moe: ModuleType, batch: int = B, options: Any = None, decoder_block: str = "MIXTRAL", **config: Any
) -> Bare:
    given = {"model_name": "mixtral", "routed_score_func": "", "mlp_activations": ["silu"], "model_call_mode": "train"}
    given |= {"num_experts": E, "routed_bias_update_rate": 0.01, "routed_scaling_factor": 2.5}
    given |= {"matmul_precision": "highest"}
    given |= {"load_balance_loss_weight": 0.1, "mlp_activations_limit": -1.0, "capacity_factor": -1.0}
    given |= {"gradient_accumulation_steps": 1, "norm_topk_prob": False, "routed_bias": False, "mlp_bias": False}
    off = ("use_random_routing", "activations_in_float32", "float32_weight_sum", "fuse_expert_scales")
    block = moe.ctypes.DecoderBlockType[decoder_block]
    settings = SimpleNamespace(**given | config | dict.fromkeys(off, False), decoder_block=block, shard_mode=None)
    own = {"num_experts_per_tok": K, "dtype": jnp.dtype("float32"), "activation_fn": jax.nn.silu, "num_experts": E}
    nothing = dict.fromkeys(("rngs", "quant", "per_expert_scale", "wi_kernel_axes", "wo_kernel_axes", "mesh"))
    alone = {"get_context_partition_and_sub_seq": lambda length: (1, length), "is_hash_routing": False}
    return Bare(moe.RoutedMoE, config=settings, _maybe_shard_with_logical=lambda x, *_: x, **own, **nothing, **alone)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", MAXTEXT)
def test_maxtext(name: str, rng: helpers.Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `RoutedMoE.dense_matmul` has, of every token and every expert; logits are not those of the inputs."""
    real = ("maxtext.layers.moe", "maxtext.common.common_types")
    moe = upstream.load(upstream.wheel("maxtext", "0.2.5"), real, ("aqt", "qwix", "tokamax"))
    layer = maxtext_layer(moe, **MAXTEXT[name])
    batch, options = MAXTEXT[name].get("batch", B), MAXTEXT[name].get("options", {})
    logits = draw(rng, batch, S, E)
    scores = jax.nn.sigmoid(logits) if layer.config.routed_score_func else None
    biases = [draw(rng, E, n) for n in (F, F, D)] if layer.config.mlp_bias else [None] * 3
    biased = logits if scores is None else scores + draw(rng, E) / 10
    operands = (draw(rng, batch, S, D), biased, scores, *draw_experts(rng), *biases)
    wanted = with_gradients(layer.dense_matmul, *operands)
    with Group(helpers.mesh_of(data=2, expert=4), "expert", timeout=30) as group:
        monkeypatch.setattr(moe.RoutedMoE, "sparse_matmul", None)  # is put back
        example.patch("maxtext", group, **options)
        found = with_gradients(layer.sparse_matmul, *operands)
        group.check()
    if name == "float8":  # both factors of every product are rounded, also in the sums that are the cotangent
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert np.linalg.norm(mine - theirs) < 0.12 * np.linalg.norm(theirs)
    else:
        assert_alike(found, wanted)
    assert (wanted[1][1] is None) == (name == "decoding")
    assert (wanted[1][2] is None) == (not layer.config.routed_bias)
    assert set(layer.sown) == {"te_moe_total_recv_tokens", "te_moe_recv_capacity_per_rank"}


def test_maxtext_says_what_was_received(rng: helpers.Rng) -> None:
    """The most assignments that a rank of any line has, and its capacity."""
    ids = rng.permuted(np.tile(np.arange(E), (B, S, 1)), axis=2)[:, :, :K].astype(np.int32)
    gate, up, down = map(jnp.asarray, draw_experts(rng))
    with Group(helpers.mesh_of(data=2, expert=4), "expert", timeout=30) as group:

        def both(x: Any, ids: Any, weights: Any) -> Any:
            experts = Experts(gate=gate, up=up, down=down)
            out, received, room = example.experts_of(group, x, ids, weights, experts)
            assert room == 4 * (B * S // 8) * K
            return out, received

        received = helpers.fetch(jax.jit(both)(draw(rng, B, S, D), ids, draw(rng, B, S, K)))[1]
    owners = (ids // (E // 4)).reshape(2, -1)
    assert received == max(np.bincount(line, minlength=4).max() for line in owners)


@pytest.mark.usefixtures("native")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what tunix imports
def test_tunix(rng: helpers.Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the layer itself computes on a CPU: all tokens by all experts."""
    nnx = pytest.importorskip("flax.nnx")
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


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("biases", [False, True])
def test_easydel(biases: bool, rng: helpers.Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its own `_sparse_moe_call` has on one device."""
    folder = "easydel.layers.moe."
    real = (folder + "_moe_module", folder + "_communication_utils")
    moe = upstream.load(upstream.wheel("easydel", "0.3.0"), real, ("eformer", "ejkernel", "jaxtyping"))
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
    operands = (draw(rng, B, S, D), *draw_experts(rng), *([draw(rng, E, n) for n in (F, F, D)] if biases else []))

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


EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 12, 10, 2


def gradient_of_logits(of_weights: np.ndarray, weights: np.ndarray, ids: np.ndarray, shape: Any) -> np.ndarray:
    """Through the softmax over the chosen ones."""
    found = np.zeros(shape)
    best = weights * (of_weights - (weights * of_weights).sum(axis=1, keepdims=True))
    np.put_along_axis(found, ids, best, axis=1)
    return found


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("axes", [(1, 1, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", ["sparse_matmul", "dispatched_matmul"])
def test_values_and_gradients(name: str, axes: tuple[int, int, int], rng: helpers.Rng) -> None:
    example = load("examples", "maxtext_moe")
    tokens = 5 * 8  # of all devices
    x, logits = (rng.standard_normal((tokens, width)).astype(np.float32) for width in (HIDDEN, EXPERTS))
    logits[:, 1] += 2  # a busy expert
    ids, weights = moe_oracle.routed(logits, TOP_K)
    layer = moe_oracle.draw_layer(rng, x[None], weights[None].astype(np.float32), EXPERTS, WIDTH)
    cotangent = rng.standard_normal(x.shape).astype(np.float32)
    expected, gradient = moe_oracle.gated_experts(layer, ids[None], cotangent[None])
    wanted = {
        "x": gradient.tokens[0],
        "logits": gradient_of_logits(gradient.weights[0], weights, ids, logits.shape),
        "w0": gradient.gate[0],
        "w1": gradient.up[0],
        "wo": gradient.down[0],
    }

    mesh = helpers.mesh_of(**dict(zip(("data", "fsdp", "expert"), axes, strict=True)))
    with Group(mesh, "expert", timeout=30) as group:
        mapped = example.over_devices(getattr(example, name), group)
        matrices = (jnp.asarray(matrix[0]) for matrix in (layer.gate, layer.up, layer.down))
        experts = example.Experts(
            *(jax.device_put(m, NamedSharding(mesh, spec)) for m, spec in zip(matrices, example.AT_REST, strict=True))
        )

        @jax.jit
        def both(x: jax.Array, logits: jax.Array, experts: Any) -> Any:
            out, back = jax.vjp(mapped, x, logits, experts)
            return out, back(jnp.asarray(cotangent))

        out, (of_x, of_logits, of_experts) = helpers.fetch(both(x, logits, experts))
        group.check()
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-5)
    for (what, exact), actual in zip(wanted.items(), (of_x, of_logits, *of_experts), strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=1e-4, err_msg=what)
