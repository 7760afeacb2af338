"""Collectives for mixture-of-experts and sparse models in JAX, at the speed of the interconnect."""

from jax_ep import embedding, float8, lax, nn
from jax_ep._kit.checks import Implementation, OnOverflow
from jax_ep.errors import (
    CapacityError,
    GroupClosedError,
    InvalidRoutingError,
    JaxEpError,
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
    PlatformError,
)
from jax_ep.group import Group
from jax_ep.nn.layers import moe_mlp
from jax_ep.node_options import NodeOptions
from jax_ep.ops.collective_matmul.api import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from jax_ep.ops.matmul.gated import ClampedSwiglu
from jax_ep.ops.moe.api import combine, dispatch
from jax_ep.ops.moe.types import Dispatched, MoeStats, Routing, Unexpanded
from jax_ep.ops.moe.units import Experts, Gated
from jax_ep.ops.sparse.api import sparse_all_reduce
from jax_ep.ops.sparse.coalesce import coalesce
from jax_ep.ops.sparse.types import SparseRows
from jax_ep.profiling import profile
from jax_ep.version import __version__

__all__ = [
    "CapacityError", "ClampedSwiglu", "Dispatched", "Experts", "Gated", "Group", "GroupClosedError",
    "Implementation", "InvalidRoutingError", "JaxEpError", "MismatchError", "MoeStats", "NodeOptions", "OnOverflow",
    "PeerLostError", "PeerTimeoutError", "PlatformError", "Routing", "SparseRows", "Unexpanded", "__version__",
    "all_gather_matmul", "coalesce", "combine", "dispatch", "embedding", "float8", "lax", "matmul_all_reduce",
    "matmul_reduce_scatter", "moe_mlp", "nn", "profile", "sparse_all_reduce",
]  # fmt: skip


def __dir__() -> list[str]:
    """Public names alone, without the modules that define them."""
    return __all__
