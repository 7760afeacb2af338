"""The experts of a layer, and the elementwise unit between their products."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._kit import checks
from jax_ep._kit.float8 import Float8Weights

Activation = Callable[[jax.Array], jax.Array]
Matrix = jax.Array | Float8Weights
Biases = tuple[jax.Array | None, jax.Array | None, jax.Array | None]  # of gate, up, down

# Those that the GEMM core knows in gated units (Shazeer, "GLU Variants Improve Transformer", 2020): SwiGLU, GEGLU by
# tanh, and ReGLU.
ActivationName = Literal["silu", "gelu", "relu"]
ACTIVATIONS: dict[ActivationName, Activation] = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


@dataclasses.dataclass(frozen=True)
class Gated:
    """An activation of two arguments: `function(gate, up)` of the products, elementwise, function(0, 0) finite."""

    function: Callable[[jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experts:
    """The matrices of a rank's own experts: a pytree, so under `jax.shard_map` the one spec `P(axis_name)` fits it.

    An expert makes of a row x: (activation(x gate) * (x up)) down.

    Attributes:
      gate: [E / R, H, F] in the dtype of the tokens, or `Float8Weights` of that shape. None: experts have two matrices,
        and make activation(x up) down.
      up: [E / R, H, F], as `gate`. None: `gate` holds both, [E / R, H, 2 F] with gate in front: they are one product.
      down: [E / R, F, H], as `gate`.
      biases: of gate [E / R, F], of up [E / R, F] and of down [E / R, H], each an array in the dtype of the tokens or
        None; added to the products.
      activation: static. "silu", "gelu" or "relu", which stand for `jax.nn.silu`, `jax.nn.gelu` (by tanh) and
        `jax.nn.relu`; an elementwise function with activation(0) finite; or `Gated(function)` of both products. A
        function is compared by identity: define it once, or `jax.jit` compiles again.
    """

    gate: Any
    up: Any
    down: Any
    biases: Biases | None = dataclasses.field(default=None, kw_only=True)
    activation: ActivationName | Activation | Gated = dataclasses.field(
        default="silu", kw_only=True, metadata={"static": True}
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the matrices that rows are multiplied by: gate and up, or the one that there is."""
        return tuple(name for name in ("gate", "up") if getattr(self, name) is not None)

    @property
    def first(self) -> tuple[Any, ...]:
        """The matrices of these names."""
        return tuple(getattr(self, name) for name in self.names)


class Unit(NamedTuple):
    """What experts make of their first products: static."""

    function: Callable[..., jax.Array]  # of the products by gate and up, or of the one by up; elementwise
    operands: int  # how many products that takes
    splits: bool  # gate and up come as one product
    known: ActivationName | None  # by which name the GEMM core knows it

    def __call__(
        self,
        products: tuple[jax.Array, ...],
        biases: tuple[jax.Array | None, ...],
        group_sizes: jax.Array,
        parameters: tuple[jax.Array, ...] = (),
    ) -> jax.Array:
        """[C, F] in the dtype of the products, however the function promotes.

        Args:
          biases: of gate and up, or of the one product.
          parameters: what `closed_over` found.
        """
        parts = jnp.split(products[0], 2, axis=1) if self.splits else products
        parts = [with_bias(part, bias, group_sizes) for part, bias in zip(parts, biases, strict=True)]
        return self.function(*parts, *parameters).astype(products[0].dtype)


def unit_of(op: str, experts: Experts) -> Unit:
    """Raises ValueError or TypeError, naming `op`, where the activation is none, or none of such experts.

    A function of the user's raises ValueError when it is called, if it returns another shape than it was given.
    """
    splits: bool = experts.up is None
    activation: Any = experts.activation
    if isinstance(activation, Gated):
        if experts.gate is None:
            raise ValueError(f"{op}: experts.activation must be of one argument where experts.gate is None, got Gated")
        if not callable(activation.function):
            raise TypeError(
                f"{op}: experts.activation must be Gated of a function of two arrays, got {activation.function!r}"
            )
        return Unit(_elementwise(op, activation.function), 2, splits, None)
    if isinstance(activation, str):
        checks.check_one_of(op, "experts.activation", activation, tuple(ACTIVATIONS))
    elif not callable(activation):
        names = ", ".join(map(repr, ACTIVATIONS))
        raise TypeError(f"{op}: experts.activation must be a function, Gated or one of {names}, got {activation!r}")
    known: ActivationName | None = next(
        (name for name, function in ACTIVATIONS.items() if activation in (name, function)), None
    )
    given: Any = activation
    function = ACTIVATIONS[known] if known is not None else _elementwise(op, given)
    if experts.gate is None:
        return Unit(function, 1, splits=False, known=None)

    def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
        return function(gate) * up

    return Unit(gated, 2, splits, known)


def _elementwise(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*operands: jax.Array) -> Any:
        made, shape = function(*operands), operands[0].shape
        if not isinstance(made, checks.ARRAYS) or made.shape != shape:
            raise ValueError(
                f"{op}: experts.activation must return an array of the shape {shape} that it is given, got "
                f"{checks.describe(made)}"
            )
        return made

    return checked


def closed_over(unit: Unit, product: jax.ShapeDtypeStruct) -> tuple[Unit, tuple[jax.Array, ...]]:
    """A unit that closes over nothing that is differentiated, and what it closed over, its parameters: a
    `jax.custom_jvp` differentiates operands only.

    Args:
      product: the type of its operands, [C, F].
    """
    if unit.known is not None:
        return unit, ()
    function, parameters = jax.closure_convert(unit.function, *[product] * unit.operands)
    return (unit._replace(function=function), tuple(parameters)) if parameters else (unit, ())


def with_bias(product: jax.Array, bias: jax.Array | None, group_sizes: jax.Array) -> jax.Array:
    """Each row [C, N] plus the bias [E / R, N] of its expert."""
    return product if bias is None else product + bias_of_rows(bias, group_sizes, product.shape[0]).astype(bias.dtype)


def bias_of_rows(bias: jax.Array, group_sizes: jax.Array, rows: int) -> jax.Array:
    """[C, N] float32: the bias [E / R, N] of each row's expert, and 0 behind the last expert's.

    float32, so that the gradient sums up in it. What rows behind the last one hold does not come into that.
    """
    experts = bias.shape[0]
    sizes = jnp.append(group_sizes, rows - jnp.sum(group_sizes, dtype=group_sizes.dtype))
    expert = jnp.repeat(jnp.arange(experts + 1), sizes, total_repeat_length=rows)
    return bias.astype(jnp.float32).at[expert].get(mode="fill", fill_value=0)
