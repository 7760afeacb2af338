"""Opens a process' part of a native group."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jax_ep._kit import checks, ffi
from jax_ep._kit.ffi import Ranks
from jax_ep.runtime import native, rendezvous, topology
from jax_ep.runtime.timeouts import Deadline

MOST_SMS = 2**31 - 1  # the greatest C++ int


def open_native(
    ranks: Ranks, *, timeout: float, open_timeout: Deadline, max_sms: int | None
) -> tuple[Ranks, native.NativeGroup, Callable[[], None]]:
    """The ranks with their id, their native group, and the function that frees its number when it is closed.

    Raises:
      JaxEpError: as for `rendezvous.introduce` and `native.create_group`.
    """
    me, axes = jax.process_index(), checks.axes_of(ranks.axis_name)
    ordinals = [
        [ffi.ordinal(device) if device.process_index == me else -1 for device in line]
        for line in topology.lines(ranks.mesh, axes)
    ]
    ffi.library(ranks.platform).await_devices([ordinal for line in ordinals for ordinal in line if ordinal >= 0])
    processes = topology.processes(ranks.mesh, axes)
    everyone = {process for line in processes for process in line}
    what = identity(ranks)
    content = int(hashlib.sha256(what.encode()).hexdigest()[:15], 16)
    most = None if max_sms is None else min(int(max_sms), MOST_SMS)
    create = partial(native.create_group, ranks.platform, ordinals, timeout, content=content, max_sms=most)
    neighbours: dict[str, Any] = {}
    with contextlib.ExitStack() as on_failure:
        if everyone != {me}:
            introduced = rendezvous.introduce(what, me, processes, open_timeout)
            on_failure.callback(introduced.free)
            neighbours = {"index": introduced.number, **introduced.neighbours}
        opened = create(**neighbours)
        return dataclasses.replace(ranks, id=opened.id), opened, on_failure.pop_all().close


def identity(ranks: Ranks) -> str:
    """A text that identifies the devices, mesh and axis of a group: the same in all its processes."""
    devices = [(device.id, device.process_index) for device in ranks.mesh.devices.flat]
    return f"{ranks.platform} {devices} {dict(ranks.mesh.shape)} {ranks.axis_name}"
