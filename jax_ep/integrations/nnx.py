"""A mixture of experts as a layer of Flax NNX."""

import inspect
import math
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_ep._kit import checks
from jax_ep.group import Group
from jax_ep.nn.balance import Score, balance_loss, expert_load, z_loss
from jax_ep.nn.layers import moe_mlp
from jax_ep.nn.routers import sigmoid_top_k, softmax_top_k
from jax_ep.ops.matmul.gated import ActivationName, ClampedSwiglu
from jax_ep.ops.moe.units import Activation, Experts, Gated

_OPTIONS = {each.name for each in inspect.signature(moe_mlp).parameters.values() if each.kind == each.KEYWORD_ONLY}
_OPTIONS -= {"group", "shared_tokens", "shared_experts"}


class MoeAux(NamedTuple):
    """What `MoeMlp` returns beside its output, for the tokens of all devices.

    Attributes:
      balance_loss, z_loss: float32 scalars, to be weighted and added to the loss (`jax_ep.nn`).
      load: [E] int32, the assignments of each expert.
      dropped: int32 scalar, the assignments that found no room where `on_overflow="drop"`.
    """

    balance_loss: jax.Array
    z_loss: jax.Array
    load: jax.Array
    dropped: jax.Array


@lru_cache  # the layers of a model share what was compiled
def _drawer(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding) -> jax.stages.Wrapped:
    """key -> random matrices, the last two axes of `shape`, made in their shards."""
    return jax.jit(lambda key: jax.random.normal(key, shape, dtype) / math.sqrt(shape[-2]), out_shardings=sharding)


class MoeMlp(nnx.Module):
    """A router and its gated experts: x [B, ..., H] -> [B, ..., H] in x's dtype, and a `MoeAux`.

    The layer takes global arrays and calls `jax.shard_map` itself. B is sharded over all axes of the group's mesh, and
    each device flattens its part of x to tokens [T, H]. The axes of the mesh may be Auto or Explicit. Call the layer
    inside `nnx.jit`: outside, JAX compiles it again in every call.

    Each parameter is drawn in its shards, inside and outside of `nnx.jit`, so no device ever holds all experts. The
    group is a plain attribute, not state, so checkpoints do not hold it.

    Args:
      hidden, width: H, and F, the inner width of an expert.
      num_experts, top_k: E, a multiple of the group's size, and K.
      group: the open group. Its ranks divide the experts.
      fsdp: a mesh axis that shards every matrix by rows, too. XLA gathers the matrices before the layer and scatters
        their gradients.
      score: "softmax" or "sigmoid": the router is `jax_ep.nn.softmax_top_k` or `jax_ep.nn.sigmoid_top_k`.
      router_options: further arguments of the router, such as {"scale": 2.5}.
      activation: as for `jax_ep.Experts`.
      use_bias: whether biases are added to the logits and to the experts' products, as in GPT-OSS. They begin at 0.
      param_dtype: of the parameters. The products of the experts are in the dtype of x, the logits in float32.
      rngs: its stream "params" draws the parameters.
      options: further arguments of `jax_ep.moe_mlp`, such as `capacity_factor` and `implementation`, but not
        `shared_tokens` or `shared_experts`.

    Raises:
      ValueError, TypeError, JaxEpError: as for `jax_ep.moe_mlp`.
    """

    def __init__(
        self,
        hidden: int,
        width: int,
        num_experts: int,
        top_k: int,
        *,
        group: Group,
        fsdp: str | None = None,
        score: Score = "softmax",
        router_options: dict[str, Any] | None = None,
        activation: ActivationName | Activation | ClampedSwiglu | Gated = "silu",
        use_bias: bool = False,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        if not isinstance(group, Group):
            raise TypeError(f"MoeMlp: group must be an open jax_ep.Group, got {checks.describe(group)}")
        sizes = {"hidden": hidden, "width": width, "num_experts": num_experts, "top_k": top_k}
        for name, size in sizes.items():  # first of all, because the cache of `_drawer` takes 8.0 for 8
            checks.check_int("MoeMlp", name, size)
        checks.check_one_of("MoeMlp", "score", score, Score)
        checks.check_bool("MoeMlp", "use_bias", use_bias)
        if fsdp is not None and (fsdp not in group.mesh.axis_names or fsdp in checks.axes_of(group.axis_name)):
            raise ValueError(f"MoeMlp: fsdp must be another axis of the mesh than the group's, got {fsdp!r}")
        if fsdp is not None and hidden % group.mesh.shape[fsdp]:
            parts = group.mesh.shape[fsdp]
            raise ValueError(f"MoeMlp: hidden must be a multiple of the {parts} devices along fsdp, got {hidden}")
        if wrong := options.keys() - _OPTIONS:
            raise TypeError(f"MoeMlp: options must be among {sorted(_OPTIONS)}, got {sorted(wrong)}")
        if num_experts % group.size:
            raise ValueError(f"MoeMlp: num_experts must be a multiple of the {group.size} ranks, got {num_experts}")
        self.group, self.top_k = group, top_k
        self.score: Score = score
        self.activation: ActivationName | Activation | ClampedSwiglu | Gated = activation
        self.router_options = nnx.static(tuple((router_options or {}).items()))  # hashable, as jit's cache needs
        self.options = nnx.static(tuple(options.items()))
        ep = group.axis_name

        def param(x: jax.Array, spec: P) -> nnx.Param:
            return nnx.Param(x, out_sharding=tuple(spec), mesh=group.mesh)

        def drawn(*shape: int, spec: P) -> nnx.Param:
            draw = _drawer(shape, jnp.dtype(param_dtype), NamedSharding(group.mesh, spec))
            return param(draw(rngs.params()), spec)

        def bias(*shape: int, spec: P) -> nnx.Param | None:
            if not use_bias:
                return None
            return param(jax.device_put(jnp.zeros(shape, param_dtype), NamedSharding(group.mesh, spec)), spec)

        self.router = drawn(hidden, num_experts, spec=P(fsdp))
        self.gate = drawn(num_experts, hidden, width, spec=P(ep, fsdp))
        self.up = drawn(num_experts, hidden, width, spec=P(ep, fsdp))
        self.down = drawn(num_experts, width, hidden, spec=P(ep, None, fsdp))
        self.router_bias = bias(num_experts, spec=P())
        self.gate_bias, self.up_bias = (bias(num_experts, width, spec=P(ep)) for _ in range(2))
        self.down_bias = bias(num_experts, hidden, spec=P(ep))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, MoeAux]:
        group, axes = self.group, self.group.mesh.axis_names
        route = sigmoid_top_k if self.score == "sigmoid" else softmax_top_k
        hidden, devices = self.router[...].shape[0], group.mesh.size
        if x.ndim < 2 or x.shape[-1] != hidden or x.shape[0] % devices:
            shape = f"[B, ..., {hidden}] where B is a multiple of the {devices} devices of the mesh"
            raise ValueError(f"MoeMlp: x must have shape {shape}, got {x.shape}")

        def per_device(
            x: jax.Array, router: jax.Array, bias: jax.Array | None, experts: Experts
        ) -> tuple[jax.Array, MoeAux]:
            tokens = x.reshape(-1, x.shape[-1])
            logits = tokens.astype(jnp.float32) @ router.astype(jnp.float32)
            if bias is not None:
                logits += bias.astype(jnp.float32)
            ids, weights = route(logits, self.top_k, **dict(self.router_options))
            out, stats = moe_mlp(tokens, ids, weights, experts, group=group, **dict(self.options))
            aux = MoeAux(
                balance_loss(logits, ids, score=self.score, axis_name=axes),
                z_loss(logits, axis_name=axes),
                expert_load(ids, logits.shape[1], axis_name=axes),
                jax.lax.psum(stats.dropped.sum(), axes),
            )
            return out.reshape(x.shape), aux

        def placed(x: jax.Array, spec: P) -> jax.Array:  # Auto axes need nothing
            return jax.sharding.reshard(x, NamedSharding(group.mesh, spec)) if explicit else x

        def cast(*params: nnx.Param | None) -> tuple[Any, ...]:
            return tuple(None if each is None else placed(each[...].astype(x.dtype), by_expert) for each in params)

        explicit = group.mesh.are_all_axes_explicit
        rows, by_expert = P(axes), P(group.axis_name)
        gate, up, down = cast(self.gate, self.up, self.down)
        biases = cast(self.gate_bias, self.up_bias, self.down_bias)
        experts = Experts(gate=gate, up=up, down=down, biases=biases, activation=self.activation)
        router_bias = None if self.router_bias is None else placed(self.router_bias[...], P())
        specs = {"in_specs": (rows, P(), P(), by_expert), "out_specs": (rows, P())}
        layer = jax.shard_map(per_device, mesh=group.mesh, **specs)
        out, aux = layer(placed(x, rows), placed(self.router[...], P()), router_bias, experts)
        return (placed(out, jax.typeof(x).sharding.spec) if explicit else out), aux
