"""DeepSeek-V3: latent attention, a sigmoid router with groups and a bias, a shared expert, and a few dense layers.

The float8 blocks of a published checkpoint become bfloat16. With `dataclasses.replace(config, float8=True)` those of
the routed experts stay as they are, for `Run(group, moe={"precision": "float8"})`. Multi-token prediction is left out.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep.float8 import Float8Weights

from . import layers
from .checkpoint import BLOCK, Parameter, Stack
from .layers import Cache, Hidden, LayerCache, OfLayer, Run
from .model import Model

# Other fields of config.json, which must have these values.
FIXED = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "attention_bias": False,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
LATENT_EPSILON = 1e-6  # of the norms within latent attention


@dataclasses.dataclass(frozen=True)
class Config(Model):
    """The further fields of config.json that the model reads, and `float8`."""

    first_k_dense_replace: int  # layers without experts, which come first
    intermediate_size: int  # of these
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rope_interleave: bool = True
    float8: bool = False  # routed experts are `Float8Weights`

    fixed, quantization = FIXED, "fp8"
    harmless = "aux_loss_alpha", "ep_size", "num_key_value_heads", "num_nextn_predict_layers", "seq_aux"

    @property
    def cache_shapes(self) -> list[tuple[int, ...]]:
        return [(self.kv_lora_rank + self.qk_rope_head_dim,)]  # a latent, which makes keys and values; a rotated key

    def skips(self, name: str) -> bool:
        """Multi-token prediction, whose layers come last."""
        found = re.match(r"model\.layers\.(\d+)\.", name)
        return found is not None and int(found[1]) >= self.num_hidden_layers

    def layout(self) -> dict[str, Any]:
        h, e, f, dense = self.hidden_size, self.n_routed_experts, self.moe_intermediate_size, self.first_k_dense_replace
        first, others = Stack(dense), Stack(self.num_hidden_layers - dense, dense)

        def expert(name: str, k: int, n: int) -> Any:
            name = f"mlp.experts.{{expert}}.{name}_proj.weight"
            if not self.float8:
                return others.array(name, e, k, n, swapped=True, experts=True)
            bits = others.array(name, e, n, k, experts=True, fixed=jnp.uint8, init=0.0)
            grid = (e, n // BLOCK, k // BLOCK)
            return Float8Weights(bits, others.array(name + "_scale_inv", *grid, experts=True, fixed=jnp.float32))  # pyright: ignore

        router = {
            "weight": others.array("mlp.gate.weight", h, e, swapped=True, fixed=jnp.float32),
            "bias": others.array("mlp.gate.e_score_correction_bias", e, init=0.0, fixed=jnp.float32),
        }
        experts = jax_ep.Experts(gate=expert("gate", h, f), up=expert("up", h, f), down=expert("down", f, h))

        def mlp(of: Stack, name: str, width: int) -> jax_ep.Experts:
            gate, up = (of.matrix(f"{name}.{each}_proj", h, width) for each in ("gate", "up"))
            return jax_ep.Experts(gate=gate, up=up, down=of.matrix(f"{name}.down_proj", width, h))

        shared = mlp(others, "mlp.shared_experts", f * self.n_shared_experts)
        return self.ends() | {
            "dense_layers": {**self._attention(first), "mlp": mlp(first, "mlp", self.intermediate_size)},
            "layers": {**self._attention(others), "router": router, "experts": experts, "shared": shared},
        }

    def _attention(self, of: Stack) -> dict[str, Parameter]:
        h, heads, rank, nope = self.hidden_size, self.num_attention_heads, self.kv_lora_rank, self.qk_nope_head_dim
        return {
            "attention_norm": of.norm("input_layernorm", h),
            "q_a": of.matrix("self_attn.q_a_proj", h, self.q_lora_rank),
            "q_norm": of.norm("self_attn.q_a_layernorm", self.q_lora_rank),
            "q_b": of.matrix("self_attn.q_b_proj", self.q_lora_rank, heads * (nope + self.qk_rope_head_dim)),
            "kv_a": of.matrix("self_attn.kv_a_proj_with_mqa", h, rank + self.qk_rope_head_dim),
            "kv_norm": of.norm("self_attn.kv_a_layernorm", rank),
            "kv_b": of.matrix("self_attn.kv_b_proj", rank, heads * (nope + self.v_head_dim)),
            "o": of.matrix("self_attn.o_proj", heads * self.v_head_dim, h),
            "mlp_norm": of.norm("post_attention_layernorm", h),
        }

    def hidden(self, params: Any, ids: jax.Array, run: Run, cache: Cache | None = None) -> Hidden:
        epsilon = self.rms_norm_eps
        angles = self.rope.angles(layers.positions(cache, ids.shape[1]), self.qk_rope_head_dim)

        def route(router: Any, tokens: jax.Array) -> tuple[jax.Array, jax_ep.nn.Routed]:
            logits = layers.dot(tokens.astype(jnp.float32), router["weight"], run)
            return logits, jax_ep.nn.sigmoid_top_k(
                logits,
                self.num_experts_per_tok,
                bias=router["bias"],
                groups=self.n_group,
                top_groups=self.topk_group,
                renormalize=self.norm_topk_prob,
                scale=self.routed_scaling_factor,
            )

        def attended(x: jax.Array, layer: Any, cache: LayerCache | None) -> tuple[jax.Array, jax.Array, Any]:
            """Attention and what it adds to, the input of the layer's second half, the cache."""
            out, cache = self._attend(layers.rms_norm(x, layer["attention_norm"], epsilon), layer, cache, run, angles)
            x += out
            return x, layers.rms_norm(x, layer["mlp_norm"], epsilon), cache

        def dense(x: jax.Array, layer: Any, cache: LayerCache | None, _: None) -> OfLayer:
            x, h, cache = attended(x, layer, cache)
            mlp = layer["mlp"]
            gate, up = (layers.dot(h, weight, run) for weight in (mlp.gate, mlp.up))
            return x + layers.dot(jax.nn.silu(gate) * up, mlp.down, run), cache, None

        def block(x: jax.Array, layer: Any, cache: LayerCache | None, _: None) -> OfLayer:
            x, h, cache = attended(x, layer, cache)
            options: Any = {"shared_experts": layer["shared"], "score": "sigmoid"}
            out, aux = layers.mixture(h, route, layer["router"], layer["experts"], run, **options)
            return x + out, cache, aux

        x = layers.embed(params["embedding"], ids, run)
        x, cache, _ = layers.scan_layers(dense, x, params["dense_layers"], cache, run)
        x, cache, aux = layers.scan_layers(block, x, params["layers"], cache, run, first=self.first_k_dense_replace)
        return layers.rms_norm(x, params["norm"], epsilon), layers.advance(cache, ids.shape[1]), aux

    def _attend(
        self, h: jax.Array, layer: Any, cache: LayerCache | None, run: Run, angles: Any
    ) -> tuple[jax.Array, LayerCache | None]:
        """Latent attention (DeepSeek-V2, 2024): a sequence expands its latents to keys and values; a single token
        multiplies its query by the matrix of the keys, and attends to the latents of the cache."""
        nope, rank, heads = self.qk_nope_head_dim, self.kv_lora_rank, (*h.shape[:2], self.num_attention_heads, -1)
        q_latent, kv_latent = (layers.whole_sequences(layers.dot(h, layer[name], run), run) for name in ("q_a", "kv_a"))
        q = layers.dot(layers.rms_norm(q_latent, layer["q_norm"], LATENT_EPSILON), layer["q_b"], run).reshape(heads)
        rotated = layers.rotate(q[..., nope:], angles, interleaved=self.rope_interleave)
        latent, k_rope = jnp.split(kv_latent, [rank], axis=-1)
        latent = layers.rms_norm(latent, layer["kv_norm"], LATENT_EPSILON)
        k_rope = layers.rotate(k_rope[:, :, None], angles, interleaved=self.rope_interleave)
        (kept,), cache = layers.remember(cache, jnp.concatenate([latent, k_rope[:, :, 0]], axis=-1))
        scale = (nope + self.qk_rope_head_dim) ** -0.5
        if self.rope.mscale_all_dim:
            scale *= self.rope.magnitude(self.rope.mscale_all_dim) ** 2
        if cache is None or h.shape[1] > 1:
            k, v = jnp.split((latent @ layer["kv_b"]).reshape(heads), [nope], axis=-1)
            k = jnp.concatenate([k, jnp.broadcast_to(k_rope, (*k.shape[:-1], k_rope.shape[-1]))], axis=-1)
            q = jnp.concatenate([q[..., :nope], rotated], axis=-1)
            out = layers.attention(q, k, v, run, cache, scale=scale)
        else:
            of_k, of_v = jnp.split(layer["kv_b"].reshape(rank, heads[2], -1), [nope], axis=-1)
            q = jnp.concatenate([jnp.einsum("bsnd,rnd->bsnr", q[..., :nope], of_k), rotated], axis=-1)
            out = layers.attention(q, kept[:, None], kept[:, None], run, cache, scale=scale)[..., :rank]
            out = jnp.einsum("bsnr,rnd->bsnd", out, of_v)
        return layers.dot(out.reshape(*h.shape[:2], -1), layer["o"], run), cache
