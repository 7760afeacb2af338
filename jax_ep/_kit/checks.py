"""Checks of arguments, shared by the ops. An error says the op, the argument, what it must be and what it was."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

# Who computes an op: our kernels for the platform, Pallas kernels, or jax.lax alone. An op has some of these.
Implementation = Literal["auto", "kernels", "pallas", "xla"]
Resolved = Literal["kernels", "xla"]  # what "auto" becomes in ops that have these two
OnOverflow = Literal["raise", "drop"]
PyTree = Any  # a tree of tuples, lists, dicts and registered dataclasses whose leaves are arrays
AxisName = str | tuple[str, ...]  # an axis of a mesh; or several, whose devices are ranks in row-major order
AnyArray = jax.Array | np.ndarray
ARRAYS = (jax.Array, np.ndarray, np.generic)
TOKEN_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
NUMBERS = (np.integer, np.floating)
KINDS: dict[object, str] = {np.integer: "an integer", np.floating: "a float", NUMBERS: "an integer or float"}


def describe(x: object) -> str:
    """float32[4,2] for an array, the name of the type for everything else."""
    if not isinstance(x, ARRAYS):
        return type(x).__name__
    return str(jax.typeof(x)) if is_jax_dtype(x.dtype) else f"{x.dtype}[{','.join(map(str, x.shape))}]"


def described(**fields: object) -> str:
    """Fields for a repr: of arrays, also in tuples, their types."""

    def short(x: object) -> str:
        if type(x) is tuple:
            return f"({', '.join(map(short, x))})"
        return describe(x) if isinstance(x, ARRAYS) else repr(x)

    return ", ".join(f"{name}={short(x)}" for name, x in fields.items())


def is_jax_dtype(dtype: np.dtype) -> bool:
    """Whether jax has arrays of this dtype: it has none of numpy's objects, strings and dates."""
    kinds = (np.number, np.bool_, jax.dtypes.extended)
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def check_array(
    op: str,
    name: str,
    x: object,
    layout: str | None = None,
    dtype: Any = None,
    *,
    shape: tuple[int, ...] | None = None,
    hint: str = "",
) -> None:
    """Raises ValueError or TypeError unless `x` is an array of this shape and dtype.

    Args:
      layout: the shape in words, such as "[T, H]". Without `shape` its number of axes counts.
      dtype: a dtype, a tuple of them, or one of `KINDS`; None: any.
      hint: follows the error of a wrong dtype.
    """
    if not isinstance(x, ARRAYS):
        raise TypeError(f"{op}: {name} must be an array, got {describe(x)}")
    if shape is not None and x.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {layout} = {shape}, got {x.shape}")
    if shape is None and layout is not None and x.ndim != layout.count(",") + 1:
        way_out = ""
        if layout.startswith("[T") and x.ndim > layout.count(",") + 1:
            way_out = f": flatten batches by .reshape(-1{layout[2:-1]})"
        raise ValueError(f"{op}: {name} must have shape {layout}, got {x.shape}{way_out}")
    if dtype is None:
        return
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    if dtype in KINDS:
        fits, what = any(jnp.issubdtype(x.dtype, kind) for kind in allowed), f"{KINDS[dtype]} dtype"
    else:
        allowed = tuple(map(np.dtype, allowed))
        fits, what = x.dtype in allowed, f"dtype {', '.join(map(str, allowed))}"
    if not fits:
        raise TypeError(f"{op}: {name} must be of {what}, got {x.dtype}{hint}")


def check_whole_bytes(op: str, name: str, x: jax.Array) -> None:
    """Raises unless values have whole bytes. Kernels move bytes, and some platforms pack narrower values."""
    check_array(op, name, x)
    if not is_jax_dtype(x.dtype):
        raise TypeError(f"{op}: {name} must be of a dtype that jax has, got {x.dtype}")
    if not jnp.issubdtype(x.dtype, jax.dtypes.extended) and jax.dtypes.itemsize_bits(x.dtype) < 8:
        raise TypeError(f"{op}: {name} must be of a dtype of whole bytes, such as int8, got {x.dtype}")


def to_int32(indices: jax.Array | np.ndarray) -> jax.Array:
    """`indices` clamped to the range of int32: what was out of bounds stays so."""
    return within_32_bits(indices).astype(np.int32)


def within_32_bits(indices: jax.Array | np.ndarray) -> jax.Array:
    """`indices` clamped to the range of int32. Their dtype stays, unless jax lacks it: without x64, jnp cuts 64-bit
    values."""
    at = jnp if isinstance(indices, jax.Array) else np
    held, info = jnp.iinfo(np.int32), jnp.iinfo(indices.dtype)
    if info.min < held.min or info.max > held.max:
        indices = at.clip(indices, max(info.min, held.min), held.max)
    return jnp.asarray(indices)


def check_int(op: str, name: str, value: int, *, least: int = 1, below_32_bits: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{op}: {name} must be a Python int, known when the op is traced; got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
    if value >= 2**31 and below_32_bits:
        raise ValueError(f"{op}: {name} must be below 2**31, got {value}")


def check_number(op: str, name: str, value: ArrayLike) -> None:
    """A real number: Python's, or an array of one, which may be traced."""
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if array.ndim or not any(jnp.issubdtype(array.dtype, kind) for kind in NUMBERS):
        raise TypeError(f"{op}: {name} must be a number, got {describe(value)}")


def check_bool(op: str, name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be True or False, got {value!r}")


def canonical_dtype(op: str, name: str, dtype: DTypeLike | None) -> np.dtype | None:
    try:
        return None if dtype is None else np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{op}: {name} must be a dtype or None, got {dtype!r}") from None


def check_one_of(op: str, name: str, value: object, literal: object) -> None:
    """Raises ValueError or TypeError unless the value is one of a `Literal` of strings, perhaps with None."""
    allowed = get_args(literal)
    is_of_type = isinstance(value, str) or (value is None and None in allowed)
    if not is_of_type or value not in allowed:
        error = ValueError if is_of_type else TypeError
        raise error(f"{op}: {name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def axes_of(axis_name: str | Sequence[str]) -> tuple[str, ...]:
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def canonical_axis(axis_name: str | list[str] | tuple[str, ...]) -> AxisName:
    """`axis_name` as a string if it is a single axis, and otherwise as a tuple."""
    if isinstance(axis_name, list | tuple):
        return axis_name[0] if len(axis_name) == 1 else tuple(axis_name)
    return axis_name


def check_axis(op: str, axis_name: object) -> None:
    axes = axes_of(axis_name) if isinstance(axis_name, str | list | tuple) else ()
    if not axes or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(f"{op}: axis_name must be an axis of the mesh or a tuple of axes, got {describe(axis_name)}")


def check_axis_here(op: str, axis_name: AxisName) -> None:
    """Raises also where no `jax.shard_map` or `jax.vmap` around the call has the axis."""
    check_axis(op, axis_name)
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{op}: axis_name must be of the jax.shard_map around the call, got {axis_name!r} outside of it"
        ) from None
