"""A function of the rows of arrays, as equations that a kernel evaluates on blocks of rows.

The function is traced once. Values that do not depend on rows are computed outside of the kernel; its scalars are
operands of the kernel. All other equations must be elementwise, a sum along a row, or a broadcast of one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

_MOST_COLUMNS = 8192  # of each array in a program
_ROW_DTYPES = (jnp.bfloat16, np.float16, np.float32, np.float64, np.int32, np.int64, np.bool_)
_ELEMENTWISE = {  # lowered by Pallas' Triton backend for float32
    *("abs", "add", "and", "atan2", "cbrt", "ceil", "convert_element_type", "cos", "div", "eq", "exp", "exp2", "expm1"),
    *("floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "mul", "ne", "neg"),
    *("not", "or", "pow", "rem", "rsqrt", "select_n", "sin", "sqrt", "square", "sub", "tan", "tanh", "xor", "add_any"),
}
_KEEPS_NAN: dict[str, Callable[..., jax.Array]] = {  # Triton's own drop NaN
    "max": lambda x, y: jnp.where((x > y) | (x != x), x, y),
    "min": lambda x, y: jnp.where((x < y) | (x != x), x, y),
    "clamp": lambda low, x, high: jnp.where(x < low, low, jnp.where(x > high, high, x)),
    "sign": lambda x: jnp.where(x != x, x, jnp.sign(x)),
}
_IDENTITY = ("copy", "copy_p", "pvary", "pcast", "optimization_barrier")
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


class _Row(NamedTuple):
    """The number of an array of rows: operands of the function, then results of equations."""

    number: int


class _Scalar(NamedTuple):
    """The number of a scalar."""

    number: int


class _Equation(NamedTuple):
    rule: Callable[..., jax.Array]  # of the sizes of the block, the mask of its columns, and the operands
    operands: tuple[Any, ...]  # `_Row`, `_Scalar`, or a number of numpy


class RowFunction(NamedTuple):
    """The result of `trace_rows`.

    Attributes:
      scalars: operands of the kernel.
      results: the results of the function without rows.
    """

    equations: tuple[_Equation, ...]
    rows: tuple[Any, ...]
    scalars: tuple[jax.Array, ...]
    results: tuple[jax.Array, ...]

    def on_block(self, blocks: Sequence[jax.Array], scalars: Sequence[jax.Array], real: jax.Array) -> list[jax.Array]:
        """The results with rows.

        Args:
          blocks: [rows, columns] for an operand [V, D], [rows, 1] for [V, 1], [rows] for [V].
          scalars: the values of `scalars`.
          real: [columns] bool: the columns of a row.
        """
        found, size = list(blocks), (blocks[0].shape[0], real.shape[0])

        def read(x: Any) -> Any:
            if isinstance(x, _Row):
                return found[x.number]
            return scalars[x.number] if isinstance(x, _Scalar) else jnp.asarray(x)

        for equation in self.equations:
            found.append(equation.rule(size, real, *map(read, equation.operands)))
        return [read(x) for x in self.rows]


def trace_rows(function: Callable[..., Any], width: int, rows: Sequence[Any], scalars: Sequence[Any]) -> RowFunction:
    """Traces `function(rows, scalars)`, which returns lists of rows and of scalars and treats rows independently.

    Args:
      width: D.
      rows: arrays or their types, of shape [V, D], [V, 1] or [V]. The function is traced for other V.

    Raises:
      NotImplementedError: a kernel cannot compute the function. The message says why.
    """
    if width > _MOST_COLUMNS:
        raise NotImplementedError(f"rows of {width} columns")
    height = width + 1  # an axis of this size is the axis of rows
    types = []
    for x in rows:
        types.append(jax.ShapeDtypeStruct((height, *x.shape[1:]), x.dtype))
        _size_of(types[-1], height)
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(types, list(scalars))
    trace = _Trace(height, len(rows))
    found = trace.run(traced.jaxpr, traced.consts, [*map(_Row, range(len(rows))), *scalars])
    count = len(shapes[0])
    if any(isinstance(x, _Row) for x in found[count:]):
        raise NotImplementedError("a scalar that depends on rows")
    taken = tuple(trace.operand(x) for x in found[:count])
    if not all(isinstance(x, _Row) for x in taken):
        raise NotImplementedError("rows that are constant")
    return RowFunction(tuple(trace.equations), taken, tuple(trace.scalars), tuple(found[count:]))


class _Trace:
    def __init__(self, height: int, operands: int):
        self.height, self._rows = height, operands
        self.equations: list[_Equation] = []
        self.scalars: list[jax.Array] = []

    def run(self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

        def read(x: Any) -> Any:
            return np.asarray(x.val, getattr(x.aval, "dtype", None)) if isinstance(x, Literal) else known[x]

        for eqn in jaxpr.eqns:
            results = self._evaluate(jaxpr, eqn, [read(x) for x in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def operand(self, x: Any) -> Any:
        if isinstance(x, _Row):
            return x
        if np.ndim(x):
            raise NotImplementedError(f"an array {np.shape(x)} that is the same for all rows")
        if isinstance(x, np.ndarray):
            return x
        for number, scalar in enumerate(self.scalars):
            if scalar is x:
                return _Scalar(number)
        self.scalars.append(x)
        return _Scalar(len(self.scalars) - 1)

    def _evaluate(self, jaxpr: Any, eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        of_rows = any(isinstance(x, _Row) for x in operands)
        if not of_rows and not any(self.height in x.aval.shape for x in eqn.outvars):
            return _apply(jaxpr, eqn, operands)
        if name in _CALLS:
            inner = eqn.params[_CALLS[name]]
            return self.run(inner.jaxpr, inner.consts, operands)
        if name in _IDENTITY:
            return operands
        rule = _rule(eqn, self.height)
        (out,) = eqn.outvars
        size = _size_of(out.aval, self.height)
        self.equations.append(_Equation(_sized(size, rule), tuple(map(self.operand, operands))))
        self._rows += 1
        return [_Row(self._rows - 1)]


def _apply(jaxpr: Any, eqn: Any, operands: list[Any]) -> list[Any]:
    of = [(var, x) for var, x in zip(eqn.invars, operands, strict=True) if not isinstance(var, Literal)]
    invars = [var for var, _ in of]
    names = jaxpr.debug_info.with_unknown_names()
    alone = jaxpr.replace(constvars=[], invars=invars, outvars=eqn.outvars, eqns=[eqn], debug_info=names)
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*(x for _, x in of))


def _size_of(x: Any, height: int) -> tuple[str, ...]:
    if x.dtype not in map(np.dtype, _ROW_DTYPES):
        raise NotImplementedError(f"rows of {x.dtype}")
    if x.shape == (height, height - 1):
        return "rows", "columns"
    if x.shape not in ((height,), (height, 1)):
        raise NotImplementedError(f"rows of shape {x.shape[1:]}")
    return ("rows", "one")[: x.ndim]


def _sized(axes: tuple[str, ...], rule: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def of_block(block: tuple[int, int], real: jax.Array, *operands: jax.Array) -> jax.Array:
        sizes = {"rows": block[0], "columns": block[1], "one": 1}
        return rule(tuple(sizes[axis] for axis in axes), real, *operands)

    return of_block


def _rule(eqn: Any, height: int) -> Callable[..., jax.Array]:
    """The result, from its shape in the block, the mask of columns, and the operands."""
    name, params = eqn.primitive.name, eqn.params
    if name in _ELEMENTWISE or name in _KEEPS_NAN:
        compute = _KEEPS_NAN.get(name) or (lambda *x: eqn.primitive.bind(*x, **params))
        return lambda shape, real, *x: compute(*(jnp.broadcast_to(each, shape) for each in x))
    shapes = [x.aval.shape for x in eqn.invars]
    if name == "broadcast_in_dim":
        axes = params["broadcast_dimensions"]
        return lambda shape, real, x: jax.lax.broadcast_in_dim(x, shape, axes)
    if name in ("reshape", "squeeze"):
        return lambda shape, real, x: x.reshape(shape)
    if name == "reduce_sum" and params["axes"] == (1,) and shapes[0] == (height, height - 1):
        return lambda shape, real, x: jnp.sum(jnp.where(real[None, :], x, 0), axis=1, dtype=x.dtype)
    raise NotImplementedError(name)
