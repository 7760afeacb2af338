"""The open groups, for ops that take an axis instead of a group."""

import threading
import weakref
from typing import Any

import jax

from jax_ep._kit import checks, meshes
from jax_ep._kit.checks import AxisName

_open: "weakref.WeakSet[Any]" = weakref.WeakSet()
_lock = threading.Lock()  # a WeakSet must not change while another thread iterates over it


def add(group: Any) -> None:
    with _lock:
        _open.add(group)


def discard(group: Any) -> None:
    with _lock:
        _open.discard(group)


def find(op: str, axis_name: AxisName) -> Any:
    """The open `Group` over `axis_name` of the mesh that is manual here.

    Raises:
      ValueError: no such axis is manual here, there is no such group, or more than one.
    """
    axis_name = checks.canonical_axis(axis_name)
    meshes.check_manual_axis(op, axis_name)
    with _lock:
        groups = list(_open)
    found = [group for group in groups if group.axis_name == axis_name and meshes.is_mesh_here(group.mesh)]
    if len(found) == 1:
        return found[0]
    what = "no open jax_ep.Group" if not found else f"{len(found)} open jax_ep.Groups"
    shape = dict(jax.sharding.get_abstract_mesh().shape)
    raise ValueError(f"{op}: {what} over axis {axis_name!r} of a mesh {shape}; open exactly one, or pass group=")
