"""The GEMM core's grouped products as FFI calls of one op, `grouped_matmul`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jax_ep._kit import ffi
from jax_ep._kit.float8 import FLOAT8, Float8, Float8Rows, Float8Weights
from jax_ep.ops.matmul.gated import KnownUnit
from jax_ep.ops.matmul.rows import GatheredRows, Rows


def grouped_matmul(
    lhs: Rows | Float8Rows,
    rhs: jax.Array | Float8Weights,
    group_sizes: jax.Array,
    *,
    dtype: DTypeLike,
    transpose_rhs: bool = False,
) -> jax.Array:
    """[M, K], [G, K, N] (or [G, N, K], to be transposed), [G] -> [M, N]: a group's rows times its matrix."""
    return _call([lhs], [rhs], group_sizes, dtype=dtype, transpose_rhs=transpose_rhs)["result"]


def biased_matmul(lhs: Rows, group_sizes: jax.Array, rhs: jax.Array, bias: jax.Array) -> jax.Array:
    """[M, K], [G], [G, K, N], [G, N] -> [M, N]: a group's rows times its matrix, plus its bias."""
    return _call([lhs], [rhs], group_sizes, dtype=lhs.dtype, biases=[bias])["result"]


def grouped_outer(lhs: Rows, rhs: Rows, group_sizes: jax.Array, *, dtype: DTypeLike) -> jax.Array:
    """[M, K], [M, N], [G] -> [G, K, N]: over a group's rows, `lhs` transposed times `rhs`. One may be gathered."""
    return _call([lhs], [rhs], group_sizes, dtype=dtype, grouping="k_grouped")["result"]


def summed_matmul(
    first: jax.Array, second: jax.Array, first_rhs: jax.Array, second_rhs: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """Two [M, K], two [G, N, K], [G] -> [M, N]: rows times matrices transposed, the sum of both products."""
    lhs, rhs = [first, second], [first_rhs, second_rhs]
    return _call(lhs, rhs, group_sizes, dtype=first.dtype, formula="summed", transpose_rhs=True)["result"]


def gated_matmul(
    rows: Rows, group_sizes: jax.Array, *operands: jax.Array, matrices: int, unit: KnownUnit, keep_products: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """[M, K], [G], gate and up [G, K, F] or both in one [G, K, 2 F] -> [M, F]: unit(rows gate, rows up).

    Also returns the product by each matrix if `keep_products`.

    Args:
      operands: `matrices` matrices, then, if products have biases, the bias of each, [G, N].
    """
    rhs, biases = operands[:matrices], operands[matrices:]
    options: dict[str, Any] = {"dtype": rhs[0].dtype, "keeps_products": keep_products, "biases": biases}
    options |= {"activation": unit.activation, "limit": unit.limit, "slope": unit.slope}
    called = _call([rows], rhs, group_sizes, formula="gated", **options)
    return called["result"], tuple(called[name] for name in ("first_product", "second_product") if name in called)


def gated_matmul_float8(rows: Float8Rows, group_sizes: jax.Array, *rhs: Float8Weights, activation: str) -> Float8Rows:
    """`gated_matmul` of float8 operands, with a quantized result. No products are kept."""
    called = _call([rows], rhs, group_sizes, dtype=FLOAT8, formula="gated", activation=activation)
    return Float8Rows(called["result"], called["result_scales"])


def _call(
    lhs: Sequence[Rows | Float8Rows],
    rhs: Sequence[Rows | Float8Weights],
    group_sizes: jax.Array,
    *,
    dtype: DTypeLike,
    grouping: str = "m_grouped",
    formula: str = "store",
    activation: str = "none",
    limit: float = 0.0,
    slope: float = 0.0,
    keeps_products: bool = False,
    biases: Sequence[jax.Array] = (),
    transpose_rhs: bool = False,
) -> dict[str, jax.Array]:
    """The results, by name, of the op (ffi/kernels/grouped_matmul/args.h) on one or two left and right operands.

    Args:
      rhs: for a gated product gate and up, or one array of both, gate in front.
      biases: of each of `rhs`, or ().
      grouping: groups divide the rows of lhs ("m_grouped"), or the contraction, along the rows of both ("k_grouped").
    """
    gathered = next((name for name, x in (("lhs", lhs[0]), ("rhs", rhs[0])) if isinstance(x, GatheredRows)), "none")
    indices = [x.indices for x in (lhs[0], rhs[0]) if isinstance(x, GatheredRows)]
    first = [x.matrix if isinstance(x, GatheredRows) else x for x in (lhs[0], rhs[0])]
    left, right = (x.bits if isinstance(x, Float8) else x for x in first)
    rows = indices[0].shape[0] if indices else left.shape[0]
    by_contraction = grouping == "k_grouped"
    rhs_is_k_by_n = not (transpose_rhs or isinstance(rhs[0], Float8Weights))
    columns = right.shape[-1 if rhs_is_k_by_n else -2]
    both_in_one = formula == "gated" and len(rhs) == 1
    second = [*lhs[1:], *(rhs if both_in_one else rhs[1:])]
    added = [*biases, *biases] if both_in_one else biases
    return ffi.call(
        "grouped_matmul",
        *jax.tree.leaves([*first, *second, *added, group_sizes, indices]),
        ranks=None,
        dtype=np.dtype(dtype),
        operand_dtype=FLOAT8 if isinstance(first[0], Float8Rows) else np.dtype(left.dtype),
        grouping=grouping,
        formula=formula,
        activation=activation,
        limit=float(limit),
        slope=float(slope),
        keeps_products=keeps_products,
        is_biased=len(biases) > 0,
        gathered=gathered,
        source_rows={"none": 0, "lhs": left.shape[0], "rhs": right.shape[0]}[gathered],
        rhs_is_k_by_n=rhs_is_k_by_n,
        m=left.shape[1] if by_contraction else rows,
        n=columns // (2 if both_in_one else 1),
        k=rows if by_contraction else left.shape[1],
        groups=group_sizes.shape[0],
        columns=columns,
    )
