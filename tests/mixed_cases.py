"""A program in which our ops run beside each other and beside XLA's collectives, and what numpy makes of it.

All values are small integers in float32, so every sum is exact and results are equal to the last bit. Arrays have a
leading axis of ranks.
"""

from functools import partial
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from chaos.ragged import slices_of

import jax_ep
from jax_ep import Group, SparseRows, combine, dispatch

Array = np.ndarray
EXPERTS, TOP_K, HIDDEN, TABLE, ROWS = 16, 2, 24, 60, 40
AXIS = "ep"


class Operands(NamedTuple):
    tokens: Array  # [R, T, H], T a multiple of R
    ids: Array  # [R, T, K]
    weights: Array  # [R, T, K]
    names: Array  # [R, T]: rows of a table
    slices: oracle.Slices  # of `ROWS` rows


def draw(rng: helpers.Rng, size: int, tokens: int) -> Operands:
    case = helpers.draw_case(rng, size, tokens, TOP_K, EXPERTS, HIDDEN)
    return Operands(
        tokens=rng.integers(-8, 9, case.tokens.shape).astype(np.float32),
        ids=case.ids,
        weights=rng.integers(1, 4, case.weights.shape).astype(np.float32),
        names=rng.integers(0, TABLE, (size, tokens), np.int32),
        slices=slices_of(rng, rng.integers(0, 3, (size, size, 2)), ROWS, ROWS),
    )


def routed(group: Group, tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    """Expert e multiplies its rows by 1 + e mod 3, found by where they lie."""
    out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, implementation="kernels")
    local = EXPERTS // group.size
    expert = jax.lax.axis_index(AXIS) * local + jnp.arange(local)
    factor = jnp.repeat(1 + expert % 3, out.group_sizes, total_repeat_length=len(out.rows))
    return combine(out.rows * factor[:, None], out.routing, group=group, implementation="kernels")


def after(x: jax.Array, other: jax.Array, in_turn: bool) -> jax.Array:
    """x, but not before the other is there."""
    return x + 0 * other.ravel()[0] if in_turn else x


def mixed(one: Group, other: Group, *operands: Any, collectives: bool, in_turn: bool) -> dict[str, jax.Array]:
    """On one rank. `in_turn`: each op of ours waits for the one before, as it must in CPU processes."""
    tokens, ids, weights, names, *slices = operands
    size = one.size
    found = {"first": routed(one, tokens, ids, weights)}
    second = after(tokens, found["first"], in_turn)
    found["second"] = routed(other, -second, ids, weights)  # needs nothing of the first
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    if collectives:
        found["psum"] = jax.lax.psum(found["first"], AXIS)
        found["all_gather"] = jax.lax.all_gather(tokens, AXIS).sum(0)
        found["all_to_all"] = jax.lax.all_to_all(found["second"], AXIS, 0, 0, tiled=True)
        found["next"] = jax.lax.ppermute(tokens, AXIS, ring)
    else:
        found["next"] = after(tokens, found["second"], in_turn)

    third = after(found["next"], found["second"], in_turn)
    rows = SparseRows.from_entries(names, third, num_rows=TABLE)  # needs a collective
    summed = jax_ep.sparse_all_reduce(rows, group=one, capacity=TABLE, implementation="kernels")
    table = jnp.zeros((TABLE, HIDDEN), jnp.float32)
    found["table"] = table.at[summed.indices].add(summed.values, mode="drop")
    found["third"] = routed(other, after(third, found["table"], in_turn), ids, weights)

    operand = jnp.resize(after(tokens, found["third"], in_turn), (ROWS, HIDDEN))
    output = -operand
    found["ragged"] = jax_ep.lax.ragged_all_to_all(operand, output, *slices, axis_name=AXIS, group=one)
    if collectives and one.platform != "cpu":  # XLA:CPU has none
        found["XLA's ragged"] = jax.lax.ragged_all_to_all(operand, output, *slices, axis_name=AXIS)
    return found


def expected(operands: Operands, *, collectives: bool, on_cpu: bool) -> dict[str, Array]:
    tokens, ids, weights, names, slices = operands
    scale, size = (weights * (1 + ids % 3)).sum(-1, keepdims=True), len(tokens)
    following = np.roll(tokens, 1, axis=0) if collectives else tokens
    table = np.zeros((TABLE, HIDDEN), np.float32)
    np.add.at(table, names.ravel(), following.reshape(-1, HIDDEN))
    operand = np.array([np.resize(x, (ROWS, HIDDEN)) for x in tokens])
    moved = oracle.ragged_all_to_all(operand, -operand, slices)
    found = {"first": tokens * scale, "second": -tokens * scale, "next": following, "third": following * scale}
    found |= {"table": np.stack([table] * size), "ragged": moved}
    if not collectives:
        return found
    parts = found["second"].reshape(size, size, -1, HIDDEN)  # from, to
    found |= {"psum": np.stack([found["first"].sum(0)] * size), "all_gather": np.stack([tokens.sum(0)] * size)}
    found |= {"all_to_all": parts.swapaxes(0, 1).reshape(tokens.shape)}
    return found if on_cpu else found | {"XLA's ragged": moved}


def assert_right(found: dict[str, jax.Array], wanted: dict[str, Array]) -> None:
    """This process' part of every result."""
    assert found.keys() == wanted.keys()
    for name, result in found.items():
        for shard in result.addressable_shards:
            np.testing.assert_array_equal(shard.data, wanted[name][shard.index], name)


def run(
    one: Group,
    other: Group,
    operands: Operands,
    *,
    turns: int,
    look: int,
    collectives: bool,
    in_turn: bool,
    check_vma: bool = True,
) -> None:
    """So many executions, each with the tokens that the one before has passed on; looks at every `look`-th.

    Those in between are awaited by nobody.
    """
    body = partial(mixed, one, other, collectives=collectives, in_turn=in_turn)
    step = helpers.per_rank(body, one.mesh, check_vma=check_vma)
    tokens, *others = (helpers.spread(one.mesh, x) for x in (*operands[:-1], *operands.slices))
    for turn in range(turns):
        found = step(tokens, *others)
        if turn % look == 0 or turn == turns - 1:
            shift = turn if collectives else 0
            now = operands._replace(tokens=np.roll(operands.tokens, shift, axis=0))
            assert_right(found, expected(now, collectives=collectives, on_cpu=one.platform == "cpu"))
            for group in {one, other}:
                group.check()
        tokens = found["next"]
