"""A group: the devices along one mesh axis, their signal pads, and its lifetime."""

import contextlib
import logging
import threading
import time
import weakref
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import jax
from jax.sharding import AxisType, Mesh

from jax_ep._kit import checks, ffi, meshes
from jax_ep._kit.checks import AxisName, Implementation, Resolved
from jax_ep._kit.ffi import Ranks
from jax_ep._kit.logs import log_once
from jax_ep.backends import Backend, KernelBackend, NodesBackend, logged, who_computes
from jax_ep.errors import CapacityError, GroupClosedError, InvalidRoutingError, JaxEpError
from jax_ep.node_options import NodeOptions, NodePlan, checked, plan_of
from jax_ep.runtime import native, opening, timeouts, topology, watchdog
from jax_ep.runtime.agreement import Participants
from jax_ep.runtime.membership import Membership, heartbeat_thread
from jax_ep.runtime.progress import Progress

OnLost = Literal["raise", "exit"]
_EXPLICIT = (
    "jax_ep: the mesh has axes of AxisType.Explicit, as by jax.make_mesh, over which jax.shard_map takes arrays "
    "in the shards of in_specs alone: place them by jax.reshard(x, jax.P(...)), or make the mesh with "
    "axis_types=(jax.sharding.AxisType.Auto,) * len(axis_names)."
)
_open: "weakref.WeakSet[Group]" = weakref.WeakSet()
_open_lock = threading.Lock()  # a WeakSet must not change while another thread iterates over it


class Group:
    """The ranks along one axis of a mesh, and the memory through which they signal.

    A mesh with further axes gives one independent group per line along the axis: the ops never talk across lines.
    Use it as a context manager, or call `close()`: both wait for the arrays on its devices, unless an exception leaves
    the block.

    Args:
      mesh: the mesh of `jax.shard_map`: the same axes and devices, in the same order. Other axes raise an error when an
        op is traced, devices in another order when its kernels are lowered. Over an AbstractMesh their order is not
        checked, because JAX does not pass it on.
      axis_name: the axis whose devices exchange tokens; or several, such as ("context", "expert"), whose ranks are
        numbered with the last axis running fastest, as `jax.lax.axis_index` of the same tuple does.
      across_nodes: if True, the axes before the last one cross *nodes*: kernels exchange along the last axis, XLA's
        collectives (NCCL, gloo) along the others, and ranks are numbered node by node. If False, kernels exchange along
        all axes. Default: True if every line along the last axis is on one host (on a CPU: in one process), and some
        line along all axes is not.
      nodes: `NodeOptions`: how `dispatch` and `moe_mlp` send tokens between nodes. A group of one node ignores it. All
        processes must give the same. Default: `NodeOptions()`.
      timeout: seconds a rank waits for a peer before the group fails with `PeerTimeoutError`. A rank that compiles,
        loads data or saves a checkpoint keeps its peers waiting, so the timeout must be longer. More than 24 days, and
        `inf`, count as 24 days. Default: `JAX_EP_TIMEOUT` of the environment, or else 300. In a group across nodes a
        process without a heartbeat for this time, and at least 2 seconds, is lost (`PeerLostError`).
      open_timeout: seconds that this call waits for the other processes, in all. Default: `timeout`, but at most 300.
      max_sms: the most SMs that an op of this group may take on a GPU; other platforms ignore it. Default: the fastest
        number that leaves room for XLA's own collectives, 96 of 132. Products with a collective may take all SMs. An op
        that takes nearly all SMs can deadlock with a collective that runs at the same time, until the timeout. All
        processes must give the same number.
      on_lost: what a failure of the group does, besides its log entry and its dump. "raise": `check()` and
        later ops raise it. "exit": the process ends with code 75, so that its launcher can restart it. Nothing else
        frees a thread that waits in one of XLA's collectives.

    The devices may be of several processes (`jax.distributed`), which must be on one host except along axes that cross
    nodes. All processes create the group, in the same order as other groups over these devices. If a process comes too
    late, the call fails in all processes that have come. They may call again: the call returns once all processes are
    in it at the same time.

    Raises:
      ValueError: the axis is not in the mesh, the mesh mixes platforms, a timeout, max_sms or a number in `nodes` is
        not positive, one axis shall cross nodes, or on_lost or nodes.capacity is another text.
      TypeError: max_sms is no int, across_nodes no bool, nodes no `NodeOptions`, or a timeout no number.
      RuntimeError: this is traced code.
      PlatformError: a line has GPUs of several hosts, or XLA's flags let ops of a GPU overlap.
      PeerTimeoutError, PeerLostError: a process did not create its part of the group.
    """

    def __init__(
        self,
        mesh: Mesh,
        axis_name: AxisName,
        *,
        across_nodes: bool | None = None,
        nodes: NodeOptions | None = None,
        timeout: float | None = None,
        open_timeout: float | None = None,
        max_sms: int | None = None,
        on_lost: OnLost = "raise",
    ):
        meshes.check_mesh(mesh, axis_name)
        checks.check_one_of("Group", "on_lost", on_lost, OnLost)
        if max_sms is not None:
            checks.check_int("Group", "max_sms", max_sms)
        self.node_options = checked(nodes)
        timeout = timeouts.seconds("timeout", timeouts.default() if timeout is None else timeout)
        platforms = {device.platform for device in mesh.devices.flat}
        if len(platforms) != 1:
            raise ValueError(f"Group: the devices of a mesh must be of one platform, got {sorted(platforms)}")
        self.mesh = mesh
        self.axis_name: AxisName = checks.canonical_axis(axis_name)
        self.timeout = timeout
        self.platform = ffi.library_name(mesh.devices.flat[0])
        self.intranode: Group | None = None  # of the ranks of each node; None in a group of one node
        self._closed = False
        self._kept_error: JaxEpError | None = None
        self._lock = threading.Lock()
        self._progress = Progress()
        self._backend = self._open(across_nodes, timeouts.opening(open_timeout, timeout), max_sms, on_lost)
        with _open_lock:
            _open.add(self)

    def _open(
        self, across_nodes: bool | None, open_timeout: timeouts.Deadline, max_sms: int | None, on_lost: OnLost
    ) -> Backend:
        ranks, axes = Ranks(self.mesh, self.axis_name, self.platform), checks.axes_of(self.axis_name)
        waits: dict[str, Any] = {"timeout": self.timeout, "open_timeout": open_timeout}
        if topology.crosses_nodes(self.mesh, self.axis_name, self.platform, across_nodes, open_timeout):
            self.intranode = inside = Group(self.mesh, axes[-1], **waits, max_sms=max_sms, on_lost=on_lost)
            with _open_lock:
                _open.discard(inside)
            try:
                membership = self._membership(ranks, inside._backend.native, waits, on_lost)
            except BaseException:
                inside._close(in_order=True)
                raise
            return NodesBackend(ranks, inside._backend, membership)
        if self._spans_cpu_processes:
            refusal = "CPU groups of several processes need implementation='xla', got 'kernels'"
            return Backend(ranks, None, refusal, "kernels on a CPU do not leave their process")
        device = self.mesh.devices.flat[0]
        if (missing := ffi.without_kernels(device)) is not None:
            why, could_be = missing
            level = logging.WARNING if could_be else logging.INFO
            log_once(level, "Group: its ops are computed by %s", who_computes(device))
            refusal = f"{why}; or pass implementation='auto' or 'xla'"
            inside = Backend(ranks, None, refusal, why)
            return NodesBackend(ranks, inside, self._membership(ranks, None, waits, on_lost), refusal, why)
        if self.size > ffi.MAX_RANKS:
            raise ValueError(
                f"Group: axis_name must have at most {ffi.MAX_RANKS} devices, got {self.size}: exchange over an axis "
                "within a host, and shard batches, or experts' matrices, over the others"
            )
        native.check_xla_flags(self.platform)  # before processes connect
        opened = opening.open_native(ranks, max_sms=max_sms, **waits)
        return KernelBackend(*opened, repr(self), exits=on_lost == "exit")

    def _membership(
        self, ranks: Ranks, node: native.NativeGroup | None, waits: dict[str, Any], on_lost: OnLost
    ) -> Membership | None:
        """Of the other processes; None if there are none. `node`: of the ranks of this process' node."""
        processes = topology.other_processes(self.mesh, checks.axes_of(self.axis_name))
        if not processes:
            return None
        name, over = repr(self), opening.identity(ranks)
        thread = heartbeat_thread(frozenset({jax.process_index(), *processes}))
        on_failure = partial(watchdog.handle_failure, node, name, on_lost == "exit")
        self._progress = Progress(tuple if node is None else node.marks)
        return Membership(name, over, processes, **waits, thread=thread, progress=self._progress, on_lost=on_failure)

    @property
    def size(self) -> int:
        """Ranks in each line of the group."""
        return meshes.line_size(self.mesh, self.axis_name)

    @property
    def node_axes(self) -> tuple[str, ...]:
        """The axes that cross nodes; none in a group of one node."""
        return () if self.intranode is None else checks.axes_of(self.axis_name)[:-1]

    @property
    def nodes(self) -> int:
        """How many nodes a line spans."""
        return 1 if self.intranode is None else self.size // self.intranode.size

    def node_plan(self, num_tokens: int, top_k: int, num_experts: int) -> NodePlan:
        """What `NodeOptions(capacity="auto")` stands for.

        Args:
          num_tokens: T, the tokens of a rank.
          top_k: K, the experts of each token.
          num_experts: E.

        Raises:
          ValueError, TypeError: an argument is no int, negative, or num_experts is 0.
        """
        for name, number in (("num_tokens", num_tokens), ("top_k", top_k)):
            checks.check_int("Group.node_plan", name, number, least=0)
        checks.check_int("Group.node_plan", "num_experts", num_experts)
        return plan_of(self.nodes, num_tokens, top_k, num_experts)

    @property
    def closed(self) -> bool:
        return self._closed

    def check(self) -> None:
        """Raises what went wrong in an earlier op: `PeerTimeoutError`, `PeerLostError`, `CapacityError`, ...

        A `CapacityError` or `InvalidRoutingError` is raised once; a failed group raises on every check.
        """
        if self._closed:
            raise GroupClosedError(f"{self!r} is closed")
        with self._lock:
            kept, self._kept_error = self._kept_error, None
        if kept is not None:
            raise kept
        if (error := self._backend.error()) is not None:
            raise error

    def report(self) -> list[native.RankHistory]:
        """The flight recorder: for every rank, the last 64 ops, how long it waited for each peer, and how many bytes of
        rows it received from each.

        May be called at any time, from any thread, while ops run and after a failure. It includes ranks of other
        processes, but no ranks of other hosts, and no ops with implementation="xla". A failure writes it as JSON into
        the folder that the environment variable JAX_EP_DUMP names; `python -m jax_ep report` merges the files of all
        processes.
        """
        return [] if self._backend.native is None else native.history(self._backend.native)

    def close(self) -> None:
        """Ends the group and frees its memory. May be called twice.

        It first waits, for `timeout` at most, until all live arrays on the group's devices are computed, unless the
        group has failed. An op that runs later, or whose results nobody holds, gets a `GroupClosedError`.
        """
        if not self._closed:
            self._await_arrays()
        self._close(in_order=True)

    def _await_arrays(self) -> None:
        deadline, devices = time.monotonic() + self.timeout, set(self.mesh.devices.flat)
        for array in jax.live_arrays(self.mesh.devices.flat[0].platform):
            with contextlib.suppress(RuntimeError):  # it was donated meanwhile
                while devices & array.sharding.device_set and not array.is_ready():
                    if time.monotonic() > deadline or self._has_failed():
                        return
                    time.sleep(0.001)

    def _has_failed(self) -> bool:
        error = self._backend.error()
        return error is not None and not isinstance(error, (CapacityError, InvalidRoutingError))

    def _close(self, *, in_order: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with _open_lock:
            _open.discard(self)
        self._backend.close(in_order=in_order)
        if self.intranode is not None:
            self.intranode._close(in_order=in_order)

    def _resolve(self, op: str, implementation: Implementation, *, serves_nodes: bool = False) -> Resolved:
        """ "kernels" or "xla": the same answer on every rank, from the platform and the processes alone.

        Args:
          op: what the user called, for errors and the log.
          serves_nodes: the op can combine kernels inside nodes with XLA's collectives between nodes. Other ops are
            "xla" in a group across nodes.

        Raises:
          ValueError: there is no such implementation.
          GroupClosedError, PlatformError: the group is closed, or has no kernels for it and "kernels" was asked for.
        """
        checks.check_one_of(op, "implementation", implementation, Literal["auto", Resolved])
        if self._closed:
            raise GroupClosedError(f"{op}: {self!r} is closed")
        if implementation == "xla":
            return logged(op, "xla", "it was asked for")
        return self._backend.resolve(op, implementation, serves_nodes=serves_nodes)

    @property
    def _ranks(self) -> Ranks:
        """What kernel calls ask of a group."""
        return self._backend.ranks

    @property
    def _participants(self) -> Participants:
        """What `Agreement` asks of a group."""
        compares, marked = self._spans_cpu_processes, self._backend.marked
        return Participants(self.mesh, self.axis_name, compares, marked, self._progress, self._keep_error)

    def _keep_error(self, error: JaxEpError) -> None:
        """Keeps an error that "xla" has seen for the next `check()`. The first error is kept."""
        with self._lock:
            self._kept_error = self._kept_error or error

    @property
    def _spans_cpu_processes(self) -> bool:
        """Whether XLA's collectives serve the group, and compare the calls of ranks first (runtime/agreement.py).

        Kernels would deadlock: CPU processes may run independent ops in different orders, and wait for each other.
        """
        return self.platform == "cpu" and topology.spans_processes(self.mesh, checks.axes_of(self.axis_name))

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        """Itself: a copy of a module that holds the group exchanges through the same memory."""
        return self

    def __copy__(self) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a jax_ep.Group cannot be pickled: it is memory of this process; open one where it is loaded")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is None:
            self.close()
            return
        self._close(in_order=False)
        if isinstance(exc, ValueError) and "in_specs" in str(exc) and AxisType.Explicit in self.mesh.axis_types:
            exc.add_note(_EXPLICIT)

    def __repr__(self) -> str:
        if self._closed:
            return f"Group(axis_name={self.axis_name!r}, closed=True)"
        shape = dict(self.mesh.shape)
        text = f"mesh={shape}, axis_name={self.axis_name!r}, size={self.size}, platform={self.platform!r}"
        text += f", nodes={self.nodes}" if self.nodes > 1 else ""
        return f"Group({text})"


def keep_or_raise(error: JaxEpError) -> None:
    """Keeps the error of an op that has no group for `check()` of every open group; raises it if none is open.

    A program must not fail on one rank alone: its peers would wait in their next collective.
    """
    with _open_lock:
        groups = list(_open)
    for group in groups:
        group._keep_error(error)
    if not groups:
        raise error


def check_group(op: str, group: Any) -> None:
    """Raises unless `group` is a group in which nothing went wrong, and whose axes are manual here.

    Raises:
      TypeError, ValueError: `group` is no group, or this is no `jax.shard_map` over its mesh.
      JaxEpError: an earlier op of the group failed.
    """
    if not isinstance(group, Group):
        raise TypeError(f"{op}: group must be an open jax_ep.Group(mesh, axis_name), got {checks.describe(group)}")
    group.check()
    meshes.check_inside_shard_map(op, group.mesh, group.axis_name)


def find_group(op: str, axis_name: AxisName) -> Group:
    """The open group over `axis_name` of the mesh that is manual here.

    Raises:
      ValueError: no such axis is manual here, there is no such group, or more than one.
    """
    axis_name = checks.canonical_axis(axis_name)
    meshes.check_manual_axis(op, axis_name)
    with _open_lock:
        groups = list(_open)
    found = [group for group in groups if group.axis_name == axis_name and meshes.is_mesh_here(group.mesh)]
    if len(found) == 1:
        return found[0]
    what = "no open jax_ep.Group" if not found else f"{len(found)} open jax_ep.Groups"
    shape = dict(jax.sharding.get_abstract_mesh().shape)
    raise ValueError(f"{op}: {what} over axis {axis_name!r} of a mesh {shape}; open exactly one, or pass group=")
