"""Lists, scalars and strings where an op wants an array, SparseRows, a dtype or a bool: refused by name."""

import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_ep
from jax_ep import Group, SparseRows
from jax_ep.lax import ragged_all_to_all

EXPERTS, HIDDEN, V, D = 4, 16, 12, 3

TOKENS, IDS = jnp.zeros((6, HIDDEN)), jnp.zeros((6, 2), jnp.int32)
SQUARE, INDICES = jnp.zeros((8, 8)), jnp.zeros(2, jnp.int32)
TABLE = jnp.zeros((V, D))
SGD = jax_ep.embedding.by_rows(optax.sgd(0.1))
ROWS = SparseRows.from_entries(jnp.zeros(5, jnp.int32), jnp.zeros((5, D)), num_rows=V)
EIGHT = jax_ep.float8.Float8Rows(jnp.zeros((48, 128), jnp.uint8), jnp.zeros((48, 1)))

no_arrays: Any = None  # as jax.tree.map may leave it

Call = Callable[[Group], Any]
wrongly: Any = jax_ep  # its functions with arguments that no type checker lets pass


def dispatch(group: Group, tokens: Any = TOKENS, ids: Any = IDS, weights: Any = None, **options: Any) -> Any:
    return jax_ep.dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, **options)


def combine(group: Group, outputs: Any, routing: Any = None) -> Any:
    return jax_ep.combine(outputs, routing or dispatch(group).routing, group=group)


def moe_mlp(group: Group, **changes: Any) -> Any:
    zeros = jnp.zeros((EXPERTS // group.size, HIDDEN, HIDDEN))
    matrices = {name: changes.pop(name, zeros) for name in ("gate", "up", "down")}
    arguments: dict[str, Any] = {"tokens": TOKENS, "expert_ids": IDS, "weights": None}
    arguments |= {"experts": jax_ep.Experts(**matrices)} | changes
    return jax_ep.moe_mlp(**arguments, group=group)


def exchange(
    operand: Any = SQUARE, output: Any = SQUARE, offsets: Any = INDICES, axis_name: Any = "ep", parts: Any = None
) -> Any:
    return ragged_all_to_all(operand, output, offsets, *[INDICES] * 3, axis_name=axis_name, axis_index_groups=parts)


def product(group: Group, a: Any = SQUARE, b: Any = SQUARE, **options: Any) -> Any:
    return jax_ep.matmul_all_reduce(a, b, group=group, **options)


def mesh_of(group: Group) -> Any:
    """In place of a group, as in other libraries."""
    return group.mesh


# What is called on every rank of a group, and what it says.
ON_RANKS: list[tuple[Call, str]] = [
    (lambda g: dispatch(mesh_of(g)), "dispatch: group must be an open jax_ep.Group(mesh, axis_name), got Mesh"),
    (lambda g: product(mesh_of(g)), "matmul_all_reduce: group must be an open jax_ep.Group(mesh, axis_name), got Mesh"),
    (lambda g: dispatch(g, [[1.0]]), "dispatch: tokens must be an array, got list"),
    (
        lambda g: dispatch(g, jax.random.split(jax.random.key(0), (6, HIDDEN))),
        "dispatch: tokens must be of dtype bfloat16, float16, float32, got key<fry>",
    ),
    (lambda g: dispatch(g, ids=[[1]]), "dispatch: expert_ids must be an array, got list"),
    (lambda g: dispatch(g, weights=1.0), "dispatch: weights must be an array, got float"),
    (lambda g: dispatch(g, nodes=3), "dispatch: nodes must be a jax_ep.NodeOptions or None, got int"),
    (lambda g: combine(g, EIGHT), "combine: expert_outputs must be an array, got Float8Rows"),
    (lambda g: combine(g, TOKENS, [0]), "combine: routing must be the Routing of a dispatch, got list"),
    (lambda g: combine(g, TOKENS, dispatch(g)), "combine: routing must be the Routing of a dispatch, got Dispatched"),
    (lambda g: moe_mlp(g, tokens=[1.0]), "moe_mlp: tokens must be an array, got list"),
    (lambda g: moe_mlp(g, gate=[1.0]), "moe_mlp: experts.gate must be an array, got list"),
    (
        lambda g: moe_mlp(g, gate=jax_ep.float8.Float8Weights(*(no_arrays,) * 2), precision="float8"),
        "moe_mlp: experts.gate.bits must be an array, got NoneType",
    ),
    (lambda g: moe_mlp(g, down=1), "moe_mlp: experts.down must be an array, got int"),
    (lambda g: exchange([1.0]), "ragged_all_to_all: operand must be an array, got list"),
    (lambda g: exchange(output=1), "ragged_all_to_all: output must be an array, got int"),
    (lambda g: exchange(offsets=(0, 0)), "ragged_all_to_all: input_offsets must be an array, got tuple"),
    (
        lambda g: exchange(axis_name=0),
        "ragged_all_to_all: axis_name must be an axis of the mesh or a tuple of axes, got int",
    ),
    (
        lambda g: exchange(parts=[0, 1]),
        "ragged_all_to_all: axis_index_groups must be None, or a sequence of sequences of ranks, got list",
    ),
    (lambda g: product(g, [[1.0]]), "matmul_all_reduce: lhs must be an array, got list"),
    (lambda g: product(g, b="b"), "matmul_all_reduce: rhs must be an array, got str"),
    (lambda g: product(g, bias=[0.0] * 8), "matmul_all_reduce: bias must be an array, got list"),
    (
        lambda g: product(g, bias=jnp.zeros(8, jnp.complex64)),
        "matmul_all_reduce: bias must be of dtype bfloat16, float16, float32, got complex64",
    ),
    (
        lambda g: product(g, preferred_element_type="foo"),
        "matmul_all_reduce: preferred_element_type must be a dtype or None, got 'foo'",
    ),
    (
        lambda g: product(
            g, SQUARE.astype(jnp.bfloat16), SQUARE.astype(jnp.bfloat16), preferred_element_type=jnp.float16
        ),
        "matmul_all_reduce: preferred_element_type must be bfloat16 or float32, got float16",
    ),
    (
        lambda g: wrongly.sparse_all_reduce(SQUARE, group=g, capacity=8),
        "sparse_all_reduce: rows must be SparseRows, got float32[8,8]",
    ),
]

# What needs no group.
ANYWHERE: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: wrongly.SparseRows.from_entries([1], TABLE[:1], num_rows=V),
        "SparseRows: indices must be an array, got list",
    ),
    (
        lambda: wrongly.SparseRows.from_entries(INDICES, 1.0, num_rows=V),
        "SparseRows: values must be an array, got float",
    ),
    (lambda: wrongly.SparseRows.from_bcoo(TABLE), "SparseRows.from_bcoo: matrix must be BCOO, got float32[12,3]"),
    (lambda: wrongly.coalesce((INDICES, TABLE)), "coalesce: rows must be SparseRows, got tuple"),
    (lambda: wrongly.embedding.lookup(TABLE, [1]), "lookup: ids must be an array, got list"),
    (
        lambda: wrongly.embedding.sparse_value_and_grad(jnp.sum)(TABLE, [1, 2]),
        "sparse_value_and_grad: ids must be an array, got int",
    ),
    (
        lambda: wrongly.embedding.sparse_value_and_grad(jnp.sum)(1.0, INDICES),
        "sparse_value_and_grad: table must be an array, got float",
    ),
    *(
        (lambda gradient=gradient: SGD.update(gradient, gradient), f"update: gradient must {what}")
        for gradient, what in (
            (TABLE, "be SparseRows, got float32[12,3]"),
            ({"a": ROWS, "b": TABLE}, "be SparseRows, got float32[12,3]"),
            ({}, "hold SparseRows, got dict"),
        )
    ),
    (lambda: wrongly.embedding.rowwise_adagrad("0.1"), "rowwise_adagrad: learning_rate must be a number, got str"),
    (
        lambda: wrongly.embedding.sparse_value_and_grad(jnp.sum, None),
        "sparse_value_and_grad: argnums must be an int or a sequence of them, got None",
    ),
    (
        lambda: wrongly.embedding.apply_updates(TABLE, TABLE),
        "apply_updates: updates must be SparseRows, got float32[12,3]",
    ),
]


@pytest.mark.parametrize(("call", "message"), ON_RANKS, ids=[message for _, message in ON_RANKS])
def test_on_ranks(call: Call, message: str, group: Group) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        helpers.trace(group, lambda: call(group))


@pytest.mark.parametrize(("call", "message"), ANYWHERE, ids=[message for _, message in ANYWHERE])
def test_anywhere(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        call()


def test_arrays_of_numpy_are_arrays() -> None:
    ids = np.array([1, 1, 4], np.int32)
    rows = wrongly.SparseRows.from_entries(ids, np.ones((3, D), np.float32), num_rows=V)
    np.testing.assert_array_equal(jax_ep.coalesce(rows).values[:2, 0], [2, 1])
    assert wrongly.embedding.lookup(TABLE, np.int32(3)).shape == (D,)


def options(module: ModuleType) -> Iterator[tuple[str, str, Any]]:
    """("function: parameter", its default, its type) where the default is a string, of what a module exports."""
    for name, function in inspect.getmembers(module, inspect.isfunction):
        hints = get_type_hints(function)
        for parameter in inspect.signature(function).parameters.values():
            if isinstance(parameter.default, str):
                yield f"{name}: {parameter.name}", parameter.default, hints[parameter.name]


def literals(hint: Any) -> set[Any]:
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    return set().union(*map(literals, get_args(hint)))


def test_string_options_have_literal_types() -> None:
    """So that an editor knows them, and a type checker finds a wrong one."""
    found = [option for module in (jax_ep, jax_ep.nn, jax_ep.lax) for option in options(module)]
    assert {name.split(": ")[1] for name, _, _ in found} >= {"implementation", "on_overflow", "method", "op", "score"}
    for name, default, hint in found:
        assert default in literals(hint), f"{name} is {hint}"
        assert str not in get_args(hint), f"{name} is {hint}"
