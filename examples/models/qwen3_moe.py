"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): loads, trains and generates."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jax_ep

from . import layers
from .checkpoint import Parameter, Stack
from .layers import Cache, Hidden, LayerCache, OfLayer, Run
from .model import Model

# Other fields of config.json, which must have these values.
FIXED = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_interleaved": False,
}


@dataclasses.dataclass(frozen=True)
class Config(Model):
    """The further fields of config.json that the model reads."""

    num_key_value_heads: int
    head_dim: int
    moe_intermediate_size: int
    num_experts: int
    norm_topk_prob: bool
    intermediate_size: int = 0  # of dense layers, which the model does not have

    fixed = FIXED

    @property
    def cache_shapes(self) -> list[tuple[int, ...]]:
        return [(self.num_key_value_heads, self.head_dim)] * 2  # a key and a value

    def layout(self) -> dict[str, Any]:
        of, h, f, e = Stack(self.num_hidden_layers), self.hidden_size, self.moe_intermediate_size, self.num_experts
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim

        def experts(name: str, *shape: int) -> Parameter:
            return dataclasses.replace(of.matrix(f"mlp.experts.{{expert}}.{name}", e, *shape), experts=True)

        return self.ends() | {
            "layers": {
                "attention_norm": of.norm("input_layernorm", h),
                "q": of.matrix("self_attn.q_proj", h, q),
                "k": of.matrix("self_attn.k_proj", h, kv),
                "v": of.matrix("self_attn.v_proj", h, kv),
                "o": of.matrix("self_attn.o_proj", q, h),
                "q_norm": of.norm("self_attn.q_norm", self.head_dim),
                "k_norm": of.norm("self_attn.k_norm", self.head_dim),
                "moe_norm": of.norm("post_attention_layernorm", h),
                "router": of.matrix("mlp.gate", h, e),
                "experts": jax_ep.Experts(
                    gate=experts("gate_proj", h, f), up=experts("up_proj", h, f), down=experts("down_proj", f, h)
                ),
            }
        }

    def hidden(self, params: Any, ids: jax.Array, run: Run, cache: Cache | None = None) -> Hidden:
        heads, epsilon = (*ids.shape, -1, self.head_dim), self.rms_norm_eps
        angles = self.rope.angles(layers.positions(cache, ids.shape[1]), self.head_dim)

        def route(router: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax_ep.nn.Routed]:
            logits = layers.dot(tokens, router, run, jnp.float32)
            top_k, renormalize = self.num_experts_per_tok, self.norm_topk_prob
            return logits, jax_ep.nn.softmax_top_k(logits, top_k, renormalize=renormalize)

        def block(x: jax.Array, layer: Any, cache: LayerCache | None, _: None) -> OfLayer:
            h = layers.whole_sequences(layers.rms_norm(x, layer["attention_norm"], epsilon), run)
            q = layers.rms_norm(layers.dot(h, layer["q"], run).reshape(heads), layer["q_norm"], epsilon)
            k = layers.rms_norm(layers.dot(h, layer["k"], run).reshape(heads), layer["k_norm"], epsilon)
            v = layers.dot(h, layer["v"], run).reshape(heads)
            (k, v), cache = layers.remember(cache, layers.rotate(k, angles), v)
            out = layers.attention(layers.rotate(q, angles), k, v, run, cache, scale=self.head_dim**-0.5)
            x += layers.dot(out.reshape(*ids.shape, -1), layer["o"], run)
            h = layers.rms_norm(x, layer["moe_norm"], epsilon)
            out, aux = layers.mixture(h, route, layer["router"], layer["experts"], run)
            return x + out, cache, aux

        x = layers.embed(params["embedding"], ids, run)
        x, cache, aux = layers.scan_layers(block, x, params["layers"], cache, run)
        return layers.rms_norm(x, params["norm"], epsilon), layers.advance(cache, ids.shape[1]), aux
