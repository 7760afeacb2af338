"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): loads, trains and generates.

config = qwen3_moe.Config.from_json(folder)
params = model.load(folder, config, group)
tokens = model.generate(params, ids, 64, config, Run(group))
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_ep

from . import layers
from .checkpoint import Parameter, config_json, read_config
from .layers import Aux, Cache, LayerCache, Rope, Run

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
class Config:
    """The fields of config.json that the model reads."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    rms_norm_eps: float
    rope: Rope
    intermediate_size: int = 0  # of dense layers, which the model does not have

    @classmethod
    def from_json(cls, path: Path | str) -> "Config":
        return read_config(cls, path, FIXED)

    @property
    def cache_shapes(self) -> list[tuple[int, ...]]:
        """Of what a layer keeps of each token: a key and a value."""
        return [(self.num_key_value_heads, self.head_dim)] * 2

    def to_json(self) -> dict[str, Any]:
        return config_json(self, FIXED)

    def layout(self) -> dict[str, Any]:
        """What the parameters are, and where a checkpoint has them."""
        n, h, f, e = self.num_hidden_layers, self.hidden_size, self.moe_intermediate_size, self.num_experts
        d, v = self.head_dim, self.vocab_size
        q, kv = self.num_attention_heads * d, self.num_key_value_heads * d

        def matrix(name: str, *shape: int) -> Parameter:
            return Parameter(f"model.layers.{{layer}}.{name}.weight", (n, *shape), swapped=True)

        def norm(name: str, width: int) -> Parameter:
            return Parameter(f"model.layers.{{layer}}.{name}.weight", (n, width), init="ones")

        def experts(name: str, *shape: int) -> Parameter:
            return dataclasses.replace(matrix(f"mlp.experts.{{expert}}.{name}", e, *shape), experts=True)

        return {
            "embedding": Parameter("model.embed_tokens.weight", (v, h), init=0.02),
            "layers": {
                "attention_norm": norm("input_layernorm", h),
                "q": matrix("self_attn.q_proj", h, q),
                "k": matrix("self_attn.k_proj", h, kv),
                "v": matrix("self_attn.v_proj", h, kv),
                "o": matrix("self_attn.o_proj", q, h),
                "q_norm": norm("self_attn.q_norm", d),
                "k_norm": norm("self_attn.k_norm", d),
                "moe_norm": norm("post_attention_layernorm", h),
                "router": matrix("mlp.gate", h, e),
                "experts": jax_ep.Experts(
                    gate=experts("gate_proj", h, f), up=experts("up_proj", h, f), down=experts("down_proj", f, h)
                ),
            },
            "norm": Parameter("model.norm.weight", (h,), init="ones"),
            "head": Parameter("lm_head.weight", (h, v), swapped=True),
        }

    def hidden(
        self, params: Any, ids: jax.Array, run: Run, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None, Aux]:
        """Tokens [B, S] -> hidden states [B, S, H] for the head; `params` in `run.dtype`."""
        heads, epsilon = (*ids.shape, -1, self.head_dim), self.rms_norm_eps
        angles = self.rope.angles(layers.positions(cache, ids.shape[1]), self.head_dim)

        def route(router: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax_ep.nn.Routed]:
            logits = jnp.dot(tokens, router, preferred_element_type=jnp.float32)
            top_k, renormalize = self.num_experts_per_tok, self.norm_topk_prob
            return logits, jax_ep.nn.softmax_top_k(logits, top_k, renormalize=renormalize)

        def block(
            x: jax.Array, layer: Any, cache: LayerCache | None, _: None
        ) -> tuple[jax.Array, LayerCache | None, Aux]:
            h = layers.whole_sequences(layers.rms_norm(x, layer["attention_norm"], epsilon), run)
            q = layers.rms_norm((h @ layer["q"]).reshape(heads), layer["q_norm"], epsilon)
            k = layers.rms_norm((h @ layer["k"]).reshape(heads), layer["k_norm"], epsilon)
            v = (h @ layer["v"]).reshape(heads)
            (k, v), cache = layers.remember(cache, layers.rotate(k, angles), v)
            out = layers.attention(layers.rotate(q, angles), k, v, run, cache, scale=self.head_dim**-0.5)
            x += out.reshape(*ids.shape, -1) @ layer["o"]
            h = layers.rms_norm(x, layer["moe_norm"], epsilon)
            out, aux = layers.mixture(h, route, layer["router"], layer["experts"], run)
            return x + out, cache, aux

        x = layers.embed(params["embedding"], ids, run)
        x, cache, aux = layers.scan_layers(block, x, params["layers"], cache, run)
        return layers.rms_norm(x, params["norm"], epsilon), layers.advance(cache, ids.shape[1]), aux
