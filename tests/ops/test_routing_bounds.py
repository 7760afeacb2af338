"""combine and its gradient with a routing that was changed on the way: refused by name, or never followed."""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from nodes_cases import over

from jax_ep import Dispatched, Group, InvalidRoutingError, NodeOptions, Routing, SparseRows, combine, dispatch
from jax_ep.float8 import Float8Rows

SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN, CAPACITY = 2, 6, 3, 8, 16, 40
DIFFER = "targets must differ by rank, got the same on all"
LEAVES = ("targets", "row_of", "weights", "counts", "dropped", "invalid")


def dispatched(group: Group, rng: helpers.Rng) -> tuple[helpers.Case, Dispatched]:
    case = helpers.draw_case(rng, group.size, TOKENS, TOP_K, EXPERTS, HIDDEN)
    options: dict[str, Any] = {"group": group, "num_experts": EXPERTS, "capacity": CAPACITY, "alignment": 4}
    return case, helpers.run(group, partial(dispatch, **options), *case)


def combined(group: Group, **by: Any) -> Callable[..., Any]:
    return helpers.per_rank(partial(combine, group=group, **by), group.mesh)


def gradient(group: Group) -> Callable[..., Any]:
    """The cotangents of the rows and of the weights, for one of ones."""

    def body(rows: jax.Array, routing: Routing) -> Any:
        def weighted(rows: jax.Array, weights: jax.Array) -> jax.Array:
            return combine(rows, dataclasses.replace(routing, weights=weights), group=group)

        out, pull = jax.vjp(weighted, rows, routing.weights)
        return pull(jnp.ones_like(out))

    return helpers.per_rank(body, group.mesh)


def spoilt(routing: Routing, leaf: str, value: int) -> Routing:
    """With the value in a leaf of rank 1, for a token of another rank where the leaf has those."""
    changed = getattr(routing, leaf).copy()
    changed[1].reshape(-1)[1] = value
    return dataclasses.replace(routing, **{leaf: changed})


def assert_works(group: Group, case: helpers.Case, out: Dispatched) -> None:
    group.check()
    actual = helpers.fetch(combined(group)(out.rows, out.routing))
    helpers.assert_combined(actual, out.rows, np.asarray(out.routing.targets), case.weights)


@pytest.mark.parametrize(
    ("program", "leaf", "limit"),
    [
        *((program, "targets", SIZE * CAPACITY) for program in (combined, gradient)),
        *((program, "row_of", CAPACITY) for program in (combined, gradient)),
        (gradient, "counts", TOKENS * TOP_K + 1),
    ],
)
def test_out_of_bounds(program: Any, leaf: str, limit: int, native: None, group: Group, rng: helpers.Rng) -> None:
    case, out = dispatched(group, rng)
    run = program(group)
    for value in (limit, helpers.BIG, *((-1, -helpers.BIG) if leaf == "counts" else ())):
        bad = spoilt(out.routing, leaf, value)
        with helpers.awaiting_failure(group, "InvalidRoutingError: (combine|scatter): .* out of bounds"):
            rows, *weights = jax.tree.leaves(helpers.fetch(run(out.rows, bad)))
            assert np.isnan(rows[1]).all()
            assert all(np.isnan(each[1][bad.row_of[1] >= 0]).all() for each in weights)
        # A gradient runs both, of which the op that comes last has the word; combine reads no counts.
        op = {(combined, leaf): "combine", (gradient, "counts"): "scatter"}.get((program, leaf), "(combine|scatter)")
        match = f"^{op}: rank 1: routing.{leaf} holds {value}, which is out of bounds: it must be below "
        with pytest.raises(InvalidRoutingError, match=match + (f"{limit}" if "|" not in op else "")):
            group.check()
    assert_works(group, case, out)


def test_xla_gives_nan_for_rows_that_are_not(native: None, group: Group, rng: helpers.Rng) -> None:
    case, out = dispatched(group, rng)
    program = combined(group, implementation="xla")
    actual = helpers.fetch(program(out.rows, spoilt(out.routing, "row_of", CAPACITY))).copy()
    assert np.isnan(actual[0, 0]).all()
    actual[0, 0] = helpers.fetch(program(out.rows, out.routing))[0, 0]
    helpers.assert_combined(actual, out.rows, np.asarray(out.routing.targets), case.weights)


@pytest.mark.parametrize("program", [combined, gradient])
@pytest.mark.parametrize("largest", [CAPACITY + 10, helpers.BIG])
def test_anything_in_the_leaves(program: Any, largest: int, native: None, group: Group, rng: helpers.Rng) -> None:
    """Whatever they hold, the process lives on and the group works."""
    case, out = dispatched(group, rng)
    run = program(group)
    for leaves in (["targets"], ["row_of"], ["counts"], ["targets", "row_of", "counts"]) * 3:
        shapes = {leaf: getattr(out.routing, leaf).shape for leaf in leaves}
        changed = {leaf: rng.integers(-largest, largest, shape).astype(np.int32) for leaf, shape in shapes.items()}
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            helpers.fetch(run(out.rows, dataclasses.replace(out.routing, **changed)))
        with contextlib.suppress(InvalidRoutingError):
            group.check()
    assert_works(group, case, out)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("nodes", "leaf"), [*((1, leaf) for leaf in LEAVES), *((2, leaf) for leaf in (*LEAVES, "local_counts", "sent"))]
)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x[:0], ValueError, "must have shape"),
        (lambda x: x[..., None], ValueError, "must have shape"),
        (lambda x: x.astype(jnp.int16), TypeError, "must be of dtype (int|float)32, got int16"),
        (lambda x: None, TypeError, "must be an array, got NoneType"),
        (lambda x: object(), TypeError, "must be an array, got object"),
        (lambda x: [1], TypeError, "must be an array, got list"),
        (lambda x: np.zeros(x.shape, object), TypeError, "must be of dtype (int|float)32, got object"),
    ],
)
def test_leaf_refused_by_name(
    nodes: int, leaf: str, change: Any, error: type[Exception], message: str, rng: helpers.Rng
) -> None:
    options: dict[str, Any] = {"on_overflow": "drop"} if nodes > 1 else {}
    with over(nodes, SIZE, nodes=NodeOptions(3)) if nodes > 1 else Group(helpers.mesh_of(ep=SIZE), "ep") as group:

        def body(tokens: jax.Array, ids: jax.Array) -> jax.Array:
            out = dispatch(tokens, ids, group=group, num_experts=EXPERTS, implementation="xla", **options)
            routing = dataclasses.replace(out.routing, **{leaf: change(getattr(out.routing, leaf))})
            return combine(out.rows, routing, group=group, implementation="xla")

        case = helpers.draw_case(rng, group.size, TOKENS, TOP_K, EXPERTS, HIDDEN)
        operands = helpers.on_mesh(group.mesh, case[:2])
        if leaf == "sent" and "NoneType" in message:  # then all tokens were sent to all nodes
            error, message = ValueError, "must be of the tokens of 2 nodes"
        # By targets, and by what was sent, the others are known to fit.
        other = {"targets": "row_of|rows", "sent": "targets"}.get(leaf, leaf)
        with pytest.raises(error, match=rf"^combine: routing\.({leaf}|{other}) {message}"):
            jax.eval_shape(helpers.per_rank(body, group.mesh), *operands)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"alignment": 0}, ValueError, "routing.config.alignment must be at least 1, got 0"),
        ({"alignment": 7}, ValueError, "routing.config.capacity must be a multiple of alignment 7"),
        ({"capacity": 4.0}, TypeError, "routing.config.capacity must be a Python int"),
        ({"capacity": 4}, ValueError, "expert_outputs must have the 4 rows of the dispatch, got (40, 16)"),
        ({"capacity": 2**30}, ValueError, "routing.config.capacity must be a multiple of alignment 4, below 2**31 / 2"),
        ({"num_experts": 9}, ValueError, "routing.config.num_experts must be a multiple of 2 ranks, got 9"),
        ({"num_experts": 4}, ValueError, "routing.counts must have shape [R, E / R] = (2, 2), got (2, 4)"),
        ({"size": 1}, ValueError, "routing.row_of must have shape [R, T, K] = (1, 6, 3), got (2, 6, 3)"),
        (None, TypeError, "routing.config must be a DispatchConfig, got NoneType"),
    ],
)
def test_config_refused_by_name(
    change: Any, error: type[Exception], message: str, native: None, group: Group, rng: helpers.Rng
) -> None:
    _, out = dispatched(group, rng)
    config = change and dataclasses.replace(out.routing.config, **change)
    with pytest.raises(error, match=f"^combine: {re.escape(message)}"):
        jax.eval_shape(combined(group), out.rows, dataclasses.replace(out.routing, config=config))


def test_replicated(native: None, group: Group, rng: helpers.Rng) -> None:
    """By P() every rank is given the same: that of all ranks, of another shape, or that of one."""
    _, out = dispatched(group, rng)
    all_ranks, one = (jax.tree.map(f, out.routing) for f in (np.concatenate, lambda x: x[0]))
    shape = r"row_of must have shape \[R, T, K\] = \(2, 12, 3\)"
    for routing, check_vma, match in ((all_ranks, True, shape), (all_ranks, False, shape), (one, True, DIFFER)):
        body = helpers.sharded(group.mesh, partial(combine, group=group), (P("ep"), P()), P("ep"), check_vma)
        with pytest.raises(ValueError, match=rf"^combine: routing\.{match}"):
            jax.eval_shape(body, np.concatenate(out.rows), routing)


@pytest.mark.parametrize("leaf", [None, object(), "text", 3])
def test_pytrees_hold_anything(leaf: Any) -> None:
    """As jax's own transformations put markers in the place of arrays."""
    rows = SparseRows.from_entries(jnp.zeros(2, jnp.int32), jnp.zeros((2, 3)), num_rows=4)
    eight = Float8Rows(jnp.zeros((4, 128), jnp.uint8), jnp.zeros((4, 1)))
    for tree in (rows, eight, Routing(*map(jnp.zeros, range(6)), config=None)):  # pyright: ignore[reportArgumentType]
        leaves, structure = jax.tree.flatten(tree)
        again = jax.tree.unflatten(structure, [leaf] * len(leaves))
        assert type(again) is type(tree)
        assert jax.tree.leaves(again, is_leaf=lambda x: x is None) == [leaf] * len(leaves)
