"""What `moe_mlp` refuses when it is traced: each error names the layer and the argument."""

import dataclasses
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import zeros

from jax_ep import Experts, Gated, Group, moe_mlp
from jax_ep.float8 import Float8Weights

SIZE, LOCAL, HIDDEN, WIDTH = 4, 2, 16, 24  # LOCAL: experts of a rank
FLOAT16 = np.float16
MATRICES = {"gate": (LOCAL, HIDDEN, WIDTH), "up": (LOCAL, HIDDEN, WIDTH), "down": (LOCAL, WIDTH, HIDDEN)}


def trace(group: Group, changes: dict[str, Any], options: dict[str, Any]) -> None:
    """`changes` are those of `Experts`, of which numpy's arrays differ by rank."""

    def layer() -> None:
        fields = {name: zeros(shape) for name, shape in MATRICES.items()} | changes
        arrays = {name: x for name, x in fields.items() if isinstance(x, np.ndarray | Float8Weights)}
        experts = Experts(**fields | jax.tree.map(helpers.vary, arrays))
        given: dict[str, Any] = {"tokens": zeros((6, HIDDEN)), "expert_ids": zeros((6, 3), np.int32), "weights": None}
        given |= {"experts": experts, "group": group, "implementation": "xla"}
        moe_mlp(**given | options)

    helpers.trace(group, layer)


def clipped(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate * up


def unshaped(x: jax.Array) -> Any:
    return x[:1]


def nothing(gate: jax.Array, up: jax.Array) -> Any:
    return None


def in_float8(columns: int = 1) -> Float8Weights:
    """[E / R, 128, 128], with one scale, if it is to be right."""
    return Float8Weights(zeros((LOCAL, 128, 128), np.uint8), zeros((LOCAL, columns, 1)))


def alike(matrix: Any) -> Experts:
    return Experts(gate=matrix, up=matrix, down=matrix)


EXPERTS: list[tuple[dict[str, Any], str]] = [
    ({"gate": [1.0]}, "experts.gate must be an array, got list"),
    ({"down": 1}, "experts.down must be an array, got int"),
    ({"gate": zeros((LOCAL, HIDDEN + 1, WIDTH))}, r"experts.gate must have shape \[E / R, H, F\]"),
    ({"gate": zeros((0, HIDDEN, WIDTH))}, "experts.gate must have at least one expert on every rank"),
    ({"gate": zeros((HIDDEN, WIDTH))}, r"experts.gate must have shape \[E / R, H, F\], got \(16, 24\)"),
    ({"up": zeros((LOCAL, HIDDEN, WIDTH + 8))}, r"experts.up must have shape \[E / R, H, F\]"),
    ({"up": zeros((LOCAL, HIDDEN, WIDTH), FLOAT16)}, "experts.up must be of dtype float32, got float16"),
    ({"gate": None, "up": None}, "experts.gate and experts.up must not both be None"),
    (
        {"gate": zeros((LOCAL, HIDDEN, 7)), "up": None},
        r"experts.gate must have shape \[E / R, H, 2 F\] where experts.up",
    ),
    ({"down": zeros((LOCAL, HIDDEN, WIDTH))}, r"experts.down must have shape \[E / R, F, H\]"),
    ({"biases": 3}, r"experts.biases must be None or a triple \(gate, up, down\), got int"),
    ({"biases": (None, zeros((1, 3)), None)}, r"experts.biases\[1\] must have shape \[E / R, F\] = \(2, 24\)"),
    (
        {"biases": (None, None, zeros((LOCAL, HIDDEN), np.float64))},
        r"experts.biases\[2\] must be of dtype float32, got float64",
    ),
    ({"gate": None, "biases": (zeros((LOCAL, WIDTH)), None, None)}, r"experts.biases\[0\] must be None where"),
    ({"activation": "swiglu"}, "experts.activation must be one of 'silu', 'gelu', 'relu', 'clam.*; got 'swiglu'"),
    ({"activation": None}, "experts.activation must be a function, Gated or one of 'silu', .*, got None"),
    ({"activation": Gated(3)}, "experts.activation must be Gated of a function of two arrays, got 3"),  # pyright: ignore
    ({"gate": None, "activation": Gated(clipped)}, "experts.activation must be of one argument where experts.gate"),
    ({"activation": Gated(nothing)}, r"experts.activation must return an array .* \(48, 24\).*, got NoneType"),
    ({"activation": unshaped}, r"experts.activation must return an array .* \(48, 24\) .*, got float32\[1,24\]"),
]
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"tokens": [1.0]}, "tokens must be an array, got list"),
    ({"tokens": zeros((2, 3, HIDDEN))}, r"tokens .* \[T, H\], got \(2, 3, 16\): flatten batches by \.reshape\(-1, H\)"),
    ({"expert_ids": zeros((2, 3, 3), int)}, r"expert_ids .*: flatten batches by \.reshape\(-1, K\)"),
    (
        {"expert_ids": zeros((6, 3)), "weights": zeros((6, 3), int)},
        "expert_ids must be of an integer dtype, got float32: the order is tokens, expert_ids, weights, but jax.lax",
    ),
    ({"experts": None}, r"experts must be a jax_ep\.Experts, got NoneType"),
    ({"shared_experts": (zeros((HIDDEN, 8)),) * 3}, r"shared_experts must be a jax_ep\.Experts, got tuple"),
    ({"shared_experts": alike(zeros((HIDDEN, 8)))}, r"shared_experts\.down must have shape \[F, H\] = \(8, 16\)"),
    (
        {"shared_experts": alike(zeros((HIDDEN, 8), FLOAT16))},
        r"shared_experts\.gate must be of dtype float32, got float16",
    ),
    (
        {"shared_experts": alike(zeros((1, HIDDEN, 8)))},
        r"shared_experts\.gate must have shape \[H, F\], got \(1, 16, 8\)",
    ),
    ({"capacity": 0}, "capacity must be at least 1, got 0"),
    ({"wire": "foo"}, "wire must be one of None, 'float8'; got 'foo'"),
    ({"wire": "float8_rows"}, "wire must be one of None, 'float8'; got 'float8_rows'"),
    ({"precision": np.array(["float8"] * 2)}, "precision must be one of None, 'float8'; got array"),
    ({"precision": "float8"}, "precision must be None unless 128 divides H and F, got 'float8', H = 16, F = "),
    ({"weigh_inputs": 1}, "weigh_inputs must be True or False, got 1"),
    ({"product": 3}, r"product must be a function of \(rows, matrix, group_sizes\) or None, got 3"),
    ({"product": lambda *_: jnp.zeros(3), "precision": "float8"}, "precision must be None where product is given"),
    ({"product": lambda *_: jnp.zeros(3)}, r"product must return an array of 48 rows, got float32\[3\]"),
    ({"group": "ep"}, r"group must be an open jax_ep\.Group\(mesh, axis_name\), got str"),
]
OF_A_PRODUCT: list[tuple[dict[str, Any], str]] = [
    ({"biases": (None,) * 3}, "experts.biases must be None where product is given"),
    ({"up": (zeros((3, HIDDEN)), zeros((LOCAL,)))}, "each leaf of experts must have the rank's experts, one or more"),
    ({"up": {}}, "experts.up must have a leaf, got none"),
    ({"down": [3]}, "each leaf of experts.down must be an array, got int"),
]


OF_128 = {name: zeros((LOCAL, 128, 128)) for name in ("gate", "up", "down")}
WIDE = {name: zeros((LOCAL, 128, 256)) for name in ("gate", "up")}
OF_FLOAT8: list[tuple[dict[str, Any], str | None, str]] = [
    (OF_128 | {"up": in_float8()}, None, "experts.up must be an array unless precision='float8'"),
    (WIDE | {"down": in_float8()}, "float8", r"experts.down must have shape .* = \(2, 256, 128\), got Float8"),
    (OF_128 | {"gate": in_float8(2)}, "float8", r"experts.gate.scales must have shape .* = \(2, 1, 1\), got"),
]
NO_ARRAYS = Float8Weights(None, None)  # pyright: ignore[reportArgumentType] - as jax.tree.map may leave it


@pytest.mark.parametrize(
    ("changes", "options", "match"),
    [
        *((changes, {}, match) for changes, match in EXPERTS),
        *(({}, options, match) for options, match in OPTIONS),
        ({"gate": NO_ARRAYS}, {"precision": "float8"}, "experts.gate.bits must be an array, got NoneType"),
        *((changes, {"tokens": zeros((6, 128)), "precision": by}, match) for changes, by, match in OF_FLOAT8),
        *((changes, {"product": clipped}, match) for changes, match in OF_A_PRODUCT),
    ],
)
def test_refused_by_name(changes: dict[str, Any], options: dict[str, Any], match: str, group: Group) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^moe_mlp: {match}"):
        trace(group, changes, options)


@pytest.mark.parametrize("name", MATRICES)
def test_experts_that_are_not_sharded_are_refused(name: str, group: Group) -> None:
    """They would be taken for R times as many experts, of which the first ranks own all that tokens name."""
    match = rf"^moe_mlp: experts.{name} must be of the experts that each rank owns, .*P\('ep'\)"
    with pytest.raises(ValueError, match=match):
        trace(group, {name: jnp.zeros(MATRICES[name])}, {})


def test_experts_are_named() -> None:
    with pytest.raises(TypeError, match="positional"):
        Experts(1, 2, 3)  # pyright: ignore[reportCallIssue]


def test_experts_are_a_pytree() -> None:
    """Static is the activation alone; markers that jax's transformations put in place of arrays pass."""
    marked: Any = (None, 4, None)
    experts = Experts(gate=1, up=None, down=3, biases=marked, activation=Gated(clipped))
    leaves, structure = jax.tree.flatten(experts)
    assert leaves == [1, 3, 4]
    assert jax.tree.unflatten(structure, leaves) == experts
    others = dataclasses.replace(experts, gate=0, down=0)
    assert structure == jax.tree.structure(others)
    assert structure != jax.tree.structure(dataclasses.replace(others, activation="silu"))
