"""Checks that the ranks of several processes call an op alike, before XLA's collectives exchange its operands.

Kernels compare their calls by themselves. XLA's collectives between CPU processes (gloo) do not: if sizes differ, they
end the processes; if sizes are equal, they misread the bytes. Therefore the ranks first exchange a description of the
call, which has the same size for all ops. If descriptions differ, all ranks of all processes raise and exchange
nothing. The gradient of an op is a call of its own. Calls also mark where this process is (`progress`).
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep._kit.checks import AxisName
from jax_ep._kit.linear import linear
from jax_ep._kit.vary import vary_alike
from jax_ep.errors import JaxEpError, MismatchError
from jax_ep.runtime.progress import Progress

_ZERO = np.zeros((), np.int32)
_TEXT_BYTES, _HASH_BYTES = 504, 8  # of a description; longer texts differ by the hash


class Participants(NamedTuple):
    """The ranks whose calls are compared."""

    mesh: Mesh
    axis_name: AxisName
    compares: bool  # False: kernels do
    progress: Progress
    keep_error: Callable[[JaxEpError], None]  # for `Group.check`


class Agreement:
    """The agreement of all ranks along an axis on a call of an op, before XLA's collectives exchange its operands.

    It does nothing unless `participants.compares`.

    Args:
      settings: must be equal on all ranks.
    """

    def __init__(self, participants: Participants, op: str, /, **settings: Any):
        self._participants = participants
        self._text = " ".join([op, *(f"{name}={value}" for name, value in settings.items())])

    def enter(self, operands: Any) -> Any:
        """Returns the operands once all ranks have called the op with equal settings; else the program raises
        `MismatchError`. In a gradient of the op, their cotangents mark its end."""
        if not self._participants.compares:
            return operands
        return _through(operands, _begun(self._participants, self._text, operands), partial(_ended, self._participants))

    def leave(self, results: Any) -> Any:
        """Returns the results, and marks the end of the op. Their cotangents begin its gradient, a call of its own."""
        if not self._participants.compares:
            return results
        return _through(
            results,
            _ended(self._participants, results),
            partial(_begun, self._participants, f"gradient of {self._text}"),
        )


def _through(arrays: Any, done: jax.Array, back: Callable[[Any], jax.Array]) -> Any:
    """Returns `arrays` once `done` is 0. Cotangents of its floats pass once `back(cotangents)` is 0."""
    leaves, structure = jax.tree.flatten(arrays)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    waited = _once(done, leaves)
    passed = linear(_once, lambda _, cotangents: _once(back(cotangents), cotangents), done, [leaves[i] for i in floats])
    for i, x in zip(floats, passed, strict=True):
        waited[i] = x
    return structure.unflatten(waited)


def _begun(participants: Participants, text: str, operands: Any) -> jax.Array:
    """0, as int32, if all ranks give the same text. The texts are exchanged once the operands are there."""
    words, progress = _encoded(text), participants.progress

    def begin(rank: np.ndarray, *_: np.ndarray) -> np.ndarray:
        progress.begin(int(rank), text)
        return words

    rank = jax.lax.axis_index(participants.mesh.axis_names)
    [mine] = vary_alike(participants.axis_name, _called(begin, words, rank, *_firsts(operands)))
    everyone = jax.lax.all_gather(mine, participants.axis_name, to="invarying")
    refuse = partial(_refuse, participants.keep_error, progress)
    return jax.lax.cond(
        (everyone != everyone[0]).any(), lambda: _called(refuse, _ZERO, rank, everyone), lambda: everyone[0, 0] * 0
    )


def _ended(participants: Participants, results: Any) -> jax.Array:
    """0, as int32, once the results are there."""
    progress = participants.progress

    def end(rank: np.ndarray, *_: np.ndarray) -> np.ndarray:
        progress.end(int(rank))
        return _ZERO

    return _called(end, _ZERO, jax.lax.axis_index(participants.mesh.axis_names), *_firsts(results))


def _called(callback: Callable[..., np.ndarray], like: np.ndarray, *arrays: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return jax.pure_callback(callback, result, *arrays, vmap_method="sequential")


def _firsts(arrays: Any) -> list[jax.Array]:
    """One element of each array that is not empty: an op that takes these elements waits for the arrays."""
    return [jax.lax.stop_gradient(x.reshape(-1)[0]) for x in jax.tree.leaves(arrays) if x.size]


def _once(agreed: jax.Array, arrays: Any) -> Any:
    return jax.tree.map(lambda x: jnp.where(agreed == 0, x, jnp.zeros_like(x)), arrays)


def _encoded(text: str) -> np.ndarray:
    """[n] int32, with one n for all texts."""
    given = text.encode()
    start = given[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    return np.frombuffer(start + hashlib.sha256(given).digest()[:_HASH_BYTES], np.int32)


def _refuse(
    keep_error: Callable[[JaxEpError], None], progress: Progress, rank: np.ndarray, everyone: np.ndarray
) -> np.ndarray:
    numbers = np.asarray(everyone)
    differs = (numbers != numbers[0]).any(axis=1)
    if differs.any():  # under jax.vmap both branches of a cond run
        progress.end(int(rank))
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
    return _ZERO
