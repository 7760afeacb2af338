"""What can go wrong at run time. Bad arguments raise plain `ValueError` and `TypeError` at trace time instead."""


class JaxEpError(RuntimeError):
    """Base of every error that jax_ep raises about a running group."""


class PeerTimeoutError(JaxEpError):
    """A rank waited longer than the group's timeout for a peer. The group has failed: close it and open a new one."""


class PeerLostError(JaxEpError):
    """A peer gave up on an op, closed the group too early, ended, or sends no heartbeats.

    The group has failed: close it and open a new one.
    """


class MismatchError(JaxEpError):
    """Two ranks ran different ops at a time, or one op with different shapes, dtypes or options. For example, ops ran
    in another order, or the last batch had another size. The group has failed: close it and open a new one. But if CPU
    processes exchange by XLA, nothing was exchanged, and the group remains usable. With JAX_EP_DEBUG_CHECKS=1 also:
    ranks of a layer with shared_tokens=True have different tokens; its sums are NaN, and the group remains usable.
    """


class CapacityError(JaxEpError):
    """A rank was sent more rows than its `capacity`. Nothing was delivered; the group remains usable."""


class InvalidRoutingError(JaxEpError):
    """Offsets, sizes or the values of a `Routing` point outside a buffer, or two ranks disagree on them. Nothing was
    delivered; the group remains usable.
    """


class GroupClosedError(JaxEpError):
    """The group was closed before the operation ran: await its results first, as by `jax.block_until_ready`."""


class PlatformError(JaxEpError):
    """Something cannot run on these devices: their platform has no library, or one of another version; they are of
    several hosts or processes, which is not allowed; XLA's flags let ops overlap; or there are no kernels to ask about.
    """
