"""Matrix products overlapped with their collective, for tensor parallelism.

Early blocks of rows travel while later blocks are computed. The gradient of `matmul_reduce_scatter` is an
`all_gather_matmul`, and the reverse. The gradient of `matmul_all_reduce` needs no collective.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep._kit import checks, gemm, quantization, vary
from jax_ep._kit.checks import AxisName, Implementation, Resolved
from jax_ep._kit.linear import linear
from jax_ep._kit.scopes import op_scope
from jax_ep.group import Group, check_group
from jax_ep.ops.collective_matmul import kernels
from jax_ep.ops.collective_matmul.kernels import MatmulConfig
from jax_ep.runtime.agreement import Agreement

_Pair = tuple[jax.Array, jax.Array]  # of lhs and rhs, or of a product and the gathered rows


def matmul_all_reduce(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    group: Group,
    bias: jax.Array | None = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """The sum of all ranks' `lhs @ rhs`, on every rank: `psum(lhs @ rhs)`.

    Call it on every rank, inside `jax.shard_map` over the group's axis. Products are rounded to
    `preferred_element_type`, and summed in float32 in rank order by one rank per row, so all ranks get the same bits in
    every run. With `check_vma` the result does not vary over the axis, and gradients are as for `jax.lax.psum`.
    Cotangents are rounded to the dtype of the operands.

    Args:
      lhs: [M, K] bfloat16, float16 or float32, not empty: this rank's columns of the left operand.
      rhs: [K, N] of the same dtype, not empty: this rank's rows of the right operand.
      group: the open group of the ranks.
      bias: [N] bfloat16, float16 or float32, added once to every row of the sum, or None; the same on all ranks.
      preferred_element_type: the dtype of `lhs`, which is the default, or float32.
      implementation: "kernels" (on CUDA they need Hopper GPUs, 16-bit operands, and K and N multiples of 8), "xla"
        (only jax.lax), or "auto": "kernels" if they support the call.

    Returns:
      [M, N] of `preferred_element_type`.

    Raises:
      ValueError, TypeError: an argument is wrong, or "kernels" do not support the call; raised when the op is traced.
      JaxEpError: as for `dispatch`.
    """
    return _call("matmul_all_reduce", lhs, rhs, bias, group, preferred_element_type, implementation)


def matmul_reduce_scatter(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    group: Group,
    bias: jax.Array | None = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """This rank's part of the sum of the ranks' `lhs @ rhs`: `psum_scatter(lhs @ rhs, tiled=True)`.

    Arguments, errors and sums are those of `matmul_all_reduce`. M must be a multiple of the group's size R.

    Returns:
      [M / R, N] of `preferred_element_type`: rows [r M / R, (r + 1) M / R) of the sum on rank r.
    """
    return _call("matmul_reduce_scatter", lhs, rhs, bias, group, preferred_element_type, implementation)


def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    group: Group,
    bias: jax.Array | None = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """The rows of all ranks times this rank's matrix: `all_gather(lhs, tiled=True) @ rhs`.

    Arguments and errors are those of `matmul_all_reduce`, except that `bias` belongs to this rank's columns.

    Returns:
      [R M, N] of `preferred_element_type`, for a group of R ranks.
    """
    return _call("all_gather_matmul", lhs, rhs, bias, group, preferred_element_type, implementation)


def _call(
    op: str,
    lhs: jax.Array,
    rhs: jax.Array,
    bias: jax.Array | None,
    group: Group,
    preferred_element_type: DTypeLike | None,
    implementation: Implementation,
) -> jax.Array:
    check_group(op, group)
    dtype = _result_dtype(op, lhs, rhs, bias, group, preferred_element_type)
    with op_scope(op):
        lhs, rhs = vary.vary_alike(group.axis_name, lhs, rhs)
        if _resolve(op, group, implementation, lhs, rhs) == "xla":
            agreement = Agreement(
                group._participants, op, lhs=lhs.shape, rhs=rhs.shape, operands=lhs.dtype, result=dtype
            )
            out: jax.Array = agreement.leave(_by_xla(op, group.axis_name, dtype, *agreement.enter((lhs, rhs))))
        elif op == "all_gather_matmul":
            out = _gather(MatmulConfig(group, dtype), lhs, rhs)
        else:
            out = _reduce(MatmulConfig(group, dtype, reduce_scatter=op == "matmul_reduce_scatter"), lhs, rhs)
        return out if bias is None else out + bias.astype(dtype)[None]


def _result_dtype(
    op: str, lhs: jax.Array, rhs: jax.Array, bias: jax.Array | None, group: Group, given: DTypeLike | None
) -> np.dtype:
    """The dtype of the product. Raises ValueError or TypeError if an argument is wrong."""
    checks.check_array(op, "lhs", lhs, "[M, K]", checks.TOKEN_DTYPES)
    checks.check_array(op, "rhs", rhs, "[K, N]", lhs.dtype)
    checks.check_array(op, "rhs", rhs, "[K, N]", shape=(lhs.shape[1], rhs.shape[1]))
    if 0 in (*lhs.shape, *rhs.shape):
        raise ValueError(f"{op}: lhs and rhs must not be empty, got {lhs.shape} and {rhs.shape}")
    dtype = checks.canonical_dtype(op, "preferred_element_type", given) or np.dtype(lhs.dtype)
    if bias is not None:
        checks.check_array(op, "bias", bias, "[N]", checks.TOKEN_DTYPES, shape=(rhs.shape[1],))
    allowed = dict.fromkeys((np.dtype(lhs.dtype), np.dtype(np.float32)))
    if dtype not in allowed:
        raise TypeError(f"{op}: preferred_element_type must be {' or '.join(map(str, allowed))}, got {dtype}")
    if op == "matmul_reduce_scatter" and lhs.shape[0] % group.size:
        raise ValueError(f"{op}: lhs must have a multiple of the group's size {group.size} rows, got {lhs.shape}")
    if op == "all_gather_matmul" and group.size * lhs.shape[0] >= 2**31:  # kernels count rows in int32
        raise ValueError(f"{op}: lhs must have fewer than 2**31 / {group.size} rows, got {lhs.shape}")
    return dtype


def _resolve(op: str, group: Group, implementation: Implementation, lhs: jax.Array, rhs: jax.Array) -> Resolved:
    by = group._resolve(op, implementation)
    if quantization.is_by_qwix(op, "dot_general", implementation=implementation) or by == "xla":
        return "xla"
    served = group.platform == "cpu" or (
        group.platform == "cuda"
        and np.dtype(lhs.dtype) in gemm.CORE_DTYPES
        and all(size % gemm.CORE_MULTIPLE == 0 for size in rhs.shape)
        and gemm.has_gemm()
    )
    if served:
        return "kernels"
    if implementation == "kernels":
        raise ValueError(
            f"{op}: implementation='kernels' on {group.platform!r} needs Hopper GPUs, bfloat16 or float16 operands and "
            f"K and N multiples of {gemm.CORE_MULTIPLE}; got rhs {rhs.shape} of {rhs.dtype}: pass implementation='xla'"
        )
    return "xla"


def _by_xla(op: str, axis_name: AxisName, dtype: np.dtype, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    if op == "all_gather_matmul":
        lhs = jax.lax.all_gather(lhs, axis_name, tiled=True)
    product = quantization.dot(lhs, rhs, (1, 0), dtype)
    if op == "matmul_reduce_scatter":
        return jax.lax.psum_scatter(product, axis_name, tiled=True)
    return jax.lax.psum(product, axis_name) if op == "matmul_all_reduce" else product


_reduce = jax.custom_jvp(kernels.matmul_reduce, nondiff_argnums=(0,))
_gather_both = jax.custom_jvp(kernels.all_gather_matmul, nondiff_argnums=(0,))  # the product, and the gathered rows


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gather(config: MatmulConfig, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return kernels.all_gather_matmul(config, lhs, rhs)[0]


def _backwards(config: MatmulConfig, lhs: jax.Array, *, reduce_scatter: bool = False) -> MatmulConfig:
    """The config of the product with the same matrix, transposed."""
    return MatmulConfig(config.group, np.dtype(lhs.dtype), not config.transpose_rhs, reduce_scatter)


def _matrix_gradient(config: MatmulConfig, rows: jax.Array, cotangent: jax.Array, dtype: np.dtype) -> jax.Array:
    """The cotangent of rhs from rows [M, K] and cotangents [M, N]."""
    left, right = (cotangent, rows) if config.transpose_rhs else (rows, cotangent)
    return quantization.dot(left, right, (0, 0), dtype)


@_reduce.defjvp
def _reduce_jvp(config: MatmulConfig, primals: _Pair, tangents: _Pair) -> _Pair:
    return _reduce(config, *primals), linear(
        partial(_reduce_on, config), partial(_reduce_back, config), primals, tangents
    )


def _reduce_on(config: MatmulConfig, residuals: _Pair, tangents: _Pair) -> jax.Array:
    """d_lhs rhs + lhs d_rhs as one product with twice the contraction, so that sums travel once."""
    (lhs, rhs), (d_lhs, d_rhs) = residuals, tangents
    depth = 1 if config.transpose_rhs else 0
    return _reduce(config, jnp.concatenate([d_lhs, lhs], axis=1), jnp.concatenate([rhs, d_rhs], axis=depth))


def _reduce_back(config: MatmulConfig, residuals: _Pair, cotangent: jax.Array) -> _Pair:
    lhs, rhs = residuals
    if config.reduce_scatter:
        d_lhs, cotangent = _gather_both(_backwards(config, lhs), cotangent.astype(lhs.dtype), rhs)
    else:
        cotangent = _of_every_rank(config, cotangent).astype(lhs.dtype)
        d_lhs = quantization.dot(cotangent, rhs, (1, 0 if config.transpose_rhs else 1), lhs.dtype)
    return d_lhs, _matrix_gradient(config, lhs, cotangent, rhs.dtype)


def _of_every_rank(config: MatmulConfig, cotangent: jax.Array) -> jax.Array:
    """The cotangent of a replicated sum: the same on all ranks if types track this, otherwise the sum over the ranks.

    The sum has its dtype, as in the transpose of `jax.lax.psum`: float32 would send twice the bytes.
    """
    axis = config.group.axis_name
    if vary.tracks_varying(axis):
        return jax.lax.pcast(cotangent, axis, to="varying")
    return jax.lax.psum(cotangent, axis)


@_gather.defjvp
def _gather_jvp(config: MatmulConfig, primals: _Pair, tangents: _Pair) -> _Pair:
    out, gathered = _gather_both(config, *primals)

    def on(residuals: _Pair, tangents: _Pair) -> jax.Array:
        return _gather_on(config, residuals, tangents)[0]

    return out, linear(on, partial(_gather_back, config), (gathered, primals[1]), tangents)


@_gather_both.defjvp
def _gather_both_jvp(config: MatmulConfig, primals: _Pair, tangents: _Pair) -> tuple[_Pair, _Pair]:
    out, gathered = _gather_both(config, *primals)

    def back(residuals: _Pair, cotangents: _Pair) -> _Pair:
        d_lhs, d_rhs = _gather_back(config, residuals, cotangents[0])
        return d_lhs + jax.lax.psum_scatter(cotangents[1], config.group.axis_name, tiled=True), d_rhs

    return (out, gathered), linear(partial(_gather_on, config), back, (gathered, primals[1]), tangents)


def _gather_on(config: MatmulConfig, residuals: _Pair, tangents: _Pair) -> _Pair:
    (gathered, rhs), (d_lhs, d_rhs) = residuals, tangents
    moved, d_gathered = _gather_both(config, d_lhs, rhs)
    return moved + quantization.dot(gathered, d_rhs, (1, 1 if config.transpose_rhs else 0), config.dtype), d_gathered


def _gather_back(config: MatmulConfig, residuals: _Pair, cotangent: jax.Array) -> _Pair:
    gathered, rhs = residuals
    cotangent = cotangent.astype(gathered.dtype)
    d_lhs = _reduce(_backwards(config, gathered, reduce_scatter=True), cotangent, rhs)
    return d_lhs, _matrix_gradient(config, gathered, cotangent, rhs.dtype)
