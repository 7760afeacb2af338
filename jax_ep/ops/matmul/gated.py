"""Gated units: elementwise functions of the products with gate and up. Kernels compute them with these products."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._kit import checks

ActivationName = Literal["silu", "gelu", "relu", "clamped_swiglu"]

# SwiGLU, GEGLU by tanh, and ReGLU (Shazeer, "GLU Variants Improve Transformer", 2020) apply these to the gate.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
}


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """The gated unit of GPT-OSS: (clip(up, -limit, limit) + 1) * g * sigmoid(slope * g), with g = min(gate, limit).

    Use an instance as the `activation` of `Experts`, or the name "clamped_swiglu" for the default values.

    Attributes:
      limit: a positive float. Products beyond it have no gradient.
      slope: a float.
    """

    limit: float = 7.0
    slope: float = 1.702

    def __post_init__(self) -> None:
        for name in ("limit", "slope"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"ClampedSwiglu: {name} must be a float, got {checks.describe(value)}")
            object.__setattr__(self, name, float(value))
        if not 0 < self.limit < math.inf:
            raise ValueError(f"ClampedSwiglu: limit must be positive and finite, got {self.limit}")
        if not math.isfinite(self.slope):
            raise ValueError(f"ClampedSwiglu: slope must be finite, got {self.slope}")

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        # Selections keep NaN, and the gradient at the limit, as torch.clamp does.
        gate = jnp.where(gate > self.limit, self.limit, gate)
        up = jnp.where(up > self.limit, self.limit, jnp.where(up < -self.limit, -self.limit, up))
        return (up + 1) * (gate * jax.nn.sigmoid(self.slope * gate))


class KnownUnit(NamedTuple):
    """A gated unit that kernels support: `function` of gate and up, and its settings in the CUDA kernels."""

    function: Callable[[jax.Array, jax.Array], jax.Array]
    activation: str
    limit: float = 0.0
    slope: float = 0.0


def _times_up(activation: str) -> KnownUnit:
    function = ACTIVATIONS[activation]
    return KnownUnit(lambda gate, up: function(gate) * up, activation)


_KNOWN = {name: _times_up(name) for name in ACTIVATIONS}


def known_unit(activation: object) -> KnownUnit | None:
    """The unit of this name, function of `jax.nn`, or `ClampedSwiglu`. None if kernels do not support it."""
    if activation == "clamped_swiglu":
        activation = ClampedSwiglu()
    if isinstance(activation, ClampedSwiglu):
        return KnownUnit(activation, "clamped_swiglu", activation.limit, activation.slope)
    return next((_KNOWN[name] for name, function in ACTIVATIONS.items() if activation in (name, function)), None)
