"""A small byte-level mixture-of-experts language model, to read and to copy.

Experts are spread over the devices of a group, and the batch over the same devices: every device runs attention
on its own sequences with replicated weights, and sends each token to the devices that own its experts and back.
Everything below `loss` runs inside `jax.shard_map`, so arrays are what one device sees: B sequences of S bytes,
T = B * S tokens, D = d_model, E experts of which E / size are local.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_ep

VOCABULARY = 256  # bytes


@dataclasses.dataclass(frozen=True)
class Config:
    d_model: int = 128
    heads: int = 4
    layers: int = 2
    experts: int = 16
    top_k: int = 2
    d_expert: int = 256
    capacity_factor: float = 1.5  # rows a device may receive, as a multiple of the mean
    balance_weight: float = 0.01
    z_weight: float = 0.001
    implementation: jax_ep.Implementation = "auto"
    precision: Literal["float8"] | None = None  # in which tokens travel to experts, and are multiplied
    multiple: int | None = None  # to which the rows of each expert are rounded, over all devices


class Layer(NamedTuple):
    """One block; in `Params` every array has a leading [layers] axis."""

    attention_norm: jax.Array  # [D]
    qkv: jax.Array  # [D, 3 D]
    attention_out: jax.Array  # [D, D]
    moe_norm: jax.Array  # [D]
    router: jax.Array  # [D, E]
    expert_in: jax.Array  # [E, D, F], spread over the devices
    expert_out: jax.Array  # [E, F, D], spread over the devices


class Params(NamedTuple):
    embedding: jax.Array  # [256, D]
    layers: Layer
    final_norm: jax.Array  # [D]
    logits: jax.Array  # [D, 256]


class RouterStats(NamedTuple):
    balance_loss: jax.Array  # [] 1 when tokens are spread evenly
    z_loss: jax.Array  # [] grows with the router's logits
    load: jax.Array  # [E] share of the assignments of all devices
    dropped: jax.Array  # [] share of the assignments that found no room


class Metrics(NamedTuple):
    loss: jax.Array  # [] cross-entropy in nats per byte
    load: jax.Array  # [E]
    dropped: jax.Array  # []


def partition_specs(axis: str | tuple[str, ...]) -> Params:
    """Expert weights are spread over `axis`, all others replicated."""
    replicated = P()
    experts = P(None, axis)
    layers = Layer(*[replicated] * 5, expert_in=experts, expert_out=experts)  # pyright: ignore
    return Params(replicated, layers, replicated, replicated)  # pyright: ignore


def init_params(key: jax.Array, config: Config, group: jax_ep.Group) -> Params:
    """Random weights, placed on the devices of the group."""
    layers, d, f, e = config.layers, config.d_model, config.d_expert, config.experts
    keys = iter(jax.random.split(key, 6))

    def normal(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / math.sqrt(fan_in)

    params = Params(
        embedding=normal(VOCABULARY, d, fan_in=1),
        layers=Layer(
            attention_norm=jnp.ones((layers, d)),
            qkv=normal(layers, d, 3 * d, fan_in=d),
            attention_out=normal(layers, d, d, fan_in=d * 2 * layers),
            moe_norm=jnp.ones((layers, d)),
            router=normal(layers, d, e, fan_in=d),
            expert_in=normal(layers, e, d, f, fan_in=d),
            expert_out=normal(layers, e, f, d, fan_in=f * 2 * layers),
        ),
        final_norm=jnp.ones(d),
        logits=jnp.zeros((d, VOCABULARY)),
    )
    specs = partition_specs(group.axis_name)
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(group.mesh, spec)), params, specs)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attention(layer: Layer, x: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention [B, S, D] -> [B, S, D] with linear position biases (ALiBi, Press et al. 2021)."""
    batch, length, d = x.shape
    qkv = rms_norm(x, layer.attention_norm) @ layer.qkv
    q, k, v = jnp.split(qkv.reshape(batch, length, 3 * heads, d // heads), 3, axis=2)
    position = jnp.arange(length)
    slopes = 2.0 ** (-8 * jnp.arange(1, heads + 1) / heads)
    bias = -slopes[:, None, None] * (position[:, None] - position)
    out = jax.nn.dot_product_attention(q, k, v, bias[None], is_causal=True)
    return out.reshape(batch, length, d) @ layer.attention_out


def experts(
    layer: Layer, tokens: jax.Array, ids: jax.Array, weights: jax.Array, config: Config, group: jax_ep.Group
) -> tuple[jax.Array, jax_ep.MoeStats]:
    """Tokens [T, D] to their experts and back: the weighted sum of their answers [T, D], and what was counted."""
    return jax_ep.moe_mlp(
        tokens,
        ids,
        weights,
        jax_ep.Experts(gate=None, up=layer.expert_in, down=layer.expert_out, activation="gelu"),
        group=group,
        capacity_factor=config.capacity_factor,
        precision=config.precision,
        on_overflow="drop",
        implementation=config.implementation,
    )


def moe(layer: Layer, x: jax.Array, config: Config, group: jax_ep.Group) -> tuple[jax.Array, RouterStats]:
    """The mixture of experts: [B, S, D] -> [B, S, D]."""
    tokens = rms_norm(x, layer.moe_norm).reshape(-1, x.shape[-1])
    logits = tokens @ layer.router
    axis = group.axis_name  # losses and loads are of the tokens of all devices
    if config.multiple is None:
        ids, weights = jax_ep.nn.softmax_top_k(logits, config.top_k)
    else:
        chosen = jax_ep.nn.softmax_top_k(logits, config.top_k + 1)
        rounding = {"multiple": config.multiple, "axis_name": axis}
        ids, weights = jax_ep.nn.round_tokens(chosen, config.top_k, config.experts, **rounding)
    combined, counted = experts(layer, tokens, ids, weights, config, group)
    load = jax_ep.nn.expert_load(ids, config.experts, axis_name=axis)
    stats = RouterStats(
        balance_loss=jax_ep.nn.balance_loss(logits, ids, axis_name=axis),
        z_loss=jax_ep.nn.z_loss(logits, axis_name=axis),
        load=load / jnp.sum(load),
        dropped=jax.lax.pmean(counted.dropped[0] / ids.size, axis),
    )
    return combined.reshape(x.shape), stats


def forward(params: Params, inputs: jax.Array, config: Config, group: jax_ep.Group) -> tuple[jax.Array, RouterStats]:
    """Bytes [B, S] -> logits [B, S, 256] of the next byte, and router statistics per layer."""

    def block(x: jax.Array, layer: Layer) -> tuple[jax.Array, RouterStats]:
        x = x + attention(layer, x, config.heads)
        y, stats = moe(layer, x, config, group)
        return x + y, stats

    x, stats = jax.lax.scan(block, params.embedding[inputs], params.layers)
    return rms_norm(x, params.final_norm) @ params.logits, stats


def loss(params: Params, batch: jax.Array, config: Config, group: jax_ep.Group) -> tuple[jax.Array, Metrics]:
    """What is minimised, and metrics, for a batch [sequences, S + 1] of bytes spread over the group's axis.

    The mean over all devices makes the result replicated, so the gradients of replicated weights arrive summed.
    """
    import optax  # here, so that --help needs no extras

    def per_device(params: Params, batch: jax.Array) -> tuple[jax.Array, Metrics]:
        batch = batch.astype(jnp.int32)
        logits, stats = forward(params, batch[:, :-1], config, group)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        cross_entropy = jax.lax.pmean(jnp.mean(losses), group.axis_name)
        total = cross_entropy + config.balance_weight * jnp.mean(stats.balance_loss)
        total += config.z_weight * jnp.mean(stats.z_loss)
        return total, Metrics(cross_entropy, jnp.mean(stats.load, axis=0), jnp.mean(stats.dropped))

    specs = partition_specs(group.axis_name), P(group.axis_name)
    return jax.shard_map(per_device, mesh=group.mesh, in_specs=specs, out_specs=P())(params, batch)


def generate(params: Params, prompt: bytes, length: int, seed: int, config: Config, group: jax_ep.Group) -> bytes:
    """Continues the prompt to `length` bytes at temperature 0.8. All devices sample; the first one's text is kept."""
    if not 1 <= len(prompt) <= length:
        raise ValueError(f"generate: prompt must have from 1 to length = {length} bytes, got {len(prompt)}")
    config = dataclasses.replace(config, capacity_factor=group.size)  # a sample is too small to be balanced
    start = jnp.zeros((1, length), jnp.int32).at[0, : len(prompt)].set(jnp.frombuffer(prompt, jnp.uint8))

    def per_device(params: Params) -> jax.Array:
        rank = jax.lax.axis_index(group.axis_name)
        key = jax.random.fold_in(jax.random.key(seed), rank)

        def append(position: jax.Array, text: jax.Array) -> jax.Array:
            logits = forward(params, text, config, group)[0][:, position - 1]
            sampled = jax.random.categorical(jax.random.fold_in(key, position), logits / 0.8)
            return text.at[:, position].set(sampled)

        text = jax.lax.pcast(start, group.axis_name, to="varying")
        return jax.lax.fori_loop(len(prompt), length, append, text)

    specs = partition_specs(group.axis_name)
    sample = jax.jit(jax.shard_map(per_device, mesh=group.mesh, in_specs=(specs,), out_specs=P(group.axis_name)))
    return bytes(fetch(sample(params))[0].astype("uint8"))


def fetch(results: Any) -> Any:
    """Arrays that are spread over the devices of all processes, on each host."""
    return multihost_utils.process_allgather(results, tiled=True)
