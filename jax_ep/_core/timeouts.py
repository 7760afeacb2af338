"""How long a group waits: as given, or by the environment."""

import os

from jax_ep._core import checks

LONGEST_TIMEOUT = 24 * 24 * 3600.0  # seconds; sockets count milliseconds in 31 bits
DEFAULT_TIMEOUT = 300.0  # seconds, as of jax.distributed.initialize; the first op may wait for a peer that compiles


def seconds(name: str, value: float) -> float:
    checks.check_seconds("Group", name, value)
    return min(float(value), LONGEST_TIMEOUT)


def default() -> float:
    given = os.environ.get("JAX_EP_TIMEOUT")
    try:
        given_seconds = DEFAULT_TIMEOUT if given is None else float(given)
    except ValueError:
        given_seconds = -1.0
    if not given_seconds > 0:
        raise ValueError(f"Group: JAX_EP_TIMEOUT must be a positive number of seconds, got {given!r}")
    return given_seconds
