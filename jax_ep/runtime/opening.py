"""Opens a process' part of a group: the native group, and heartbeats for other nodes."""

import hashlib
from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import Mesh

from jax_ep._kit import checks, ffi
from jax_ep._kit.checks import AxisName
from jax_ep.errors import JaxEpError
from jax_ep.runtime import liveness, native, rendezvous, topology
from jax_ep.runtime.liveness import Liveness
from jax_ep.runtime.timeouts import Deadline

MOST_SMS = 2**31 - 1  # the greatest C++ int


def open_native(
    platform: str,
    mesh: Mesh,
    axis_name: AxisName,
    *,
    timeout: float,
    open_timeout: Deadline,
    max_sms: int | None,
    async_ops: bool,
) -> tuple[native.NativeGroup, Callable[[], None]]:
    """The native group, and the function that frees its number when it is closed.

    Raises:
      JaxEpError: as for `rendezvous.introduce` and `native.create_group`.
    """
    me, axes = jax.process_index(), checks.axes_of(axis_name)
    ordinals = [
        [ffi.ordinal(device) if device.process_index == me else -1 for device in line]
        for line in topology.lines(mesh, axes)
    ]
    ffi.library(platform).await_devices([ordinal for line in ordinals for ordinal in line if ordinal >= 0])
    processes = topology.processes(mesh, axes)
    everyone = {process for line in processes for process in line}
    what = _identity(platform, mesh, axis_name) + (", async_ops" if async_ops else "")
    content = int(hashlib.sha256(what.encode()).hexdigest()[:15], 16)
    most = None if max_sms is None else min(int(max_sms), MOST_SMS)
    create = partial(
        native.create_group, platform, ordinals, timeout, content=content, max_sms=most, async_ops=async_ops
    )
    if everyone == {me}:
        return create(), lambda: None
    introduced = rendezvous.introduce(what, me, processes, open_timeout)
    try:
        return create(index=introduced.number, **introduced.neighbours), introduced.free
    except BaseException:
        introduced.free()
        raise


def open_liveness(
    name: str,
    platform: str,
    mesh: Mesh,
    axis_name: AxisName,
    *,
    timeout: float,
    open_timeout: Deadline,
    on_lost: Callable[[JaxEpError], None],
) -> Liveness | None:
    """Waits for the processes of the group's other nodes, and watches them; None if there are none.

    Raises:
      PlatformError, PeerTimeoutError: as for `liveness.heartbeat_thread` and `Liveness`.
    """
    others = topology.other_processes(mesh, checks.axes_of(axis_name))
    if not others:
        return None
    over = _identity(platform, mesh, axis_name)
    return Liveness(name, over, others, timeout, open_timeout, liveness.heartbeat_thread(), on_lost)


def _identity(platform: str, mesh: Mesh, axis_name: AxisName) -> str:
    """A text that identifies the devices, mesh and axis of a group: the same in all its processes."""
    return f"{platform} {[(d.id, d.process_index) for d in mesh.devices.flat]} {dict(mesh.shape)} {axis_name}"
