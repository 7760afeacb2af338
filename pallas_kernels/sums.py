"""Sums of rows by segment, added in one order, for GPUs that Triton compiles for.

Each segment is cut into parts of 32 entries, starting at its first entry. The entries of a part are added in order, and
then the parts are added in order, by plain float32 additions, in any division of the work among programs.

The first kernel adds up the first part of every segment, the second further parts, and the third the parts of each long
segment. A row is read once. No memory is cleared.

With `groups`, segments are added up in groups. Then one kernel adds up the first parts of long segments only, and a
fourth kernel adds up the groups and their short segments.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl

from jax_ep.pallas_kernels.call import call_kernel, triton
from jax_ep.pallas_kernels.checks import FLOATS, check_array
from jax_ep.pallas_kernels.tiles import ceil_div, power_of_two, store_rows
from jax_ep.pallas_kernels.varying import vary_alike

PART = 32  # entries
MOST_ENTRIES = 2**31 - 2 * PART  # so that the end of any part is an int32
_FAN_OUT = 32  # of a search


class Cut(NamedTuple):
    """The tile of a program: `rows` sums at once, in `columns` columns, with `ahead` terms loaded before they are
    added.
    """

    rows: int
    columns: int
    ahead: int
    warps: int = 1


class SumTiling(NamedTuple):
    """The tiles of the three kernels. A row of the last is a window of 32 entries, in which a long segment may
    begin."""

    first: Cut
    further: Cut
    long: Cut


def sum_tiling(columns: int, dtype: Any) -> SumTiling:
    """Tiles of 4 KiB for first parts and 256 values for further parts. Long segments need many loads ahead."""
    wide = power_of_two(columns)
    first = min(1024 if np.dtype(dtype).itemsize == 4 else 2048, wide)
    further, long = min(256, wide), min(64, wide)
    return SumTiling(
        Cut(max(1, min(64, 1024 // first)), first, 2 if np.dtype(dtype).itemsize == 4 else 8, 4),
        Cut(max(1, min(64, 256 // further)), further, 8),
        Cut(8, long, 64),
    )


def sum_segments(
    values: jax.Array,
    starts: jax.Array,
    *,
    order: jax.Array | None = None,
    weights: jax.Array | None = None,
    scale: jax.Array | None = None,
    groups: jax.Array | None = None,
    dtype: Any = None,
    tiling: SumTiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """out[s] = scale[s] * the sum of weights[j] * values[order[j]] over the entries j of segment s.

    The entries of segment s are starts[s], ..., starts[s + 1] - 1. A segment without entries has a sum of 0. Every sum
    begins with 0, so a sum of -0 is 0. A product with a weight may be fused with its addition.

    Args:
      values: [N, D] of bfloat16, float16 or float32.
      starts: [S + 1] int32 or int64, not decreasing. Bounds outside [0, M] are clamped.
      order: [M] int32 or int64, the rows of `values`. An entry outside [0, N) adds nothing. None: row j, and M = N.
      weights: [M] floats. None: 1.
      scale: [S] floats, or [G] with groups. None: 1.
      groups: [G + 1] int32 or int64, not decreasing: out[g] adds up the segments groups[g], ..., groups[g + 1] - 1
        in order, each times scale[g]. A group of 16-bit rows with more entries than segments is multiplied at the end.
      dtype: of the result. Default: the dtype of `values`.
      tiling: default: `sum_tiling`.
      interpret: run without a GPU; inside `jax.shard_map` only with check_vma=False.

    Returns:
      [S, D], or [G, D] with groups. Under `jax.vmap` one element of the batch is computed after the other.
    """
    check_array("sum_segments", "values", values, "[N, D]", FLOATS)
    entries, segments = values.shape[0] if order is None else order.shape[0], starts.shape[0] - 1
    check_array("sum_segments", "starts", starts, "[S + 1]", (np.integer,))
    if segments < 0:
        raise ValueError("sum_segments: starts must have at least one element, got (0,)")
    results = segments if groups is None else groups.size - 1
    for name, x, layout, size, kind in (
        ("order", order, "[M]", entries, np.integer),
        ("weights", weights, "[M]", entries, np.floating),
        ("scale", scale, "[S]" if groups is None else "[G]", results, np.floating),
        ("groups", groups, "[G + 1]", max(results, 0) + 1, np.integer),
    ):
        if x is not None:
            check_array("sum_segments", name, x, layout, (kind,), (size,))
    if max(values.shape[0], entries) >= MOST_ENTRIES or segments >= 2**30 - 1:
        raise ValueError(
            "sum_segments: values must have fewer than 2**31 - 64 rows and entries, and starts fewer than 2**30 - 1 "
            f"segments, got {values.shape[0]}, {entries} and {segments}"
        )
    dtype = np.dtype(values.dtype if dtype is None else dtype)
    optional = {"order": order, "weights": weights, "scale": scale, "groups": groups}
    given = {name: x for name, x in optional.items() if x is not None}
    operands = vary_alike(values, starts, *given.values())
    if not (entries and segments and results and values.size):
        return jnp.zeros_like(operands[0], dtype, shape=(results, values.shape[1]))
    tiling = tiling or sum_tiling(values.shape[1], values.dtype)
    result, names = jax.ShapeDtypeStruct((results, values.shape[1]), dtype), ("values", "starts", *given)

    def sums(*operands: jax.Array) -> jax.Array:
        given = dict(zip(names, operands, strict=True))
        if groups is not None:
            return _fold_groups(given, entries, result, tiling, interpret)
        return fold_segments(given, entries, [result], _write, tiling, interpret)[0]

    return sequential_vmap(sums)(*operands)


def _write(refs: dict[str, Any], outs: Any, segment: jax.Array, mask: jax.Array, column: jax.Array) -> Any:
    """An `Epilogue` that writes the sums, times the scale."""
    scale = triton.load(refs["scale"].at[segment]).astype(jnp.float32)[:, None] if "scale" in refs else None

    def finish(total: jax.Array) -> None:
        store_rows(outs[0], mask, segment, column, total if scale is None else total * scale)

    return finish


def _write_by_window(
    entries: int, refs: dict[str, Any], outs: Any, segment: jax.Array, mask: jax.Array, column: jax.Array
) -> Any:
    """An `Epilogue` that writes the sum of a long segment to the window of entries in which the segment begins."""
    window = jax.lax.div(_bounds(refs["starts"], segment, entries)[0], jnp.int32(PART))
    return lambda total: store_rows(outs[0], mask, window, column, total)


# An epilogue takes the operands' refs, the results' refs, the program's segments [R], their mask [R] and the columns
# [C]. It returns a function of the sums [R, C], so its loads can start before the sums are ready.
Epilogue = Callable[[dict[str, Any], Any, jax.Array, jax.Array, jax.Array], Callable[[jax.Array], None]]


def fold_segments(
    given: dict[str, jax.Array],
    entries: int,
    results: Sequence[Any],
    epilogue: Epilogue,
    tiling: SumTiling,
    interpret: bool,
) -> Sequence[jax.Array]:
    """The results of the epilogue, which gets the sum of each segment once.

    Args:
      given: operands that vary over the same axes: "values" and "starts", perhaps "order" and "weights", as for
        `sum_segments`, and operands of the epilogue.
      results: types; or arrays, which are written in place.
    """
    call, segments = partial(_call, given, entries, interpret), given["starts"].shape[0] - 1
    parts, owners = _windows(given, entries)
    if entries <= PART:
        return call(_sum_first_parts, tiling.first, segments, results, epilogue=epilogue)
    *short, firsts = call(_sum_first_parts, tiling.first, segments, [*results, parts], epilogue=epilogue)
    further, owner = call(_sum_further_parts, tiling.further, len(owners), [parts, owners])
    more = {"firsts": firsts, "further": further, "owner": owner}
    return call(_sum_long_segments, tiling.long, len(owners), short, more, epilogue=epilogue)


def _fold_groups(
    given: dict[str, jax.Array], entries: int, result: jax.ShapeDtypeStruct, tiling: SumTiling, interpret: bool
) -> jax.Array:
    """The sums of groups of segments. `given`: as for `fold_segments`, and "groups"."""
    call, longs = partial(_call, given, entries, interpret), dict[str, jax.Array]()
    parts, owners = _windows(given, entries)
    if entries > PART:
        (firsts,) = call(_sum_long_first_parts, tiling.further, len(owners), [parts])
        further, owner = call(_sum_further_parts, tiling.further, len(owners), [parts, owners])
        more, write = {"firsts": firsts, "further": further, "owner": owner}, partial(_write_by_window, entries)
        (longs["longs"],) = call(_sum_long_segments, tiling.long, len(owners), [parts], more, epilogue=write)
    return call(_sum_groups, tiling.first, len(result), [result], longs)[0]


def _windows(given: dict[str, jax.Array], entries: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The types of a sum per window of 32 entries, and of a number per window.

    In each window at most one further part and one long segment begin.
    """
    windows, width = pl.cdiv(entries, PART), given["values"].shape[1]
    return jax.ShapeDtypeStruct((windows, width), np.float32), jax.ShapeDtypeStruct((windows,), np.int32)


def _call(
    given: dict[str, jax.Array],
    entries: int,
    interpret: bool,
    body: Callable[..., None],
    cut: Cut,
    rows: int,
    results: Sequence[Any],
    more: dict[str, jax.Array] | None = None,
    **options: Epilogue,
) -> list[jax.Array]:
    """`rows` sums, of which a program has `cut.rows`. The operands are `given` and `more`."""
    operands = given | (more or {})

    def named(*refs: Any) -> None:
        refs_of = dict(zip(operands, refs, strict=False))
        body(refs_of, refs[len(operands) :], entries=entries, cut=cut, **options)

    grid = pl.cdiv(given["values"].shape[1], cut.columns), pl.cdiv(rows, cut.rows)
    return call_kernel(named, body.__name__.strip("_"), grid, [*operands.values()], results, interpret, cut.warps)


def _sum_first_parts(refs: dict[str, Any], outs: Any, *, entries: int, cut: Cut, epilogue: Epilogue) -> None:
    """Sums of short segments, and of the first parts of long ones, by the window in which they begin."""
    segment = pl.program_id(1) * cut.rows + jnp.arange(cut.rows, dtype=jnp.int32)
    column = _columns(cut.columns)
    inside = segment < refs["starts"].shape[0] - 1
    segment = jnp.where(inside, segment, 0)
    begin, end = _bounds(refs["starts"], segment, entries)
    size = jnp.where(inside, end - begin, 0)
    finish = epilogue(refs, outs, segment, inside & (size <= PART), column)
    total = _sum_parts(refs, begin, jnp.minimum(size, PART), column, cut.ahead)
    if entries > PART:
        store_rows(outs[-1], size > PART, jax.lax.div(begin, jnp.int32(PART)), column, total)
    finish(total)


def _sum_groups(refs: dict[str, Any], outs: Any, *, entries: int, cut: Cut) -> None:
    """Sums of groups: short segments are added up here, and long ones are taken from `longs`."""
    group = pl.program_id(1) * cut.rows + jnp.arange(cut.rows, dtype=jnp.int32)
    width = refs["values"].shape[1]
    column, inside = _columns(cut.columns), group < refs["groups"].shape[0] - 1
    group = jnp.where(inside, group, 0)
    first, end = _bounds(refs["groups"], group, refs["starts"].shape[0] - 1)
    count = jnp.where(inside, end - first, 0)
    scale = late = jnp.ones(cut.rows, jnp.float32)
    if "scale" in refs:
        scale = triton.load(refs["scale"].at[group]).astype(jnp.float32)
        if refs["values"].dtype.itemsize == 2:
            last = refs["starts"].shape[0] - 2
            ends = (jnp.clip(at, 0, last) for at in (first, end - 1))
            (begin, _), (_, stop) = (_bounds(refs["starts"], at, entries) for at in ends)
            crowded = stop - begin > count
            scale, late = jnp.where(crowded, late, scale), jnp.where(crowded, scale, late)

    def add(i: Any, total: jax.Array) -> jax.Array:
        valid = i < count
        begin, end = _bounds(refs["starts"], jnp.where(valid, first + i, 0), entries)
        size = jnp.where(valid, end - begin, 0)
        part = _sum_parts(refs, begin, jnp.where(size > PART, 0, size), column, cut.ahead)
        if "longs" in refs:
            long = size > PART
            at = refs["longs"].at[jnp.where(long, jax.lax.div(begin, jnp.int32(PART)), 0)[:, None], column[None, :]]
            mask = long[:, None] & (column < width)[None, :]
            part = jnp.where(long[:, None], triton.load(at, mask=mask, other=0.0), part)
        return total + jnp.where(valid[:, None], scale[:, None] * part, 0)

    zeros = jnp.zeros((cut.rows, cut.columns), jnp.float32)
    total = jax.lax.fori_loop(np.int32(0), jnp.max(count), add, zeros)
    store_rows(outs[0], inside, group, column, total * late[:, None])


def _sum_long_first_parts(refs: dict[str, Any], outs: Any, *, entries: int, cut: Cut) -> None:
    """The sum of the first part of the long segment that begins in a window: it has the window's last entry."""
    (firsts,) = outs
    window = pl.program_id(1) * cut.rows + jnp.arange(cut.rows, dtype=jnp.int32)
    column, inside = _columns(cut.columns), window < firsts.shape[0]
    window = jnp.where(inside, window, 0)
    segment, begin, _ = _long_segment(refs["starts"], jnp.minimum((window + 1) * PART, entries) - 1, entries)
    found = inside & (segment >= 0) & (begin >= window * PART)
    size = jnp.where(found, PART, 0)
    store_rows(firsts, found, window, column, _sum_parts(refs, begin, size, column, cut.ahead))


def _sum_further_parts(refs: dict[str, Any], outs: Any, *, entries: int, cut: Cut) -> None:
    """The sum of the further part that begins in a window, and the long segment that has the window's first entry."""
    further, owner = outs
    window = pl.program_id(1) * cut.rows + jnp.arange(cut.rows, dtype=jnp.int32)
    column, inside = _columns(cut.columns), window < further.shape[0]
    first = jnp.where(inside, window, 0) * PART
    segment, begin, end = _long_segment(refs["starts"], first, entries)
    triton.store(owner.at[window], segment, mask=inside)
    part = begin + ceil_div(first - begin, PART) * PART
    found = inside & (segment >= 0) & (part > begin) & (part < end)
    size = jnp.where(found, jnp.minimum(end - part, PART), 0)
    store_rows(further, found, window, column, _sum_parts(refs, part, size, column, cut.ahead))


def _sum_long_segments(refs: dict[str, Any], outs: Any, *, entries: int, cut: Cut, epilogue: Epilogue) -> None:
    """The sum of each long segment whose first window belongs to this program, one after the other."""
    further = refs["further"]
    windows, width = further.shape
    lane = jnp.arange(cut.rows, dtype=jnp.int32)
    window = pl.program_id(1) * cut.rows + lane
    inside = window < windows
    segments = triton.load(refs["owner"].at[jnp.where(inside, window, 0)], mask=inside, other=-1)
    begins, ends = _bounds(refs["starts"], jnp.maximum(segments, 0), entries)
    found = (segments >= 0) & (window == ceil_div(begins, PART))
    column = _columns(cut.columns)

    def add_up(i: Any, nothing: None) -> None:
        """Adds up the segment of window i of the program."""
        segment, begin, end = (
            jnp.sum(jnp.where(found & (lane == i), x, 0), dtype=jnp.int32) for x in (segments, begins, ends)
        )
        first, parts = jax.lax.div(begin, jnp.int32(PART)), ceil_div(end - begin, PART)  # no parts without a segment
        finish = epilogue(refs, outs, segment[None], (parts > 0)[None], column)

        def load(ref: Any, part: Any) -> jax.Array:
            valid = part < parts
            at = ref.at[jnp.where(valid, first + part, 0), column]
            return triton.load(at, mask=valid & (column < width), other=0.0)

        def add(step: Any, total: jax.Array) -> jax.Array:
            loaded = [load(further, 1 + step * cut.ahead + j) for j in range(cut.ahead)]
            for each in loaded:
                total += each
            return total

        total = jax.lax.fori_loop(0, ceil_div(jnp.maximum(parts - 1, 0), cut.ahead), add, load(refs["firsts"], 0))
        finish(total[None, :])

    jax.lax.fori_loop(0, jnp.max(jnp.where(found, lane + 1, 0)), add_up, None)


def _columns(count: int) -> jax.Array:
    return pl.program_id(0) * count + jnp.arange(count, dtype=jnp.int32)


def _bounds(starts: Any, segment: jax.Array, entries: int) -> tuple[jax.Array, jax.Array]:
    """int32: the first entry of each segment, and the end of its entries."""
    begin, end = (jnp.minimum(jnp.maximum(triton.load(starts.at[segment + i]), 0), entries) for i in (0, 1))
    return begin.astype(jnp.int32), jnp.maximum(begin, end).astype(jnp.int32)


def _long_segment(starts: Any, entry: jax.Array, entries: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The long segment that has an entry, or -1, and the bounds of the segment."""
    segment = _segment_of(starts, entry)
    found = (segment >= 0) & (segment < starts.shape[0] - 1)
    begin, end = _bounds(starts, jnp.where(found, segment, 0), entries)
    return jnp.where(found & (end - begin > PART), segment, -1), begin, end


def _segment_of(starts: Any, entry: jax.Array) -> jax.Array:
    """The last segment that begins at or before an entry: -1 or starts.size - 1 if the entry is outside of all.

    Every step divides the range by `_FAN_OUT`, because a step takes as long as a load.
    """
    span = _FAN_OUT
    while span <= starts.shape[0]:
        span *= _FAN_OUT
    least = jnp.zeros_like(entry)  # least number that begin at or before the entry, to within `span`
    while span > 1:
        span //= _FAN_OUT
        pivot = least[:, None] + jnp.arange(_FAN_OUT, dtype=jnp.int32)[None, :] * span
        inside = (pivot > least[:, None]) & (pivot <= starts.shape[0])
        start = triton.load(starts.at[jnp.where(inside, pivot - 1, 0)])
        least += span * jnp.sum(inside & (start <= entry[:, None]), axis=1, dtype=jnp.int32)
    return least - 1


def _sum_parts(refs: dict[str, Any], begin: jax.Array, size: jax.Array, column: jax.Array, ahead: int) -> jax.Array:
    """[P, columns] float32: the sums of parts, of `size` [P] entries from `begin` [P] on."""
    values = refs["values"]
    rows, width = values.shape

    def load(i: Any) -> jax.Array:
        valid = i < size
        entry = jnp.where(valid, begin + i, 0)
        row = entry
        if "order" in refs:
            row = triton.load(refs["order"].at[entry], mask=valid, other=0)
            valid &= (row >= 0) & (row < rows)
            row = jnp.where(valid, row, 0).astype(jnp.int32)
        mask = valid[:, None] & (column < width)[None, :]
        loaded = triton.load(values.at[row[:, None], column[None, :]], mask=mask, other=0.0).astype(jnp.float32)
        if "weights" in refs:
            weight = triton.load(refs["weights"].at[entry], mask=valid, other=0.0).astype(jnp.float32)
            loaded *= weight[:, None]
        return loaded

    def add(i: Any, total: jax.Array) -> jax.Array:
        loaded = [load(i * ahead + j) for j in range(ahead)]
        for each in loaded:
            total += each
        return total

    zeros = jnp.zeros((begin.shape[0], column.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, ceil_div(jnp.max(size), ahead), add, zeros)
