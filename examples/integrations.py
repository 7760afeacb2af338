"""`jax_ep.moe_mlp` in the layers of MaxText, tunix and EasyDeL: one line in a program, and none in their trees.

    integrations.patch("maxtext", jax_ep.Group(mesh, "expert"))  # before the model's first call

Each function below takes the place of one method, with its arguments and results. Routing, losses, biases and
activations remain the project's own, so its options for them still apply.
"""

import dataclasses
import functools
import importlib
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

import jax_ep

BATCH_AXES = ("dp", "data", "fsdp", "expert", "ep")  # a batch is spread over those that the mesh has and that divide it
KEPT_AS = {  # what moe_mlp names for jax.checkpoint, and what MaxText's options of remat call the same
    "jax_ep_dispatch": ("moe_x_sorted",),
    "jax_ep_products": ("mlpwi_0", "moe_mlpwi_0", "moe_mlpwi_1"),
    "jax_ep_combine": ("mlpwo", "moe_mlpwo"),
}
open_group = functools.cache(jax_ep.Group)  # a group per mesh and axis, for docs/maxtext.patch


def axes_of(*parts: Any) -> tuple[str, ...]:
    """The mesh axes in parts of a PartitionSpec."""
    return tuple(axis for part in parts if part for axis in ((part,) if isinstance(part, str) else part))


def dividing(axes: tuple[str, ...], size: int, mesh: Mesh) -> tuple[str, ...]:
    """Goes through `axes` in order, and keeps an axis of the mesh if it and those kept before it divide `size`."""
    kept: tuple[str, ...] = ()
    for axis in axes:
        ranks = mesh.shape.get(axis)
        if ranks and size % ranks == 0:
            kept, size = (*kept, axis), size // ranks
    return kept


def experts_of(
    group: jax_ep.Group,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    experts: jax_ep.Experts,
    rows: P | None = None,
    split: tuple[str, ...] = (),
    shard: Any = lambda x, spec: x,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[B, S, D], [B, S, K] twice -> the sums [B, S, D]; and of each rank its load and what it dropped.

    A rank's load is given relative to the even load.

    Args:
      rows: the axes over which B and S are spread; by default B over those of `BATCH_AXES` that divide it. If no axis
        of the group is among them, its ranks share their tokens, and `wire` must be None.
      split: the axes over which the experts' inner width is spread, and D of the sums.
      shard: places an operand; a mesh with Explicit axes needs it.
    """
    owners, rows = group.axis_name, P(dividing(BATCH_AXES, len(x), group.mesh)) if rows is None else rows
    shared = not {*axes_of(owners)} & {*axes_of(*rows)}
    width, biases = split or None, experts.biases
    specs = dataclasses.replace(
        experts,
        gate=P(owners, None, width),
        up=P(owners, None, width),
        down=P(owners, width),
        biases=biases and tuple(b if b is None else P(owners, width if i < 2 else None) for i, b in enumerate(biases)),
    )

    def layer(x: jax.Array, ids: jax.Array, weights: jax.Array, experts: jax_ep.Experts) -> Any:
        tokens, chosen, shares = (a.reshape(-1, a.shape[-1]) for a in (x, ids, weights))
        out, stats = jax_ep.moe_mlp(tokens, chosen, shares, experts, group=group, shared_tokens=shared, **options)
        out, even = out.reshape(x.shape), ids.size / (group.size if shared else 1)
        if split:
            out = jax.lax.psum_scatter(out, split, scatter_dimension=2, tiled=True)
        return out, stats.counts.sum(keepdims=True) / even, stats.dropped

    in_specs = (rows, rows, rows, specs)
    operands = jax.tree.map(lambda spec, a: shard(a, spec), in_specs, (x, ids, weights, experts))
    ranks = P((*axes_of(*rows), *(axes_of(owners) if shared else ())))
    out_specs = (P(*(*rows, None, None)[:2], width), ranks, ranks)
    return jax.shard_map(layer, mesh=group.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*operands)


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

    Arrays are spread by MaxText's logical rules; `ragged_buffer_factor` is the capacity. qwix quantizes products where
    one of its rules names `ragged_dot`. `options` go to `moe_mlp`: precision="float8", wire.
    """
    moe, config = sys.modules[self.get_topk.__module__], self.config
    if self.quant is not None and "precision" not in options:
        raise NotImplementedError(
            f"jax_ep in MaxText takes quantization={config.quantization!r} with use_qwix_quantization=true alone, "
            'or patch("maxtext", group, precision=...): None, or "float8" for experts'
        )
    if config.moe_dropless_fallback == "layer":
        raise NotImplementedError("jax_ep in MaxText takes moe_dropless_fallback='step', got 'layer'")
    rules = self._logical_to_mesh_axes(("activation_batch", "activation_norm_length"))
    rows = P(*(dividing(axes_of(part), size, group.mesh) for part, size in zip(rules, inputs.shape, strict=False)))
    split = axes_of(*self._logical_to_mesh_axes(("mlp_no_fsdp",)))
    split = tuple(axis for axis in split if axis not in axes_of(*rows))
    shard = self._maybe_shard_with_pspec
    gate_logits = shard(gate_logits, rows)
    pre_bias_logits = None if pre_bias_logits is None else shard(pre_bias_logits, rows)
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
        biases=None if wo_bias is None else (w0_bias, w1_bias, wo_bias / math.prod(group.mesh.shape[a] for a in split)),
        activation=config.mlp_activations[0] if plain else jax_ep.Gated(self.apply_ffn_activation),
    )
    if early := config.decoder_block.value == "llama4":
        weights = jax.nn.sigmoid(weights.astype(jnp.float32))
    force_dropless = getattr(self, "force_dropless", False)
    if force_dropless:
        options = {name: x for name, x in options.items() if name not in ("capacity", "capacity_factor", "on_overflow")}
    elif (factor := self.get_ragged_buffer_factor()) > 0:
        options = {"capacity_factor": factor, "on_overflow": "drop", **options}
    operands = (inputs, ids, weights, experts, rows, split, shard)
    out, loads, dropped = experts_of(group, *operands, weigh_inputs=early, **options)
    self.sow(moe.nnx.Intermediate, "moe_has_overflow", dropped > 0)
    if config.moe_log_max_load_ratio:
        self.sow(moe.nnx.Intermediate, "moe_max_load_ratio", loads.max())
    if config.log_required_ragged_buffer_factor:
        self.sow(moe.nnx.Intermediate, "moe_required_rbf", loads.max())
    return out, loss, bias_updates


def kept_by_maxtext(policy: Any) -> Any:
    """A policy of `NNXDecoder.get_remat_policy` that keeps what `moe_mlp` names, by MaxText's names of the same."""

    def kept(primitive: Any, *avals: Any, **params: Any) -> Any:
        otherwise = policy(primitive, *avals, **params)
        names = KEPT_AS.get(params.get("name", ""), ())
        found = (policy(primitive, *avals, **params | {"name": name}) for name in names)
        return next((answer for answer in found if answer != otherwise), otherwise)

    return policy and kept


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
    biases = None if wi_bias is None else (wi_bias, wu_bias, wd_bias)
    experts = jax_ep.Experts(
        gate=wi_kernel.astype(self.dtype),
        up=wu_kernel.astype(self.dtype),
        down=wd_kernel.astype(self.dtype),
        biases=jax.tree.map(lambda b: b.astype(self.dtype), biases),
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
    if project == "maxtext":
        decoder = importlib.import_module("maxtext.layers.nnx_decoders").NNXDecoder
        theirs = getattr(decoder.get_remat_policy, "theirs", decoder.get_remat_policy)  # also if it is patched again

        def get_remat_policy(self: Any) -> Any:
            return kept_by_maxtext(theirs(self))

        setattr(get_remat_policy, "theirs", theirs)  # noqa: B010
        decoder.get_remat_policy = get_remat_policy
