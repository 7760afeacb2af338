"""Matrix products of rows in groups, with a matrix per group, for GPUs that Triton compiles for.

A program computes one tile of a result. In `grouped_matmul` the groups divide the rows, and a tile's rows belong to one
group (as in MegaBlocks: Gale et al., 2022). In `grouped_outer` they divide the contraction. Rows may be gathered: row i
is row indices[i] of an operand, without a copy.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jax_ep.pallas_kernels.call import call_kernel, triton
from jax_ep.pallas_kernels.checks import FLOATS, check_array
from jax_ep.pallas_kernels.tiles import ceil_div, power_of_two
from jax_ep.pallas_kernels.varying import vary_alike

ZERO_ROW = -1  # an index. Any other outside the operand gives a row of NaN

GatedUnit = Callable[[jax.Array, jax.Array], jax.Array]  # elementwise, of the products by gate and up in float32


class Tiling(NamedTuple):
    """The tile of a product: `rows` by `columns` of the result, in steps of `depth` along the contraction."""

    rows: int
    columns: int
    depth: int
    warps: int = 8
    stages: int = 3


def row_tiling(rows: int, columns: int, depth: int, groups: int, products: int, dtype: Any) -> Tiling:
    """For `grouped_matmul`: tiles no higher than an average group, rounded up to a power of two.

    The widest tiles are the fastest on an H200 (`bench matmul --by pallas`), and fit 99 KiB of shared memory.
    """
    high = min(128, _power_of_two(pl.cdiv(rows, groups)))
    if jnp.dtype(dtype).itemsize == 4:
        return Tiling(high, min(64, _power_of_two(columns)), min(32, _power_of_two(depth)), 4)
    if high == 128 and products == 1 and columns > 128:
        return Tiling(high, 256, min(32, _power_of_two(depth)), 8, 4)
    return Tiling(high, min(128, _power_of_two(columns)), min(64, _power_of_two(depth)), 8 if high > 64 else 4)


def outer_tiling(rows: int, columns: int, depth: int, groups: int, dtype: Any) -> Tiling:
    """For `grouped_outer`. `depth` is that of an average group."""
    depth = min(32, _power_of_two(pl.cdiv(depth, groups)))
    if jnp.dtype(dtype).itemsize == 4:
        return Tiling(min(128, _power_of_two(rows)), min(64, _power_of_two(columns)), depth, 4)
    return Tiling(min(128, _power_of_two(rows)), min(256, _power_of_two(columns)), depth, 8, 4)


def within(op: str, shared_bytes: int, tiling: Tiling, products: int, dtype: Any) -> Tiling:
    """The tiling in two stages, with steps so short that both fit the shared memory.

    Raises ValueError if steps of depth 16 do not fit.
    """
    tiling = tiling._replace(stages=2)
    while (needed := 2 * step_bytes(tiling, products, dtype)) > shared_bytes:
        if tiling.depth == 16:
            raise ValueError(f"{op}: shared_bytes must be at least {needed}, got {shared_bytes}; or pass tiling=")
        tiling = tiling._replace(depth=tiling.depth // 2)
    return tiling


def step_bytes(tiling: Tiling, products: int, dtype: Any) -> int:
    """Bytes of the operands of a step along the contraction: a tile of rows, and one of columns for each product."""
    return (tiling.rows + products * tiling.columns) * tiling.depth * jnp.dtype(dtype).itemsize


def _power_of_two(size: int) -> int:
    """At least 16, which tensor cores require."""
    return max(16, power_of_two(size))


def grouped_matmul(
    lhs: jax.Array,
    rhs: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    *,
    indices: jax.Array | None = None,
    transpose_rhs: bool = False,
    unit: GatedUnit | None = None,
    keep_products: bool = False,
    dtype: Any = None,
    precision: Any = None,
    tiling: Tiling | None = None,
    shared_bytes: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Each group's rows of `lhs` times its matrix. Rows after the last group are zero.

    Args:
      lhs: [M, K], or with `indices` any number of rows.
      rhs: one [G, K, N]; or two, gate and up, with a unit.
      group_sizes: [G] integers.
      indices: [M] int32, the rows of `lhs`: -1 is a row of zeros, any other index out of bounds a row of NaN.
      transpose_rhs: the matrices are [G, N, K].
      unit: an elementwise function that Triton compiles: the result is unit(lhs gate, lhs up), of rounded products.
      keep_products: with a unit, also return both products.
      dtype: of the results. Default: the dtype of `lhs`.
      precision: of products in float32, as for `jax.numpy.dot`.
      tiling: default: `row_tiling`.
      shared_bytes: of the GPU if it has less than 99 KiB, as AMD's have: the default tiling is then `within` it.
      interpret: run without a GPU; inside `jax.shard_map` only with check_vma=False.

    Returns:
      The result [M, N], then the kept products.
    """
    op = "grouped_matmul"
    check_array(op, "lhs", lhs, "[M, K]", FLOATS)
    check_array(op, "group_sizes", group_sizes, "[G]", (np.integer,))
    layout = "[G, N, K]" if transpose_rhs else "[G, K, N]"
    for i, matrix in enumerate(rhs):
        check_array(op, f"rhs[{i}]", matrix, layout, FLOATS)
        if matrix.shape != rhs[0].shape or matrix.shape[0] != group_sizes.shape[0]:
            raise ValueError(f"{op}: rhs must be {layout} alike, with G = {group_sizes.shape[0]}, got {matrix.shape}")
        if matrix.shape[2 if transpose_rhs else 1] != lhs.shape[1]:
            raise ValueError(f"{op}: rhs must be {layout} with K = {lhs.shape[1]}, got {matrix.shape}")
    if len(rhs) != (1 if unit is None else 2):
        raise ValueError(f"{op}: rhs must be two matrices with a unit, otherwise one, got {len(rhs)}")
    if keep_products and unit is None:
        raise ValueError(f"{op}: keep_products must be false where unit is None, got True")
    groups, rows = group_sizes.shape[0], _count_rows(op, lhs, "indices", indices)
    depth, columns = (rhs[0].shape[2], rhs[0].shape[1]) if transpose_rhs else rhs[0].shape[1:]
    _check_not_empty(op, rows, lhs, rhs[0])
    if tiling is None:
        tiling = row_tiling(rows, columns, depth, groups, len(rhs), lhs.dtype)
        tiling = tiling if shared_bytes is None else within(op, shared_bytes, tiling, len(rhs), lhs.dtype)
    gathers = [] if indices is None else [indices]
    lhs, *rest = vary_alike(lhs, *rhs, *gathers, *_tiles(group_sizes, rows, tiling.rows))
    tiles = rest[-1].shape[0]
    body = partial(
        _row_tile,
        operands=len(rhs),
        gathers=bool(gathers),
        transpose_rhs=transpose_rhs,
        unit=unit,
        precision=precision,
        tiling=tiling,
        shape=(rows, columns, depth),
    )
    results = [jax.ShapeDtypeStruct((rows, columns), dtype or lhs.dtype)] * (3 if keep_products else 1)
    grid = (pl.cdiv(columns, tiling.columns), tiles)
    return tuple(call_kernel(body, op, grid, (lhs, *rest), results, interpret, tiling.warps, tiling.stages))


def grouped_outer(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    lhs_indices: jax.Array | None = None,
    rhs_indices: jax.Array | None = None,
    dtype: Any = None,
    precision: Any = None,
    tiling: Tiling | None = None,
    shared_bytes: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Over each group's rows, `lhs` [M, K] transposed times `rhs` [M, N]: [G, K, N].

    Arguments as for `grouped_matmul`. Each operand may be gathered, and the default tiling is `outer_tiling`.
    """
    op = "grouped_outer"
    for name, x, layout, kinds in (
        ("lhs", lhs, "[M, K]", FLOATS),
        ("rhs", rhs, "[M, N]", FLOATS),
        ("group_sizes", group_sizes, "[G]", (np.integer,)),
    ):
        check_array(op, name, x, layout, kinds)
    groups, rows, columns = group_sizes.shape[0], lhs.shape[1], rhs.shape[1]
    lists = [x for x in (lhs_indices, rhs_indices) if x is not None]
    total = _count_rows(op, lhs, "lhs_indices", lhs_indices)
    if (others := _count_rows(op, rhs, "rhs_indices", rhs_indices)) != total:
        raise ValueError(f"{op}: rhs must have as many rows as lhs, or as its indices, {total}, got {others}")
    _check_not_empty(op, total, lhs, rhs, group_sizes)
    if tiling is None:
        tiling = outer_tiling(rows, columns, total, groups, lhs.dtype)
        tiling = tiling if shared_bytes is None else within(op, shared_bytes, tiling, 1, lhs.dtype)
    ends = _ends(group_sizes, total)
    lhs, *rest = vary_alike(lhs, rhs, *lists, jnp.append(0, ends[:-1]), ends)
    body = partial(
        _outer_tile,
        gathers=(lhs_indices is not None, rhs_indices is not None),
        precision=precision,
        tiling=tiling,
        shape=(rows, columns),
    )
    grid = (pl.cdiv(columns, tiling.columns), pl.cdiv(rows, tiling.rows), groups)
    result = jax.ShapeDtypeStruct((groups, rows, columns), dtype or lhs.dtype)
    return call_kernel(body, op, grid, (lhs, *rest), [result], interpret, tiling.warps, tiling.stages)[0]


def _count_rows(op: str, rows: jax.Array, name: str, indices: jax.Array | None) -> int:
    """M, of the operand or of its indices. Raises ValueError or TypeError if the indices are wrong."""
    if indices is None:
        return rows.shape[0]
    check_array(op, name, indices, "[M]", (np.integer,))
    return indices.shape[0]


def _check_not_empty(op: str, rows: int, *operands: jax.Array) -> None:
    if not (rows and all(x.size for x in operands)):
        raise ValueError(f"{op}: operands must not be empty, got {rows} rows and {[x.shape for x in operands]}")


def _ends(group_sizes: jax.Array, rows: int) -> jax.Array:
    """int32: the end of each group, within the rows even if the sizes are wrong."""
    sizes = jnp.clip(group_sizes, 0, rows).astype(jnp.uint32)  # their sum has more than 31 bits
    return jnp.minimum(jnp.cumsum(sizes), rows).astype(jnp.int32)


def _tiles(group_sizes: jax.Array, rows: int, height: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each program its group, its first row and the end of its rows. Group G has the rows after the last group."""
    ends = jnp.append(_ends(group_sizes, rows), rows)
    begins = jnp.append(0, ends[:-1])
    tiles = ceil_div(ends - begins, height)
    last_tiles = jnp.cumsum(tiles)
    program = jnp.arange((rows + ends.size * (height - 1)) // height, dtype=jnp.int32)
    group = jnp.minimum((last_tiles[None, :] <= program[:, None]).sum(axis=1, dtype=jnp.int32), ends.size - 1)
    first = begins[group] + (program - (last_tiles - tiles)[group]) * height
    return group, first, jnp.maximum(ends[group], first)


class _Rows(NamedTuple):
    """Rows of an operand [M, K] for a tile."""

    ref: Any
    at: jax.Array  # within the operand
    valid: jax.Array  # whether there is a row that is not zero
    outside: jax.Array | None  # whether the row is NaN

    def load(self, columns: jax.Array, width: int) -> jax.Array:
        mask = self.valid[:, None] & (columns < width)[None, :]
        return triton.load(self.ref.at[self.at[:, None], columns[None, :]], mask=mask, other=0.0)

    def spoiled(self, values: jax.Array) -> jax.Array:
        return values if self.outside is None else jnp.where(self.outside[:, None], jnp.nan, values)


def _rows_at(ref: Any, rows: jax.Array, valid: jax.Array, indices: Any | None) -> _Rows:
    rows = jnp.where(valid, rows, 0)
    if indices is None:
        return _Rows(ref, rows, valid, None)
    at = triton.load(indices.at[rows], mask=valid, other=ZERO_ROW)
    inside = (at >= 0) & (at < ref.shape[0])
    return _Rows(ref, jnp.where(inside, at, 0), inside, (at != ZERO_ROW) & ~inside)


def _row_tile(
    lhs: Any,
    *refs: Any,
    operands: int,
    gathers: bool,
    transpose_rhs: bool,
    unit: GatedUnit | None,
    precision: Any,
    tiling: Tiling,
    shape: tuple[int, int, int],
) -> None:
    rhs, refs = refs[:operands], refs[operands:]
    indices, refs = (refs[0], refs[1:]) if gathers else (None, refs)
    group_of, first_of, end_of, *out = refs
    (_, columns, depth), program = shape, pl.program_id(1)
    group, end = group_of[program], end_of[program]
    row = first_of[program] + jnp.arange(tiling.rows, dtype=jnp.int32)
    column = pl.program_id(0) * tiling.columns + jnp.arange(tiling.columns, dtype=jnp.int32)
    rows = _rows_at(lhs, row, row < end, indices)
    has_matrix = (group < rhs[0].shape[0]) & (first_of[program] < end)

    def step(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        k = i * tiling.depth + jnp.arange(tiling.depth, dtype=jnp.int32)
        left = rows.load(k, depth)
        return tuple(
            total + _dot(left, _matrix(ref, group, k, column, depth, columns, transpose_rhs), precision)
            for total, ref in zip(sums, rhs, strict=True)
        )

    zeros = jnp.zeros((tiling.rows, tiling.columns), jnp.float32)
    steps = has_matrix.astype(jnp.int32) * pl.cdiv(depth, tiling.depth)
    products = jax.lax.fori_loop(0, steps, step, (zeros,) * operands)
    if unit is not None:
        gate, up = (x.astype(out[0].dtype).astype(jnp.float32) for x in products)
        products = (unit(gate, up), *products)
    mask = (row < end)[:, None] & (column < columns)[None, :]
    for ref, values in zip(out, products[: len(out)], strict=True):
        at = ref.at[row[:, None], column[None, :]]
        if rows.outside is None:
            triton.store(at, values.astype(ref.dtype), mask=mask)
            continue
        # A select of the sums lost their last multiply (float16, tiles of 128 x 256, H200, jax 0.11.2).
        outside = rows.outside[:, None] & (group < rhs[0].shape[0])  # rows after the last group are zero
        triton.store(at, values.astype(ref.dtype), mask=mask & ~outside)
        triton.store(at, jnp.full(mask.shape, jnp.nan, ref.dtype), mask=mask & outside)


def _matrix(ref: Any, group: Any, k: Any, column: Any, depth: int, columns: int, transposed: bool) -> jax.Array:
    mask = (k < depth)[:, None] & (column < columns)[None, :]
    if transposed:
        return triton.load(ref.at[group, column[:, None], k[None, :]], mask=mask.T, other=0.0).T
    return triton.load(ref.at[group, k[:, None], column[None, :]], mask=mask, other=0.0)


def _outer_tile(
    lhs: Any,
    rhs: Any,
    *refs: Any,
    gathers: tuple[bool, bool],
    precision: Any,
    tiling: Tiling,
    shape: tuple[int, int],
) -> None:
    lists, (begin_of, end_of, out) = list(refs[:-3]), refs[-3:]
    indices = [lists.pop(0) if gathered else None for gathered in gathers]
    rows, columns = shape
    group = pl.program_id(2)
    begin, end = begin_of[group], end_of[group]
    row = pl.program_id(1) * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
    column = pl.program_id(0) * tiling.columns + jnp.arange(tiling.columns, dtype=jnp.int32)

    def step(i: Any, total: jax.Array) -> jax.Array:
        k = begin + i * tiling.depth + jnp.arange(tiling.depth, dtype=jnp.int32)
        left, right = (_rows_at(ref, k, k < end, at) for ref, at in zip((lhs, rhs), indices, strict=True))
        a, b = left.spoiled(left.load(row, rows)), right.spoiled(right.load(column, columns))
        return total + _dot(a.T, b, precision)

    zeros = jnp.zeros((tiling.rows, tiling.columns), jnp.float32)
    total = jax.lax.fori_loop(np.int32(0), ceil_div(end - begin, tiling.depth), step, zeros)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    triton.store(out.at[group, row[:, None], column[None, :]], total.astype(out.dtype), mask=mask)


def _dot(left: jax.Array, right: jax.Array, precision: Any) -> jax.Array:
    return jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32)
