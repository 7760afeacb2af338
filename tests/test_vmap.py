"""Batching an op, or no more than its gradient or its indices, raises an error that names it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup
from matmul_cases import OPS

import jax_ep
from jax_ep import Group
from jax_ep.lax import ragged_all_to_all

SIZE, EXPERTS = 2, 8
TOKENS, IDS, WEIGHTS = jnp.zeros((4, 16)), jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 2))
OUTPUTS = jnp.zeros((SIZE * 4 * 2, 16))  # of as many rows as there can be
ROWS, INDICES = jnp.zeros((6, 3)), jnp.zeros(SIZE, jnp.int32)
SQUARE = jnp.zeros((8, 8), jnp.bfloat16)  # GPUs multiply 16-bit operands only


def expect(name: str, group: Group, body: Callable[[], Any]) -> None:
    """Traces `body` on every rank."""

    def traced(x: jax.Array) -> jax.Array:
        body()
        return x

    with pytest.raises(NotImplementedError, match=rf"^{name} does not support jax\.vmap"):
        jax.eval_shape(helpers.per_rank(traced, group.mesh), np.zeros(SIZE))


def batched(x: jax.Array) -> jax.Array:
    return jnp.stack([x] * 3)


def there_and_back(
    group: Group, implementation: str, tokens: Any = TOKENS, ids: Any = IDS, weights: Any = WEIGHTS, outputs: Any = None
) -> jax.Array:
    out = jax_ep.dispatch(
        tokens, ids, weights, group=group, num_experts=EXPERTS, capacity=len(OUTPUTS), implementation=implementation
    )
    rows = out.tokens if outputs is None else outputs
    return jax_ep.combine(rows, out.routing, group=group, implementation=implementation)


@pytest.mark.parametrize(
    ("op", "operand", "value"),
    [
        ("dispatch", "tokens", TOKENS),
        ("dispatch", "ids", IDS),
        ("dispatch", "weights", WEIGHTS),
        ("combine", "outputs", OUTPUTS),
    ],
)
def test_dispatch_and_combine(
    op: str, operand: str, value: jax.Array, implementation: str, open_group: OpenGroup
) -> None:
    group = open_group(SIZE)
    run = partial(there_and_back, group, implementation)
    expect(op, group, lambda: jax.vmap(lambda x: run(**{operand: x}))(batched(value)))


@pytest.mark.parametrize("operand", range(6))
def test_ragged_all_to_all(
    operand: int, implementation: str, open_group: OpenGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = open_group(SIZE)
    monkeypatch.setattr(Group, "resolve", lambda *_: implementation)
    operands = [ROWS, ROWS, *[INDICES] * 4]

    def run(x: jax.Array) -> jax.Array:
        changed = [x if i == operand else other for i, other in enumerate(operands)]
        return ragged_all_to_all(*changed, axis_name="ep")

    expect("ragged_all_to_all", group, lambda: jax.vmap(run)(batched(operands[operand])))


@pytest.mark.parametrize("op", OPS)
def test_products(op: str, implementation: str, open_group: OpenGroup) -> None:
    group = open_group(SIZE)
    multiply = partial(OPS[op], group=group, implementation=implementation)
    expect(op, group, lambda: jax.vmap(multiply, in_axes=(0, None))(batched(SQUARE), SQUARE))
    expect(op, group, lambda: jax.vmap(multiply, in_axes=(None, 0))(SQUARE, batched(SQUARE)))


@pytest.mark.usefixtures("native")
def test_jacobians(open_group: OpenGroup) -> None:
    """The op runs once, its gradient is batched."""
    group = open_group(SIZE)
    run = partial(there_and_back, group, "ffi")
    route = partial(jax_ep.dispatch, group=group, num_experts=EXPERTS, implementation="ffi")
    multiply = {name: partial(op, group=group, implementation="ffi") for name, op in OPS.items()}
    slices = [INDICES] * 4
    for name, function, operand in (
        ("the gradient of combine", lambda x: run(outputs=x), OUTPUTS),
        ("the gradient of dispatch", lambda x: route(x, IDS, WEIGHTS).tokens, TOKENS),
        ("the gradient of dispatch", lambda x: route(TOKENS, IDS, x).routing.weights, WEIGHTS),
        ("ragged_all_to_all", lambda x: ragged_all_to_all(x, ROWS, *slices, axis_name="ep"), ROWS),
        ("all_gather_matmul", lambda x: multiply["matmul_reduce_scatter"](x, SQUARE), SQUARE),
        ("matmul_reduce_scatter", lambda x: multiply["all_gather_matmul"](x, SQUARE), SQUARE),
    ):
        expect(name, group, lambda f=function, x=operand: jax.jacrev(f)(x))
