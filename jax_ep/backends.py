"""How the ranks of a group exchange: by kernels, or by XLA's collectives; between nodes, by both."""

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

from jax_ep import profiling
from jax_ep._kit import ffi, gemm
from jax_ep._kit.checks import Implementation, Resolved
from jax_ep._kit.ffi import Ranks
from jax_ep.errors import JaxEpError, PeerTimeoutError, PlatformError
from jax_ep.runtime import native
from jax_ep.runtime.membership import Membership
from jax_ep.runtime.watchdog import Watchdog

_LOGGER = logging.getLogger("jax_ep")


class Backend:
    """What a group has from its opening until it is closed. By itself it calls no kernels.

    Args:
      opened: the native group of the ranks of this process or node; None without kernels.
      refusal: the error of an op that asks for kernels.
      why_xla: why implementation="auto" is "xla".
    """

    marked: Ranks | None = None  # whose library keeps marks that processes of other nodes read

    def __init__(self, ranks: Ranks, opened: native.NativeGroup | None, refusal: str = "", why_xla: str = ""):
        self.ranks, self.native = ranks, opened
        self._refusal, self._why_xla = refusal, why_xla

    def resolve(self, op: str, implementation: Implementation, *, serves_nodes: bool) -> Resolved:
        """As `Group._resolve`, unless XLA was asked for."""
        if implementation == "auto":
            return logged(op, "xla", self._why_xla)
        raise PlatformError(f"{op}: {self._refusal}")

    def error(self) -> JaxEpError | None:
        """What went wrong. A recoverable error is returned once."""
        return None if self.native is None else native.as_error(self.native.take_error())

    def close(self, *, in_order: bool) -> None:
        """Called once. Unless `in_order`, the group fails in processes of other nodes."""


class KernelBackend(Backend):
    """Kernels exchange among all ranks of a line.

    Args:
      ranks, opened, free_number: as `opening.open_native` returns them.
      name: of the group, for the log.
      exits: whether a failure ends the process.
    """

    def __init__(
        self, ranks: Ranks, opened: native.NativeGroup, free_number: Callable[[], None], name: str, *, exits: bool
    ):
        super().__init__(ranks, opened)
        weakref.finalize(self, opened.release).atexit = False  # at exit the watchdogs close all groups
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(free_number)
            on_failure.callback(opened.close)
            profiling.group_opened(ranks, opened)
            self._watchdog = Watchdog(opened, name, exits=exits)
            self._end = on_failure.pop_all().close

    def resolve(self, op: str, implementation: Implementation, *, serves_nodes: bool) -> Resolved:
        return logged(op, "kernels", f"there are kernels for {self.ranks.platform}")

    def close(self, *, in_order: bool) -> None:
        try:
            profiling.group_closing(self.ranks)
        finally:
            self._end()
            self._watchdog.end()


class NodesBackend(Backend):
    """Kernels exchange inside nodes, and XLA's collectives between them.

    Args:
      inside: of the ranks of each node. `Group` closes it after this one.
      membership: of the processes of other nodes; None if all nodes are in this process.
      refusal, why_xla: as for `Backend`, of ops that do not serve nodes.
    """

    def __init__(
        self,
        ranks: Ranks,
        inside: Backend,
        membership: Membership | None,
        refusal: str = "groups across nodes need implementation='xla', got 'kernels'",
        why_xla: str = "its kernels do not leave a node",
    ):
        super().__init__(ranks, inside.native, refusal, why_xla)
        self._inside, self._membership = inside, membership
        if membership is not None:
            self.marked = None if self.native is None else inside.ranks
            weakref.finalize(self, membership.release).atexit = False

    def resolve(self, op: str, implementation: Implementation, *, serves_nodes: bool) -> Resolved:
        if serves_nodes:
            return self._inside.resolve(op, implementation, serves_nodes=True)
        return super().resolve(op, implementation, serves_nodes=False)

    def error(self) -> JaxEpError | None:
        """The loss of a process of another node, or the error of this node's ranks that it did not cause."""
        if self._membership is None:
            return self._inside.error()
        if (lost := self._membership.error()) is not None:
            return lost
        error = self._inside.error()
        if isinstance(error, PeerTimeoutError) and (lost := self._membership.error(in_vain=True)) is not None:
            lost.__cause__ = error
            return lost
        return error

    def close(self, *, in_order: bool) -> None:
        if self._membership is not None:
            self._membership.close(in_order=in_order)  # it reads marks of the inner ranks


def logged(op: str, implementation: Resolved, why: str) -> Resolved:
    _LOGGER.debug("%s: implementation %r, as %s", op, implementation, why)
    return implementation


def who_computes(device: Any) -> str:
    """Who computes the ops of a device if that is "auto", and why no library of ours does."""
    if (missing := ffi.without_kernels(device)) is None:
        return "kernels"
    return f"{'XLA and Pallas kernels' if gemm.runs_pallas(device) else 'XLA'}, as {missing[0]}"
