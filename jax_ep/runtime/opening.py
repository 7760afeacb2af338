"""Opens a process' part of a native group."""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable

import jax

from jax_ep import errors
from jax_ep._kit import checks, ffi
from jax_ep._kit.ffi import Ranks
from jax_ep.runtime import native, rendezvous, topology
from jax_ep.runtime.timeouts import Deadline

MOST_SMS = 2**31 - 1  # the greatest C++ int


def open_native(
    ranks: Ranks, *, timeout: float, open_timeout: Deadline, max_sms: int | None
) -> tuple[Ranks, native.NativeGroup, Callable[[], None]]:
    """The ranks with their id, their native group, and the function that frees its number when it is closed.

    `JAX_EP_DEBUG_POISON=1` fills results that an op writes as a whole, and mailboxes, with 0xFF: stale data shows.

    Raises:
      PlatformError: the compiled library is of another version.
      JaxEpError: as for `rendezvous.introduce`, or what the library raises.
    """
    me, axes = jax.process_index(), checks.axes_of(ranks.axis_name)
    ordinals = [  # -1 for a device of another process
        [ffi.ordinal(device) if device.process_index == me else -1 for device in line]
        for line in topology.lines(ranks.mesh, axes)
    ]
    library = ffi.library(ranks.platform)
    library.await_devices([ordinal for line in ordinals for ordinal in line if ordinal >= 0])
    what = identity(ranks)
    content = int(hashlib.sha256(what.encode()).hexdigest()[:15], 16)  # by which compiled programs find the group
    most = None if max_sms is None else min(int(max_sms), MOST_SMS)
    poison = os.environ.get("JAX_EP_DEBUG_POISON", "0") == "1"
    processes = topology.processes(ranks.mesh, axes)
    number, sockets = -1, list[int]()  # -1: the lowest that is free. The group closes the sockets
    with contextlib.ExitStack() as on_failure:
        if any({*line} != {me} for line in processes):
            number, sockets, free = rendezvous.introduce(what, me, processes, open_timeout)
            on_failure.callback(free)
        others = processes if sockets else ()
        try:
            waits = open_timeout.left()
            opened = library.Group(ordinals, timeout, poison, others, sockets, waits, content, number, most)
        except library.GroupException as error:
            raise getattr(errors, error.args[0].name)(error.args[1]) from error
        except RuntimeError as error:
            raise errors.JaxEpError(str(error)) from error
        return dataclasses.replace(ranks, id=opened.id), opened, on_failure.pop_all().close


def identity(ranks: Ranks) -> str:
    """A text that identifies the devices, mesh and axis of a group: the same in all its processes."""
    devices = [(device.id, device.process_index) for device in ranks.mesh.devices.flat]
    return f"{ranks.platform} {devices} {dict(ranks.mesh.shape)} {ranks.axis_name}"
