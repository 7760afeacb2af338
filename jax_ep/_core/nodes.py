"""The nodes of a group: its hosts, and on a CPU its processes, between which XLA's collectives carry what is exchanged.

Kernels exchange inside a node (`Group.intranode`). Between nodes a rank talks to those with its own index in the other
nodes, so that every network interface carries the traffic of its own GPU (as in DeepEP's internode kernels).
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep._core import bootstrap, jax_private
from jax_ep.errors import PeerTimeoutError, PlatformError

MOSTLY = 0.9  # of the tokens: to leave out fewer does not pay
SLACK = 1.25  # room for a router that is not quite even
_FOLDER = "jax_ep/node"  # in the key-value store of jax.distributed


class NodePlan(NamedTuple):
    """How tokens go between nodes.

    Attributes:
      node_capacity: tokens that a rank can send to each node; None: each node is sent all, and none can be lost.
      expected: tokens that a rank has for a node, on average, when experts are drawn alike.
    """

    node_capacity: int | None
    expected: float


def plan(nodes: int, num_tokens: int, top_k: int, num_experts: int) -> NodePlan:
    """All tokens to all nodes, while a token that needs a node is no exception: else room for 5/4 of what is expected.

    A token needs a node if one of its top_k experts, different and drawn alike, is there.
    """
    elsewhere = num_experts - num_experts // max(nodes, 1)
    nowhere = math.comb(elsewhere, top_k) / max(1, math.comb(num_experts, top_k))
    expected = num_tokens * (1 - nowhere)
    room = -(-math.ceil(SLACK * expected) // 8) * 8
    return NodePlan(room if 0 < room < MOSTLY * num_tokens else None, expected)


def crosses_nodes(mesh: Mesh, axes: Sequence[str], platform: str, timeout: float) -> bool:
    """Whether the devices along `axes` of the mesh are of several nodes, and those along the last of them of one.

    On GPUs of several processes all of them call it.

    Raises:
      PlatformError: there are several processes, and `jax.distributed.initialize` was not called.
      PeerTimeoutError: a process did not call it within `timeout` seconds.
    """
    nodes = _nodes_of(platform, {device.process_index for device in mesh.devices.flat}, timeout)
    of_devices = np.array([nodes[device.process_index] for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    places = [mesh.axis_names.index(axis) for axis in axes]
    lines = np.moveaxis(of_devices, places, range(-len(places), 0)).reshape(-1, mesh.shape[axes[-1]])
    several = any(len(set(line)) > 1 for line in lines.reshape(-1, math.prod(mesh.shape[axis] for axis in axes)))
    return several and all(len(set(line)) == 1 for line in lines)


def _nodes_of(platform: str, processes: Collection[int], timeout: float) -> dict[int, str]:
    """The node of each process."""
    if platform == "cpu" or len(processes) == 1:
        return {process: str(process) for process in processes}
    client = jax_private.coordination_client()
    if client is None:
        raise PlatformError("Group: a mesh of several processes needs jax.distributed.initialize")
    client.key_value_set(f"{_FOLDER}/{jax.process_index()}", bootstrap.host_identity(), allow_overwrite=True)
    found: dict[int, str] = {}
    for process in sorted(processes):
        try:
            found[process] = client.blocking_key_value_get(f"{_FOLDER}/{process}", int(timeout * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise PeerTimeoutError(f"Group: process {process} did not say which host it is on: {error}") from error
    return found


def sum_over_nodes(
    parts: jax.Array, axes: tuple[str, ...], taken: Callable[[jax.Array, int], jax.Array] = lambda part, node: part
) -> jax.Array:
    """Sends parts[n] to node n, and adds up what comes in float32, in the order of the nodes: the same bits always.

    A reduce-scatter in as many bytes, whose order XLA would choose.

    Args:
      parts: [N, ...], one per node along `axes`.
      taken: what the part of a node adds.
    """
    arrived = jax.lax.all_to_all(parts, axes, 0, 0)
    total = taken(arrived[0], 0).astype(jnp.float32)
    for node in range(1, arrived.shape[0]):
        total += taken(arrived[node], node).astype(jnp.float32)
    return total.astype(parts.dtype)
