"""Checks that the ranks of several processes call an op alike, before XLA's collectives exchange its operands.

Kernels compare their calls by themselves. XLA's collectives between CPU processes (gloo) do not: if sizes differ, they
end the processes; if sizes are equal, they misread the bytes. Therefore the ranks first exchange a description of the
call, which has the same size for all ops. If descriptions differ, all ranks of all processes raise and exchange
nothing. The gradient of an op is a call of its own.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit.checks import AxisName
from jax_ep._kit.linear import linear
from jax_ep._kit.vary import vary_alike
from jax_ep.errors import JaxEpError, MismatchError

_TEXT_BYTES, _HASH_BYTES = 504, 8  # of a description; longer texts differ by the hash


class CallingGroup(Protocol):
    """What a call asks of its group: a `jax_ep.Group` is one."""

    axis_name: AxisName

    @property
    def _asks_processes(self) -> bool: ...
    def _keep_error(self, error: JaxEpError) -> None: ...


class Call:
    """A call of an op by all ranks along an axis, around what XLA's collectives exchange.

    Does nothing where ranks are compared otherwise.

    Args:
      settings: which all ranks must give alike.
    """

    def __init__(self, group: CallingGroup, op: str, /, **settings: Any):
        self._group = group
        self._text = " ".join([op, *(f"{name}={value}" for name, value in settings.items())])
        self._agreed: Any = None

    def enter(self, operands: Any) -> Any:
        """The operands, once all ranks call the op alike; otherwise the program raises `MismatchError`."""
        if not self._group._asks_processes:
            return operands
        self._agreed = _agreed(self._group, self._text, operands)
        return _once(self._agreed, operands)

    def leave(self, results: Any) -> Any:
        """The results. Cotangents of floats pass once all ranks call the gradient alike.

        Results wait for the comparison even if the operands are empty.
        """
        if self._agreed is None:
            return results
        leaves, structure = jax.tree.flatten(results)
        floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

        def back(_: Any, cotangents: Any) -> Any:
            return _once(_agreed(self._group, f"gradient of {self._text}", cotangents), cotangents)

        for i, x in zip(floats, linear(_once, back, self._agreed, [leaves[i] for i in floats]), strict=True):
            leaves[i] = x
        return structure.unflatten(leaves)


def _agreed(group: CallingGroup, text: str, operands: Any) -> jax.Array:
    """0, as int32, if all ranks give the same text, which is not exchanged before the operands are there."""
    words = _described(text)
    described = jax.ShapeDtypeStruct(words.shape, words.dtype)
    mine = jax.pure_callback(lambda *_: words, described, *_firsts(operands), vmap_method="sequential")
    [mine] = vary_alike(group.axis_name, mine)
    everyone = jax.lax.all_gather(mine, group.axis_name, to="invarying")
    callback = partial(_refuse, group._keep_error)

    def refuse() -> jax.Array:
        return jax.pure_callback(callback, jax.ShapeDtypeStruct((), jnp.int32), everyone, vmap_method="sequential")

    return jax.lax.cond((everyone != everyone[0]).any(), refuse, lambda: everyone[0, 0] * 0)


def _firsts(arrays: Any) -> list[jax.Array]:
    """An element of each array that is not empty: who waits for these waits for the arrays."""
    return [jax.lax.stop_gradient(x.reshape(-1)[0]) for x in jax.tree.leaves(arrays) if x.size]


def _once(agreed: jax.Array, arrays: Any) -> Any:
    return jax.tree.map(lambda x: jnp.where(agreed == 0, x, jnp.zeros_like(x)), arrays)


def _described(text: str) -> np.ndarray:
    """[n] int32: of the same size for all texts."""
    given = text.encode()
    start = given[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    return np.frombuffer(start + hashlib.sha256(given).digest()[:_HASH_BYTES], np.int32)


def _refuse(keep_error: Callable[[JaxEpError], None], everyone: np.ndarray) -> np.ndarray:
    numbers = np.asarray(everyone)
    differs = (numbers != numbers[0]).any(axis=1)
    if differs.any():  # under jax.vmap both branches of a cond run
        other = int(np.argmax(differs))
        first, second = (
            row.tobytes()[:_TEXT_BYTES].rstrip(b"\0").decode(errors="replace") for row in numbers[[0, other]]
        )
        error = MismatchError(
            f"rank 0 calls {first}; rank {other} calls {second}: all ranks must run the same ops alike, in one order; "
            "nothing was exchanged"
        )
        keep_error(error)
        raise error
    return np.zeros((), np.int32)
