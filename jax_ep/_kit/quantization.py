"""Where a user quantizes the products of a model by qwix, which replaces functions of jax.lax while the model runs."""

import importlib
import sys
from typing import Literal

import jax
from jax.typing import DTypeLike


def is_by_qwix(op: str, function: Literal["dot_general", "ragged_dot"], **arguments: object) -> bool:
    """Whether a rule of qwix quantizes the products of the module that runs here: then call `jax.lax.<function>` alone.

    Its derivative is then that of qwix, also where JAX takes it after the model has returned.

    Args:
      arguments: what the user may have given to choose another product.

    Raises:
      ValueError: there is such a rule, but its provider does not replace the function, or another product is chosen.
    """
    if "qwix" not in sys.modules:
        return False
    rule = importlib.import_module("qwix.pallas").get_current_rule(function)
    if rule is None or rule.weight_qtype is None:
        return False
    ways_out = "leave this module out of the rule, or give moe_mlp a function as product="
    if getattr(jax.lax, function).__code__.co_name == function:
        raise ValueError(
            f"{op}: products must be those of jax.lax.{function} for a rule of qwix, whose provider does not replace "
            f"this function: {ways_out}, such as qwix.ragged_dot"
        )
    for name, value in arguments.items():
        if value not in (None, "auto", "xla"):
            raise ValueError(f"{op}: {name} must not be given where qwix quantizes products, got {value!r}: {ways_out}")
    return True


def dot(
    left: jax.Array, right: jax.Array, contracted: tuple[int, int] = (1, 0), dtype: DTypeLike | None = None
) -> jax.Array:
    """A product of two matrices, by the function that qwix replaces: `jnp.dot` and `jax.lax.dot` do not always call it.

    Args:
      contracted: an axis of each.
      dtype: of the result; by default that of the operands.
    """
    axes = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=dtype)
