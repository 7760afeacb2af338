"""Linear functions with transposes of their own: derivatives of the ops, forward and backward.

`jax.custom_vjp` has no forward mode, and JAX cannot transpose a kernel. An op is therefore a `jax.custom_jvp` whose
tangents come by `linear`, a linear function with a given transpose. `jax.jvp` runs the function; `jax.grad` runs the
transpose alone.
"""

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import NoReturn, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jax_ep._kit.checks import PyTree

Flat = Callable[..., list[jax.Array]]
_Flats = Sequence[jax.Array]
_Residuals = TypeVar("_Residuals")
_In = TypeVar("_In")
_Out = TypeVar("_Out")


def linear(
    forward: Callable[[_Residuals, _In], _Out],
    transpose: Callable[[_Residuals, _Out], PyTree],
    residuals: _Residuals,
    operands: _In,
) -> _Out:
    """forward(residuals, operands), linear in the operands.

    It can be differentiated in residuals and operands, to any order that `forward` and `transpose` support.

    Args:
      transpose: (residuals, cotangent of the result) -> cotangents of `operands`, alike in structure.
    """
    res, res_tree = jax.tree.flatten(residuals)
    linear_in, linear_tree = jax.tree.flatten(operands)
    out_tree: PyTree = None

    def flat_forward(*flat: jax.Array) -> list[jax.Array]:
        nonlocal out_tree
        out = forward(res_tree.unflatten(flat[: len(res)]), linear_tree.unflatten(flat[len(res) :]))
        leaves, out_tree = jax.tree.flatten(out)
        return leaves

    def flat_transpose(*flat: jax.Array) -> list[jax.Array]:
        cotangents = transpose(res_tree.unflatten(flat[: len(res)]), out_tree.unflatten(flat[len(res) :]))
        return jax.tree.leaves(cotangents)

    update_wrapper(flat_transpose, transpose, (), ())  # whoever reads a jaxpr finds `transpose` as its `__wrapped__`
    leaves = _bind(flat_forward, flat_transpose, len(res), (*res, *linear_in))
    return out_tree.unflatten(leaves)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_gradient(message: str, x: PyTree) -> PyTree:
    """`x`, a pytree. Its differentiation raises a TypeError with this message."""
    return x


@without_gradient.defjvp
def _refuse(message: str, *_: PyTree) -> NoReturn:
    raise TypeError(message)


_linear_p = Primitive("jax_ep_linear")
_linear_p.multiple_results = True


def _bind(forward: Flat, transpose: Flat, num_res: int, operands: Sequence[jax.Array]) -> list[jax.Array]:
    jaxpr = jax.make_jaxpr(forward)(*operands)
    return _linear_p.bind(*operands, jaxpr=jaxpr, forward=forward, transpose=transpose, num_res=num_res)


def _evaluate(*operands: jax.Array, jaxpr: ClosedJaxpr, **_: object) -> list[jax.Array]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _types(*_: object, jaxpr: ClosedJaxpr, **__: object) -> tuple[object, object]:
    return jaxpr.out_avals, jaxpr.effects


def _jvp(
    primals: _Flats,
    tangents: Sequence[jax.Array | ad.Zero],
    *,
    jaxpr: ClosedJaxpr,
    forward: Flat,
    transpose: Flat,
    num_res: int,
) -> tuple[_Flats, _Flats]:
    """The tangent in the operands is the function itself; JAX differentiates in the residuals."""
    out = _linear_p.bind(*primals, jaxpr=jaxpr, forward=forward, transpose=transpose, num_res=num_res)
    d_out = _bind(forward, transpose, num_res, (*primals[:num_res], *map(ad.instantiate_zeros, tangents[num_res:])))
    moving = [i for i in range(num_res) if type(tangents[i]) is not ad.Zero]
    if not moving:
        return out, d_out

    def by_residuals(*moved: jax.Array) -> list[jax.Array]:
        operands = list(primals)
        for i, x in zip(moving, moved, strict=True):
            operands[i] = x
        return forward(*operands)

    _, d_by_residuals = jax.jvp(by_residuals, [primals[i] for i in moving], [tangents[i] for i in moving])
    return out, [a + b for a, b in zip(d_out, d_by_residuals, strict=True)]


def _transpose(
    cotangents: Sequence[jax.Array | ad.Zero],
    *operands: PyTree,  # the residuals, and an `ad.UndefinedPrimal` for each operand that has a cotangent
    jaxpr: ClosedJaxpr,
    forward: Flat,
    transpose: Flat,
    num_res: int,
) -> list[jax.Array | None]:
    assert not any(map(ad.is_undefined_primal, operands[:num_res]))
    filled = [ad.instantiate_zeros(c) for c in cotangents]
    back = _bind(transpose, forward, num_res, (*operands[:num_res], *filled))
    wanted = [c if ad.is_undefined_primal(x) else None for c, x in zip(back, operands[num_res:], strict=True)]
    return [None] * num_res + wanted


def _batch(
    operands: _Flats, dims: Sequence[int | None], *, jaxpr: ClosedJaxpr, forward: Flat, transpose: Flat, num_res: int
) -> tuple[_Flats, list[int]]:
    """Batches all operands, so that each has a cotangent in every batch."""
    (size,) = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    rows = [batching.bdim_at_front(x, dim, size) for x, dim in zip(operands[num_res:], dims[num_res:], strict=True)]

    def each(function: Flat) -> Flat:
        return lambda *flat: jax.vmap(function, in_axes=(*dims[:num_res], *[0] * (len(flat) - num_res)))(*flat)

    out = _bind(each(forward), each(transpose), num_res, (*operands[:num_res], *rows))
    return out, [0] * len(out)


_linear_p.def_impl(_evaluate)
_linear_p.to_lojax = _evaluate  # needed if a function contains `jnp.searchsorted`, which jax lowers in two steps
_linear_p.def_effectful_abstract_eval(_types)
ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batch
mlir.register_lowering(_linear_p, mlir.lower_fun(_evaluate, multiple_results=True))
