"""What dispatch_ragged_dot and ragged_dot_combine refuse when traced: each error names the op and the argument."""

from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup

from jax_ep import Group, dispatch_ragged_dot, ragged_dot_combine

SIZE, EXPERTS, TOKENS, TOP_K, HIDDEN, WIDTH = 2, 4, 6, 2, 16, 8

ROWS = jnp.zeros((SIZE * TOKENS * TOP_K, WIDTH))  # of as many rows as there can be
FIRST = jnp.zeros((EXPERTS // SIZE, HIDDEN, WIDTH))
LAST = jnp.zeros((EXPERTS // SIZE, WIDTH, HIDDEN))


def first(group: Group, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "tokens": jnp.zeros((TOKENS, HIDDEN)),
        "expert_ids": jnp.zeros((TOKENS, TOP_K), jnp.int32),
        "weights": None,
        "rhs": FIRST,
        "num_experts": EXPERTS,
    }
    return dispatch_ragged_dot(**(arguments | changes), group=group)


def last(group: Group, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"lhs": ROWS, "rhs": LAST}
    return ragged_dot_combine(**(arguments | changes), group=group)


def trace(group: Group, call: Callable[[], Any]) -> None:
    def body(x: jax.Array) -> jax.Array:
        call()
        return x

    jax.eval_shape(helpers.per_rank(body, group.mesh), np.zeros(group.size))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokens": [1.0]}, TypeError, "tokens must be an array, got list"),
        ({"tokens": jnp.zeros((TOKENS, HIDDEN), jnp.int32)}, TypeError, "tokens must be of dtype bfloat16"),
        ({"expert_ids": jnp.zeros((TOKENS, TOP_K))}, TypeError, "expert_ids must be of an integer dtype, got float32"),
        ({"weights": jnp.zeros((TOKENS, 3))}, ValueError, r"weights must have shape \[T, K\] = \(6, 2\), got \(6, 3\)"),
        ({"num_experts": 5}, ValueError, "num_experts must be a multiple of the group's size 2, got 5"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
        ({"wire_dtype": jnp.float8_e4m3fn}, ValueError, "wire_dtype float8_e4m3fn needs H to be a multiple of 128"),
        ({"on_overflow": "ignore"}, ValueError, "on_overflow must be one of 'raise', 'drop'; got 'ignore'"),
        (
            {"implementation": "nccl"},
            ValueError,
            "implementation must be one of 'auto', 'ffi', 'xla'; got 'nccl'",
        ),
        ({"rhs": None}, TypeError, "rhs must be an array, got NoneType"),
        ({"rhs": FIRST[0]}, ValueError, r"rhs must have shape \[E / R, H, N\], got \(16, 8\)"),
        ({"rhs": FIRST[:1]}, ValueError, r"rhs must have shape \[E / R, H, N\] = \(2, 16, 8\), got \(1, 16, 8\)"),
        ({"rhs": LAST}, ValueError, r"rhs must have shape \[E / R, H, N\] = \(2, 16, 16\), got \(2, 8, 16\)"),
        ({"rhs": FIRST.astype(jnp.bfloat16)}, TypeError, "rhs must be of dtype float32, got bfloat16"),
        ({"rhs": (FIRST,)}, ValueError, r"rhs must be an array or a pair \(gate, up\), got 1 arrays"),
        ({"rhs": (FIRST, 1.0)}, TypeError, r"rhs\[1\] must be an array, got float"),
        ({"rhs": (FIRST, FIRST[..., :4])}, ValueError, r"rhs\[1\] must have the shape of rhs\[0\] \(2, 16, 8\)"),
        (
            {"rhs": (FIRST, FIRST), "activation": "swish"},
            ValueError,
            "activation must be one of 'silu', .* got 'swish'",
        ),
        (
            {"rhs": FIRST[..., :7], "activation": "silu"},
            ValueError,
            r"rhs must have shape \[E / R, H, 2 F\] with an activation, got \(2, 16, 7\)",
        ),
        ({"activation": 3}, TypeError, "activation must be a function, or one of 'silu', .* got 3"),
        ({"precision": np.zeros(2)}, ValueError, r"precision must be 'float8' or None, got array"),
        (
            {"precision": "float8"},
            ValueError,
            r"the rows of tokens must have sizes that are multiples of 128, got \(16,\)",
        ),
    ],
    ids=str,
)
def test_dispatch_ragged_dot(
    changes: dict[str, Any], error: type[Exception], message: str, open_group: OpenGroup
) -> None:
    group = open_group(SIZE)
    with pytest.raises(error, match=f"^dispatch_ragged_dot: {message}"):
        trace(group, lambda: first(group, **changes))


def test_an_activation_of_another_shape(open_group: OpenGroup) -> None:
    group = open_group(SIZE)
    message = r"activation must return an array of the shape \(24, 8\) that it is given, got float32\[24,1\]"
    with pytest.raises(ValueError, match=f"^dispatch_ragged_dot: {message}"):
        trace(group, lambda: first(group, rhs=(FIRST, FIRST), activation=lambda x: x[:, :1]))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lhs": 1.0}, TypeError, "lhs must be an array, got float"),
        ({"lhs": jnp.zeros((5, WIDTH))}, ValueError, r"lhs must have the 24 rows of the dispatch, got \(5, 8\)"),
        (
            {"lhs": jnp.zeros((24, WIDTH), jnp.int8)},
            TypeError,
            "lhs must be of dtype bfloat16, float16, float32, got int8",
        ),
        ({"rhs": FIRST}, ValueError, r"rhs must have shape \[E / R, F, H'\] = \(2, 8, 8\), got \(2, 16, 8\)"),
        ({"rhs": LAST.astype(jnp.float16)}, TypeError, "rhs must be of dtype float32, got float16"),
        ({"routing": None}, TypeError, "routing must be the Routing of a dispatch, got NoneType"),
        ({"implementation": 1}, ValueError, "implementation must be one of 'auto', 'ffi', 'xla'; got 1"),
    ],
    ids=str,
)
def test_ragged_dot_combine(
    changes: dict[str, Any], error: type[Exception], message: str, open_group: OpenGroup
) -> None:
    group = open_group(SIZE)
    with pytest.raises(error, match=f"^ragged_dot_combine: {message}"):
        trace(group, lambda: last(group, **({"routing": first(group)[1].routing} | changes)))


def test_outside_shard_map(open_group: OpenGroup) -> None:
    for op, more in ((first, {}), (last, {"routing": None})):
        with pytest.raises(ValueError, match=r"must be called inside jax\.shard_map over axis 'ep'"):
            op(open_group(SIZE), **more)
