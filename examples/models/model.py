"""What all models do: they load, save, compute logits, and generate. training.py has what trains them.

A model is its config: `qwen3_moe.Config`, `gpt_oss.Config` or `deepseek_v3.Config`, each a `Model`.

    config = qwen3_moe.Config.from_json(folder)
    params = load(folder, config, group)
    tokens = generate(params, ids, 64, config, Run(group))
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike

import jax_ep

from . import checkpoint
from .checkpoint import Parameter
from .layers import Aux, Cache, Hidden, Run, dot

PAGE = 128  # tokens
AHEAD = 16  # XLA's own collectives on CPUs may hang with more than 31 programs in flight


@dataclasses.dataclass(frozen=True)
class Model(checkpoint.JsonConfig, abc.ABC):
    """The fields of config.json that every model has, and what it makes of them."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_experts_per_tok: int
    rms_norm_eps: float

    @property
    @abc.abstractmethod
    def cache_shapes(self) -> Sequence[tuple[int, ...]]:
        """What a layer keeps of each token: the shapes [..., D] of its arrays."""

    @abc.abstractmethod
    def layout(self) -> dict[str, Any]:
        """A pytree of `Parameter`; parameters are a pytree of arrays of the same structure."""

    @abc.abstractmethod
    def hidden(self, params: Any, ids: jax.Array, run: Run, cache: Cache | None = None) -> Hidden:
        """Tokens [B, S], behind those of the cache, -> hidden states [B, S, H] for the head, and the new cache.

        Without a cache, or with an empty one, they are whole sequences; else S is 1. `params` are in `run.dtype`.
        """

    def skips(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is not the model's."""
        return False

    def ends(self) -> dict[str, Parameter]:
        """The part of `layout` that is of no layer."""
        return {
            "embedding": Parameter("model.embed_tokens.weight", (self.vocab_size, self.hidden_size), init=0.02),
            "norm": Parameter("model.norm.weight", (self.hidden_size,), init="ones"),
            "head": Parameter("lm_head.weight", (self.hidden_size, self.vocab_size), swapped=True),
        }


def init(key: jax.Array, config: Model, group: jax_ep.Group, dtype: DTypeLike = jnp.float32) -> Any:
    """Random parameters, in their shards from the beginning."""
    return checkpoint.random_params(key, config.layout(), group, dtype)


def load(folder: Path | str, config: Model, group: jax_ep.Group, dtype: DTypeLike = jnp.bfloat16) -> Any:
    """The parameters of a checkpoint; errors as of `checkpoint.load`."""
    return checkpoint.load(folder, config.layout(), group, dtype, config.skips)


def save(folder: Path | str, params: Any, config: Model) -> None:
    """Writes config.json and the parameters, in their dtype. All processes call it."""
    checkpoint.save(folder, params, config.layout(), config.to_json())


def cast(params: Any, config: Model, dtype: DTypeLike) -> Any:
    """The parameters in the dtype in which they are multiplied. Call it once, outside of the scan over layers."""
    return jax.tree.map(lambda x, one: x if one.fixed else x.astype(dtype), params, config.layout())


def for_generation(params: Any, config: Model, run: Run) -> Any:
    """The parameters in `run.dtype`, with all but the experts whole on each device.

    A step of decoding with them gathers no weights. An array that already has this dtype and placement is not copied.
    Those that `cast` leaves as they are keep their dtype.
    """

    def placed(x: jax.Array, one: Parameter) -> jax.Array:
        x = x if one.fixed else x.astype(run.dtype)
        return x if one.experts else jax.device_put(x, NamedSharding(run.group.mesh, P()))

    return jax.tree.map(placed, params, config.layout())


def logits(params: Any, ids: jax.Array, config: Model, run: Run) -> tuple[jax.Array, Aux]:
    """Tokens [B, S] -> float32 logits [B, S, V] of the next token, and what the routers did."""
    params = cast(params, config, run.dtype)
    hidden, _, aux = config.hidden(params, ids, run)
    return _logits(params, hidden, run), aux


def _logits(params: Any, hidden: jax.Array, run: Run) -> jax.Array:
    return dot(hidden, run.constrain(params["head"], P()), run, jnp.float32)


def empty_cache(config: Model, run: Run, batch: int, length: int) -> Cache:
    """For `batch` sequences of at most `length` tokens.

    The cache has room for a multiple of `PAGE` tokens. With another number, XLA may copy keys and values in each step
    to pad them.
    """
    room = -(-length // PAGE) * PAGE
    shapes = [(batch, *shape[:-1], room, shape[-1]) for shape in config.cache_shapes]
    kept = tuple(run.constrain(jnp.zeros(shape, run.dtype), run.rows(batch, 1)) for shape in shapes)
    return Cache((kept,) * config.num_hidden_layers, jnp.int32(0))


class Decoder(NamedTuple):
    """Compiled programs that continue sequences. Their parameters are those of `for_generation`.

    Attributes:
      prefill: (params, ids [B, T], key) -> the next tokens [B], and the cache.
      step: (params, tokens [B], cache, key) -> the next tokens, and the cache, in the memory of the old one.
    """

    prefill: Callable[..., tuple[jax.Array, Cache]]
    step: Callable[..., tuple[jax.Array, Cache]]


def decoder(config: Model, run: Run, length: int, temperature: float = 0.0) -> Decoder:
    """For sequences of at most `length` tokens, prompts included; the likeliest tokens at temperature 0.

    If a sequence outgrows `length`, its next tokens are -1. Raises ValueError if a prompt is longer, or empty.
    """
    if not temperature >= 0:
        raise ValueError(f"decoder: temperature must be at least 0, got {temperature}")

    def next_token(params: Any, ids: jax.Array, cache: Cache, key: jax.Array) -> tuple[jax.Array, Cache | None]:
        if ids.ndim != 2 or not ids.size:
            raise ValueError(f"decoder: ids must be [B, T] with at least one token, got {ids.shape}")
        if ids.shape[1] > length:
            raise ValueError(f"decoder: ids must have at most length = {length} tokens, got {ids.shape[1]}")
        hidden, after, _ = config.hidden(params, ids, run, cache)
        logits = _logits(params, hidden[:, -1], run)
        if temperature == 0:
            token = jnp.argmax(logits, axis=-1)
        else:
            token = jax.random.categorical(jax.random.fold_in(key, cache.position), logits / temperature)
        return jnp.where(cache.position + ids.shape[1] <= length, token, -1).astype(jnp.int32), after

    def prefill(params: Any, ids: jax.Array, key: jax.Array) -> tuple[jax.Array, Cache | None]:
        return next_token(params, ids, empty_cache(config, run, ids.shape[0], length), key)

    def step(params: Any, tokens: jax.Array, cache: Cache, key: jax.Array) -> tuple[jax.Array, Cache | None]:
        if tokens.shape != (batch := cache.kept[0][0].shape[:1]):
            raise ValueError(f"decoder: tokens must have shape [B] = {batch}, as the cache has, got {tokens.shape}")
        return next_token(params, tokens[:, None], cache, key)

    return Decoder(jax.jit(prefill), jax.jit(step, donate_argnums=2))


def generate(
    params: Any,
    ids: jax.Array,
    tokens: int,
    config: Model,
    run: Run,
    *,
    temperature: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """The `tokens` tokens [B, tokens] that follow the prompts [B, T]. The host runs at most `AHEAD` steps ahead.

    Each call compiles two programs. For several calls, keep a `decoder`.
    """
    if tokens < 1:
        raise ValueError(f"generate: tokens must be at least 1, got {tokens}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size):
        raise ValueError(f"generate: ids must be in [0, {config.vocab_size}), got {ids.min()} to {ids.max()}")
    key = jax.random.key(0) if key is None else key
    params = for_generation(params, config, run)
    prefill, step = decoder(config, run, ids.shape[-1] + tokens, temperature)
    token, cache = prefill(params, ids, key)
    found = [token]
    for _ in range(tokens - 1):
        token, cache = step(params, token, cache, key)
        found.append(token)
        jax.block_until_ready(found[-AHEAD:][0])
    return jnp.stack(found, axis=1)
