"""The only module that uses private names of jax, which may change in any release."""

from collections.abc import Callable
from typing import Any

from jax._src import distributed


def coordination_client() -> Any | None:
    """The client of the key-value store of jax.distributed; None before `jax.distributed.initialize`."""
    return distributed.global_state.client


def replace_coordination_service(replace: Callable[[Any], Any]) -> None:
    """Replaces the coordinator's service by `replace(service)`, in the process that has it."""
    distributed.global_state.service = replace(distributed.global_state.service)
