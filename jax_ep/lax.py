"""Ops with the signatures and semantics of `jax.lax`: change one import."""

from jax_ep.ops.matmul.api import ragged_dot, ragged_dot_general
from jax_ep.ops.ragged.api import ragged_all_to_all

__all__ = [
    "ragged_all_to_all", "ragged_dot", "ragged_dot_general",
]  # fmt: skip
