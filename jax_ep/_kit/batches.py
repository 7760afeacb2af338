"""What ops do with a batch (`jax.vmap`)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_ep._kit import vary


def by_platform(default: Callable[..., Any], **platforms: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.lax.platform_dependent` as a function of the operands.

    Under `jax.vmap` it runs once per element, and operands without a batch are not copied.
    JAX cannot batch the choice itself if operands vary over a `spmd_axis_name`.
    """

    def choose(*operands: Any) -> Any:
        # Elements of a batch vary over a `spmd_axis_name`, and operands without a batch do not.
        return jax.lax.platform_dependent(*vary.vary_alike(None, *operands), **platforms, default=default)

    return sequential_vmap(choose)


def batched_alike(*operands: Any) -> tuple[Any, ...]:
    """The operands, pytrees. If one of their arrays is batched, all are, along their first axis.

    For `jax.lax.ragged_dot`, which takes a batch of all operands or of none. Operands without a batch are copied.
    """
    arrays, structure = jax.tree.flatten(operands)
    return structure.unflatten(
        _alike_p.bind(x, *(y for j, y in enumerate(arrays) if j != i)) for i, x in enumerate(arrays)
    )


_alike_p = Primitive("jax_ep_batched_alike")  # returns its first operand, batched if any operand is


def _jvp(primals: Any, tangents: Any) -> Any:
    moved = tangents[0]
    return _alike_p.bind(*primals), moved if type(moved) is ad.Zero else _alike_p.bind(moved, *primals[1:])


def _batch(operands: Any, dims: Any) -> Any:
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    first = jax.lax.broadcast(operands[0], (size,)) if dims[0] is None else jnp.moveaxis(operands[0], dims[0], 0)
    return vary.vary_alike(None, first, *operands[1:])[0], 0  # as some vary over a `spmd_axis_name`


_alike_p.def_impl(lambda x, *_: x)
_alike_p.def_abstract_eval(lambda x, *_: x)
ad.primitive_jvps[_alike_p] = _jvp
ad.primitive_transposes[_alike_p] = lambda cotangent, x, *others: [cotangent, *[None] * len(others)]
batching.primitive_batchers[_alike_p] = _batch
mlir.register_lowering(_alike_p, lambda ctx, x, *_: [x])
