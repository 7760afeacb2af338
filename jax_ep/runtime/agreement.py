"""Checks that the ranks of several processes call an op alike, before XLA's collectives exchange its operands.

Kernels compare their calls by themselves. XLA's collectives between CPU processes (gloo) do not: if sizes differ, they
end the processes; if sizes are equal, they misread the bytes. Therefore the ranks first exchange a few numbers, in a
collective that always has the same size. If the numbers differ, all ranks of all processes raise and exchange nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit import vary
from jax_ep._kit.checks import AxisName
from jax_ep.errors import JaxEpError, MismatchError


class Choice(NamedTuple):
    """A setting whose values have numbers: their places in `among`."""

    value: Any
    among: Sequence[Any]


def once_agreed(
    op: str,
    axis_name: AxisName,
    call: Mapping[str, int | Choice],
    operands: tuple[jax.Array, ...],
    keep_error: Callable[[JaxEpError], None],
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """`operands`, once all ranks along the axis have given equal settings; otherwise the program raises.

    Also returns 0, as int32, which depends on the comparison: for results of empty operands.

    Args:
      call: the settings by name, with numbers below 2^31. All ranks give the same names.
      keep_error: of the group; gets the `MismatchError`.
    """
    numbers = [x.among.index(x.value) if isinstance(x, Choice) else int(x) for x in call.values()]
    [mine] = vary.vary_alike(axis_name, jnp.array(numbers, jnp.int32))
    everyone = jax.lax.all_gather(mine, axis_name)
    none = mine[0] * 0

    def refuse() -> jax.Array:
        callback = partial(_refuse, op, dict(call), keep_error)
        raised = jax.pure_callback(callback, jax.ShapeDtypeStruct((), jnp.int32), everyone, vmap_method="sequential")
        return vary.vary_alike(None, raised, none)[0]

    raised = jax.lax.cond((everyone != everyone[0]).any(), refuse, lambda: none)
    return tuple(jnp.where(raised == 0, x, jnp.zeros_like(x)) for x in operands), raised


def _refuse(
    op: str, call: Mapping[str, int | Choice], keep_error: Callable[[JaxEpError], None], everyone: np.ndarray
) -> np.ndarray:
    numbers = np.asarray(everyone)
    differs = (numbers != numbers[0]).any(axis=1)
    if differs.any():  # under jax.vmap both branches of a cond run
        other = int(np.argmax(differs))
        first, second = _named(call, numbers[0]), _named(call, numbers[other])
        error = MismatchError(
            f"{op}: rank 0 calls it with {first}, rank {other} with {second}: all ranks must call it alike; nothing "
            "was exchanged"
        )
        keep_error(error)
        raise error
    return np.zeros((), np.int32)


def _named(call: Mapping[str, int | Choice], numbers: np.ndarray) -> str:
    """ "num_tokens=64 dtype=float32": the settings of `call` with the numbers of a rank."""

    def text(mine: int | Choice, number: int) -> Any:
        return mine.among[number] if isinstance(mine, Choice) else number

    return " ".join(f"{name}={text(mine, int(x))}" for (name, mine), x in zip(call.items(), numbers, strict=True))
