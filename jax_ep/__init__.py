"""Collectives for mixture-of-experts and sparse models in JAX, at the speed of the interconnect."""

from jax_ep import lax as lax
from jax_ep.errors import (
    CapacityError as CapacityError,
)
from jax_ep.errors import (
    GroupClosedError as GroupClosedError,
)
from jax_ep.errors import (
    InvalidRoutingError as InvalidRoutingError,
)
from jax_ep.errors import (
    JaxEpError as JaxEpError,
)
from jax_ep.errors import (
    PeerLostError as PeerLostError,
)
from jax_ep.errors import (
    PeerTimeoutError as PeerTimeoutError,
)
from jax_ep.errors import (
    PlatformError as PlatformError,
)
from jax_ep.group import Group as Group
from jax_ep.moe import combine as combine
from jax_ep.moe import dispatch as dispatch
from jax_ep.routing import Dispatched as Dispatched
from jax_ep.routing import Routing as Routing
from jax_ep.version import __version__ as __version__
