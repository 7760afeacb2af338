"""dispatch and combine over several nodes: XLA's collectives between them, kernels inside.

dispatch sends every token to every node; with `NodeOptions.capacity`, once to each node that has one of its experts.
There the rank with the same index receives it, and sends it once to each rank of the node that needs it. combine is the
reverse: each node sums its experts' outputs for a token, then the token's rank adds the nodes' sums in the order of the
nodes. (DeepEP's internode kernels do the same.)

Rows are ordered by source rank, as in one group of all ranks. Kernels know only the ranks of their node and would give
another order. So this module derives the routing from the expert ids of all tokens that came to the node.
"""

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._kit.checks import PyTree
from jax_ep._kit.float8 import Float8Rows, packed, rows_from_float8, rows_to_float8, unpacked
from jax_ep._kit.linear import linear, without_gradient
from jax_ep._kit.node_sums import added_up, sum_over_nodes
from jax_ep.errors import CapacityError
from jax_ep.group import Group
from jax_ep.ops.moe import kernels
from jax_ep.ops.moe.layout import count_invalid, layout
from jax_ep.ops.moe.settings import DispatchCall
from jax_ep.ops.moe.types import DISPATCHED, NO_GRADIENT, WHOLE, Chunks, Dispatched, NodeRouting, Routing
from jax_ep.ops.moe.xla import routing_of, xla_combine, xla_scatter
from jax_ep.runtime.undelivered import nan_on_overflow

_Rows = TypeVar("_Rows")  # a pytree of rows


def internode_dispatch(call: DispatchCall, tokens: jax.Array, expert_ids: jax.Array, weights: jax.Array) -> Dispatched:
    group = call.group
    of_nodes = _ids_of_nodes(expert_ids, group.nodes, call.inside.num_experts)
    sent, most = None, None
    if call.node_capacity is not None and call.node_capacity < expert_ids.shape[0]:
        sent, most = _tokens_to_send(of_nodes, call.node_capacity)
        of_nodes = of_nodes.at[jnp.arange(group.nodes)[:, None], sent].get(mode="fill", fill_value=-1)
    ids = jax.lax.all_to_all(of_nodes, group.node_axes, 0, 0)
    [weights] = _to_nodes(group, weights, sent)
    local, needed = _routing_inside(call, ids, weights)
    local, sent = checkpoint_name((local, sent), DISPATCHED)  # the rows' derivatives need them
    received = _received(call, tokens, sent, local)
    if expert_ids.size and not call.config.drop:
        received = _nan_on_overflow(call, received, needed, most)
    routing = _routing(call, expert_ids, local, sent)
    return Dispatched(received, routing.group_sizes, routing)


def internode_combine(group: Group, expert_outputs: jax.Array, routing: NodeRouting, *, by_kernels: bool) -> jax.Array:
    assert group.intranode is not None
    chunks = Chunks(group.nodes, routing.chunks if by_kernels else 1)
    if by_kernels:
        sums = kernels.combine_chunks(group.intranode, chunks, expert_outputs, routing.weights, routing.local)
    else:
        sums = [xla_combine(expert_outputs, routing.local, axis_name=group.intranode.axis_name)]
    combined = _from_nodes(group, sums, routing.sent, routing.num_tokens, chunks)
    if routing.sent is not None:
        no_token = ((routing.sent < 0) | (routing.sent > routing.num_tokens)).any()
        combined = jnp.where(no_token, jnp.asarray(jnp.nan, combined.dtype), combined)
    return combined


def _ids_of_nodes(expert_ids: jax.Array, nodes: int, experts: int) -> jax.Array:
    """[N, T, K]: for each node the ids relative to the node's first expert, and -1 for experts of other nodes."""
    first = experts * jnp.arange(nodes, dtype=expert_ids.dtype)[:, None, None]
    relative = expert_ids[None] - first
    return jnp.where((relative >= 0) & (relative < experts), relative, -1)


def _tokens_to_send(of_nodes: jax.Array, node_capacity: int) -> tuple[jax.Array, jax.Array]:
    """[N, B]: for each node the first B tokens with an expert there, padded with T. And the most that a node needs."""
    nodes, num_tokens, _ = of_nodes.shape
    wanted = (of_nodes >= 0).any(axis=2)
    position = jnp.cumsum(wanted, axis=1) - 1
    position = jnp.where(wanted & (position < node_capacity), position, node_capacity)
    sent = jnp.full((nodes, node_capacity), num_tokens, jnp.int32)
    sent = sent.at[jnp.arange(nodes)[:, None], position].set(jnp.arange(num_tokens, dtype=jnp.int32), mode="drop")
    return sent, wanted.sum(axis=1, dtype=jnp.int32).max()


def _routing_inside(call: DispatchCall, ids: jax.Array, weights: jax.Array) -> tuple[Routing, jax.Array]:
    """The routing of the tokens that came to this node, and [L], the rows that each rank of the node needs.

    Args:
      ids: [N, B, K], of the tokens that this rank received, by source node, relative to this node's first expert.
      weights: [N B, K].
    """
    axis, inside = call.intranode.axis_name, call.inside
    (nodes, tokens, top_k), size = ids.shape, inside.size
    me = jax.lax.axis_index(axis)
    by_source = jax.lax.all_gather(ids, axis, axis=1)  # [N, L, B, K], as ranks are numbered
    first_expert = jax.lax.axis_index(call.group.node_axes) * inside.num_experts
    placed = layout(by_source.reshape(-1), inside, nodes * size, first_expert)

    def by_rank(x: jax.Array) -> jax.Array:
        return x.reshape(nodes, size, tokens, top_k).swapaxes(0, 1).reshape(size, nodes * tokens, top_k)

    placed = placed._replace(owner=by_rank(placed.owner), row=by_rank(placed.row), dropped=by_rank(placed.dropped))
    return routing_of(placed, jax.lax.all_gather(weights, axis), me, inside, ids), placed.needed


def _routing(call: DispatchCall, expert_ids: jax.Array, local: Routing, sent: jax.Array | None) -> NodeRouting:
    """The routing over all nodes, from the routing inside this node and the tokens that were sent."""
    group, experts = call.group, call.config.num_experts
    valid = (expert_ids >= 0) & (expert_ids < experts)
    to_experts = jnp.bincount(jnp.where(valid, expert_ids, experts).reshape(-1), length=experts + 1)[:experts]
    found = jnp.sum(local.targets.reshape(group.nodes, -1) >= 0, axis=1, dtype=jnp.int32)
    found = jax.lax.all_to_all(found, group.node_axes, 0, 0, tiled=True).sum(dtype=jnp.int32)
    return NodeRouting(
        targets=local.targets,
        row_of=local.row_of,
        weights=local.weights,
        counts=jax.lax.all_to_all(to_experts.reshape(group.size, -1).astype(jnp.int32), group.axis_name, 0, 0),
        dropped=(valid.sum(dtype=jnp.int32) - found)[None],
        invalid=count_invalid(expert_ids, experts),
        config=local.config,
        local_counts=local.counts,
        sent=sent,
        num_tokens=expert_ids.shape[0],
        chunks=call.chunks,
    )


def _nan_on_overflow(call: DispatchCall, received: _Rows, needed: jax.Array, most: jax.Array | None) -> _Rows:
    """`received`, or NaN if a rank has more tokens for a node than are sent, or needs more rows than the capacity."""
    group, op = call.group, call.op
    all_needed = jax.lax.all_gather(needed, group.node_axes).reshape(-1)
    if most is not None and call.node_capacity is not None:
        all_sent = jax.lax.all_gather(most, group.axis_name)
        received = nan_on_overflow(op, all_sent, call.node_capacity, received, group._keep_error, _node_capacity_error)
        all_needed = jnp.where((all_sent > call.node_capacity).any(), 0, all_needed)
    return nan_on_overflow(op, all_needed, call.config.capacity, received, group._keep_error)


def _node_capacity_error(op: str, rank: int, needed: int, node_capacity: int) -> CapacityError:
    return CapacityError(
        f"{op}: rank {rank} has {needed} tokens for a node but nodes.capacity is {node_capacity}; open the "
        'group with a larger NodeOptions(capacity=...), or None, or pass on_overflow="drop"'
    )


def _received(call: DispatchCall, tokens: jax.Array, sent: jax.Array | None, local: Routing) -> jax.Array | Float8Rows:
    """The rows of the local experts, [C, H], or `Float8Rows`."""
    if call.config.wire is None:
        return _moved(call, tokens, sent, local)
    if call.config.wire == "float8_rows":
        return _float8_rows(call, without_gradient(NO_GRADIENT, tokens), sent, local)
    return _rows_through_float8(call, tokens, sent, local)


def _moved(call: DispatchCall, tokens: jax.Array, sent: jax.Array | None, local: Routing) -> jax.Array:
    """Sends tokens [T, H] to their nodes, and to their rows there."""
    chunks = Chunks(call.group.nodes, call.chunks)
    taken_in = _to_nodes(call.group, tokens, sent, chunks)
    if call.by_kernels:
        return kernels.scatter_all(call.intranode, taken_in, chunks.cut(local))
    return xla_scatter(taken_in[0], local, axis_name=call.intranode.axis_name)


def _float8_rows(call: DispatchCall, tokens: jax.Array, sent: jax.Array | None, local: Routing) -> Float8Rows:
    return unpacked(_moved(call, packed(rows_to_float8(tokens)), sent, local), tokens.shape[1])


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rows_through_float8(call: DispatchCall, tokens: jax.Array, sent: jax.Array | None, local: Routing) -> jax.Array:
    """Tangents and gradients pass straight through the rounding."""
    return rows_from_float8(_float8_rows(call, tokens, sent, local), tokens.dtype)


@_rows_through_float8.defjvp
def _rows_through_float8_jvp(call: DispatchCall, primals: PyTree, tangents: PyTree) -> tuple[jax.Array, jax.Array]:
    tokens, sent, local = primals
    return _rows_through_float8(call, tokens, sent, local), _moved(call, tangents[0], sent, local)


def _to_nodes(group: Group, x: jax.Array, sent: jax.Array | None, chunks: Chunks = WHOLE) -> list[jax.Array]:
    """Sends [T, H] of every rank to the nodes; returns [N B, H] for each chunk. `_from_nodes` is the transpose."""
    return linear(partial(_send_to_nodes, group, chunks), partial(_sum_from_nodes, group, x.shape[0]), sent, x)


def _from_nodes(group: Group, x: list[jax.Array], sent: jax.Array | None, num_tokens: int, chunks: Chunks) -> jax.Array:
    """Sends [N B, H] of each chunk back to the nodes of its tokens; returns [T, H], each token's sum over the nodes."""
    return linear(partial(_sum_from_nodes, group, num_tokens), partial(_send_to_nodes, group, chunks), sent, x)


def _send_to_nodes(group: Group, chunks: Chunks, sent: jax.Array | None, x: jax.Array) -> list[jax.Array]:
    taken_in: list[jax.Array] = []
    for chunk in chunks.slices(x.shape[0] if sent is None else sent.shape[1]):
        part = x[chunk] if sent is None else x.at[sent[:, chunk]].get(mode="fill", fill_value=0)
        if taken_in:  # one after the other, or XLA would merge small collectives
            part, taken_in[-1] = jax.lax.optimization_barrier((part, taken_in[-1]))
        if sent is None:
            came = jax.lax.all_gather(part, group.node_axes)
        else:
            came = jax.lax.all_to_all(part, group.node_axes, 0, 0)
        taken_in.append(came.reshape(group.nodes * came.shape[1], x.shape[1]))
    return taken_in


def _sum_from_nodes(group: Group, num_tokens: int, sent: jax.Array | None, chunks: list[jax.Array]) -> jax.Array:
    nodes = group.nodes
    parts = [x.reshape(nodes, x.shape[0] // nodes, x.shape[1]) for x in chunks]
    if sent is None:
        return jnp.concatenate([sum_over_nodes(part, group.node_axes) for part in parts])
    number = jnp.full((nodes, num_tokens), sent.shape[1], jnp.int32)
    number = number.at[jnp.arange(nodes)[:, None], sent].set(jnp.arange(sent.shape[1], dtype=jnp.int32), mode="drop")

    def taken(part: jax.Array, node: int) -> jax.Array:
        return part.at[number[node]].get(mode="fill", fill_value=0)

    # A token may be in different chunks for different nodes, so sums wait for all chunks.
    sums = jnp.concatenate([jax.lax.all_to_all(part, group.node_axes, 0, 0) for part in parts], axis=1)
    return added_up(sums, taken)
