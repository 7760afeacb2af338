"""The nodes of a group. A node is a set of ranks that exchange by kernels (`Group.intranode`): by default the ranks of
one host, and on a CPU of one process. Rows travel between nodes by XLA's collectives.

Between nodes a rank exchanges only with the ranks of its own index, so every network interface carries the traffic of
its own GPU (as in DeepEP's internode kernels).
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ep._kit import checks, meshes
from jax_ep._kit.checks import AxisName
from jax_ep.runtime import bootstrap
from jax_ep.runtime.membership import heartbeat_thread, hosts_of
from jax_ep.runtime.timeouts import Deadline


def lines(mesh: Mesh, axes: Sequence[str]) -> list[list[Any]]:
    """For every line along `axes` of the mesh, its devices in rank order."""
    places = [mesh.axis_names.index(axis) for axis in axes]
    last = np.moveaxis(mesh.devices, places, range(-len(places), 0))
    return last.reshape(-1, meshes.line_size(mesh, tuple(axes))).tolist()


def processes(mesh: Mesh, axes: Sequence[str]) -> list[list[int]]:
    """The process of each rank, by line and rank."""
    return [[device.process_index for device in line] for line in lines(mesh, axes)]


def spans_processes(mesh: Mesh, axes: Sequence[str]) -> bool:
    """Whether some line along `axes` has ranks of several processes."""
    return any(len(set(line)) > 1 for line in processes(mesh, axes))


def company(lines: Sequence[Sequence[int]], me: int) -> set[int]:
    """The processes that lines, of the process of each rank, connect with process `me`, directly or through others."""
    met, found = set[int](), {me}
    while met != found:
        met, found = found, found.union(*(line for line in lines if found & {*line}))
    return met


def other_processes(mesh: Mesh, axes: Sequence[str]) -> dict[int, str]:
    """The processes that lines along `axes` join with this one, directly or not, and what errors call them."""
    everywhere, ranks, me = processes(mesh, axes), defaultdict[int, set[int]](set), jax.process_index()
    others = company(everywhere, me) - {me}
    for line in everywhere:
        for rank, process in enumerate(line):
            ranks[process].add(rank)

    def names(numbers: set[int]) -> str:
        return ", ".join(map(str, sorted(numbers)))

    nodes = {process: {rank // mesh.shape[axes[-1]] for rank in ranks[process]} for process in others}
    return {p: f"process {p} (node {names(nodes[p])}, rank {names(ranks[p])})" for p in sorted(others)}


def crosses_nodes(mesh: Mesh, axis_name: AxisName, platform: str, wanted: bool | None, timeout: Deadline) -> bool:
    """Whether a group along `axis_name` crosses nodes.

    `wanted` decides if it is given. Otherwise a group crosses nodes if the devices along all axes span several nodes,
    while those along the last axis never do. With `wanted=None`, several axes and GPUs of several processes, every
    process must call this function, which waits for all of them.

    Raises:
      TypeError, ValueError: `wanted` is no bool, or there is no axis left for the inside of nodes.
      PlatformError: there are several processes, and `jax.distributed.initialize` was not called.
      PeerTimeoutError, PeerLostError: a process did not call it within the timeout, or the store does not answer.
    """
    axes = checks.axes_of(axis_name)
    if wanted is not None:
        checks.check_bool("Group", "across_nodes", wanted)
        if wanted and len(axes) == 1:
            raise ValueError(
                f"Group: axis_name must be a tuple where across_nodes is True, got {axis_name!r}: name the axes across "
                "nodes and the one inside"
            )
        return wanted
    if len(axes) == 1:
        return False
    nodes = _nodes_of(platform, {device.process_index for device in mesh.devices.flat}, timeout)

    def several_nodes(axes: Sequence[str]) -> list[bool]:
        return [len({nodes[process] for process in line}) > 1 for line in processes(mesh, axes)]

    return any(several_nodes(axes)) and not any(several_nodes(axes[-1:]))


def _nodes_of(platform: str, everyone: Collection[int], timeout: Deadline) -> dict[int, str]:
    if platform == "cpu" or len(everyone) == 1:
        return {process: str(process) for process in everyone}
    me, thread = jax.process_index(), heartbeat_thread(frozenset(everyone))
    return hosts_of(thread, me, {*everyone} - {me}, bootstrap.host_identity(), timeout)
