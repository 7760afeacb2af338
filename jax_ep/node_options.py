"""How tokens travel between the nodes of a group."""

import dataclasses
import math
from typing import Literal, NamedTuple

from jax_ep._kit import checks

MOSTLY = 0.9  # a node that needs this fraction of the tokens is sent all
SLACK = 1.25  # room for a router that is not quite even


class NodePlan(NamedTuple):
    """How many tokens of a rank go to each node.

    Attributes:
      capacity: tokens that a rank can send to each node; None: each node is sent all, and none can be lost.
      expected: tokens that a rank has for a node, on average, if every expert is equally likely.
    """

    capacity: int | None
    expected: float


@dataclasses.dataclass(frozen=True)
class NodeOptions:
    """How the tokens of a mixture of experts travel between the nodes of a group: `jax_ep.Group(..., nodes=)`.

    Attributes:
      capacity: the most tokens that a rank sends to each node; `on_overflow` says what happens to more. None: all
        tokens go to all nodes, which is best for few tokens. "auto": None, or room for 5/4 of the tokens that an even
        router has for a node (`Group.node_plan`).
      chunks: into how many chunks tokens are cut: one chunk travels inside the nodes while the next travels between
        them. The `combine` of the dispatch, and the gradients of both, use as many. Results have the same bits with any
        number. "xla" ignores it.
    """

    capacity: int | Literal["auto"] | None = None
    chunks: int = 1


def checked(nodes: object) -> NodeOptions:
    """The argument `nodes` of a group; None stands for the defaults."""
    if nodes is None:
        return NodeOptions()
    if not isinstance(nodes, NodeOptions):
        raise TypeError(f"Group: nodes must be a jax_ep.NodeOptions or None, got {checks.describe(nodes)}")
    checks.check_int("Group", "nodes.chunks", nodes.chunks)
    if isinstance(nodes.capacity, str):
        if nodes.capacity != "auto":
            raise ValueError(f"Group: nodes.capacity must be an int, 'auto' or None, got {nodes.capacity!r}")
    elif nodes.capacity is not None:
        checks.check_int("Group", "nodes.capacity", nodes.capacity)
    return nodes


def plan_of(nodes: int, num_tokens: int, top_k: int, num_experts: int) -> NodePlan:
    """Room for 5/4 of the tokens that are expected to need a node; or None if that is nearly all tokens.

    A token needs a node if one of its top_k different experts is there; every expert is equally likely.
    """
    other_experts = num_experts - num_experts // max(nodes, 1)
    not_needed = math.comb(other_experts, top_k) / max(1, math.comb(num_experts, top_k))
    expected = num_tokens * (1 - not_needed)
    room = -(-math.ceil(SLACK * expected) // 8) * 8
    return NodePlan(room if 0 < room < MOSTLY * num_tokens else None, expected)
