"""Routers, what balances experts, and replicas of experts. The layer is `jax_ep.moe_mlp`."""

from jax_ep.nn.balance import (
    LoadStats as LoadStats,
    balance_loss as balance_loss,
    balanced_bias as balanced_bias,
    expert_load as expert_load,
    load_stats as load_stats,
    scalars as scalars,
    z_loss as z_loss,
)
from jax_ep.nn.replicas import (
    ReplicaPlan as ReplicaPlan,
    physical_ids as physical_ids,
    plan_replicas as plan_replicas,
    replicate as replicate,
)
from jax_ep.nn.routers import (
    Routed as Routed,
    round_tokens as round_tokens,
    sigmoid_top_k as sigmoid_top_k,
    softmax_top_k as softmax_top_k,
    within_top_groups as within_top_groups,
)
