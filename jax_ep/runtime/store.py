"""The key-value store of jax.distributed, which lives in process 0. Processes of any hosts find each other there."""

from collections.abc import Iterable
from typing import Any, Protocol

from jax_ep.errors import PeerTimeoutError, PlatformError
from jax_ep.runtime import jax_private


class Store(Protocol):
    """The functions that we use of the client of jax.distributed."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...
    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]: ...  # of any bytes


def store() -> Any:
    """The client of this process: a `Store`.

    Raises:
      PlatformError: `jax.distributed.initialize` was not called.
    """
    client = jax_private.coordination_client()
    if client is None:
        raise PlatformError("Group: a mesh of several processes needs jax.distributed.initialize")
    return client


def not_opened(processes: Iterable[int], timeout: float) -> PeerTimeoutError:
    """The error if processes did not open their parts of a group within `timeout` seconds."""
    names = ", ".join(map(str, sorted(processes)))
    return PeerTimeoutError(f"Group: process {names} did not create its part of the group within {timeout:g} s")
