"""What the fused ops are told besides their arrays, and the activations that they know."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._kit import checks
from jax_ep._kit.float8 import Float8Rows, Float8Weights
from jax_ep.group import Group
from jax_ep.ops.moe.types import DispatchCall

Activation = Callable[[jax.Array], jax.Array]
Rows = jax.Array | Float8Rows
Matrix = jax.Array | Float8Weights
# The right operand, or gate and up, or both in one array with gate in front.
Matrices = tuple[Matrix, ...]
Products = tuple[jax.Array, ...]  # by each of them
Precision = Literal["float8"]

# Those of gated units (Shazeer, "GLU Variants Improve Transformer", 2020): SwiGLU, GEGLU by tanh, and ReGLU.
ActivationName = Literal["silu", "gelu", "relu"]
ACTIVATIONS: dict[ActivationName, Activation] = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}

# The names by which a policy of `jax.checkpoint` keeps products.
FIRST_PRODUCTS = "jax_ep_dispatch_ragged_dot"  # of dispatched rows, and what an activation makes of them
LAST_PRODUCT = "jax_ep_ragged_dot_combine"  # before it is combined: where JAX differentiates the chain


class FirstCall(NamedTuple):
    """A call of `dispatch_ragged_dot`."""

    dispatch: DispatchCall
    activation: ActivationName | None  # None: the products themselves are wanted
    in_float8: bool  # products of rows that came in float8 and of matrices that are quantized, if not yet


class Counted(NamedTuple):
    """What a `Routing` says of a dispatch besides where rows are."""

    counts: jax.Array
    dropped: jax.Array
    invalid: jax.Array


class LastCall(NamedTuple):
    """A call of `ragged_dot_combine`."""

    group: Group
    in_float8: bool  # a product of operands that are quantized, if not yet


def wants_float8(op: str, precision: Any) -> bool:
    """Whether `precision` asks for products in float8. Raises ValueError where it is neither that nor None."""
    if precision is not None and not (isinstance(precision, str) and precision == "float8"):
        raise ValueError(f"{op}: precision must be 'float8' or None, got {precision!r}")
    return precision is not None


def gate_and_up(products: Products) -> Products:
    """Gate and up, of two products or of one with the columns of gate in front."""
    return products if len(products) == 2 else tuple(jnp.split(products[0], 2, axis=1))


def activated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """activation(gate) * up, in the dtype of `gate` however the activation promotes."""
    return (activation(gate) * up).astype(gate.dtype)


def elementwise(op: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's function of arrays of one shape, which raises ValueError where it returns another one."""

    def checked(*operands: jax.Array) -> Any:
        made, shape = function(*operands), operands[0].shape
        if not isinstance(made, checks.ARRAYS) or made.shape != shape:
            raise ValueError(
                f"{op}: {name} must return an array of the shape {shape} that it is given, got {checks.describe(made)}"
            )
        return made

    return checked


def outcome(activation: ActivationName | None, products: Products) -> Any:
    """What `dispatch_ragged_dot` makes of its products."""
    return products if activation is None else activated(ACTIVATIONS[activation], *gate_and_up(products))
