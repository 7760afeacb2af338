"""What dispatch and combine over nodes cost: bytes and memory as formulas of a few sizes (docs/scaling.md).

All are of one rank and one layer. Each rank has a network interface of its own, over which it talks to the ranks of the
same index in the other nodes. So what a rank sends to other nodes is what its interface sends, and it takes in as much.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax.numpy as jnp

from jax_ep.pallas_kernels import BLOCK

from .moe_cases import Shape
from .runner import Row

INDEX = WEIGHT = COUNT = 4  # bytes of an int32 or a float32
SLACK = 1.25  # of a node capacity, as in `Group.node_plan`
NODES = (2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How tokens go: N `nodes` of L `ranks` each, T tokens of a rank."""

    nodes: int
    ranks: int
    shape: Shape
    node_capacity: int | None = None  # B tokens of a rank for each node; None: all T
    float8: bool = False
    top_nodes: int | None = None  # a token's experts are of so many nodes at most, drawn alike; None: of any

    @property
    def others(self) -> int:
        return self.nodes - 1

    @property
    def dense(self) -> bool:
        return self.node_capacity is None or self.node_capacity >= self.shape.tokens

    @property
    def room(self) -> int:
        """B: the tokens that a rank sends to each node."""
        return self.shape.tokens if self.dense or self.node_capacity is None else self.node_capacity

    @property
    def row(self) -> int:
        """Bytes of a token, or of a sum, in its own dtype."""
        return self.shape.hidden * jnp.dtype(self.shape.dtype).itemsize

    @property
    def sent_row(self) -> int:
        """Bytes of a token on the wire of a dispatch."""
        hidden = self.shape.hidden
        scales = -(-hidden // BLOCK // 4) * 4  # a multiple of 16 bytes
        return hidden + scales * WEIGHT if self.float8 else self.row

    def share(self, parts: int) -> float:
        """The share of the tokens that need a certain one of `parts` equal parts of a node's experts."""
        top = self.top_nodes or self.nodes
        experts = top * self.shape.experts // self.nodes
        part = self.shape.experts // self.nodes // parts
        nowhere = math.comb(experts - part, self.shape.top_k) / math.comb(experts, self.shape.top_k)
        return top / self.nodes * (1 - nowhere)

    # Between nodes: exactly, whatever the ids are.

    @property
    def dispatch(self) -> int:
        """With all that it returns."""
        return self.dispatch_uncounted + self.others * (self.shape.experts // self.nodes + 1) * COUNT

    @property
    def dispatch_uncounted(self) -> int:
        """Without `routing.counts` and `dropped`, which cost nothing where nobody asks for them."""
        routing = self.shape.top_k * (INDEX + WEIGHT)
        overflow = self.ranks * COUNT * (1 if self.dense else 2)  # rows; on the way, too
        return self.others * (self.room * (self.sent_row + routing) + overflow)

    @property
    def combine(self) -> int:
        return self.others * self.room * self.row

    @property
    def backward(self) -> int:
        """The gradients in tokens and weights: a cotangent goes where its token went, and its sums come back."""
        return 2 * self.combine + self.others * self.room * self.shape.top_k * WEIGHT

    @property
    def step(self) -> int:
        """A layer, forward and backward."""
        return self.dispatch_uncounted + self.combine + self.backward

    def least(self, rows: float) -> float:
        """The fewest bytes of a dispatch whose rank has `rows` tokens for other nodes, one for each that needs it."""
        return rows * self.sent_row

    @property
    def rows_needed(self) -> float:
        """On average, where experts are drawn alike."""
        return self.others * self.shape.tokens * self.share(1)

    # Inside a node, by NVLink: on average, where experts are drawn alike.

    @property
    def rows_inside(self) -> float:
        """A rank sends on what it took in from all nodes, its own too: once to each other rank that needs it."""
        return self.nodes * self.shape.tokens * (self.ranks - 1) * self.share(self.ranks)

    @property
    def routing_inside(self) -> int:
        """Ids and weights of the tokens taken in, to all ranks of the node."""
        return (self.ranks - 1) * self.nodes * self.room * self.shape.top_k * (INDEX + WEIGHT)

    @property
    def dispatch_inside(self) -> float:
        return self.rows_inside * self.sent_row + self.routing_inside

    @property
    def combine_inside(self) -> float:
        return self.rows_inside * self.row

    @property
    def routing(self) -> int:
        """Memory for a routing's rows, weights and targets, which are kept from dispatch to combine."""
        assignments = self.nodes * self.room * self.shape.top_k
        return self.ranks * assignments * (INDEX + WEIGHT) + assignments * INDEX


def planned(exchange: Exchange) -> Exchange:
    """By the node capacity that `Group.node_plan` would choose if it knew `top_nodes`."""
    expected = exchange.shape.tokens * exchange.share(1)
    room = -(-math.ceil(SLACK * expected) // 8) * 8
    return dataclasses.replace(exchange, node_capacity=room if room < 0.9 * exchange.shape.tokens else None)


def rows(shape: Shape, ranks: int, *, float8: bool, top_nodes: int | None) -> Iterator[Row]:
    """A row for each number of hosts: KB (1000 bytes) per token and layer that a rank sends, forward."""
    for count in NODES:
        of_count = dataclasses.replace(shape, experts=max(shape.experts, count * ranks))
        dense = Exchange(count, ranks, of_count, float8=float8, top_nodes=min(top_nodes or count, count))
        by_room = planned(dense)
        sent = {
            "dense, KB": dense.dispatch + dense.combine,
            "by B, KB": by_room.dispatch + by_room.combine,
            "least, KB": dense.least(dense.rows_needed) + dense.rows_needed * dense.row,
            "inside, KB": by_room.dispatch_inside + dense.combine_inside,
        }
        cells = {name: f"{each / shape.tokens / 1e3:,.1f}" for name, each in sent.items()}
        yield {
            "experts on": "any host" if top_nodes is None else f"at most {top_nodes} hosts",
            "wire": "float8" if float8 else shape.dtype,
            "hosts": count,
            "E": of_count.experts,
            "tokens that need a host": f"{dense.share(1):.1%}",
            "B": "-" if by_room.dense else by_room.room,
            **cells,
            **({"by B, KB": "-"} if by_room.dense else {}),
        }
