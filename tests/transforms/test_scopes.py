"""Names of ops in HLO, which profiles show, forward and backward."""

import re
from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import pytest

import jax_ep
from jax_ep import Experts, Group, Implementation, SparseRows, embedding, lax

NAME = re.compile(r'op_name="([^"]*)"')
TOKENS, IDS = jnp.ones((2, 8, 16)), jnp.arange(16, dtype=jnp.int32).reshape(2, 8, 1) % 4
SIZES = jnp.full((2, 2), 4, jnp.int32)
OFFSETS = jnp.array([0, 4], jnp.int32)


def _moe(x: jax.Array, ids: jax.Array, **given: Any) -> jax.Array:
    matrix = helpers.vary(jnp.ones((2, 16, 16)))
    return jax_ep.moe_mlp(x, ids, None, Experts(gate=matrix, up=matrix, down=matrix), **given)[0]


def _round_trip(x: jax.Array, ids: jax.Array, **given: Any) -> jax.Array:
    out = jax_ep.dispatch(x, ids, num_experts=4, **given)
    return jax_ep.combine(out.rows, out.routing, **given)


def _product(x: jax.Array, ids: jax.Array, group: Group, **given: Any) -> jax.Array:
    del group, given
    return lax.ragged_dot(x, helpers.vary(jnp.ones((2, 16, 16))), helpers.vary(SIZES[0]))


def _exchange(x: jax.Array, ids: jax.Array, group: Group, **given: Any) -> jax.Array:
    offsets, sizes = helpers.vary(OFFSETS), helpers.vary(SIZES[0])
    out = jax.lax.axis_index("ep") * 4 + jnp.zeros_like(offsets)
    return lax.ragged_all_to_all(x, x, offsets, sizes, out, sizes, axis_name="ep", **given)


def _sparse(x: jax.Array, ids: jax.Array, **given: Any) -> jax.Array:
    rows = SparseRows.from_entries(ids[:, 0], x, num_rows=8)
    return jax_ep.sparse_all_reduce(rows, capacity=16, sharded=True, **given).values


def _lookup(x: jax.Array, ids: jax.Array, **given: Any) -> jax.Array:
    needed = embedding.rows_needed(ids, 16, group=given["group"])
    return embedding.sharded_lookup(x, ids[:, 0], **given) + needed[0].astype(x.dtype)


def _square(op: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """In 16 bits, as the kernels on GPUs want it."""

    def body(x: jax.Array, ids: jax.Array, **given: Any) -> jax.Array:
        narrow = x.astype(jnp.bfloat16)
        return op(narrow, narrow.T, **given)

    return body


# The names in the forward pass, and in the backward pass by kernels; some transposes are other ops.
OPS: dict[str, tuple[Callable[..., jax.Array], set[str], set[str]]] = {
    "moe_mlp": (
        _moe,
        {"moe_mlp", "dispatch", "ragged_dot", "combine"},
        {"moe_mlp", "scatter", "ragged_dot", "combine"},
    ),
    "dispatch, combine": (_round_trip, {"dispatch", "combine"}, {"dispatch", "combine", "scatter"}),
    "sharded_lookup": (
        _lookup,
        {"sharded_lookup", "rows_needed", "dispatch", "combine"},
        {"sharded_lookup", "scatter"},
    ),
    **{
        name: (body, {name}, {name})
        for name, body in {
            "ragged_dot": _product,
            "ragged_all_to_all": _exchange,
            "sparse_all_reduce": _sparse,
            "matmul_all_reduce": _square(jax_ep.matmul_all_reduce),
            "matmul_reduce_scatter": _square(jax_ep.matmul_reduce_scatter),
            "all_gather_matmul": _square(jax_ep.all_gather_matmul),
        }.items()
    },
}


@pytest.mark.parametrize("op", OPS)
def test_names(op: str, implementation: Implementation, group: Group) -> None:
    """Every kernel of ours has one of them."""
    body, forward, backward = OPS[op]

    def loss(x: jax.Array, ids: jax.Array) -> jax.Array:
        return helpers.vary(body(x, ids, group=group, implementation=implementation).sum())

    program = helpers.per_rank(lambda x, ids: jax.value_and_grad(loss)(x, ids), group.mesh)
    text = program.lower(TOKENS, IDS).as_text(dialect="hlo", debug_info=True)
    paths = [(set(re.split(r"[/()]+", path)), line) for line in text.splitlines() for path in NAME.findall(line)]
    of_backward = [parts for parts, _ in paths if "transpose" in parts]
    of_forward = [parts for parts, _ in paths if "transpose" not in parts]
    assert forward <= set().union(*of_forward)
    assert (backward if implementation == "kernels" else backward - {"scatter"}) <= set().union(*of_backward)
    for parts, line in paths:
        assert "jax_ep_" not in line or parts & (forward | backward), line
