"""Over several nodes, there and back; in chunks the results of whole tokens, by as many calls as chunks."""

import re
from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Rng
from jax.sharding import PartitionSpec as P
from test_nodes import AXES, EXPERTS, HIDDEN, TOKENS, TOP_K, assert_there_and_back, over, run, uneven

from jax_ep import Group, Implementation, NodeOptions, combine, dispatch

pytestmark = pytest.mark.usefixtures("native")

CAPACITY = 24

BFLOAT16, FLOAT16, FLOAT32 = helpers.DTYPES
# Nodes, ranks, node capacity, wire, dtype, and chunks: those that divide the tokens of a node or not, and more than
# there are.
WAYS = [
    *((2, 4, None, None, BFLOAT16, chunks) for chunks in (1, 2)),
    *((4, 2, None, None, FLOAT16, chunks) for chunks in (1, 4)),
    *((2, 2, capacity, None, FLOAT32, chunks) for capacity, chunks in ((None, 100), (5, 2), (100, 1))),
    (1, 2, None, None, FLOAT32, 1),
    (2, 1, None, None, FLOAT32, 1),
    (2, 4, 2, None, FLOAT32, 1),
    (2, 4, 3, None, FLOAT32, 3),
    (4, 2, 5, None, FLOAT32, 1),
    *((2, 2, capacity, "float8", FLOAT32, 4) for capacity in (None, 4)),
]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_there_and_back(way: Any, implementation: Implementation, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody writes is NaN before."""
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    nodes, ranks, node_capacity, wire, dtype, chunks = way
    case = uneven(rng, nodes * ranks, 128 if wire else HIDDEN, dtype)
    with over(nodes, ranks, nodes=NodeOptions(node_capacity, chunks)) as group:
        assert (group.size, group.nodes, group.node_axes) == (nodes * ranks, nodes, ("node",))
        sent: dict[str, Any] = {"on_overflow": "drop", "wire": wire, "capacity": CAPACITY, "alignment": 4}
        found = run(group, case, implementation=implementation, **sent)
        group.check()
    form: dict[str, Any] = {"node_capacity": node_capacity, "fp8": wire is not None, "alignment": 4}
    assert_there_and_back(found, group, case, **form)


def vjp_of(group: Group, **options: Any) -> Callable[..., Any]:
    """On a rank: the sums, their derivatives along the cotangent, and those of tokens and weights."""

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array, cotangent: jax.Array) -> Any:
        def sums(tokens: jax.Array, weights: jax.Array) -> jax.Array:
            return helpers.round_trip(group, experts=jnp.tanh, num_experts=EXPERTS, **options)(tokens, ids, weights)[1]

        out, back = jax.vjp(sums, tokens, weights)
        return out, jax.jvp(sums, (tokens, weights), (cotangent, weights))[1], back(cotangent)

    return body


@pytest.mark.optimized
@pytest.mark.parametrize(("node_capacity", "chunks", "check_vma"), [(None, 2, True), (4, 4, False)])
def test_the_bits_are_those_of_whole_tokens(node_capacity: int | None, chunks: int, check_vma: bool, rng: Rng) -> None:
    """Forward and backward, in 16 bits; of routings whose rows do not fit, too."""
    case = uneven(rng, 4, dtype=helpers.DTYPES[0])
    operands = [jnp.asarray(x.reshape(-1, *x.shape[2:])) for x in (*case, case.tokens[:, ::-1])]
    found = []
    for number in (1, chunks):
        with over(2, 2, nodes=NodeOptions(node_capacity, number)) as group:
            body, spec = vjp_of(group, capacity=CAPACITY, on_overflow="drop"), P(AXES)
            mapped = jax.shard_map(body, mesh=group.mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
            found.append(helpers.fetch(jax.jit(mapped)(*operands)))
            group.check()
    for whole, cut in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(whole.view(np.uint8), cut.view(np.uint8))


SCATTER, COMBINE = (rf'custom-call\(.*custom_call_target="jax_ep_{kernel}"' for kernel in ("scatter", "combine"))
EXCHANGE = rf"\(?f32\[[^=]*\b{HIDDEN}\][^=]* (?:all-gather|all-to-all)\("  # of rows
COPY = rf"f32\[{CAPACITY},{HIDDEN}\]\S* copy\(%(?!broadcast)"  # of a buffer of rows, unless it is of zeros


def read(hlo: str) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Each instruction of a compiled program by its name, and the names of those that it waits for."""
    found = dict(re.findall(r"^\s*(?:ROOT )?(%\S+) = (.*)$", hlo, re.MULTILINE))
    waits: dict[str, set[str]] = {}
    for name, text in found.items():  # operands come before what uses them
        operands = {operand for operand in re.findall(r"%[\w.-]+", text) if operand in waits}
        waits[name] = operands.union(*(waits[operand] for operand in operands))
    return found, waits


def counted(program: Any, *operands: Any) -> dict[str, int]:
    """Calls of kernels, exchanges between nodes of rows, copies, and what would keep chunks from overlapping."""
    found, waits = read(program.lower(*operands).compile().as_text())

    def of_kind(pattern: str) -> set[str]:
        return {name for name, text in found.items() if re.search(pattern, text)}

    scatter, combine, exchange = (of_kind(each) for each in (SCATTER, COMBINE, EXCHANGE))
    waiting = [name for name in exchange if waits[name] & scatter] + [
        name for name in combine if waits[name] & exchange
    ]
    of_each = {"scatter": scatter, "combine": combine, "exchange": exchange, "copy": of_kind(COPY), "waiting": waiting}
    return {kind: len(names) for kind, names in of_each.items()}


@pytest.mark.matrix(1)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA compiles for a CPU")
@pytest.mark.parametrize("node_capacity", [None, 4])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_kernel_and_an_exchange_for_each_chunk(node_capacity: int | None, chunks: int) -> None:
    """All write into one buffer of rows, which is nowhere copied. No exchange waits for kernels that pass on what
    another one brought, nor do kernels that sum rows up wait for an exchange.
    """
    with over(2, 2, nodes=NodeOptions(node_capacity, chunks)) as group:

        def sent(tokens: jax.Array, ids: jax.Array) -> Any:
            return dispatch(tokens, ids, group=group, num_experts=EXPERTS, capacity=CAPACITY, on_overflow="drop")

        def summed(rows: jax.Array, routing: Any) -> jax.Array:
            return combine(rows, routing, group=group)

        def of_sums(rows: jax.Array, routing: Any, cotangent: jax.Array) -> Any:
            return jax.vjp(lambda rows: combine(rows, routing, group=group), rows)[1](cotangent)

        def of_rows(tokens: jax.Array, ids: jax.Array, cotangent: jax.Array) -> Any:
            return jax.vjp(lambda tokens: sent(tokens, ids).rows, tokens)[1](cotangent)

        tokens, ids = np.zeros((2, 2, TOKENS, HIDDEN), np.float32), np.zeros((2, 2, TOKENS, TOP_K), np.int32)
        out = jax.eval_shape(helpers.per_rank(sent, group.mesh), tokens, ids)
        rows = out.rows, out.routing
        moved = {"scatter": chunks, "combine": 0, "exchange": chunks, "copy": 0, "waiting": 0}
        added = {"scatter": 0, "combine": chunks, "exchange": chunks, "copy": 0, "waiting": 0}
        for body, operands, expected in (
            (sent, (tokens, ids), moved),
            (summed, rows, added),
            (of_sums, (*rows, tokens), moved),
            (of_rows, (tokens, ids, out.rows), added),
        ):
            assert counted(helpers.per_rank(body, group.mesh), *operands) == expected, body.__name__
