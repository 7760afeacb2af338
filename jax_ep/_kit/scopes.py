"""The names of ops in profiles and in HLO's `op_name`, forward and backward."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

_innermost = ContextVar("_innermost", default="")


@contextlib.contextmanager
def op_scope(op: str) -> Iterator[None]:
    """`jax.named_scope`, also as a decorator; but an op inside itself, such as its kernel, adds no second name."""
    if _innermost.get() == op:
        yield
        return
    before = _innermost.set(op)
    try:
        with jax.named_scope(op):
            yield
    finally:
        _innermost.reset(before)
