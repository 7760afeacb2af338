"""What the fused ops are told besides their arrays, and the activations that they know."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep.ops.moe.types import DispatchCall

Activation = Callable[[jax.Array], jax.Array]
# The right operand, or gate and up, or both in one array with gate in front; and the products by them.
Matrices = tuple[jax.Array, ...]

# Those of gated units (Shazeer, "GLU Variants Improve Transformer", 2020): SwiGLU, GEGLU by tanh, and ReGLU.
ActivationName = Literal["silu", "gelu", "relu"]
ACTIVATIONS: dict[ActivationName, Activation] = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}

# The names by which a policy of `jax.checkpoint` keeps products.
FIRST_PRODUCTS = "jax_ep_dispatch_ragged_dot"  # of dispatched rows, before the activation
LAST_PRODUCT = "jax_ep_ragged_dot_combine"  # before it is combined


class FirstCall(NamedTuple):
    """A call of `dispatch_ragged_dot`."""

    dispatch: DispatchCall
    activation: ActivationName | None  # None: the products themselves are wanted
    fused: bool = False  # by one kernel


def gate_and_up(products: Matrices) -> Matrices:
    """Of two products, or of one with the columns of gate in front."""
    return products if len(products) == 2 else tuple(jnp.split(products[0], 2, axis=1))


def activated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """activation(gate) * up, in the dtype of `gate` however the activation promotes."""
    return (activation(gate) * up).astype(gate.dtype)


def outcome(activation: ActivationName | None, products: Matrices) -> Any:
    """What `dispatch_ragged_dot` makes of its products."""
    return products if activation is None else activated(ACTIVATIONS[activation], *gate_and_up(products))
