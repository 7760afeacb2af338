"""Grouped matrix products at the speed of the tensor cores, with their gradients."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jax_ep._kit import checks, ffi, gemm, quantization, vary
from jax_ep._kit.batches import by_platform
from jax_ep._kit.checks import Implementation, PyTree
from jax_ep._kit.float8 import Float8
from jax_ep._kit.linear import linear
from jax_ep._kit.scopes import op_scope
from jax_ep.errors import PlatformError
from jax_ep.ops.matmul import kernels, pallas
from jax_ep.ops.matmul.gated import KnownUnit
from jax_ep.ops.matmul.rows import GatheredRows, Rows, dense_rows, gathered_rows, matrix_and_indices, sum_rows

_T = TypeVar("_T")
_Operands = tuple[Rows, Rows, jax.Array]  # left, right, group sizes


class ProductSettings(NamedTuple):
    """What computes a product, and its precision if the operands are float32."""

    implementation: Implementation = "auto"
    precision: PrecisionLike = None


AUTO = ProductSettings()
_NEEDS = {
    "kernels": f"bfloat16 or float16, with K and N multiples of {gemm.CORE_MULTIPLE}",
    "pallas": "bfloat16, float16 or float32, of fewer than 2**31 values each",
}

# Rows times the matrix of their group, or times its transpose; or a contraction of two matrices over the rows of each
# group.
Product = Literal["plain", "transposed", "contracted"]
_PRODUCTS: dict[Product, tuple[tuple[int, ...], ...]] = {  # contracted of lhs, of rhs; batches of both; ragged; groups
    "plain": ((1,), (1,), (), (), (0,), (0,)),
    "transposed": ((1,), (2,), (), (), (0,), (0,)),
    "contracted": ((0,), (0,), (), (), (0,), ()),
}
_CONTRACT_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@op_scope("ragged_dot")
def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: jax.Array | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    *,
    lhs_indices: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """`jax.lax.ragged_dot`, with kernels of jax_ep on GPUs.

    Row i of the result is row i of `lhs` times the matrix of its group. Rows after the last group are zero. With
    `lhs_indices` it is row lhs_indices[i] of `lhs`: kernels gather rows when they load them, without a copy, which
    takes 1 to 7 % of their time on Hopper (SonicMoE: Guo et al., 2025). On Hopper GPUs CUDA kernels multiply bfloat16
    or float16 operands whose K and N are multiples of 8, at the speed of the tensor cores. Pallas kernels multiply
    other operands, and run on other GPUs. CPUs use `jax.lax.ragged_dot`. Kernels accumulate in float32 in one fixed
    order, so the same operands give the same bits. Gradients use the same kernels, with the cotangent rounded to the
    dtype of the operands. On several devices call this inside `jax.shard_map`, because XLA cannot partition kernels. In
    a model that qwix quantizes, qwix computes the product on every platform.

    Args:
      lhs: [M, K]. The rows of a group are adjacent. With `lhs_indices` any number of rows, in any order.
      rhs: [G, K, N], a matrix per group.
      group_sizes: [G] integers, the rows of each group; their sum may be less than M.
      precision, out_sharding: as in `jax.lax.ragged_dot`.
      group_offset: must be None.
      preferred_element_type: the dtype of the result. Default: the dtype of `lhs` and `rhs`.
      lhs_indices: [M] integers: rows of `lhs`, with repetitions. -1 is a row of zeros, any other index out of bounds a
        row of NaN. The gradient of a row of `lhs` is summed in float32 in the order of `lhs_indices`, and rounded once.
      implementation: "auto", as above; "kernels", the CUDA kernels; "pallas", which a CPU interprets, slowly; or "xla",
        `jax.lax.ragged_dot`.

    Returns:
      [M, N].

    Raises:
      TypeError, ValueError: as `jax.lax.ragged_dot`, when traced; or an operand is in float8 or a qwix.QArray,
        `lhs_indices` are not integers [M], `implementation` does not support the call, or a rule of qwix needs a
        product that its provider does not have.
      PlatformError: "kernels" are not available.
      NotImplementedError: there is a group_offset, which `jax.lax.ragged_dot` does not implement either.
    """
    _check_plain_arrays("ragged_dot", group_offset, lhs=lhs, rhs=rhs)
    checks.check_one_of("ragged_dot", "implementation", implementation, Implementation)
    if implementation == "kernels" and not gemm.has_gemm():
        raise PlatformError(
            "ragged_dot: implementation='kernels' needs Hopper GPUs and jax_ep's library for CUDA, got "
            f"{jax.default_backend()!r} with the libraries {ffi.built_platforms()}"
        )
    rows, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    if lhs_indices is not None:
        checks.check_array("ragged_dot", "lhs", rows, "[rows, K]")
        rows = gathered_rows("ragged_dot", rows, lhs_indices)
    group_sizes = to_sizes("ragged_dot", group_sizes, max(rows.shape, default=0))
    if out_sharding is not None:
        if implementation in ("kernels", "pallas"):
            raise ValueError(f"ragged_dot: out_sharding must be None with implementation={implementation!r}")
        options = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        return jax.lax.ragged_dot(dense_rows(rows), rhs, group_sizes, precision, **options)
    settings = ProductSettings(implementation, precision)
    if implementation in _NEEDS and all(rows.shape + rhs.shape):
        dtype = preferred_element_type or rows.dtype
        if _choose(settings, dtype, rows, rhs, group_sizes) == "xla":
            raise ValueError(
                f"ragged_dot: implementation={implementation!r} needs lhs and rhs of one dtype, "
                f"{_NEEDS[implementation]}, and a precision that is no algorithm, "
                f"got {checks.describe(lhs)} and {checks.describe(rhs)}"
            )
    return _product("ragged_dot", "plain", settings, preferred_element_type, rows, rhs, group_sizes)


@op_scope("ragged_dot_general")
def ragged_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: jax.Array | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot_general`, with the kernels of `ragged_dot` on GPUs if the table has the dimension numbers.

    | `lhs` | `rhs` | contracted dimensions | result |
    |---|---|---|---|
    | [M, K] | [G, K, N] | 1 and 1, as `ragged_dot` | [M, N] |
    | [M, K] | [G, N, K] | 1 and 2: transposed matrices, without a copy | [M, N] |
    | [M, K] | [M, N] | 0 and 0, over the rows of each group | [G, K, N] |

    The gradients of the three forms have these forms (`jax.lax` has none for the last). JAX computes other forms.

    Raises:
      TypeError, ValueError, NotImplementedError: as `ragged_dot`.
    """
    op, numbers = "ragged_dot_general", ragged_dot_dimension_numbers
    _check_plain_arrays(op, group_offset, lhs=lhs, rhs=rhs)
    if not isinstance(numbers, jax.lax.RaggedDotDimensionNumbers):
        raise TypeError(
            f"{op}: ragged_dot_dimension_numbers must be jax.lax.RaggedDotDimensionNumbers, got "
            f"{checks.describe(numbers)}"
        )
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    group_sizes = to_sizes(op, group_sizes, max(lhs.shape, default=0))
    contracted, batches = numbers.dot_dimension_numbers
    dimensions = (*contracted, *batches, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)
    kind: Product | None = next((name for name, of in _PRODUCTS.items() if of == tuple(map(tuple, dimensions))), None)
    if kind is None or out_sharding is not None:
        options = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        return jax.lax.ragged_dot_general(lhs, rhs, group_sizes, numbers, precision, **options)
    settings = ProductSettings(precision=precision)
    return _product(op, kind, settings, preferred_element_type, lhs, rhs, group_sizes)


def to_sizes(op: str, group_sizes: jax.Array | np.ndarray, most: int) -> jax.Array:
    """int32. Sizes that are known when traced are clipped to `most`, so that few large ones do not overflow the sum."""
    sizes = group_sizes if isinstance(group_sizes, jax.Array) else np.asarray(group_sizes)
    checks.check_array(op, "group_sizes", sizes, dtype=np.integer)
    if not isinstance(sizes, jax.Array):
        sizes = np.minimum(sizes, min(most, jnp.iinfo(sizes.dtype).max))
    return checks.to_int32(sizes)


def _product(
    op: str,
    kind: Product,
    settings: ProductSettings,
    preferred_element_type: DTypeLike | None,
    left: Rows,
    right: jax.Array,
    group_sizes: jax.Array,
) -> jax.Array:
    operands = vary.vary_alike(None, left, right, group_sizes)
    by_xla = partial(_by_xla, kind, settings.precision, preferred_element_type)
    if kind != "contracted" and quantization.is_by_qwix(op, "ragged_dot", implementation=settings.implementation):
        return by_xla(*operands)
    dtype = jax.eval_shape(by_xla, *operands).dtype  # with JAX's checks
    return grouped_product(kind, settings, dtype, *operands)


def _check_plain_arrays(op: str, group_offset: object, **operands: object) -> None:
    """Raises TypeError for operands in formats that have other products: float8, or of other libraries."""
    if group_offset is not None:
        raise NotImplementedError(f"{op}: group_offset must be None, got {group_offset}")
    for name, operand in operands.items():
        kind = type(operand).__name__
        if isinstance(operand, Float8) or kind == "QArray":
            module = "jax_ep.float8" if isinstance(operand, Float8) else "qwix"
            raise TypeError(f"{op}: {name} must be an array, got {kind}: call {module}.ragged_dot")


def _by_xla(
    kind: Product, precision: PrecisionLike, dtype: DTypeLike | None, left: Rows, right: Rows, group_sizes: jax.Array
) -> jax.Array:
    lhs, rhs = dense_rows(left), dense_rows(right)
    if kind == "contracted":
        product = partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=_CONTRACT_ROWS)
    else:
        product, rhs = jax.lax.ragged_dot, rhs.swapaxes(1, 2) if kind == "transposed" else rhs
    options = {"precision": precision, "preferred_element_type": dtype}
    if not group_sizes.size:  # XLA for GPUs does not compile it, or crashes
        out = jax.eval_shape(partial(product, **options), lhs, rhs, group_sizes)
        return jnp.zeros_like(lhs, out.dtype, shape=out.shape)
    return product(lhs, rhs, group_sizes, **options)


def lhs_gradient(cotangent: Rows, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """[M, K]: a cotangent [M, N], in the dtype of `rhs`, times the transposed matrix [K, N] of each group.

    For backward passes. The operands vary over the same mesh axes, as in `rhs_gradient`.
    """
    return grouped_product("transposed", AUTO, rhs.dtype, cotangent, rhs, group_sizes)


def sum_of_lhs_gradients(
    cotangents: tuple[jax.Array, ...], rhs: tuple[jax.Array, ...], group_sizes: jax.Array
) -> jax.Array:
    """The sum [M, K] of the `lhs_gradient` of one or two products. All arrays have one dtype.

    On Hopper one kernel computes the sum of two gradients of one shape, and rounds it once.
    """
    if len(rhs) == 1:
        return lhs_gradient(cotangents[0], rhs[0], group_sizes)
    operands = (*cotangents, *rhs, group_sizes)
    if rhs[0].shape != rhs[1].shape or _choose(AUTO, rhs[0].dtype, cotangents[0], rhs[0], group_sizes) != "core":
        return _sum_of_two(*operands)
    return _differentiated_as(_sum_of_two, by_platform(_sum_of_two, cuda=kernels.summed_matmul), *operands)


def _sum_of_two(
    first: jax.Array, second: jax.Array, first_rhs: jax.Array, second_rhs: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    return lhs_gradient(first, first_rhs, group_sizes) + lhs_gradient(second, second_rhs, group_sizes)


def rhs_gradient(lhs: Rows, cotangent: Rows, group_sizes: jax.Array) -> jax.Array:
    """[G, K, N]: over the rows of each group, [M, K] transposed times a cotangent [M, N] of the same dtype.

    At most one operand may be `GatheredRows`.
    """
    return grouped_product("contracted", AUTO, lhs.dtype, lhs, cotangent, group_sizes)


def gated_product(
    unit: KnownUnit,
    composed: Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]],
    rows: Rows,
    group_sizes: jax.Array,
    rhs: tuple[jax.Array, ...],
    biases: tuple[jax.Array, ...] = (),
    *,
    keep_products: bool,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """unit(rows gate, rows up) of groups of rows [M, K], both products rounded: [M, F].

    The operands must vary over the same mesh axes. The derivative is that of `composed`.

    Args:
      unit: computed by the GEMM core with XLA's bits.
      composed: the same function of (rows, group_sizes, *rhs, *biases), for calls that no kernel supports.
      rhs: gate and up, each [G, K, F], or one array [G, K, 2 F] of both.
      biases: [G, N] for each [G, K, N] of `rhs`, added before rounding; or ().

    Returns:
      The result, and the products with each of `rhs`, biases included, or () unless `keep_products`.
    """
    operands = (rows, group_sizes, *rhs, *biases)
    columns = rhs[0].shape[2] // (2 if len(rhs) == 1 else 1)
    product_by = _choose(AUTO, rows.dtype, rows, rhs[0], group_sizes)
    if product_by == "core":
        # Separate products that split their contraction have other bits.
        split = gemm.splits_contraction(rows.shape[0], rhs[0].shape[2], rows.shape[1], rhs[0].shape[0])
        by_kernel = columns % gemm.CORE_MULTIPLE == 0 and not split
    else:
        by_kernel = product_by == "pallas" and len(rhs) == 2 and not biases
    if not by_kernel:
        return composed(*operands)
    options = {"matrices": len(rhs), "unit": unit, "keep_products": keep_products}
    call = _by("gated_matmul", composed, AUTO, None, rows, rhs[0], group_sizes, **options)
    return _differentiated_as(composed, call, *operands)


def biased_product(
    composed: Callable[..., jax.Array], rows: Rows, group_sizes: jax.Array, matrix: jax.Array, bias: jax.Array
) -> jax.Array:
    """Groups of rows [M, K] times [G, K, N] plus the group's bias [G, N], as in `gated_product`: [M, N]."""
    operands = (rows, group_sizes, matrix, bias)
    if _choose(AUTO, rows.dtype, rows, matrix, group_sizes) != "core":
        return composed(*operands)
    return _differentiated_as(composed, by_platform(composed, cuda=kernels.biased_matmul), *operands)


def _differentiated_as(composed: Callable[..., _T], call: Callable[..., _T], *operands: PyTree) -> _T:
    """call(*operands), with the derivative of `composed`."""
    product = jax.custom_jvp(call)
    product.defjvp(lambda primals, tangents: (product(*primals), jax.jvp(composed, primals, tangents)[1]))
    return product(*operands)


def _by(
    name: str,
    by_xla: Callable[..., _T],
    settings: ProductSettings,
    dtype: DTypeLike | None,
    left: Rows,
    right: Rows,
    group_sizes: jax.Array,
    **options: object,
) -> Callable[..., _T]:
    """The function for these operands: the core's or Pallas' kernel of this name, or XLA."""
    options |= {} if dtype is None else {"dtype": dtype}
    product_by = _choose(settings, dtype or left.dtype, left, right, group_sizes)
    platforms: dict[str, Callable[..., _T]] = {}
    if product_by == "core":
        platforms = {"cuda": partial(getattr(kernels, name), **options)}
    elif product_by == "pallas":
        call = partial(getattr(pallas, name), precision=settings.precision, **options)
        ways = {"cpu": {"interpret": True}, "rocm": {"shared_bytes": gemm.ROCM_SHARED_BYTES}}
        platforms = {platform: partial(call, **ways.get(platform, {})) for platform in _platforms(settings)}
    return op_scope("ragged_dot")(by_platform(by_xla, **platforms))


def _platforms(settings: ProductSettings) -> tuple[str, ...]:
    if settings.implementation == "pallas":
        return "cuda", "rocm", "cpu"
    return gemm.pallas_platforms() if settings.implementation == "auto" else ()


def _choose(
    settings: ProductSettings, dtype: DTypeLike, left: Rows, right: Rows, group_sizes: jax.Array
) -> Literal["core", "pallas", "xla"]:
    """What multiplies these operands.

    Products of 16-bit floats are exact in float32, so a `jax.lax.Precision` changes nothing. An algorithm might.
    """
    arrays = [matrix_and_indices(x)[0] for x in (left, right)]
    if (
        left.dtype != right.dtype
        or np.dtype(dtype) not in (left.dtype, np.dtype(np.float32))
        or isinstance(settings.precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset)
        or group_sizes.ndim != 1
        or not group_sizes.size
        or not all(size > 0 for x in (left, right, *arrays) for size in x.shape)
    ):
        return "xla"
    if (
        settings.implementation in ("auto", "kernels")
        and gemm.has_gemm()
        and np.dtype(left.dtype) in gemm.CORE_DTYPES
        and all(size % gemm.CORE_MULTIPLE == 0 for size in (*left.shape[1:], *right.shape[1:]))
        and all(x.matrix.size // gemm.CORE_MULTIPLE < 2**31 for x in (left, right) if isinstance(x, GatheredRows))
    ):
        return "core"
    by_pallas = _platforms(settings) and left.dtype in checks.TOKEN_DTYPES and all(x.size < 2**31 for x in arrays)
    return "pallas" if by_pallas else "xla"


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def grouped_product(
    kind: Product, settings: ProductSettings, dtype: DTypeLike, left: Rows, right: Rows, sizes: jax.Array
) -> jax.Array:
    """The product by kernels or XLA. Kernels store a contraction in the dtype of the operands."""
    by_xla = partial(_by_xla, kind, settings.precision, dtype)
    if kind == "contracted" and dtype != left.dtype:
        call = by_platform(by_xla)
    elif kind == "contracted":
        call = _by("grouped_outer", by_xla, settings, dtype, left, right, sizes)
    else:
        if (
            kind == "transposed"
            and dtype != left.dtype
            and not isinstance(right, GatheredRows)
            and _choose(settings, dtype, left, right, sizes) == "core"
        ):  # which has no float32 result of matrices that are stored [N, K]
            return grouped_product("plain", settings, dtype, left, jnp.swapaxes(right, 1, 2), sizes)
        transposed = {"transpose_rhs": True} if kind == "transposed" else {}
        call = _by("grouped_matmul", by_xla, settings, dtype, left, right, sizes, **transposed)
    return call(left, right, sizes)


@grouped_product.defjvp
def _product_jvp(
    kind: Product, settings: ProductSettings, dtype: DTypeLike, primals: _Operands, tangents: _Operands
) -> tuple[jax.Array, jax.Array]:
    def inside(rows: Rows, matrix: jax.Array) -> Rows:
        return dataclasses.replace(rows, matrix=matrix) if isinstance(rows, GatheredRows) else matrix

    def home(rows: Rows, d_rows: jax.Array) -> jax.Array:
        return sum_rows(d_rows, rows.indices, rows.matrix.shape[0]) if isinstance(rows, GatheredRows) else d_rows

    def forward(residuals: _Operands, tangents: tuple[jax.Array | None, ...]) -> jax.Array:
        (left, right, sizes), (d_left, d_right) = residuals, tangents
        pairs = ((d_left, lambda d: (inside(left, d), right)), (d_right, lambda d: (left, inside(right, d))))
        first, *second = (grouped_product(kind, settings, dtype, *pair(d), sizes) for d, pair in pairs if d is not None)
        return first + second[0] if second else first

    def backward(residuals: _Operands, cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
        left, right, sizes = residuals
        c = cotangent.astype(jnp.promote_types(left.dtype, right.dtype))
        of_both: dict[Product, tuple[tuple[Product, Rows, Rows], ...]] = {
            "plain": (("transposed", c, right), ("contracted", left, c)),
            "transposed": (("plain", c, right), ("contracted", c, left)),
            "contracted": (("transposed", right, c), ("plain", left, c)),
        }
        return tuple(
            home(x, grouped_product(each, settings, x.dtype, a, b, sizes)) if is_float(x) else None
            for x, (each, a, b) in zip((left, right), of_both[kind], strict=True)
        )

    def is_float(x: Rows) -> bool:
        return jnp.issubdtype(x.dtype, jnp.inexact)

    d_operands = tuple(
        matrix_and_indices(d)[0] if is_float(x) else None for x, d in zip(primals[:2], tangents[:2], strict=True)
    )
    return grouped_product(kind, settings, dtype, *primals), linear(forward, backward, primals, d_operands)
