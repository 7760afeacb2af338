"""`jax_ep.moe_mlp` in the layers of MaxText, tunix and EasyDeL: one line in a program, and none in their trees.

    integrations.patch("maxtext", jax_ep.Group(mesh, "expert"))  # before the model's first call

Each function below takes the place of one method, with its arguments and results. Routing, losses, biases and
activations remain the project's own, so that whatever its options say of them holds. `python examples/integrations.py`
prints how many lines each has, and how many the method that it replaces, where the project is installed.
"""

import functools
import importlib
import inspect
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_ep

BATCH_AXES = ("dp", "data", "fsdp", "expert", "ep")  # of meshes: a batch is spread over those that there are


def experts_of(
    group: jax_ep.Group, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: jax_ep.Experts, **options: Any
) -> tuple[jax.Array, jax.Array, int]:
    """[B, S, D], [B, S, K] twice -> the sums [B, S, D]; the most rows that a rank was sent; how many it has room for.

    Where the axes do not divide a batch, as in decoding, each rank of the group has all its tokens.
    """
    sizes, own = group.mesh.shape, {group.axis_name} if isinstance(group.axis_name, str) else {*group.axis_name}
    axes = tuple(axis for axis in BATCH_AXES if axis in sizes)
    if shared := bool(len(x) % math.prod(sizes[axis] for axis in axes)):
        axes = tuple(axis for axis in axes if axis not in own and len(x) % sizes[axis] == 0)[:1]
    each = ids.size // ids.shape[-1] // math.prod(sizes[axis] for axis in axes)
    room = each * min(ids.shape[-1], len(experts.down) // group.size) * (1 if shared else group.size)
    room = min(room, options.get("capacity") or room)

    def layer(x: jax.Array, ids: jax.Array, weights: jax.Array, experts: jax_ep.Experts) -> Any:
        tokens, chosen, shares = (a.reshape(-1, a.shape[-1]) for a in (x, ids, weights))
        out, stats = jax_ep.moe_mlp(tokens, chosen, shares, experts, group=group, shared_tokens=shared, **options)
        return out.reshape(x.shape), jax.lax.pmax(stats.counts.sum(), group.mesh.axis_names)

    specs = (*[P(axes or None)] * 3, P(group.axis_name))
    mapped = jax.shard_map(layer, mesh=group.mesh, in_specs=specs, out_specs=(specs[0], P()), check_vma=False)
    return *mapped(x, ids, weights, experts), room


def maxtext(
    self: Any,
    inputs: jax.Array,
    gate_logits: jax.Array,
    pre_bias_logits: jax.Array | None,
    w0_kernel: jax.Array,
    w1_kernel: jax.Array,
    wo_kernel: jax.Array,
    w0_bias: jax.Array | None,
    w1_bias: jax.Array | None,
    wo_bias: jax.Array | None,
    input_ids: jax.Array | None = None,
    forced_routed_experts: jax.Array | None = None,
    *,
    group: jax_ep.Group,
    **options: Any,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """`RoutedMoE.sparse_matmul` of MaxText 0.2.5: the sums, the balance loss, and the update of the router's bias.

    Also sows the rows that a rank received at most, and for how many it has room, as its TransformerEngine path does.
    `options` go to `moe_mlp`: capacity, precision="float8", wire.
    """
    moe, config = sys.modules[self.get_topk.__module__], self.config
    weights, ids = self.get_topk(gate_logits, pre_bias_logits, self.rngs, input_ids, forced_routed_experts)
    scores, loss, bias_updates = gate_logits if pre_bias_logits is None else pre_bias_logits, None, None
    if config.load_balance_loss_weight > 0 and moe.uses_megatron_seq_aux_loss(config):
        loss = self.megatron_seq_aux_loss(scores)
    elif config.load_balance_loss_weight > 0 and not self.is_hash_routing:
        loss = self.load_balance_loss(ids, jax.nn.softmax(scores.astype(jnp.float32)).astype(self.dtype))
    if self.should_update_load_balance():
        bias_updates = moe.calculate_expert_counts(ids, self.num_experts)
        if config.gradient_accumulation_steps <= 1:
            bias_updates = moe.load_balance_updates_from_counts(
                bias_updates, self.num_experts, config.routed_bias_update_rate
            )
    plain = config.mlp_activations[0] in ("silu", "gelu", "relu") and config.mlp_activations_limit <= 0
    experts = jax_ep.Experts(
        gate=w0_kernel.astype(self.dtype),
        up=w1_kernel.astype(self.dtype),
        down=wo_kernel.astype(self.dtype),
        biases=None if w0_bias is None else (w0_bias, w1_bias, wo_bias),
        activation=config.mlp_activations[0] if plain else jax_ep.Gated(self.apply_ffn_activation),
    )
    if early := config.decoder_block.value == "llama4":
        weights = jax.nn.sigmoid(weights.astype(jnp.float32))
    out, received, room = experts_of(group, inputs, ids, weights, experts, weigh_inputs=early, **options)
    self.sow(moe.nnx.Intermediate, "te_moe_total_recv_tokens", received)
    self.sow(moe.nnx.Intermediate, "te_moe_recv_capacity_per_rank", jnp.int32(room))
    return out, loss, bias_updates


def tunix(self: Any, x: jax.Array, use_megablox: bool = True, *, group: jax_ep.Group, **options: Any) -> jax.Array:
    """`MoELayer.__call__` of Qwen3 in tunix 0.1.7."""
    weights, ids = jax.lax.top_k(jax.nn.softmax(self.router(x).astype(jnp.float32)), self.experts_per_tok)
    weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(self.dtype)
    gate, up, down = (p[...].astype(self.dtype) for p in (self.gate_proj, self.up_proj, self.down_proj))
    experts = jax_ep.Experts(gate=gate, up=up, down=down)
    return experts_of(group, x.astype(self.dtype), ids, weights, experts, **options)[0]


def easydel(
    self: Any,
    hidden_state: jax.Array,
    gate_layer: Any,
    wi_kernel: jax.Array,
    wu_kernel: jax.Array,
    wd_kernel: jax.Array,
    wi_bias: jax.Array | None = None,
    wu_bias: jax.Array | None = None,
    wd_bias: jax.Array | None = None,
    ffn_activation: Any = None,
    gate_hidden_state: jax.Array | None = None,
    hooks: Any = None,
    *,
    act_fn: Any,
    group: jax_ep.Group,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """`BaseMoeModule._sparse_moe_call` of EasyDeL 0.3.0, but for hooks that change rows: the sums, and the logits."""
    moe, hooks = sys.modules[self._moe_call_dense.__module__], self.moe_hooks if hooks is None else hooks
    for name in ("refine_inputs_hook", "scale_replicated_inputs", "output_weights_hook"):
        if getattr(hooks, name, None) is not None:
            raise NotImplementedError(f"jax_ep in EasyDeL takes no {name}")

    def hooked(name: str, x: jax.Array, otherwise: Any = lambda x: x) -> jax.Array:
        return (getattr(hooks, name, None) or otherwise)(x)

    x = hidden_state.astype(self.dtype)
    seen = x if gate_hidden_state is None else gate_hidden_state.astype(self.dtype)
    logits = hooked("after_gate", gate_layer(hooked("before_gate", seen).reshape(-1, x.shape[-1])))
    scores = hooked(
        "normalize_gate_logits", logits, lambda x: jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)
    )
    weights, ids = moe.get_experts_location(
        gate_logits=hooked("before_topk", scores),
        pre_bias_logits=None,
        select_hook=getattr(hooks, "select_hook", None),
        refine_weights_hook=getattr(hooks, "refine_weights_hook", None),
        num_experts_per_tok=self.num_experts_per_tok,
    )
    experts = jax_ep.Experts(
        gate=wi_kernel.astype(self.dtype),
        up=wu_kernel.astype(self.dtype),
        down=wd_kernel.astype(self.dtype),
        biases=None if wi_bias is None else (wi_bias, wu_bias, wd_bias),
        activation=act_fn if ffn_activation is None else jax_ep.Gated(ffn_activation),
    )
    ids, weights = (a.reshape(*x.shape[:2], -1) for a in (ids, weights))
    return experts_of(group, x, ids, weights, experts, **options)[0], logits


METHODS = {
    maxtext: ("maxtext.layers.moe", "RoutedMoE", "sparse_matmul"),
    tunix: ("tunix.models.qwen3.model", "MoELayer", "__call__"),
    easydel: ("easydel.layers.moe._moe_module", "BaseMoeModule", "_sparse_moe_call"),
}


def patch(project: str, group: jax_ep.Group, **options: Any) -> None:
    """Puts a function of this file in the place of the project's method."""
    [(function, (module, owner, method))] = [item for item in METHODS.items() if item[0].__name__ == project]
    replacement = functools.partialmethod(function, group=group, **options)
    setattr(getattr(importlib.import_module(module), owner), method, replacement)


def main() -> int:
    for function, (module, owner, method) in METHODS.items():
        try:
            theirs = str(
                len(inspect.getsourcelines(getattr(getattr(importlib.import_module(module), owner), method))[0])
            )
        except ImportError:
            theirs = "not installed"
        ours = len(inspect.getsourcelines(function)[0])
        print(f"{function.__name__}: {ours} lines for {owner}.{method} ({theirs}); 1 line in a program, 0 in its tree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
