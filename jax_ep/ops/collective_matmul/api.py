"""Matrix products overlapped with their collective, as tensor parallelism needs them.

A product is announced block by block of rows, so that early blocks travel while later ones are computed. The gradient
of `matmul_reduce_scatter` is an `all_gather_matmul` and the reverse; that of `matmul_all_reduce` needs no collective.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep._kit import checks, gemm
from jax_ep._kit.checks import Chosen, Implementation
from jax_ep._kit.linear import linear
from jax_ep.group import Group, check_group
from jax_ep.ops.collective_matmul import kernels, xla
from jax_ep.ops.collective_matmul.kernels import Config


def matmul_all_reduce(
    a: jax.Array,
    b: jax.Array,
    *,
    group: Group,
    bias: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """The sum over ranks of each one's `a @ b`, on every rank: `psum(a @ b)`.

    Called on every rank, inside `jax.shard_map` over the group's axis. Products are rounded to `out_dtype`, and summed
    in float32 in rank order by one rank per row: all ranks get the same bits, on every run. With `check_vma` the result
    does not vary over the axis, and has the gradient, like that of `jax.lax.psum`. Cotangents are rounded to the dtype
    of the operands.

    Args:
      a: [M, K] bfloat16, float16 or float32, not empty: this rank's columns of the left factor.
      b: [K, N] of the same dtype, not empty: this rank's rows of the right one.
      group: the open group of the ranks.
      bias: [N] bfloat16, float16 or float32, added once to every row of the sum, or None; the same on all ranks.
      out_dtype: the dtype of `a`, which is the default, or float32.
      implementation: "ffi" (kernels; on CUDA they need Hopper GPUs, 16-bit operands, and K and N multiples of 8), "xla"
        (jax.lax alone), or "auto": "ffi" where it can.

    Returns:
      [M, N] of `out_dtype`.

    Raises:
      ValueError, TypeError: an argument is wrong, or "ffi" was asked for and cannot serve it; when the op is traced.
      JaxEpError: as for `dispatch`.
    """
    return _call("matmul_all_reduce", a, b, bias, group, out_dtype, implementation)


def matmul_reduce_scatter(
    a: jax.Array,
    b: jax.Array,
    *,
    group: Group,
    bias: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """The sum over ranks of each one's `a @ b`, a share of the rows on each: `psum_scatter(a @ b, tiled=True)`.

    Arguments, errors and sums as for `matmul_all_reduce`; M must be a multiple of the group's size R.

    Returns:
      [M / R, N] of `out_dtype`: rows [r M / R, (r + 1) M / R) of the sum on rank r.
    """
    return _call("matmul_reduce_scatter", a, b, bias, group, out_dtype, implementation)


def all_gather_matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    group: Group,
    bias: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """The rows of all ranks times this rank's matrix: `all_gather(a, tiled=True) @ b`.

    Arguments and errors as for `matmul_all_reduce`, but that `bias` belongs to this rank's columns.

    Returns:
      [R M, N] of `out_dtype`, for a group of R ranks.
    """
    return _call("all_gather_matmul", a, b, bias, group, out_dtype, implementation)


def _call(
    op: str,
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    group: Group,
    out_dtype: DTypeLike | None,
    implementation: Implementation,
) -> jax.Array:
    check_group(op, group)
    _check_factors(op, a, b)
    dtype = checks.canonical_dtype(op, "out_dtype", out_dtype) or np.dtype(a.dtype)
    _check_result(op, a, b, bias, group, dtype)
    checks.check_one_of(op, "implementation", implementation, checks.IMPLEMENTATIONS)
    if op == "all_gather_matmul" and group.size * a.shape[0] >= 2**31:  # kernels count rows in int32
        raise ValueError(f"{op}: a must have fewer than 2**31 / {group.size} rows, got {a.shape}")
    a, b = checks.vary_alike(group.axis_name, a, b)
    if _resolve(op, group, implementation, a, b) == "xla":
        by_xla = getattr(xla, op)
        out: jax.Array = by_xla(a, b, dtype=dtype, axis_name=group.axis_name)
    elif op == "all_gather_matmul":
        out = _gather(Config(group, dtype), a, b)
    else:
        out = _reduce(Config(group, dtype, reduce_scatter=op == "matmul_reduce_scatter"), a, b)
    return out if bias is None else out + bias.astype(dtype)


def _check_factors(op: str, a: jax.Array, b: jax.Array) -> None:
    checks.check_rank(op, "a", a, 2, "[M, K]")
    checks.check_dtype(op, "a", a, checks.TOKEN_DTYPES)
    checks.check_rank(op, "b", b, 2, "[K, N]")
    checks.check_dtype(op, "b", b, (np.dtype(a.dtype),))
    checks.check_shape(op, "b", b, (a.shape[1], b.shape[1]), "[K, N]")
    if 0 in (*a.shape, *b.shape):
        raise ValueError(f"{op}: a and b must not be empty, got {a.shape} and {b.shape}")


def _check_result(op: str, a: jax.Array, b: jax.Array, bias: jax.Array | None, group: Group, dtype: np.dtype) -> None:
    if bias is not None:
        checks.check_shape(op, "bias", bias, (b.shape[1],), "[N]")
        checks.check_dtype(op, "bias", bias, checks.TOKEN_DTYPES)
    allowed = dict.fromkeys((np.dtype(a.dtype), np.dtype(np.float32)))
    if dtype not in allowed:
        raise TypeError(f"{op}: out_dtype must be {' or '.join(map(str, allowed))}, got {dtype}")
    if op == "matmul_reduce_scatter" and a.shape[0] % group.size:
        raise ValueError(f"{op}: a must have a multiple of the group's size {group.size} rows, got {a.shape}")


def _resolve(op: str, group: Group, implementation: Implementation, a: jax.Array, b: jax.Array) -> Chosen:
    if group.resolve(op, implementation) == "xla":
        return "xla"
    served = group.platform == "cpu" or (
        group.platform == "cuda"
        and np.dtype(a.dtype) in gemm.CORE_DTYPES
        and all(size % gemm.CORE_MULTIPLE == 0 for size in b.shape)
        and gemm.has_gemm()
    )
    if served:
        return "ffi"
    if implementation == "ffi":
        raise ValueError(
            f"{op}: implementation='ffi' on {group.platform!r} needs Hopper GPUs, bfloat16 or float16 operands and "
            f"K and N multiples of {gemm.CORE_MULTIPLE}; got b {b.shape} of {b.dtype}: pass implementation='xla'"
        )
    return "xla"


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reduce(config: Config, a: jax.Array, b: jax.Array) -> jax.Array:
    return kernels.matmul_reduce(config, a, b)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gather_both(config: Config, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Also the gathered rows."""
    return kernels.gather_matmul(config, a, b)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gather(config: Config, a: jax.Array, b: jax.Array) -> jax.Array:
    return kernels.gather_matmul(config, a, b)[0]


def _backwards(config: Config, a: jax.Array, *, reduce_scatter: bool = False) -> Config:
    """The config of the product with the transpose of the same matrix."""
    return Config(config.group, np.dtype(a.dtype), not config.transpose_b, reduce_scatter)


def _dot(left: jax.Array, right: jax.Array, contracted: tuple[int, int], dtype: Any) -> jax.Array:
    axes = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=dtype)


def _matrix_gradient(config: Config, rows: jax.Array, cotangent: jax.Array, dtype: Any) -> jax.Array:
    """Rows [M, K] and cotangents [M, N] to that of b."""
    left, right = (cotangent, rows) if config.transpose_b else (rows, cotangent)
    return _dot(left, right, (0, 0), dtype)


@_reduce.defjvp
def _reduce_jvp(config: Config, primals: Any, tangents: Any) -> Any:
    return _reduce(config, *primals), linear(
        partial(_reduce_on, config), partial(_reduce_back, config), primals, tangents
    )


def _reduce_on(config: Config, factors: Any, changes: Any) -> jax.Array:
    """d_a b + a d_b as one product of twice the depth, so that its sums travel once."""
    (a, b), (d_a, d_b) = factors, changes
    depth = 1 if config.transpose_b else 0
    return _reduce(config, jnp.concatenate([d_a, a], axis=1), jnp.concatenate([b, d_b], axis=depth))


def _reduce_back(config: Config, factors: Any, cotangent: jax.Array) -> Any:
    a, b = factors
    if config.reduce_scatter:
        d_a, cotangent = _gather_both(_backwards(config, a), cotangent.astype(a.dtype), b)
    else:
        cotangent = _of_every_rank(config, cotangent).astype(a.dtype)
        d_a = _dot(cotangent, b, (1, 0 if config.transpose_b else 1), a.dtype)
    return d_a, _matrix_gradient(config, a, cotangent, b.dtype)


def _of_every_rank(config: Config, cotangent: jax.Array) -> jax.Array:
    """The cotangent of a sum that all ranks have: one for all where types say that it does not vary, else one each.

    As in the transpose of `jax.lax.psum`, and in its dtype: in float32 a sum of 16-bit values would send twice as much.
    """
    axis = config.group.axis_name
    if checks.tracks_varying(axis):
        return jax.lax.pcast(cotangent, axis, to="varying")
    return jax.lax.psum(cotangent, axis)


@_gather.defjvp
def _gather_jvp(config: Config, primals: Any, tangents: Any) -> Any:
    out, gathered = _gather_both(config, *primals)

    def on(factors: Any, changes: Any) -> jax.Array:
        return _gather_on(config, factors, changes)[0]

    return out, linear(on, partial(_gather_back, config), (gathered, primals[1]), tangents)


@_gather_both.defjvp
def _gather_both_jvp(config: Config, primals: Any, tangents: Any) -> Any:
    out, gathered = _gather_both(config, *primals)

    def back(factors: Any, cotangents: Any) -> Any:
        d_a, d_b = _gather_back(config, factors, cotangents[0])
        return d_a + jax.lax.psum_scatter(cotangents[1], config.group.axis_name, tiled=True), d_b

    return (out, gathered), linear(partial(_gather_on, config), back, (gathered, primals[1]), tangents)


def _gather_on(config: Config, factors: Any, changes: Any) -> tuple[jax.Array, jax.Array]:
    (gathered, b), (d_a, d_b) = factors, changes
    moved, d_gathered = _gather_both(config, d_a, b)
    return moved + _dot(gathered, d_b, (1, 1 if config.transpose_b else 0), config.dtype), d_gathered


def _gather_back(config: Config, factors: Any, cotangent: jax.Array) -> Any:
    gathered, b = factors
    cotangent = cotangent.astype(gathered.dtype)
    d_a = _reduce(_backwards(config, gathered, reduce_scatter=True), cotangent, b)
    return d_a, _matrix_gradient(config, gathered, cotangent, b.dtype)
