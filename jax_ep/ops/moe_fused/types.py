"""What the fused ops are told besides their arrays, and the activations that they know."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from jax_ep.ops.moe.types import DispatchCall

Activation = Callable[[jax.Array], jax.Array]
Matrices = tuple[jax.Array, ...]  # the right operand, or gate and up

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


def activated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """activation(gate) * up, in the dtype of `gate` however the activation promotes."""
    return (activation(gate) * up).astype(gate.dtype)


def outcome(activation: ActivationName | None, products: Matrices) -> Any:
    """What `dispatch_ragged_dot` makes of its products."""
    return products if activation is None else activated(ACTIVATIONS[activation], *products)
