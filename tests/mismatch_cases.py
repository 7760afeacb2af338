"""Ranks that call the ops differently: in the processes of `processes_worker.py` and `nodes_worker.py`."""

import contextlib
from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jax_ep
from jax_ep import Group, Implementation, MismatchError, PeerLostError, SparseRows, dispatch, sparse_all_reduce
from jax_ep.lax import ragged_all_to_all

EXPERTS, TOP_K, ROWS = 8, 2, 50


def ids_of(x: jax.Array) -> jax.Array:
    return (jnp.arange(x.shape[0] * TOP_K, dtype=jnp.int32) % EXPERTS).reshape(-1, TOP_K)


def dispatched(group: Group, x: jax.Array, **options: Any) -> jax.Array:
    given: dict[str, Any] = {"num_experts": EXPERTS, "capacity": 4096, "implementation": "kernels"} | options
    out = dispatch(x, ids_of(x), group=group, **given)
    return jnp.sum(out.rows.astype(jnp.float32), axis=1)


def multiplied(group: Group, x: jax.Array, implementation: Implementation = "kernels") -> jax.Array:
    x = x.astype(jnp.bfloat16)
    product = jax_ep.matmul_all_reduce(x, x.T, group=group, implementation=implementation)
    return jnp.sum(product.astype(jnp.float32), axis=1)


def reduced(group: Group, x: jax.Array) -> jax.Array:
    ids = jnp.arange(x.shape[0], dtype=jnp.int32) % ROWS
    rows = SparseRows.from_entries(ids, x, num_rows=ROWS)
    out = sparse_all_reduce(rows, group=group, capacity=ROWS, method="bitmap", implementation="kernels")
    return jnp.sum(out.values.astype(jnp.float32), axis=1)


def exchanged(group: Group, x: jax.Array) -> jax.Array:
    """A row to and from each rank."""
    ranks = jnp.arange(group.size, dtype=jnp.int32)
    own, one = jax.lax.axis_index("ep").astype(jnp.int32) * jnp.ones_like(ranks), jnp.ones_like(ranks)
    out = ragged_all_to_all(x, x, ranks, one, own, one, axis_name="ep", group=group, implementation="kernels")
    return jnp.sum(out.astype(jnp.float32), axis=1)


# By name: what even and what odd processes run, as (op, tokens), and what the error says of the odd ones.
Call = tuple[Callable[..., jax.Array], int]
CASES: dict[str, tuple[Call, Call, str]] = {
    "tokens": ((dispatched, 64), (dispatched, 40), "dispatch float32 T=40 "),
    "many tokens": ((dispatched, 64), (dispatched, 1100), "dispatch float32 T=1100 "),
    "op": ((dispatched, 64), (multiplied, 64), "matmul_all_reduce bfloat16 M=64 "),
    "entries": ((reduced, 64), (reduced, 40), "sparse_all_reduce N=40 "),
    "rows": ((exchanged, 64), (exchanged, 40), "ragged_all_to_all "),
}
PLANS = "plans"  # of a product whose two ranks exchange their tiles


def prepare(group: Group, call: Call) -> Callable[[], Any]:
    """Compiled: XLA compiles a GPU's program together with the other processes, so all must compile both."""
    op, tokens = call
    spread = helpers.spread(group.mesh, np.ones((group.size, tokens, 16), np.float32))
    program = jax.jit(helpers.per_rank(lambda x: op(group, x), group.mesh)).lower(spread).compile()
    return lambda: jax.block_until_ready(program(spread))


def differ(name: str, group: Group, even: Call, odd: Call, seen: str) -> None:
    """Runs the calls, and prints the error of this process."""
    run_even, run_odd = prepare(group, even), prepare(group, odd)
    if name != PLANS:
        run_even()
    with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):  # a GPU delivers NaN
        run_odd() if jax.process_index() % 2 else run_even()
    with pytest.raises((MismatchError, PeerLostError)) as caught:
        group.check()
    print(f"\n[{name}] {caught.value}\n", flush=True)  # processes write side by side
    if isinstance(caught.value, MismatchError):
        assert seen in str(caught.value), (name, str(caught.value))


def differ_in_all(mesh: Mesh) -> None:
    for name, (even, odd, seen) in CASES.items():
        with Group(mesh, "ep", timeout=60.0) as group:
            differ(name, group, even, odd, seen)
    if jax.default_backend() == "gpu" and jax.device_count() == 2:  # one call, in other shares
        call = (multiplied, 1024)
        with Group(mesh, "ep", timeout=60.0, max_sms=32 if jax.process_index() % 2 else None) as group:
            differ(PLANS, group, call, call, " 30 CTAs, tiles 128x")
