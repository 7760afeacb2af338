"""Who runs a dispatch, and whether tokens stay in the slots where they land: chosen when the op is traced."""

import dataclasses
from typing import Literal

from jax_ep.group import Group
from jax_ep.ops.moe.settings import DispatchCall, DispatchConfig, worst_case_capacity

# "nodes": XLA between nodes, kernels or XLA inside. "xla": jax.lax alone. "in place": nothing moves; rows are tokens.
Path = Literal["nodes", "xla", "in place", "kernels"]


def path_of(call: DispatchCall, assignments: int) -> Path:
    if call.group.intranode is not None:
        return "nodes"
    if not call.by_kernels:
        return "xla"
    config = call.config
    moves = config.expand or config.wire is not None or not is_alone_on_gpu(call.group)
    # If ids may overflow the capacity, the kernel runs, because it reports the overflow.
    return "kernels" if moves or not always_fits(config, assignments) else "in place"


def unexpanded(call: DispatchCall, num_tokens: int) -> DispatchCall:
    """The call with expand=False, or as it is if that would take more memory, or the group has several nodes."""
    slots = call.group.size * num_tokens
    expand = call.group.intranode is not None or not 0 < slots < call.config.capacity
    return call._replace(config=dataclasses.replace(call.config, expand=expand))


def always_fits(config: DispatchConfig, assignments: int) -> bool:
    """Whether no ids can overflow the capacity of one rank, even if a token names an expert twice."""
    return config.drop or config.capacity >= worst_case_capacity(
        1, assignments, 1, config.num_experts, config.alignment
    )


def is_alone_on_gpu(group: Group) -> bool:
    """Whether there is nobody to exchange with. On CPUs the protocol always runs."""
    return group.size == 1 and group.platform != "cpu"
