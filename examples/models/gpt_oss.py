"""GPT-OSS (20b and 120b): biases, a clamped unit, attention sinks, and sliding windows in every other layer.

The experts of a published checkpoint, in MXFP4, become bfloat16, and gate and up, which alternate there, two matrices.
"""

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
FIXED = {"model_type": "gpt_oss", "hidden_act": "silu", "attention_bias": True}
WINDOWED, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Config(Model):
    """The further fields of config.json that the model reads."""

    num_key_value_heads: int
    head_dim: int
    intermediate_size: int  # of an expert
    num_local_experts: int
    sliding_window: int
    layer_types: tuple[str, ...]
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    fixed, quantization = FIXED, "mxfp4"
    harmless = "experts_per_token", "initial_context_length"  # again num_experts_per_tok; and Rope has the other

    def __post_init__(self) -> None:
        if set(self.layer_types) - {WINDOWED, FULL} or len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"config.json: layer_types must name {WINDOWED!r} or {FULL!r} for each of {self.num_hidden_layers} "
                f"layers, got {self.layer_types}"
            )

    @property
    def cache_shapes(self) -> list[tuple[int, ...]]:
        return [(self.num_key_value_heads, self.head_dim)] * 2  # a key and a value

    @property
    def kinds(self) -> tuple[str, ...]:
        """The shortest sequence of layers that repeats."""
        n, types = self.num_hidden_layers, self.layer_types
        return next(types[:i] for i in range(1, n + 1) if n % i == 0 and types[:i] * (n // i) == types)

    def layout(self) -> dict[str, Any]:
        of, h, f, e = Stack(self.num_hidden_layers), self.hidden_size, self.intermediate_size, self.num_local_experts
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim

        def linear(name: str, *shape: int) -> dict[str, Parameter]:
            return {"weight": of.matrix(name, *shape), "bias": of.array(f"{name}.bias", shape[-1], init=0.0)}

        def experts(name: str, *shape: int, **options: Any) -> Parameter:
            return of.array(f"mlp.experts.{name}", e, *shape, experts=True, **options)

        return self.ends() | {
            "layers": {
                "attention_norm": of.norm("input_layernorm", h),
                "q": linear("self_attn.q_proj", h, q),
                "k": linear("self_attn.k_proj", h, kv),
                "v": linear("self_attn.v_proj", h, kv),
                "o": linear("self_attn.o_proj", q, h),
                "sinks": of.array("self_attn.sinks", self.num_attention_heads, init=0.0),
                "moe_norm": of.norm("post_attention_layernorm", h),
                "router": linear("mlp.router", h, e),
                "experts": jax_ep.Experts(
                    gate=experts("gate_up_proj", h, f, half=0),
                    up=experts("gate_up_proj", h, f, half=1),
                    down=experts("down_proj", f, h),
                    biases=(
                        experts("gate_up_proj_bias", f, half=0, init=0.0),
                        experts("gate_up_proj_bias", f, half=1, init=0.0),
                        experts("down_proj_bias", h, init=0.0),
                    ),  # pyright: ignore[reportArgumentType]
                    activation=jax_ep.ClampedSwiglu(self.swiglu_limit, self.swiglu_alpha),
                ),
            }
        }

    def hidden(self, params: Any, ids: jax.Array, run: Run, cache: Cache | None = None) -> Hidden:
        heads, epsilon = (*ids.shape, -1, self.head_dim), self.rms_norm_eps
        angles = self.rope.angles(layers.positions(cache, ids.shape[1]), self.head_dim)

        def route(router: Any, tokens: jax.Array) -> tuple[jax.Array, jax_ep.nn.Routed]:
            logits = layers.dot(tokens, router["weight"], run, jnp.float32) + router["bias"]
            return logits, jax_ep.nn.softmax_top_k(logits, self.num_experts_per_tok)

        def linear(x: jax.Array, p: Any) -> jax.Array:
            return layers.dot(x, p["weight"], run) + p["bias"]

        def block(x: jax.Array, layer: Any, cache: LayerCache | None, kind: str) -> OfLayer:
            h = layers.whole_sequences(layers.rms_norm(x, layer["attention_norm"], epsilon), run)
            q, k, v = (linear(h, layer[name]).reshape(heads) for name in ("q", "k", "v"))
            (k, v), cache = layers.remember(cache, layers.rotate(k, angles), v)
            options = {"window": self.sliding_window if kind == WINDOWED else None, "sinks": layer["sinks"]}
            out = layers.attention(layers.rotate(q, angles), k, v, run, cache, scale=self.head_dim**-0.5, **options)
            x += linear(out.reshape(*ids.shape, -1), layer["o"])
            h = layers.rms_norm(x, layer["moe_norm"], epsilon)
            out, aux = layers.mixture(h, route, layer["router"], layer["experts"], run)
            return x + out, cache, aux

        x = layers.embed(params["embedding"], ids, run)
        x, cache, aux = layers.scan_layers(block, x, params["layers"], cache, run, self.kinds)
        return layers.rms_norm(x, params["norm"], epsilon), layers.advance(cache, ids.shape[1]), aux
