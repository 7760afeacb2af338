"""The fused ops in plain jax.numpy and jax.lax: `implementation="xla"`. JAX itself differentiates them."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_ep.group import Group
from jax_ep.ops.matmul.api import plain_ragged_dot
from jax_ep.ops.moe.api import combine_by_xla, dispatch_by_xla
from jax_ep.ops.moe.types import Dispatched, Routing
from jax_ep.ops.moe_fused.types import FIRST_PRODUCTS, LAST_PRODUCT, FirstCall, Matrices, outcome


def dispatch_multiply(
    call: FirstCall, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array, rhs: Matrices
) -> tuple[Any, Dispatched]:
    dispatched = dispatch_by_xla(call.group, call.config, tokens, expert_ids, weights)
    products = tuple(plain_ragged_dot(dispatched.tokens, matrix, dispatched.group_sizes) for matrix in rhs)
    return outcome(call.activation, checkpoint_name(products, FIRST_PRODUCTS)), dispatched


def multiply_combine(group: Group, lhs: jax.Array, rhs: jax.Array, routing: Routing) -> jax.Array:
    product = checkpoint_name(plain_ragged_dot(lhs, rhs, routing.group_sizes), LAST_PRODUCT)
    return combine_by_xla(group, product, routing)
