"""The only module that touches private parts of jax, which may change in any of its releases."""

from collections.abc import Callable
from typing import Any

from jax._src import distributed


def coordination_client() -> Any | None:
    """Through which the key-value store of jax.distributed is read; None before `jax.distributed.initialize`."""
    return distributed.global_state.client


def replace_coordination_service(replace: Callable[[Any], Any]) -> None:
    """In the process that serves as the coordinator: what `replace` makes of its service takes the place of that."""
    distributed.global_state.service = replace(distributed.global_state.service)
