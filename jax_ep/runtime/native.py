"""Groups of the compiled libraries, their errors and their profiles."""

import os
from typing import Any, NamedTuple, Protocol

from jax_ep import errors
from jax_ep.errors import JaxEpError, PlatformError

Found = tuple[Any, str]  # an error of a library: its kind, an enum with the names of exceptions, and its message


class NativeGroup(Protocol):
    """A group of the compiled libraries."""

    id: int
    test_hooks: Any  # of the library's class TestHooks

    def close(self) -> None: ...
    def release(self) -> None: ...
    def take_error(self) -> Found | None: ...  # returns a recoverable error only once
    def await_failure(self, seconds: float) -> Found | None: ...  # also returns if it is closed
    def history(self) -> list[tuple[int, int, int, str, list[int], list[int], list[tuple[Any, ...]]]]: ...
    def marks(self) -> list[tuple[int, int, str]]: ...  # by local rank: begun, ended, the call begun last
    def start_profile(self) -> None: ...
    def stop_profile(self) -> list[tuple[int, int, int, int, list[tuple[Any, ...]]]]: ...


def check_xla_flags(platform: str) -> None:
    """Raises `PlatformError` if command buffers may run two ops of a device at once, as ops share flags."""
    flag = "--xla_gpu_command_buffer_scheduling_mode"
    modes = [flags.split("=")[1] for flags in os.environ.get("XLA_FLAGS", "").split() if flags.startswith(f"{flag}=")]
    if platform != "cpu" and modes and modes[-1].startswith("CONCURRENT"):
        raise PlatformError(
            f"Group: XLA_FLAGS must leave {flag} at its default or SERIALIZE, got {modes[-1]}: "
            "two ops of a device must not overlap"
        )


class OpRecord(NamedTuple):
    """An op that a rank began. Times are nanoseconds of the device's clock; `end_ns` is 0 while it runs."""

    epoch: int  # the number of the op on its rank
    op: str
    call: str  # with its shapes and its call site
    outcome: str  # "running", "delivered" or "failed"
    begin_ns: int
    end_ns: int


class RankHistory(NamedTuple):
    """The last ops of one rank."""

    line: int
    rank: int
    finished: int  # ops
    process: str  # how the rank's process is; empty for this process
    waited_ns: list[int]  # for each rank of the line, in longer waits
    received_bytes: list[int]  # of rows, from each rank of the line, over all ops
    ops: list[OpRecord]  # the last 64 at most, in order


def history(native: NativeGroup) -> list[RankHistory]:
    return [
        RankHistory(line, rank, finished, process, waited, received, [OpRecord(*record) for record in records])
        for line, rank, finished, process, waited, received, records in native.history()
    ]


def as_error(found: Found | None) -> JaxEpError | None:
    """The exception for an error that a library returned; None for None."""
    return None if found is None else getattr(errors, found[0].name)(found[1])


ROLES = ("send", "receive", "multiply")  # of a span's coop


class Span(NamedTuple):
    """A phase of one coop of a rank. Times are of the host's monotonic clock."""

    cta: int
    role: int  # in ROLES
    epoch: int  # of a product: the shape of its matrix
    op: str
    phase: str
    begin_ns: int
    end_ns: int

    @property
    def is_product(self) -> bool:
        return ROLES[self.role] == "multiply"


class RankProfile(NamedTuple):
    """What one rank did in a profile. Spans are ordered by CTA, role and time."""

    line: int
    rank: int
    lost: int  # phases that later phases have overwritten
    unfinished: int  # coops that were inside an op when the profile ended
    spans: list[Span]


def stop_profile(native: NativeGroup) -> list[RankProfile]:
    return [
        RankProfile(line, rank, lost, unfinished, [_named(Span(*span)) for span in spans])
        for line, rank, lost, unfinished, spans in native.stop_profile()
    ]


def _named(span: Span) -> Span:
    """A product is named after its matrix (ffi/gemm/problem.h)."""
    rows, columns = divmod(span.epoch, 1 << 24)
    return span._replace(op=f"product {rows} x {columns}") if span.is_product else span
