"""Ops with the signatures and semantics of `jax.lax`: change one import."""

from jax_ep.ops.matmul.api import ragged_dot as ragged_dot, ragged_dot_general as ragged_dot_general
from jax_ep.ops.ragged.api import ragged_all_to_all as ragged_all_to_all
