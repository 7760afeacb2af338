"""A group: the devices along one mesh axis, their symmetric heap, and its lifetime."""

import collections
import hashlib
import secrets
import threading
import weakref
from functools import partial
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # the key-value store of jax.distributed has no public name
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jax_ep import _bootstrap, _checks, _ffi, _native, _watchdog, profiling
from jax_ep.errors import CapacityError, GroupClosedError, PeerTimeoutError, PlatformError

LAUNCHED = ("dispatch", "combine", "ragged_all_to_all")
LONGEST_TIMEOUT = 24 * 24 * 3600.0  # seconds; sockets count milliseconds in 31 bits
_open_groups: "weakref.WeakSet[Group]" = weakref.WeakSet()
_opened: collections.Counter[str] = collections.Counter()  # groups over several processes, by what they are over

# Kernels on the CPU could serve several processes too, and do in tests; but there independent ops may run in another
# order in each process, and wait for each other.
_CPU_PROCESSES_SHARE = False


class Group:
    """The ranks along one axis of a mesh, and the memory through which they signal.

    A mesh with further axes gives one independent group per line along the axis: the ops never talk across lines.
    Use it as a context manager, or call `close()`. Await results before closing.

    Args:
      mesh: the very mesh that `jax.shard_map` runs over: the same axes and devices, in the same order. Other axes raise
        when an op is traced, devices in another order when its kernels are lowered.
      axis_name: the axis whose devices exchange tokens.
      max_sms: the most SMs that an op of this group may take on a GPU; other platforms do not look at it. Default: what
        measures best and leaves room for XLA's own collectives, 96 of 132. An op that takes nearly all of them can
        deadlock with a collective that runs beside it, until the timeout.
      timeout: seconds a rank waits for a peer before the group fails with `PeerTimeoutError`. More than 24 days,
        and `inf`, count as 24 days.

    The devices may be of several processes of one host (`jax.distributed`): then all of them create the group, in the
    same order as any other groups over these devices.

    Raises:
      ValueError: the axis is not in the mesh, the mesh mixes platforms, or the timeout or max_sms is not positive.
      TypeError: max_sms is no int, or the timeout no number.
      PlatformError: a line has GPUs of several hosts, or XLA's flags let ops of a GPU overlap.
      PeerTimeoutError, PeerLostError: a process did not create its part of the group.
    """

    def __init__(self, mesh: Mesh, axis_name: str, *, timeout: float = 30.0, max_sms: int | None = None):
        if axis_name not in mesh.axis_names:
            raise ValueError(f"Group: axis_name {axis_name!r} is not an axis of the mesh, which has {mesh.axis_names}")
        if max_sms is not None:
            _checks.check_positive("Group", "max_sms", max_sms)
        _checks.check_seconds("Group", "timeout", timeout)
        platforms = {device.platform for device in mesh.devices.flat}
        if len(platforms) != 1:
            raise ValueError(f"Group: the devices of a mesh must be of one platform, got {sorted(platforms)}")
        self.mesh = mesh
        self.axis_name = axis_name
        self.timeout = min(float(timeout), LONGEST_TIMEOUT)
        self.platform = _ffi.library_name(mesh.devices.flat[0])
        self._closed = False
        self._overflow: CapacityError | None = None
        self._lock = threading.Lock()
        self._native: _native.NativeGroup | None = None
        if _ffi.is_built(self.platform) and not self._needs_xla:
            _native.check_xla_flags(self.platform)  # before processes connect
            self._native = self._create_native()
            if max_sms is not None:
                self._native.limit_processors(max_sms)
            self._watchdog = _watchdog.Watchdog(self._native, repr(self))
            self._finalizer = weakref.finalize(self, self._native.release)
            self._finalizer.atexit = False  # then the watchdogs close all groups
            profiling.group_opened(self)
        _open_groups.add(self)

    @property
    def size(self) -> int:
        """Ranks in each line of the group."""
        return self.mesh.shape[self.axis_name]

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
            overflow, self._overflow = self._overflow, None
        if overflow is not None:
            raise overflow
        if self._native is not None:
            error = _native.take_error(self._native)
            if error is not None:
                raise error

    def report(self) -> list[_native.RankReport]:
        """The flight recorder: for every rank, the last 64 ops and how long it waited for each peer.

        May be called at any time, from any thread, while ops run and after a failure. Ranks of other processes are
        included, those of other hosts and with implementation="xla" are not. A failure writes it as JSON into the
        folder that the environment variable JAX_EP_DUMP names.
        """
        return [] if self._native is None else _native.history(self._native)

    def launch_config(self, op: str, num_tokens: int, *, wire_dtype: DTypeLike | None = None) -> _native.LaunchConfig:
        """How `op` ("dispatch", "combine" or "ragged_all_to_all") is launched for `num_tokens` tokens a rank.

        Raises:
          ValueError: there is no such op.
          PlatformError: the group has no kernels, or they run on a CPU, as threads.
        """
        if op not in LAUNCHED:
            raise ValueError(f"launch_config: op must be one of {LAUNCHED}, got {op!r}")
        config = None
        if self._native is not None:
            config = _native.launch_config(self._native, self.platform, op, num_tokens, wire_dtype is not None)
        if config is None:
            raise PlatformError(f"launch_config: {self!r} launches no GPU kernels")
        return config

    def close(self) -> None:
        """Ends the group and frees its heap. Ops that still run on it get a `GroupClosedError`. May be called twice."""
        if self._closed:
            return
        self._closed = True
        _open_groups.discard(self)
        if self._native is not None:
            try:
                profiling.group_closing(self)
            finally:
                self._native.close()
                self._watchdog.end()
                self._finalizer()

    def resolve(self, op: str, implementation: str) -> str:
        """ "ffi" or "xla": the same answer on every rank, from the platform and the processes alone."""
        if self._closed:
            raise GroupClosedError(f"{op}: {self!r} is closed")
        if implementation == "xla":
            return "xla"
        if self._needs_xla:
            if implementation == "auto":
                return "xla"
            raise PlatformError(
                f"{op}: CPU groups of several processes need implementation='xla', got {implementation!r}"
            )
        if self._native is None:
            raise PlatformError(
                f"{op}: no jax_ep library is built for platform {self.platform!r} (built: {_ffi.built_platforms()}); "
                "install jax_ep on a machine with its compiler, or pass implementation='xla'"
            )
        return "ffi"

    @property
    def native_id(self) -> int:
        """The id by which kernels' handlers find the group."""
        assert self._native is not None
        return self._native.id

    def nan_on_overflow(self, op: str, needed: jax.Array, capacity: int, rows: Any) -> Any:
        """For the "xla" implementation: NaN, and a `CapacityError` for `check()`, if a rank needs more than it holds.

        Args:
          op: that needs the rows.
          needed: [R] rows that each rank needs, the same on all ranks.
          capacity: rows that each can hold.
          rows: what to return if they fit; a pytree.
        """
        overflow = jnp.any(needed > capacity)

        def report() -> None:
            jax.debug.callback(partial(self._report_overflow, op, capacity), needed)

        jax.lax.cond(overflow, report, lambda: None)
        return jax.tree.map(lambda x: jnp.where(overflow, jnp.asarray(jnp.nan, x.dtype), x), rows)

    def _report_overflow(self, op: str, capacity: int, needed: np.ndarray) -> None:
        rank = int(np.argmax(np.asarray(needed) > capacity))
        with self._lock:
            self._overflow = _native.capacity_error(op, rank, int(needed[rank]), capacity)

    @property
    def _needs_xla(self) -> bool:
        """Whether the kernels cannot serve it: on the CPU they do not leave their process."""
        spans = any(len(set(line)) > 1 for line in self._processes())
        return self.platform == "cpu" and spans and not _CPU_PROCESSES_SHARE

    def _lines(self) -> list[list[Any]]:
        """For every line along the axis, its devices in rank order."""
        axis = self.mesh.axis_names.index(self.axis_name)
        return np.moveaxis(self.mesh.devices, axis, -1).reshape(-1, self.size).tolist()

    def _processes(self) -> list[list[int]]:
        return [[device.process_index for device in line] for line in self._lines()]

    def _create_native(self) -> _native.NativeGroup:
        me, processes = jax.process_index(), self._processes()
        ordinals = [
            [_ffi.ordinal(device) if device.process_index == me else -1 for device in line] for line in self._lines()
        ]
        everyone = {process for line in processes for process in line}
        what = f"{self.platform} {[(d.id, d.process_index) for d in self.mesh.devices.flat]} {dict(self.mesh.shape)}"
        what += f" {self.axis_name}"
        content = int(hashlib.sha256(what.encode()).hexdigest()[:15], 16)
        peers = {process for line in processes if me in line for process in line} - {me}
        if not peers:
            return _native.create_group(self.platform, ordinals, self.timeout, content=content)
        _opened[what] += 1
        key = hashlib.sha256(f"{what} {_opened[what]}".encode()).hexdigest()
        sockets = _connect(f"jax_ep/{key}", me, peers, leader=min(everyone), timeout=self.timeout)
        return _native.create_group(
            self.platform, ordinals, self.timeout, content=content, processes=processes, sockets=sockets
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        shape = dict(self.mesh.shape)
        return f"Group(mesh={shape}, axis_name={self.axis_name!r}, size={self.size}, platform={self.platform!r})"


def find_open_group(op: str, axis_name: str) -> Group:
    """The open group over `axis_name` of the mesh that is manual here.

    Raises:
      ValueError: no such axis is manual here, there is no such group, or more than one.
    """
    _checks.check_manual_axis(op, axis_name)
    found = [group for group in _open_groups if group.axis_name == axis_name and _checks.is_mesh_here(group.mesh)]
    if len(found) == 1:
        return found[0]
    what = "no open jax_ep.Group" if not found else f"{len(found)} open jax_ep.Groups"
    shape = dict(jax.sharding.get_abstract_mesh().shape)
    raise ValueError(f"{op}: {what} over axis {axis_name!r} of a mesh {shape}; open exactly one")


def _connect(key: str, me: int, peers: set[int], *, leader: int, timeout: float) -> list[int]:
    """Connected sockets by process, -1 where there is none; the caller closes them."""
    client = distributed.global_state.client
    if client is None:
        raise PlatformError("Group: a mesh of several processes needs jax.distributed.initialize")

    def read(name: str, process: int) -> str:
        try:
            return client.blocking_key_value_get(f"{key}/{name}", int(timeout * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise PeerTimeoutError(f"process {process} did not create its part of the group: {error}") from None

    client.key_value_set(f"{key}/host/{me}", _bootstrap.host_identity())
    if me == leader:
        client.key_value_set(f"{key}/secret", secrets.token_hex(16))
    for peer in sorted(peers):
        if read(f"host/{peer}", peer) != _bootstrap.host_identity():
            raise PlatformError(
                f"Group: the devices of a line must be of one host, those of processes {me} and {peer} are not "
                "(or are in containers with networks of their own)"
            )
    connected = _bootstrap.connect(read("secret", leader), me, peers, timeout=timeout)
    return [connected[i].detach() if i in connected else -1 for i in range(max({me, *peers}) + 1)]
