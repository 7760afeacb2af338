"""Where the ranks of several processes call an op: they mark it, and on CPUs first check that they call it alike.

Kernels compare their calls by themselves. XLA's collectives between CPU processes (gloo) do not: if sizes differ, they
end the processes; if sizes are equal, they misread the bytes. Therefore the ranks first exchange a description of the
call, which has the same size for all ops. If descriptions differ, all ranks of all processes raise and exchange
nothing. The gradient of an op is a separate call. Between nodes, calls also mark where this process is (`progress`).
On GPUs they do nothing more, because comparing calls would need a collective and a host sync per op.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep._kit import ffi
from jax_ep._kit.checks import AxisName, PyTree
from jax_ep._kit.ffi import Ranks
from jax_ep._kit.linear import linear
from jax_ep._kit.vary import vary_alike
from jax_ep.errors import JaxEpError, MismatchError
from jax_ep.runtime.progress import Progress

Identity = Callable[[PyTree], PyTree]  # that marks or compares
_Arrays = TypeVar("_Arrays")  # a pytree
_ZERO = np.zeros((), np.int32)
_TEXT_BYTES, _HASH_BYTES = 504, 8  # of a description; longer texts differ by the hash


class Participants(NamedTuple):
    """The ranks whose calls are marked and compared."""

    mesh: Mesh
    axis_name: AxisName
    compares: bool  # False: kernels compare calls, or nothing does
    marked: Ranks | None  # whose library keeps the marks; None if nobody reads them
    progress: Progress
    keep_error: Callable[[JaxEpError], None]  # for `Group.check`


class Agreement:
    """The agreement of all ranks along an axis on a call of an op, before XLA's collectives exchange its operands.

    It does nothing unless calls are compared or marked. Between GPU processes they are only marked.

    Args:
      settings: must be equal on all ranks.
    """

    def __init__(self, participants: Participants, op: str, /, **settings: object):
        text = " ".join([op, *(f"{name}={value}" for name, value in settings.items())])
        self._does_nothing = not participants.compares and participants.marked is None
        self._begin, self._end = partial(_begun, participants, text), partial(_marked, participants, text, begins=False)
        self._begin_gradient = partial(_begun, participants, f"gradient of {text}")

    def enter(self, operands: _Arrays) -> _Arrays:
        """Returns the operands. Between CPU processes it first waits until all ranks have called the op with equal
        settings, or raises `MismatchError` in the program. In a gradient of the op, their cotangents mark its end."""
        return operands if self._does_nothing else _through(self._begin, self._end, operands)

    def leave(self, results: _Arrays) -> _Arrays:
        """Returns the results, and marks the end of the op. Their cotangents begin its gradient, a call of its own."""
        return results if self._does_nothing else _through(self._end, self._begin_gradient, results)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _through(to: Identity, back: Identity, arrays: PyTree) -> PyTree:
    """`to(arrays)`, which are the arrays. Cotangents of its floats pass `back`."""
    return to(arrays)


@_through.defjvp
def _through_jvp(to: Identity, back: Identity, primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
    moved, structure = jax.tree.flatten(tangents[0])
    floats = [i for i, x in enumerate(moved) if jnp.issubdtype(x.dtype, jnp.inexact)]
    passed = linear(lambda _, x: x, lambda _, cotangents: back(cotangents), (), [moved[i] for i in floats])
    for i, x in zip(floats, passed, strict=True):
        moved[i] = x
    return _through(to, back, *primals), structure.unflatten(moved)


def _begun(participants: Participants, text: str, operands: _Arrays) -> _Arrays:
    """The operands. A rank marks that the call begins. Ranks of CPU processes exchange its text and compare."""
    operands = _marked(participants, text, operands, begins=True)
    if not participants.compares:
        return operands
    words = _encoded(text)
    [mine] = vary_alike(participants.axis_name, _called(lambda *_: words, words, *_firsts(operands)))
    everyone = jax.lax.all_gather(mine, participants.axis_name, to="invarying")
    refuse = partial(_refuse, participants)
    agreed = jax.lax.cond(
        (everyone != everyone[0]).any(), lambda: _called(refuse, _ZERO, everyone), lambda: everyone[0, 0] * 0
    )
    return jax.tree.map(lambda x: jnp.where(agreed == 0, x, jnp.zeros_like(x)), operands)


def _marked(participants: Participants, text: str, arrays: _Arrays, *, begins: bool) -> _Arrays:
    """The arrays. A rank marks that the call begins or ends."""
    leaves, structure = jax.tree.flatten(arrays)
    full = [i for i, x in enumerate(leaves) if x.size]
    if participants.marked is not None and full:
        marked = ffi.mark(*(leaves[i] for i in full), ranks=participants.marked, begins=begins, text=text)
        for i, x in zip(full, marked, strict=True):
            leaves[i] = x
    return structure.unflatten(leaves)


def _called(callback: Callable[..., np.ndarray], like: np.ndarray, *arrays: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return jax.pure_callback(callback, result, *arrays, vmap_method="sequential")


def _firsts(arrays: PyTree) -> list[jax.Array]:
    """One element of each array that is not empty: an op that takes these elements waits for the arrays."""
    return [jax.lax.stop_gradient(x.reshape(-1)[0]) for x in jax.tree.leaves(arrays) if x.size]


def _encoded(text: str) -> np.ndarray:
    """[n] int32, with one n for all texts."""
    given = text.encode()
    start = given[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    return np.frombuffer(start + hashlib.sha256(given).digest()[:_HASH_BYTES], np.int32)


def _refuse(participants: Participants, everyone: np.ndarray) -> np.ndarray:
    numbers = np.asarray(everyone)
    differs = (numbers != numbers[0]).any(axis=1)
    if differs.any():  # under jax.vmap both branches of a cond run
        participants.progress.refuse()
        other = int(np.argmax(differs))
        first, second = (
            row.tobytes()[:_TEXT_BYTES].rstrip(b"\0").decode(errors="replace") for row in numbers[[0, other]]
        )
        error = MismatchError(
            f"rank 0 calls {first}; rank {other} calls {second}: all ranks must run the same ops alike, in one order; "
            "nothing was exchanged"
        )
        participants.keep_error(error)
        raise error
    return _ZERO
