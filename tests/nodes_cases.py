"""Groups over several nodes, the first axis of a mesh of one process; uneven routings, and what must arrive of them."""

from typing import Any

import helpers
import numpy as np
import oracle

from jax_ep import Dispatched, Group

EXPERTS, TOKENS, TOP_K, HIDDEN = 16, 6, 3, 32
AXES = ("node", "ep")


def over(node: int, ep: int, **options: Any) -> Group:
    return Group(helpers.mesh_of(node=node, ep=ep), AXES, across_nodes=True, timeout=30, **options)


def assert_flat(out: Dispatched, group: Group, expected: oracle.Expected) -> None:
    """What one group of all ranks would return, of what came back from all."""
    ranks, size, routing = group.size, group.size // group.nodes, out.routing
    top_k = routing.targets.shape[-1]
    for name in ("counts", "dropped", "invalid"):
        np.testing.assert_array_equal(getattr(routing, name), getattr(expected, name), name)
    for name in ("row_of", "weights"):  # [R, L, N T, K] by rank inside and node
        parts = getattr(routing, name).reshape(ranks, size, group.nodes, -1, top_k)
        of_sources = parts.swapaxes(1, 2).reshape(ranks, ranks, -1, top_k)
        np.testing.assert_array_equal(of_sources, getattr(expected, name), name)


def run(group: Group, case: helpers.Case, **options: Any) -> tuple[Dispatched, np.ndarray]:
    program = helpers.dispatch_combine(group, num_experts=EXPERTS, **options)
    return helpers.by_rank(group.mesh, helpers.fetch(program(*helpers.on_mesh(group.mesh, case))))


def first_for_each_node(ids: np.ndarray, nodes: int, node_capacity: int, experts: int = EXPERTS) -> np.ndarray:
    """[R, T, K] whether an assignment travels to its node."""
    travels = np.zeros(ids.shape, bool)
    for rank in range(len(ids)):
        for node in range(nodes):
            here = (ids[rank] // (experts // nodes) == node) & (ids[rank] >= 0)
            tokens = np.flatnonzero(here.any(axis=1))[:node_capacity]
            travels[rank, tokens] |= here[tokens]
    return travels


def assert_there_and_back(
    found: tuple[Dispatched, np.ndarray], group: Group, case: helpers.Case, *, fp8: bool = False, alignment: int = 1
) -> None:
    """The rows of the oracle, padding and dropped ones too.

    Where the first tokens of a rank for a node travel, an oracle that never knew the others gives what arrives.
    """
    (out, combined), node_capacity = found, group.node_options.capacity
    options: dict[str, Any] = {"num_experts": EXPERTS, "capacity": out.rows.shape[1], "alignment": alignment}
    asked, kept = oracle.dispatch(*case, **options, fp8=fp8), case
    if isinstance(node_capacity, int):
        kept = case._replace(ids=np.where(first_for_each_node(case.ids, group.nodes, node_capacity), case.ids, -1))
    expected = oracle.dispatch(*kept, **options, fp8=fp8)
    if node_capacity is None:
        assert_flat(out, group, expected)
    np.testing.assert_array_equal(helpers.wide(out.rows), helpers.wide(expected.rows))
    np.testing.assert_array_equal(out.group_sizes, expected.group_sizes)
    np.testing.assert_array_equal(out.routing.counts, asked.counts)
    named = (case.ids >= 0) & (case.ids < EXPERTS)
    np.testing.assert_array_equal(out.routing.dropped[:, 0], (named & (expected.targets < 0)).sum(axis=(1, 2)))
    arrived = out.rows if fp8 else expected.rows  # XLA's division may round a value to the other neighbour
    helpers.assert_combined(combined, arrived, expected.targets, case.weights, roundings=3)


def uneven(rng: helpers.Rng, size: int, hidden: int = HIDDEN, dtype: Any = np.float32) -> helpers.Case:
    """Two thirds of all assignments to three experts, some to none, some out of bounds."""
    case = helpers.draw_case(rng, size, TOKENS, TOP_K, EXPERTS, hidden, np.dtype(dtype))
    hot = rng.random(case.ids.shape) < 2 / 3
    ids = np.where(hot, rng.integers(3, 6, case.ids.shape), case.ids)
    ids[rng.random(ids.shape) < 0.1] = -1
    ids[rng.random(ids.shape) < 0.1] = EXPERTS + 5
    ids[rng.random(ids.shape) < 0.1] = -7
    return case._replace(ids=ids.astype(np.int32))
