"""Routers: the best experts of each token, and their weights, in one read of the logits.

For GPUs that Triton compiles for. A program holds the scores of some tokens in registers and takes the best of each,
one after the other. The logits for the weights come from the cache.

Scores are compared as by `jax.lax.top_k`: -NaN < -inf < -0 < 0 < inf < NaN. The first of equal scores is taken.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl

from jax_ep.pallas_kernels.call import call_kernel, triton
from jax_ep.pallas_kernels.checks import FLOATS, check_array
from jax_ep.pallas_kernels.tiles import power_of_two, store_rows
from jax_ep.pallas_kernels.varying import vary_alike

MOST_EXPERTS = 8192  # in a program's registers, with each group padded to a power of two
MOST_TOP_K = 64  # time grows with each expert, so a sort is faster above this
_LEAST = -(2**31)  # below the key of every score
_NONE = 2**31 - 1  # above every index


class RouterTiling(NamedTuple):
    """The tile of a program: tokens with all their scores."""

    tokens: int
    warps: int


class Groups(NamedTuple):
    """Experts are chosen from the `kept` best of `total` groups of adjacent experts.

    A group's score is the sum of its `best` highest scores, or of all its scores if it has fewer experts.
    """

    total: int = 1
    kept: int = 1
    best: int = 1


class _Layout(NamedTuple):
    """The layout of a token's experts in a tile: groups and their members are padded to powers of two."""

    groups: int
    members: int

    @property
    def shape(self) -> tuple[int, int]:
        return power_of_two(self.groups), power_of_two(self.members)

    @property
    def columns(self) -> int:
        return self.shape[0] * self.shape[1]


def router_tiling(tokens: int, columns: int) -> RouterTiling:
    """A program holds 256 scores, or all of one token. It has one warp, or more from 2,048 scores of a token on.

    There are at least 512 programs if there are enough tokens: four for every SM of a large GPU.
    """
    rows = min(32, max(1, 256 // columns))
    while rows > 1 and pl.cdiv(tokens, rows) < 512:
        rows //= 2
    return RouterTiling(rows, max(1, min(8, columns // 1024)))


def can_route(experts: int, groups: int = 1, top_k: int = 1) -> bool:
    """Whether `route` and `best_groups` support these numbers of experts, groups and choices."""
    return _Layout(groups, experts // groups).columns <= MOST_EXPERTS and top_k <= MOST_TOP_K


def route(
    logits: jax.Array,
    top_k: int,
    *,
    score: Literal["softmax", "sigmoid"],
    bias: jax.Array | None = None,
    groups: Groups | None = None,
    renormalize: bool = True,
    ids: jax.Array | None = None,
    mask: jax.Array | None = None,
    tiling: RouterTiling | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The `top_k` experts of each token with the highest scores, as `jax.lax.top_k` finds them, and their weights.

    Args:
      logits: [T, E] bfloat16, float16 or float32, E and G as `can_route` says.
      top_k: K, at most 64, and at most the experts of the kept groups.
      score: of a logit in float32.
      bias: [E] floats, added to the scores when experts are chosen, and not to the weights.
      groups: default: all experts.
      renormalize: the weights are divided by their sum. Otherwise they are the scores.
      ids: [T, K] int32 or int64: experts chosen earlier. Those outside [0, E) stay, with weight 0.
      mask: [T] bool. Other tokens get ids of -1 and weights of 0.
      tiling: default: `router_tiling`.
      interpret: run without a GPU; inside `jax.shard_map` only with check_vma=False.

    Returns:
      [T, K] int32, the best expert first, and [T, K] float32. Under `jax.vmap` one element of the batch is computed
      after the other.
    """
    groups = groups or Groups()
    layout = _checked("route", "logits", logits, groups)
    if groups.kept == groups.total:
        layout = _Layout(1, logits.shape[1])
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"route: score must be 'softmax' or 'sigmoid', got {score!r}")
    tokens, experts = logits.shape
    most = min(MOST_TOP_K, groups.kept * (experts // groups.total))
    if not 1 <= top_k <= most:
        raise ValueError(f"route: top_k must be in [1, {most}], got {top_k}")
    given = {}
    for name, x, which, shape, kind in (
        ("bias", bias, "[E]", (experts,), np.floating),
        ("ids", ids, "[T, K]", (tokens, top_k), np.signedinteger),
        ("mask", mask, "[T]", (tokens,), np.bool_),
    ):
        if x is not None:
            check_array("route", name, x, which, (kind,), shape)
            wide = name == "ids" and x.dtype.itemsize > 4
            given[name] = jnp.clip(x, _LEAST, _NONE) if wide else x
    if ids is not None:
        given["ids"] = given["ids"].astype(np.int32)
    body = partial(_route, layout=layout, top_k=top_k, score=score, groups=groups, renormalize=renormalize)
    results = {"chosen": (top_k, np.int32), "weights": (top_k, np.float32)}
    call = partial(_call, body, list(given), results, layout, tiling, interpret)
    chosen, weights = sequential_vmap(call)(*vary_alike(logits, *given.values()))
    return chosen, weights


def best_groups(
    scores: jax.Array, groups: Groups, *, tiling: RouterTiling | None = None, interpret: bool = False
) -> jax.Array:
    """[T, G] bool: the kept groups of each token.

    Args:
      scores: [T, E] bfloat16, float16 or float32, E and G as `can_route` says.
      tiling, interpret: as for `route`.
    """
    layout = _checked("best_groups", "scores", scores, groups)
    body = partial(_keep_groups, layout=layout, groups=groups)
    results = {"kept": (groups.total, np.int32)}
    (kept,) = sequential_vmap(partial(_call, body, [], results, layout, tiling, interpret))(scores)
    return kept > 0


def _checked(op: str, name: str, x: Any, groups: Groups) -> _Layout:
    check_array(op, name, x, "[T, E]", FLOATS)
    experts = x.shape[1]
    if groups.total < 1 or experts < 1 or experts % groups.total:
        raise ValueError(f"{op}: groups.total must divide the {experts} experts, got {groups.total}")
    if not 1 <= groups.kept <= groups.total:
        raise ValueError(f"{op}: groups.kept must be in [1, {groups.total}], got {groups.kept}")
    if groups.best < 1:
        raise ValueError(f"{op}: groups.best must be at least 1, got {groups.best}")
    if not can_route(experts, groups.total):
        raise ValueError(f"{op}: {name} must have at most {MOST_EXPERTS} experts in padded groups, got {experts}")
    if x.shape[0] >= 2**30:
        raise ValueError(f"{op}: {name} must have fewer than 2**30 tokens, got {x.shape[0]}")
    return _Layout(groups.total, experts // groups.total)


def _call(
    body: Any,
    names: list[str],
    results: dict[str, tuple[int, Any]],
    layout: _Layout,
    tiling: RouterTiling | None,
    interpret: bool,
    scores: jax.Array,
    *others: jax.Array,
) -> list[jax.Array]:
    """Runs `body` with named operands and results. All except the bias have a row per token."""
    tokens = scores.shape[0]
    if not tokens:
        return [jnp.zeros_like(scores, dtype, shape=(0, width)) for width, dtype in results.values()]
    tiling = tiling or router_tiling(tokens, layout.columns)

    def named(*refs: Any) -> None:
        body(dict(zip(("scores", *names, *results), refs, strict=True)), rows=tiling.tokens)

    types = [jax.ShapeDtypeStruct((tokens, width), dtype) for width, dtype in results.values()]
    name, grid = body.func.__name__.strip("_"), (pl.cdiv(tokens, tiling.tokens),)
    return call_kernel(named, name, grid, (scores, *others), types, interpret, tiling.warps)


def _route(
    refs: dict[str, Any],
    *,
    rows: int,
    layout: _Layout,
    top_k: int,
    score: str,
    groups: Groups,
    renormalize: bool,
) -> None:
    row, inside, expert, logits = _load(refs["scores"], rows, layout)
    exists, experts = expert != _NONE, layout.groups * layout.members
    stats = _softmax_stats(logits) if score == "softmax" else ()
    slot = jnp.arange(power_of_two(top_k), dtype=jnp.int32)[None, :]
    if "ids" in refs:
        at = refs["ids"].at[row[:, None], slot]
        chosen = triton.load(at, mask=inside[:, None] & (slot < top_k), other=-1)
    else:
        chosen_by = jnp.exp(_log_scores(logits, *stats))
        if "bias" in refs:
            bias = triton.load(refs["bias"].at[expert[0]], mask=exists[0], other=0.0)
            chosen_by += bias.astype(jnp.float32)[None, :]
        keys = _keys(chosen_by, exists)
        if layout.groups > 1:
            by_group = keys.reshape(rows, *layout.shape)
            outside = jnp.where(by_group == _LEAST, _LEAST, _key(jnp.full_like(by_group, -np.inf, np.float32)))
            kept = _kept(keys, layout, groups)[:, :, None]
            keys = jnp.where(kept, by_group, outside).reshape(rows, layout.columns)

        def choose(j: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            _, best = _greatest(state[0], expert)
            return jnp.where(expert == best, _LEAST, state[0]), jnp.where(slot == j, best, state[1])

        start = keys, jnp.full((rows, slot.shape[1]), -1, jnp.int32)
        _, chosen = jax.lax.fori_loop(np.int32(0), np.int32(top_k), choose, start)
    if "mask" in refs:
        chosen = jnp.where(triton.load(refs["mask"].at[row], mask=inside, other=False)[:, None], chosen, -1)
    valid = (chosen >= 0) & (chosen < experts)
    of_chosen = triton.load(refs["scores"].at[row[:, None], jnp.where(valid, chosen, 0)], mask=valid, other=0.0)
    log_weights = _log_scores(of_chosen.astype(jnp.float32), *stats)
    if renormalize:
        weights = jax.nn.softmax(log_weights, axis=1, where=valid & (log_weights != -jnp.inf))
    else:
        weights = jnp.where(valid, jnp.exp(log_weights), 0.0)
    store_rows(refs["chosen"], inside, row, slot[0], chosen)
    store_rows(refs["weights"], inside, row, slot[0], weights)


def _keep_groups(refs: dict[str, Any], *, rows: int, layout: _Layout, groups: Groups) -> None:
    row, inside, expert, scores = _load(refs["scores"], rows, layout)
    kept = _kept(_keys(scores, expert != _NONE), layout, groups, refs["scores"].dtype)
    store_rows(refs["kept"], inside, row, jnp.arange(layout.shape[0], dtype=jnp.int32), kept.astype(jnp.int32))


def _load(scores: Any, rows: int, layout: _Layout) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The tokens of a program [rows], whether they exist, the experts [1, columns], and the scores in float32."""
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    inside = row < scores.shape[0]
    row = jnp.where(inside, row, 0)
    column = jnp.arange(layout.columns, dtype=jnp.int32)[None, :]
    group, member = column // layout.shape[1], column % layout.shape[1]
    exists = (group < layout.groups) & (member < layout.members)
    expert = group * layout.members + member
    loaded = triton.load(scores.at[row[:, None], expert], mask=inside[:, None] & exists, other=-jnp.inf)
    return row, inside, jnp.where(exists, expert, _NONE), loaded.astype(jnp.float32)


def _softmax_stats(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[rows, 1] each: the greatest logit, and the logarithm of the sum of exponentials after it is subtracted."""
    greatest = jnp.max(logits, axis=1, keepdims=True)
    return greatest, jnp.log(jnp.sum(jnp.exp(logits - greatest), axis=1, keepdims=True))


def _log_scores(logits: jax.Array, *stats: jax.Array) -> jax.Array:
    return logits - stats[0] - stats[1] if stats else jax.nn.log_sigmoid(logits)


def _kept(keys: jax.Array, layout: _Layout, groups: Groups, dtype: Any = np.float32) -> jax.Array:
    """[rows, groups] bool: the groups from which experts are chosen. Sums are rounded to `dtype`."""
    rows, (count, size) = keys.shape[0], layout.shape
    member = jnp.arange(size, dtype=jnp.int32)[None, None, :]
    left, worth = keys.reshape(rows, count, size), jnp.zeros((rows, count), jnp.float32)
    for _ in range(min(groups.best, layout.members)):
        greatest, best = _greatest(left, member)
        worth += _value(greatest[:, :, 0])
        left = jnp.where(member == best, _LEAST, left)
    group = jnp.arange(count, dtype=jnp.int32)[None, :]
    worth = worth.astype(dtype).astype(jnp.float32)
    keys, kept = _keys(worth, group < layout.groups), jnp.zeros((rows, count), jnp.bool_)
    for _ in range(groups.kept):
        _, best = _greatest(keys, group)
        keys, kept = jnp.where(group == best, _LEAST, keys), kept | (group == best)
    return kept


def _greatest(keys: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The greatest key of the last axis, and its first index; the axis has size 1."""
    greatest = jnp.max(keys, axis=-1, keepdims=True)
    return greatest, jnp.min(jnp.where(keys == greatest, index, _NONE), axis=-1, keepdims=True)


def _keys(scores: jax.Array, exists: jax.Array) -> jax.Array:
    """int32 in the order of float32 scores, above `_LEAST`, the key of missing experts."""
    return jnp.where(exists, jnp.maximum(_key(scores), _LEAST + 1), _LEAST)


def _key(scores: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.where(bits < 0, bits ^ _NONE, bits)


def _value(keys: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ _NONE, keys), jnp.float32)
