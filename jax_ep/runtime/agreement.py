"""Whether the ranks of several processes call an op alike, asked before XLA's collectives exchange its operands.

Kernels compare their calls by themselves. XLA's collectives between CPU processes (gloo) do not: where sizes differ
they end the processes, and where sizes are equal they take the bytes for what they are not. So a few numbers go ahead,
in a collective that always has the same size; where they differ, all ranks of all processes raise and exchange nothing.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._kit import checks, vary
from jax_ep._kit.checks import AxisName
from jax_ep.errors import JaxEpError, MismatchError

_Described = Mapping[str, int | np.dtype]


def once_agreed(
    op: str,
    axis_name: AxisName,
    call: _Described,
    operands: tuple[jax.Array, ...],
    keep_error: Callable[[JaxEpError], None],
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """`operands`, which are there when all ranks along the axis have named the same numbers; or the program raises.

    Also returns 0, as int32, by which results can wait for that where operands are empty.

    Args:
      call: what the ranks must agree on: numbers below 2^31, and dtypes of tokens. All ranks name the same things.
      keep_error: of the group; gets the `MismatchError`.
    """
    [mine] = vary.vary_alike(axis_name, jnp.array([_code(value) for value in call.values()], jnp.int32))
    everyone = jax.lax.all_gather(mine, axis_name)
    none = mine[0] * 0

    def refuse() -> jax.Array:
        callback = partial(_refuse, op, tuple(call), keep_error)
        raised = jax.pure_callback(callback, jax.ShapeDtypeStruct((), jnp.int32), everyone, vmap_method="sequential")
        return vary.vary_alike(None, raised, none)[0]

    raised = jax.lax.cond((everyone != everyone[0]).any(), refuse, lambda: none)
    return tuple(jnp.where(raised == 0, x, jnp.zeros_like(x)) for x in operands), raised


def _code(value: int | np.dtype) -> int:
    return checks.TOKEN_DTYPES.index(value) if isinstance(value, np.dtype) else value


def _refuse(
    op: str, names: tuple[str, ...], keep_error: Callable[[JaxEpError], None], everyone: np.ndarray
) -> np.ndarray:
    numbers = np.asarray(everyone)
    differs = (numbers != numbers[0]).any(axis=1)
    if differs.any():  # under jax.vmap both branches of a cond run
        other = int(np.argmax(differs))
        first, second = _named(names, numbers[0]), _named(names, numbers[other])
        error = MismatchError(
            f"{op}: rank 0 calls it with {first}, rank {other} with {second}: all ranks must call it alike; nothing "
            "was exchanged"
        )
        keep_error(error)
        raise error
    return np.zeros((), np.int32)


def _named(names: tuple[str, ...], numbers: np.ndarray) -> str:
    def text(name: str, number: int) -> str:
        return str(checks.TOKEN_DTYPES[number]) if name == "dtype" else f"{name}={number}"

    return " ".join(text(name, int(number)) for name, number in zip(names, numbers, strict=True))
