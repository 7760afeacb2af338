"""The values that travel between dispatch and combine."""

import dataclasses
from typing import ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit import checks, vary
from jax_ep._kit.checks import AxisName
from jax_ep.group import Group
from jax_ep.ops.moe.layout import expert_of_rows, rows_of_experts, segments
from jax_ep.ops.moe.settings import DispatchConfig

# Names for policies of `jax.checkpoint`.
DISPATCHED = "jax_ep_dispatch"  # all results of a dispatch
COMBINED = "jax_ep_combine"  # the sums

RowsT = TypeVar("RowsT")  # jax.Array, or `Float8Rows`
NO_GRADIENT = "dispatch: wire='float8_rows' has no gradient; differentiate with wire='float8'"


class Chunks(NamedTuple):
    """How a rank cuts the tokens that it received from each node: into `number` chunks at most."""

    nodes: int = 1
    number: int = 1

    def slices(self, tokens: int) -> list[slice]:
        """The tokens of each chunk, among the tokens of a node. Chunks differ by at most one token."""
        count = max(1, min(self.number, tokens))
        return [slice(i * tokens // count, (i + 1) * tokens // count) for i in range(count)]

    def cut(self, routing: "Routing") -> "list[Routing]":
        """The routing of each chunk's tokens. `counts` still counts all tokens."""
        tokens, top_k = routing.targets.shape[0] // self.nodes, routing.targets.shape[1]
        if len(slices := self.slices(tokens)) == 1:
            return [routing]

        def of(chunk: slice, leaf: jax.Array) -> jax.Array:
            by_node = leaf.reshape(*leaf.shape[:-2], self.nodes, tokens, top_k)[..., chunk, :]
            return by_node.reshape(*leaf.shape[:-2], self.nodes * (chunk.stop - chunk.start), top_k)

        leaves = ("targets", "row_of", "weights")
        return [dataclasses.replace(routing, **{x: of(chunk, getattr(routing, x)) for x in leaves}) for chunk in slices]


WHOLE = Chunks()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Routing:
    """The rank and row of every assignment of a dispatch, for `combine`, and counts.

    Shapes are per rank, with T tokens, top-K, E experts and R ranks. Every leaf has a leading axis, so under
    `jax.shard_map` the one spec `P(axis_name)` fits the whole pytree.

    Attributes:
      targets: [T, K] int32. `owner * capacity + row` of each assignment of this rank, or -1 without a row.
      row_of: [R, T, K] int32. The row on this rank of each assignment of source rank s, or -1.
      weights: [R, T, K] float32. The received weights, 0 where `row_of` is -1. Differentiable.
      counts: [R, E / R] int32. Assignments per source rank and local expert, before padding and before drops.
      dropped: [1] int32. Assignments of this rank's tokens that found no room (`on_overflow="drop"`).
      invalid: [1] int32. Assignments of this rank's tokens whose expert id was neither -1 nor in [0, E).
      config: static; the settings of the dispatch.
    """

    targets: jax.Array
    row_of: jax.Array
    weights: jax.Array
    counts: jax.Array
    dropped: jax.Array
    invalid: jax.Array
    config: DispatchConfig = dataclasses.field(metadata={"static": True})
    _counts: ClassVar[str] = "counts"  # the leaf with the counts of the ranks of `config`

    def __repr__(self) -> str:
        return f"{type(self).__name__}({checks.described(**vars(self))})"

    @property
    def group_sizes(self) -> jax.Array:
        """[E / R] int32, as returned by the dispatch: rows of each local expert, with padding, within the capacity."""
        alignment, capacity = self.config.alignment, self.config.capacity
        rows = self.counts.sum(axis=0, dtype=jnp.int32)
        if self.config.drop:
            rows = rows_of_experts(rows, alignment, capacity)
        return segments(rows, alignment, capacity)[2]

    def expert_of_row(self) -> jax.Array:
        """[C] int32: the local expert of each row of the products, also of padding, or E / R in unused rows."""
        return expert_of_rows(self.group_sizes, self.config.capacity)

    def weight_of_row(self) -> jax.Array:
        """[C] float32: the weight of each row of the products, 0 without an assignment. Differentiable."""
        return self.by_row(self.weights, 0)

    def row_mask(self) -> jax.Array:
        """[C] bool: which rows of the products have an assignment. The others are padding, or unused."""
        return self.by_row(self.row_of >= 0, False)

    def by_row(self, values: jax.Array, nothing: float) -> jax.Array:
        """[C]: for each row of this rank the value of its assignment in `values` [R, T, K], or `nothing`."""
        row = jnp.where(self.row_of >= 0, self.row_of, self.config.capacity)
        return jnp.full_like(values, nothing, shape=(self.config.capacity,)).at[row].set(values, mode="drop")

    def of_slots(self, rank: jax.Array | int) -> "Routing":
        """The routing that sends each token once to each rank where it has a row, into its slot (`DispatchConfig`)."""
        ranks, tokens, top_k = self.row_of.shape
        slots = jnp.arange(ranks * tokens, dtype=jnp.int32).reshape(ranks, tokens, 1)
        owner = jnp.where(self.targets >= 0, self.targets // self.config.capacity, -1)
        earlier = (owner[:, :, None] == owner[:, None, :]) & np.tri(top_k, k=-1, dtype=bool)[None]
        first = (owner >= 0) & ~earlier.any(axis=2)
        here = self.row_of >= 0
        return dataclasses.replace(
            self,
            targets=jnp.where(first, owner * (ranks * tokens) + slots[rank], jnp.minimum(self.targets, -1)),
            row_of=jnp.where(here & (jnp.cumsum(here, axis=2) == 1), slots, -1),
            config=dataclasses.replace(self.config, capacity=ranks * tokens, alignment=1, zero_unused=False),
        )

    def check(self, op: str) -> None:
        """Raises ValueError or TypeError, naming `op` and the leaf, unless all leaves have the types that a dispatch
        returns. Kernels check the values.
        """
        if not isinstance(self.config, DispatchConfig):
            raise TypeError(f"{op}: routing.config must be a DispatchConfig, got {checks.describe(self.config)}")
        checks.check_array(op, "routing.targets", self.targets, "[T, K]")
        self.config.check(op, "routing.config", empty=self.targets.size == 0)
        size, local_experts, (num_tokens, top_k) = self.config.size, self.config.local_experts, self.targets.shape
        rows = size * num_tokens * top_k
        if rows + local_experts * self.config.alignment >= 2**31:
            raise ValueError(f"{op}: routing.targets must be of fewer than 2**31 / {size} values, got {rows // size}")
        for name, shape, layout, dtype in (
            ("targets", (num_tokens, top_k), "[T, K]", np.int32),
            ("row_of", (size, num_tokens, top_k), "[R, T, K]", np.int32),
            ("weights", (size, num_tokens, top_k), "[R, T, K]", np.float32),
            (self._counts, (size, local_experts), "[R, E / R]", np.int32),
            ("dropped", (1,), "[1]", np.int32),
            ("invalid", (1,), "[1]", np.int32),
        ):
            leaf = getattr(self, name)
            checks.check_array(op, f"routing.{name}", leaf, layout, dtype, shape=shape)

    def check_own(self, op: str, axis_name: AxisName) -> None:
        """Raises ValueError if the types say that all ranks have the same routing."""
        if self.counts.shape[0] == 1 or not vary.tracks_varying(axis_name):
            return
        for name in ("targets", "row_of", "counts", "local_counts", "sent"):  # the last two of a `NodeRouting`
            leaf = getattr(self, name, None)
            if leaf is not None and not vary.varies(leaf, axis_name):
                raise ValueError(
                    f"{op}: routing.{name} must differ by rank, got the same on all: pass the routing through "
                    f"jax.shard_map by P({axis_name!r}), in and out"
                )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class NodeRouting(Routing):
    """The routing of a dispatch over several nodes. There are N nodes with L ranks each; R = N L.

    `targets` [N B, K], `row_of` and `weights` [L, N B, K] and `config` describe the dispatch inside this node. The
    sources of that dispatch are the ranks of the node. Each has received N B tokens, in the order of the nodes. B is T,
    or `NodeOptions.capacity`. `counts` [R, E / R], `dropped` and `invalid` are as in `Routing`; `dropped` includes
    tokens that found no room between nodes.

    Attributes:
      local_counts: [L, E / R] int32. Assignments per source rank inside the node and local expert, before drops there.
      sent: [N, B] int32. For each node the tokens of this rank that were sent to it, in order, padded with T. None if
        every node got all tokens.
      num_tokens: static; T.
      chunks: static; of the dispatch, and of its combine.
    """

    local_counts: jax.Array
    sent: jax.Array | None
    num_tokens: int = dataclasses.field(metadata={"static": True})
    chunks: int = dataclasses.field(metadata={"static": True})
    _counts: ClassVar[str] = "local_counts"

    @property
    def local(self) -> Routing:
        zero = jnp.zeros_like(self.dropped)
        return Routing(self.targets, self.row_of, self.weights, self.local_counts, zero, zero, self.config)

    @property
    def group_sizes(self) -> jax.Array:
        return self.local.group_sizes

    def check(self, op: str) -> None:
        super().check(op)
        checks.check_int(op, "routing.num_tokens", self.num_tokens, least=0)
        checks.check_int(op, "routing.chunks", self.chunks)
        checks.check_array(op, "routing.counts", self.counts, "[R, E / R]")
        ranks, pairs = self.counts.shape[0], self.targets.shape[0]
        nodes = max(1, ranks // self.config.size)
        shape = (nodes * self.config.size, self.config.local_experts)
        checks.check_array(op, "routing.counts", self.counts, "[R, E / R]", np.int32, shape=shape)
        if pairs != nodes * (self.num_tokens if self.sent is None else pairs // nodes):
            raise ValueError(f"{op}: routing.targets must be of the tokens of {nodes} nodes, got {self.targets.shape}")
        if self.sent is not None:
            checks.check_array(op, "routing.sent", self.sent, "[N, B]", np.int32, shape=(nodes, pairs // nodes))


class MoeStats(NamedTuple):
    """Counts of a layer.

    On a mesh of one axis the `out_specs` of `jax.shard_map` are `P(axis_name)`: all experts, and one count per rank.
    With more axes name all of them, or sum over the others first: `jax.lax.psum(stats.counts, "data")`.

    Attributes:
      counts: [E / R] int32. For each expert on this rank: how many assignments all ranks sent it, before drops.
      dropped: [1] int32. Assignments of this rank's tokens that found no room (`on_overflow="drop"`).
      invalid: [1] int32. Assignments of this rank's tokens whose expert id was neither -1 nor in [0, E).
    """

    counts: jax.Array
    dropped: jax.Array
    invalid: jax.Array


class Dispatched(NamedTuple, Generic[RowsT]):
    """The results of `dispatch`. Type checkers see `Dispatched[jax.Array]` or `Dispatched[Float8Rows]`.

    Attributes:
      rows: [C, H] in the dtype of the tokens, or `Float8Rows` with wire="float8_rows". Ordered by local expert, then
        source rank, token and k. Padding, and rows after the last expert's, are zero.
      group_sizes: [E / R] int32. Rows of each local expert, padding included, as `jax.lax.ragged_dot` takes them.
      routing: for `combine`. A `NodeRouting` if the group has several nodes.
    """

    rows: RowsT
    group_sizes: jax.Array
    routing: Routing

    def __repr__(self) -> str:
        return f"Dispatched({checks.described(**self._asdict())})"


class Unexpanded(NamedTuple, Generic[RowsT]):
    """The results of `dispatch(expand=False)`, generic in its rows like `Dispatched`.

    Attributes:
      rows: [M, H] in the dtype of the tokens, or `Float8Rows` with wire="float8_rows". The rows that `indices` names
        are those of `Dispatched`. Other rows are undefined.
      group_sizes: as in `Dispatched`.
      routing: as in `Dispatched`.
      indices: [C] int32, as `jax_ep.lax.ragged_dot(..., lhs_indices=)` takes them: for each row of the products its row
        in `rows`, or -1 for a row of zeros. If the dispatch failed, other negative numbers.
    """

    rows: RowsT
    group_sizes: jax.Array
    routing: Routing
    indices: jax.Array

    def __repr__(self) -> str:
        return f"Unexpanded({checks.described(**self._asdict())})"


def check_combined(op: str, name: str, rows: jax.Array, routing: Routing, group: Group) -> None:
    """Raises unless `rows` [capacity, H'] and `routing` fit each other and the group."""
    if not isinstance(routing, Routing):
        raise TypeError(f"{op}: routing must be the Routing of a dispatch, got {checks.describe(routing)}")
    routing.check(op)
    config = routing.config
    if isinstance(routing, NodeRouting) != (group.intranode is not None):
        kinds = ("of one node", "across nodes")
        of, here = kinds[isinstance(routing, NodeRouting)], kinds[group.intranode is not None]
        raise ValueError(f"{op}: routing must be of a group {here}, as group is, got one {of}")
    if routing.counts.shape[0] != group.size or config.size * group.nodes != group.size:
        raise ValueError(
            f"{op}: routing must be of the {group.size} ranks of group, got one of {routing.counts.shape[0]} ranks"
        )
    routing.check_own(op, group.axis_name)
    checks.check_array(op, name, rows, "[capacity, H']", checks.TOKEN_DTYPES)
    if rows.shape[0] != config.capacity:
        raise ValueError(f"{op}: {name} must have the {config.capacity} rows of the dispatch, got {rows.shape}")
