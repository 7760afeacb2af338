"""How the compiled library's part of a group comes to be: devices by line, the other processes met, an id."""

import hashlib
from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import Mesh

from jax_ep._core import checks, ffi, native, nodes, rendezvous
from jax_ep._core.checks import AxisName

MOST_SMS = 2**31 - 1  # what a C++ int holds


def open_native(
    platform: str,
    mesh: Mesh,
    axis_name: AxisName,
    *,
    timeout: float,
    open_timeout: float,
    max_sms: int | None,
    async_ops: bool,
) -> tuple[native.NativeGroup, Callable[[], None]]:
    """The group, and what frees its number when it is closed.

    Raises:
      JaxEpError: as for `rendezvous.introduce` and `native.create_group`.
    """
    me, axes = jax.process_index(), checks.axes_of(axis_name)
    ordinals = [
        [ffi.ordinal(device) if device.process_index == me else -1 for device in line]
        for line in nodes.lines(mesh, axes)
    ]
    ffi.library(platform).await_devices([ordinal for line in ordinals for ordinal in line if ordinal >= 0])
    processes = nodes.processes(mesh, axes)
    everyone = {process for line in processes for process in line}
    what = (
        f"{platform} {[(d.id, d.process_index) for d in mesh.devices.flat]} {dict(mesh.shape)} {axis_name}"
        + " async" * async_ops
    )
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
