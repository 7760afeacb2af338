"""Updates of a table's rows by sums of gradients, in place, for GPUs that Triton compiles for.

One program adds up the gradients of a row, reads the row and its states, and writes the new ones, as in the fused
backward pass of FBGEMM (Khudia et al., 2021). The order of additions is that of `sums`, where many programs add up a
row of many entries.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.pallas_kernels.call import triton
from jax_ep.pallas_kernels.checks import FLOATS, check_array
from jax_ep.pallas_kernels.row_function import RowFunction
from jax_ep.pallas_kernels.sums import Cut, SumTiling, fold_segments, sum_tiling
from jax_ep.pallas_kernels.tiles import power_of_two
from jax_ep.pallas_kernels.varying import vary_alike


def update_tiling(columns: int) -> SumTiling:
    """Like `sum_tiling`, but the first and the last kernel hold whole rows, because one program updates a row."""
    wide = power_of_two(columns)
    first = Cut(max(1, 1024 // wide), wide, 2, min(32, max(4, wide // 256)))
    long = Cut(8, wide, max(1, min(64, 4096 // wide)), min(32, max(1, wide // 256)))
    return SumTiling(first, sum_tiling(columns, np.float32).further, long)


def update_rows(
    function: RowFunction,
    arrays: Sequence[jax.Array],
    ids: jax.Array,
    values: jax.Array,
    starts: jax.Array,
    *,
    order: jax.Array | None = None,
    weights: jax.Array | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """Returns `arrays` with a new row ids[s] for each segment s. Other rows keep their bits.

    Each array is written in place if it is donated, and copied once otherwise.

    Args:
      function: from `trace_rows`, of the sum of a segment's values [D] float32 and of the row of each array. It returns
        the new row of each array.
      arrays: [V, D], [V, 1] or [V].
      ids: [S] int32 or int64, all different. Ids outside [0, V) update nothing.
      values, starts, order, weights: the terms of the sums, as for `sum_segments`. A segment without entries updates
        its row by a sum of 0.
      interpret: run without a GPU; inside `jax.shard_map` only with check_vma=False.

    Raises:
      ValueError, TypeError: an argument has the wrong shape or dtype.
    """
    op, integers = "update_rows", (np.integer,)
    check_array(op, "values", values, "[N, D]", FLOATS)
    check_array(op, "starts", starts, "[S + 1]", integers)
    check_array(op, "ids", ids, "[S]", integers, (starts.shape[0] - 1,))
    height, width = arrays[0].shape[0], values.shape[1]
    for x in arrays:
        if x.shape not in ((height, width), (height, 1), (height,)):
            raise ValueError(f"update_rows: arrays must be [V, {width}], [V, 1] or [V] alike, got {x.shape}")
    if order is not None:
        check_array(op, "order", order, "[M]", integers)
    entries = values.shape[0] if order is None else order.shape[0]
    if weights is not None:
        check_array(op, "weights", weights, "[M]", (np.floating,), (entries,))
    if not (entries and values.shape[0]):  # every sum is 0, like that of one row of zeros
        entries, values, order, weights = 1, jnp.zeros_like(values, shape=(1, width)), None, None
    given = {"values": values, "starts": starts, "ids": ids, "order": order, "weights": weights}
    given = {name: x for name, x in given.items() if x is not None}
    scalars = [jnp.asarray(x, np.int32 if x.dtype == np.bool_ else x.dtype)[None] for x in function.scalars]
    alike = vary_alike(*given.values(), *scalars, *arrays)
    arrays = alike[len(given) + len(scalars) :]
    if not (ids.size and height and width):
        return list(arrays)
    names = [f"scalar {i}" for i in range(len(scalars))]
    given = dict(zip([*given, *names], alike, strict=False))

    def epilogue(refs: dict[str, Any], outs: Any, segment: Any, mask: jax.Array, column: jax.Array) -> Any:
        outs = outs[: len(arrays)]
        row = triton.load(refs["ids"].at[segment], mask=mask, other=-1)
        mask &= (row >= 0) & (row < height)
        row = jnp.where(mask, row, 0).astype(jnp.int32)
        there = jnp.where(mask, row, height)  # interpret mode writes masked elements back
        real = column < width

        def place(ref: Any, row: jax.Array) -> tuple[Any, jax.Array]:
            if len(ref.shape) == 1:
                return ref.at[row], mask
            if ref.shape[1] == width:
                return ref.at[row[:, None], column[None, :]], mask[:, None] & real[None, :]
            return ref.at[row[:, None], jnp.zeros((1, 1), jnp.int32)], mask[:, None]

        def load(ref: Any) -> jax.Array:
            at, mask = place(ref, row)
            return triton.load(at, mask=mask, other=0)

        rows = [load(ref) for ref in outs]
        values = [refs[name][0] for name in names]
        values = [x != 0 if own.dtype == np.bool_ else x for x, own in zip(values, function.scalars, strict=True)]

        def finish(total: jax.Array) -> None:
            for ref, x in zip(outs, function.on_block([total, *rows], values, real), strict=True):
                at, mask = place(ref, there)
                triton.store(at, x.astype(ref.dtype), mask=mask)

        return finish

    return list(fold_segments(given, entries, arrays, epilogue, update_tiling(width), interpret))
