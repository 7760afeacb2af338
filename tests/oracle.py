"""What the ops must return, in numpy and plain loops. Shares no code with jax_ep.

Every array has a leading axis of ranks.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_BLOCK = 128


class Expected(NamedTuple):
    """What `dispatch` returns on all ranks where it may drop; `needed` counts the rows that each rank is asked for."""

    rows: Array  # [R, C, H]
    group_sizes: Array  # [R, E / R]
    targets: Array  # [R, T, K]
    row_of: Array  # [R, R, T, K]
    weights: Array  # [R, R, T, K]
    counts: Array  # [R, R, E / R]
    dropped: Array  # [R, 1]
    invalid: Array  # [R, 1]
    needed: Array  # [R]


def dispatch(
    tokens: Array, ids: Array, weights: Array, *, num_experts: int, capacity: int, alignment: int = 1, fp8: bool = False
) -> Expected:
    size, num_tokens, top_k = ids.shape
    local, sent = num_experts // size, through_fp8(tokens)[0] if fp8 else tokens
    assigned: list[list[tuple[int, int, int]]] = [[] for _ in range(num_experts)]
    out = Expected(
        rows=np.zeros((size, capacity, tokens.shape[2]), tokens.dtype),
        group_sizes=np.zeros((size, local), np.int32),
        targets=np.full((size, num_tokens, top_k), -1, np.int32),
        row_of=np.full((size, size, num_tokens, top_k), -1, np.int32),
        weights=np.zeros((size, size, num_tokens, top_k), np.float32),
        counts=np.zeros((size, size, local), np.int32),
        dropped=np.zeros((size, 1), np.int32),
        invalid=np.zeros((size, 1), np.int32),
        needed=np.zeros(size, np.int64),
    )
    for source in range(size):
        for token in range(num_tokens):
            for k in range(top_k):
                expert = int(ids[source, token, k])
                if 0 <= expert < num_experts:
                    assigned[expert].append((source, token, k))
                    out.counts[expert // local, source, expert % local] += 1
                elif expert != -1:
                    out.invalid[source] += 1
    for rank in range(size):
        owned = assigned[rank * local : (rank + 1) * local]
        blocks = [-(-len(each) // alignment) for each in owned]
        out.needed[rank] = sum(blocks) * alignment
        row = 0
        for expert, given in enumerate(deal(blocks, capacity // alignment)):
            start, room = row, min(len(owned[expert]), given * alignment)
            asked = [sum(source == each for source, _, _ in owned[expert]) for each in range(size)]
            left = deal(asked, room, first=(rank * local + expert) % size)
            for source, token, k in owned[expert]:
                if left[source] == 0:
                    out.dropped[source] += 1
                    continue
                left[source] -= 1
                out.rows[rank, row] = sent[source, token]
                out.targets[source, token, k] = rank * capacity + row
                out.row_of[rank, source, token, k] = row
                out.weights[rank, source, token, k] = weights[source, token, k]
                row += 1
            row = start + given * alignment
            out.group_sizes[rank, expert] = row - start
    return out


def deal(asked: Sequence[int], room: int, first: int = 0) -> list[int]:
    """What each gets of `room` things, dealt one by one in turn, from `first` on, to those that ask for more."""
    given = [0] * len(asked)
    turns = [*range(first, len(asked)), *range(first)]
    while wanting := [i for i in turns if given[i] < asked[i]][:room]:
        room -= len(wanting)
        for i in wanting:
            given[i] += 1
    return given


def through_fp8(x: Array, *block: int) -> tuple[Array, Array]:
    """`x` after its way through float8_e4m3fn in blocks of its last axes, of rows [128]; and each value's scale."""
    block = block or (FP8_BLOCK,)
    parts = [part for n, size in zip(x.shape[-len(block) :], block, strict=True) for part in (n // size, size)]
    blocks = x.astype(np.float32).reshape(*x.shape[: -len(block)], *parts)
    largest = np.abs(blocks).max(axis=tuple(range(-1, -2 * len(block), -2)), keepdims=True)
    scales = np.where(largest == 0, np.float32(1), largest / np.float32(448))
    with np.errstate(divide="ignore"):
        inverse = np.where(largest == 0, np.float32(1), np.minimum(np.float32(448) / largest, np.finfo(np.float32).max))
    arrived = (blocks * inverse).astype(FP8).astype(np.float32) * scales
    return arrived.reshape(x.shape).astype(x.dtype), np.broadcast_to(scales, blocks.shape).reshape(x.shape)


def weighted_rows(outputs: Array, targets: Array, weights: Array, dtype: type) -> Array:
    """[R, T, K, H']: the row of each assignment times its weight; zeros where there is none."""
    rows = np.concatenate([*outputs, np.zeros((1, outputs.shape[2]), outputs.dtype)])  # the last, for -1
    return rows[targets].astype(dtype) * np.where(targets < 0, 0, weights).astype(dtype)[..., None]


def combine(outputs: Array, targets: Array, weights: Array) -> Array:
    """The weighted sums [R, T, H'] in float64, without any rounding."""
    return weighted_rows(outputs, targets, weights, np.float64).sum(axis=2)


def combine_in_order(outputs: Array, targets: Array, weights: Array, *, round_own: bool) -> Array:
    """The sums as documented: over k in float32 on the expert's rank, rounded; then over ranks in float32, rounded.

    Without `round_own`, a token's rank adds its own experts' rows one by one to the sum over ranks.
    """
    size, _, top_k = targets.shape
    terms, owners = weighted_rows(outputs, targets, weights, np.float32), targets // outputs.shape[1]
    total = np.zeros_like(terms, shape=(*targets.shape[:2], outputs.shape[2]))
    for rank in range(size):
        at_rank = [np.where(owners[:, :, k, None] == rank, terms[:, :, k], 0) for k in range(top_k)]
        arrived = sum(at_rank, np.zeros_like(total)).astype(outputs.dtype).astype(np.float32)
        rounded = round_own | (np.arange(size) != rank)  # of the tokens of these ranks
        total[rounded] += arrived[rounded]
        for term in at_rank:
            total[~rounded] += term[~rounded]
    return total.astype(outputs.dtype)


class Slices(NamedTuple):
    """The index operands of `ragged_all_to_all`, each [R, R * S]; slice i of a rank goes to rank i // S."""

    input_offsets: Array
    send_sizes: Array
    output_offsets: Array
    recv_sizes: Array


def ragged_all_to_all(operand: Array, output: Array, slices: Slices) -> Array:
    result = output.copy()
    for (source, i), size in np.ndenumerate(slices.send_sizes):
        rank = i // (slices.send_sizes.shape[1] // len(operand))
        start, place = slices.input_offsets[source, i], slices.output_offsets[source, i]
        for row in range(size):
            result[rank, place + row] = operand[source, start + row]
    return result


def ranges(sizes: Sequence[int], rows: int) -> list[slice]:
    """The rows of each group; the sizes may name more than there are."""
    ends = np.minimum(np.cumsum(sizes), rows)
    return [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])]


def ragged_dot(lhs: Array, rhs: Array, sizes: Sequence[int]) -> Array:
    """The rows of each group times its matrix in `rhs` [G, K, N], in float64; zero behind them."""
    out = np.zeros((len(lhs), rhs.shape[2]))
    for rows, matrix in zip(ranges(sizes, len(lhs)), rhs, strict=True):
        out[rows] = lhs[rows].astype(np.float64) @ matrix.astype(np.float64)
    return out


def ragged_dot_gradients(lhs: Array, rhs: Array, sizes: Sequence[int], cotangent: Array) -> tuple[Array, Array]:
    d_rhs = np.zeros(rhs.shape)
    for group, rows in enumerate(ranges(sizes, len(lhs))):
        d_rhs[group] = lhs[rows].astype(np.float64).T @ cotangent[rows].astype(np.float64)
    return ragged_dot(cotangent, rhs.swapaxes(1, 2), sizes), d_rhs


def grouped_product(arrived: Expected, rhs: np.ndarray) -> np.ndarray:
    """The rows of each expert times its matrix in `rhs` [R, E / R, H, N], zero behind them: [R, C, N] in its dtype."""
    each = zip(arrived.rows, rhs, arrived.group_sizes, strict=True)
    return np.stack([ragged_dot(*of_rank) for of_rank in each]).astype(rhs.dtype)
