"""A group: the devices along one mesh axis, their symmetric heap, and its lifetime."""

import threading
import weakref
from functools import partial
from types import TracebackType
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep import _ffi, profiling
from jax_ep.errors import CapacityError, GroupClosedError, PlatformError

_open_groups: "weakref.WeakSet[Group]" = weakref.WeakSet()


class Group:
    """The ranks along one axis of a mesh, and the memory through which they signal.

    A mesh with further axes gives one independent group per line along the axis: the ops never talk across lines.
    Use it as a context manager, or call `close()`. Await results before closing.

    Args:
      mesh: the mesh that `jax.shard_map` runs over.
      axis_name: the axis whose devices exchange tokens.
      timeout: seconds a rank waits for a peer before the group fails with `PeerTimeoutError`.

    Raises:
      ValueError: the axis is not in the mesh, the mesh mixes platforms, or the timeout is not positive.
    """

    def __init__(self, mesh: Mesh, axis_name: str, *, timeout: float = 30.0):
        if axis_name not in mesh.axis_names:
            raise ValueError(f"Group: axis_name {axis_name!r} is not an axis of the mesh, which has {mesh.axis_names}")
        if not timeout > 0:
            raise ValueError(f"Group: timeout must be a positive number of seconds, got {timeout}")
        platforms = {device.platform for device in mesh.devices.flat}
        if len(platforms) != 1:
            raise ValueError(f"Group: the devices of a mesh must be of one platform, got {sorted(platforms)}")
        self.mesh = mesh
        self.axis_name = axis_name
        self.timeout = float(timeout)
        self.platform = _ffi.library_name(mesh.devices.flat[0])
        self._closed = False
        self._overflow: CapacityError | None = None
        self._lock = threading.Lock()
        self._native: _ffi.NativeGroup | None = None
        if self._single_process and _ffi.is_built(self.platform):
            self._native = _ffi.create_group(self.platform, self._lines(), self.timeout)
            self._finalizer = weakref.finalize(self, self._native.close)
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
            error = _ffi.take_error(self._native)
            if error is not None:
                raise error

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
                self._finalizer()

    def resolve(self, op: str, implementation: str) -> str:
        """ "ffi" or "xla": the same answer on every rank, from the platform and the process count alone."""
        if self._closed:
            raise GroupClosedError(f"{op}: {self!r} is closed")
        if implementation == "xla":
            return "xla"
        if implementation == "auto" and self.platform == "cpu" and not self._single_process:
            return "xla"
        if not self._single_process:
            raise PlatformError(f"{op}: groups of several processes need implementation='xla', got {implementation!r}")
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

    def nan_on_overflow(self, op: str, needed: jax.Array, capacity: int, rows: jax.Array) -> jax.Array:
        """For the "xla" implementation: NaN, and a `CapacityError` for `check()`, if a rank needs more than it holds.

        Args:
          op: that needs the rows.
          needed: [R] rows that each rank needs, the same on all ranks.
          capacity: rows that each can hold.
          rows: what to return if they fit.
        """
        overflow = jnp.any(needed > capacity)

        def report() -> None:
            jax.debug.callback(partial(self._report_overflow, op, capacity), needed)

        jax.lax.cond(overflow, report, lambda: None)
        return jnp.where(overflow, jnp.nan, rows)

    def _report_overflow(self, op: str, capacity: int, needed: np.ndarray) -> None:
        rank = int(np.argmax(np.asarray(needed) > capacity))
        with self._lock:
            self._overflow = _ffi.capacity_error(op, rank, int(needed[rank]), capacity)

    @property
    def _single_process(self) -> bool:
        return len({device.process_index for device in self.mesh.devices.flat}) == 1

    def _lines(self) -> list[list[int]]:
        """For every line along the axis, the local ordinals of its devices in rank order."""
        axis = self.mesh.axis_names.index(self.axis_name)
        lines = np.moveaxis(self.mesh.devices, axis, -1).reshape(-1, self.size)
        return [[device.local_hardware_id for device in line] for line in lines]

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
      ValueError: there is none, or more than one.
    """
    here = jax.sharding.get_abstract_mesh()
    shape = dict(here.shape)
    found = [group for group in _open_groups if group.axis_name == axis_name and dict(group.mesh.shape) == shape]
    if len(found) == 1:
        return found[0]
    what = "no open jax_ep.Group" if not found else f"{len(found)} open jax_ep.Groups"
    raise ValueError(f"{op}: {what} over axis {axis_name!r} of a mesh {shape}; open exactly one")
