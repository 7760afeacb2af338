"""The timeouts of a group: given, or from the environment."""

import contextlib
import os
import time
from typing import Self

import numpy as np

LONGEST_TIMEOUT = 24 * 24 * 3600.0  # seconds; sockets count milliseconds in 31 bits
LONGEST_OPENING = 300.0  # seconds, unless it is given
DEFAULT_TIMEOUT = 300.0  # seconds, as of jax.distributed.initialize; the first op may wait for a peer that compiles


def seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"Group: {name} must be a number of seconds, got {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"Group: {name} must be a positive number of seconds, got {value}")
    return float(min(value, LONGEST_TIMEOUT))  # an int may be larger than any float


class Deadline(float):
    """Seconds that a call may take, and `until`, the time when it must end. `Deadline(deadline)` is `deadline`."""

    until: float  # as of time.monotonic

    def __new__(cls, seconds: float) -> Self:
        if isinstance(seconds, cls):
            return seconds
        new = super().__new__(cls, seconds)
        new.until = time.monotonic() + seconds
        return new

    def left(self) -> float:
        return max(0.0, self.until - time.monotonic())


def opening(open_timeout: float | None, timeout: float) -> Deadline:
    """The deadline for opening a group with these arguments."""
    if isinstance(open_timeout, Deadline):  # of the group that this one belongs to
        return open_timeout
    return Deadline(min(timeout, LONGEST_OPENING) if open_timeout is None else seconds("open_timeout", open_timeout))


def default() -> float:
    given = os.environ.get("JAX_EP_TIMEOUT", str(DEFAULT_TIMEOUT))
    with contextlib.suppress(ValueError):
        if (given_seconds := float(given)) > 0:
            return given_seconds
    raise ValueError(f"Group: JAX_EP_TIMEOUT must be a positive number of seconds, got {given!r}")
