"""Routers, balance of experts, and replicas of experts. The layer is `jax_ep.moe_mlp`."""

from jax_ep.nn.balance import LoadStats, balance_loss, balanced_bias, expert_load, load_stats, scalars, z_loss
from jax_ep.nn.replicas import ReplicaPlan, physical_ids, plan_replicas, replicate
from jax_ep.nn.routers import Routed, round_tokens, sigmoid_top_k, softmax_top_k, within_top_groups

__all__ = [
    "LoadStats", "ReplicaPlan", "Routed", "balance_loss", "balanced_bias", "expert_load", "load_stats",
    "physical_ids", "plan_replicas", "replicate", "round_tokens", "scalars", "sigmoid_top_k", "softmax_top_k",
    "within_top_groups", "z_loss",
]  # fmt: skip
