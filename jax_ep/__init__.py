"""Collectives for mixture-of-experts and sparse models in JAX, at the speed of the interconnect."""

from jax_ep import embedding as embedding, float8 as float8, lax as lax, nn as nn
from jax_ep._kit.checks import Implementation as Implementation, OnOverflow as OnOverflow
from jax_ep.errors import (
    CapacityError as CapacityError,
    GroupClosedError as GroupClosedError,
    InvalidRoutingError as InvalidRoutingError,
    JaxEpError as JaxEpError,
    MismatchError as MismatchError,
    PeerLostError as PeerLostError,
    PeerTimeoutError as PeerTimeoutError,
    PlatformError as PlatformError,
)
from jax_ep.group import Group as Group
from jax_ep.nn.layers import moe_mlp as moe_mlp
from jax_ep.node_options import NodeOptions as NodeOptions
from jax_ep.ops.collective_matmul.api import (
    all_gather_matmul as all_gather_matmul,
    matmul_all_reduce as matmul_all_reduce,
    matmul_reduce_scatter as matmul_reduce_scatter,
)
from jax_ep.ops.matmul.gated import ClampedSwiglu as ClampedSwiglu
from jax_ep.ops.moe.api import combine as combine, dispatch as dispatch
from jax_ep.ops.moe.types import (
    Dispatched as Dispatched,
    MoeStats as MoeStats,
    Routing as Routing,
    Unexpanded as Unexpanded,
)
from jax_ep.ops.moe.units import Experts as Experts, Gated as Gated
from jax_ep.ops.sparse.api import sparse_all_reduce as sparse_all_reduce
from jax_ep.ops.sparse.coalesce import coalesce as coalesce
from jax_ep.ops.sparse.types import SparseRows as SparseRows
from jax_ep.profiling import profile as profile
from jax_ep.version import __version__ as __version__


def __dir__() -> list[str]:
    """Public names alone, without the modules that define them."""
    names = [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, type(nn))]
    return [*names, "embedding", "float8", "lax", "nn", "__version__"]
