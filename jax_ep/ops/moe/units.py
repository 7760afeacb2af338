"""The experts of a layer, and the elementwise unit between their products."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jax_ep._kit import checks, vary
from jax_ep._kit.checks import PyTree
from jax_ep._kit.float8 import Float8Weights
from jax_ep._kit.linear import linear
from jax_ep._kit.sums import Segments, sum_segments
from jax_ep.ops.matmul.gated import ACTIVATIONS, ActivationName, ClampedSwiglu, KnownUnit, known_unit
from jax_ep.ops.moe.layout import expert_of_rows

Activation = Callable[[jax.Array], jax.Array]
Matrix = jax.Array | Float8Weights
Biases = tuple[jax.Array | None, jax.Array | None, jax.Array | None]  # of gate, up, down
NO_BIASES: Biases = (None, None, None)


@dataclasses.dataclass(frozen=True)
class Gated:
    """An activation `function(gate, up)` of both products, elementwise and smooth at (1, 1)."""

    function: Callable[[jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Experts:
    """The matrices of a rank's own experts: a pytree, so under `jax.shard_map` the one spec `P(axis_name)` fits it.

    The output of an expert for a row x is (activation(x gate) * (x up)) down. In `moe_mlp(shared_experts=)` all
    arrays lack the first axis.

    Attributes:
      gate: [E / R, H, F] in the dtype of the tokens, or `Float8Weights` of that shape. None: experts have two matrices,
        and the output is activation(x up) down.
      up: [E / R, H, F], as `gate`. None: `gate` holds both matrices, [E / R, H, 2 F] with gate in front.
      down: [E / R, F, H], as `gate`.
      biases: of gate [E / R, F], of up [E / R, F] and of down [E / R, H], each an array in the dtype of the tokens or
        None. They are added to the products.
      activation: static. "silu", "gelu" (by tanh) or "relu" of `jax.nn`; an elementwise function that is smooth at 1,
        its operand in rows without a token; or a function of both products: `ClampedSwiglu()`, its name
        "clamped_swiglu", or `Gated(function)`. Functions are compared by identity: define a function once, or `jax.jit`
        compiles again.
    """

    gate: PyTree
    up: PyTree
    down: PyTree
    biases: Biases | None = None
    activation: ActivationName | Activation | ClampedSwiglu | Gated = dataclasses.field(
        default="silu", metadata={"static": True}
    )

    def __repr__(self) -> str:
        return f"Experts({checks.described(**vars(self))})"

    @property
    def first_names(self) -> tuple[str, ...]:
        """The names of the matrices that multiply dispatched rows: "gate" and "up", or one of them."""
        return tuple(name for name in ("gate", "up") if getattr(self, name) is not None)

    @property
    def first_matrices(self) -> tuple[PyTree, ...]:
        return tuple(getattr(self, name) for name in self.first_names)


def product_biases(experts: Experts) -> tuple[tuple[jax.Array | None, ...], jax.Array | None]:
    """The biases that belong to each of `experts.first_matrices`, each [..., N] or None, and the bias of down."""
    gate, up, down = experts.biases or NO_BIASES
    if experts.gate is None:
        return (up,), down
    if experts.up is not None:
        return (gate, up), down
    some = up if gate is None else gate
    if some is None:
        return (None,), down
    both = [jnp.zeros_like(some) if bias is None else bias for bias in (gate, up)]
    return (jnp.concatenate(both, axis=-1),), down


class Unit(NamedTuple):
    """The elementwise function between the first products of experts and the product by down: static."""

    function: Callable[..., jax.Array]  # elementwise, of the products by gate and up, or of the product by up
    operands: int  # of the function
    splits: bool  # gate and up come as one product
    known: KnownUnit | None  # if kernels of gated products support it

    def __call__(self, products: tuple[jax.Array, ...], parameters: tuple[jax.Array, ...] = ()) -> jax.Array:
        """[C, F] in the dtype of the products.

        Args:
          products: with their biases.
          parameters: as returned by `closed_over`.
        """
        parts = jnp.split(products[0], 2, axis=1) if self.splits else products
        # Without rows, `jnp.where` has the type of its second operand, which may vary over no axis.
        made, _ = vary.vary_alike(None, self.function(*parts, *parameters), parts)
        return made.astype(products[0].dtype)


def unit_of(op: str, experts: Experts, name: str = "experts") -> Unit:
    """The unit of `experts`, which errors call `name`.

    Raises ValueError or TypeError if the activation is wrong or does not fit the matrices. A call of the unit raises
    ValueError if a user's function changes the shape.
    """
    splits: bool = experts.up is None
    activation: Any = experts.activation
    if experts.gate is None and (isinstance(activation, Gated | ClampedSwiglu) or activation == "clamped_swiglu"):
        raise ValueError(
            f"{op}: {name}.activation must be of one argument where {name}.gate is None, got {activation!r}"
        )
    if isinstance(activation, Gated):
        if not callable(activation.function):
            raise TypeError(
                f"{op}: {name}.activation must be Gated of a function of two arrays, got {activation.function!r}"
            )
        return Unit(_elementwise(op, name, activation.function), 2, splits, None)
    if isinstance(activation, str):
        checks.check_one_of(op, f"{name}.activation", activation, ActivationName)
    elif not callable(activation):
        names = ", ".join(map(repr, get_args(ActivationName)))
        raise TypeError(f"{op}: {name}.activation must be a function, Gated or one of {names}, got {activation!r}")
    given: Any = activation
    if experts.gate is None:
        function = ACTIVATIONS.get(given) or _elementwise(op, name, given)
        return Unit(function, 1, splits=False, known=None)
    if known := known_unit(activation):
        return Unit(known.function, 2, splits, known)
    function = _elementwise(op, name, given)

    def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
        return function(gate) * up

    return Unit(gated, 2, splits, None)


def _elementwise(op: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*operands: jax.Array) -> Any:
        made, shape = function(*operands), operands[0].shape
        if not isinstance(made, checks.ARRAYS) or made.shape != shape:
            raise ValueError(
                f"{op}: {name}.activation must return an array of the shape {shape} that it is given, got "
                f"{checks.describe(made)}"
            )
        return made

    return checked


def closed_over(unit: Unit, product: jax.ShapeDtypeStruct) -> tuple[Unit, tuple[jax.Array, ...]]:
    """`unit` with the differentiable values that its function closes over as further operands, and these values.
    `jax.custom_jvp` differentiates only operands.

    Args:
      product: the type of the function's operands, [C, F].
    """
    if unit.known is not None:
        return unit, ()
    function, parameters = jax.closure_convert(unit.function, *[product] * unit.operands)
    return (unit._replace(function=function), tuple(parameters)) if parameters else (unit, ())


def with_bias(product: jax.Array, bias: jax.Array | None, group_sizes: jax.Array | None = None) -> jax.Array:
    """Each row [C, N] plus the bias [E / R, N] of its expert; without `group_sizes`, plus the one bias [N]."""
    if bias is None or group_sizes is None:
        return product if bias is None else product + bias[None]
    return product + bias_of_rows(bias, group_sizes, product.shape[0])


def bias_of_rows(bias: jax.Array, group_sizes: jax.Array, rows: int) -> jax.Array:
    """[C, N]: the bias [E / R, N] of each row's expert, and 0 after the last expert's rows."""

    def forward(group_sizes: jax.Array, bias: jax.Array) -> jax.Array:
        return bias.at[expert_of_rows(group_sizes, rows)].get(mode="fill", fill_value=0)

    return linear(forward, sums_by_expert, group_sizes, bias)


def sums_by_expert(group_sizes: jax.Array, rows: jax.Array) -> jax.Array:
    """[E / R, N]: the sum of each expert's rows [C, N], in float32 and rounded once. Ignores rows after the last."""
    starts = jnp.append(0, jnp.cumsum(group_sizes, dtype=jnp.int32))
    return sum_segments(rows, Segments(expert_of_rows(group_sizes, rows.shape[0]), starts), rows.dtype)
