"""What is special of moe_mlp of tokens that all ranks have; test_matrix.py looks at its numbers."""

import logging
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import matrix_forms
import numpy as np
import oracle
import pytest
from conftest import OpenGroup, Rng

from jax_ep import Experts, Group, MismatchError, dispatch, moe_mlp
from jax_ep.ops.matmul.rows import ZERO_ROW
from jax_ep.ops.moe import settings, xla

P = jax.sharding.PartitionSpec


@pytest.mark.usefixtures("native")
def test_drops(group: Group, rng: Rng) -> None:
    """A rank drops what its experts have no room for, and counts all that was asked of them. Rank 0 counts ids of no
    expert."""
    given, known, _ = matrix_forms.draw({}, 2, rng, layer=True)
    ids, rows = known["ids"][0], 4

    def body(tokens: jax.Array, ids: jax.Array, matrices: Any) -> Any:
        experts = Experts(**jax.tree.map(lambda x: x[0], matrices))
        options: dict[str, Any] = {"capacity": rows, "on_overflow": "drop", "shared_tokens": True}
        return moe_mlp(tokens, ids, None, experts, group=group, **options)[1]

    mapped = jax.shard_map(body, mesh=group.mesh, in_specs=(P(), P(), P("ep")), out_specs=P("ep"))
    matrices = {name: given[name] for name in ("gate", "up", "down")}
    stats = helpers.fetch(jax.jit(mapped)(given["tokens"][0], ids, matrices))
    wanted = np.bincount(ids[(ids >= 0) & (ids < matrix_forms.EXPERTS)], minlength=matrix_forms.EXPERTS)
    np.testing.assert_array_equal(stats.counts.reshape(-1), wanted)
    np.testing.assert_array_equal(stats.dropped, np.maximum(wanted.reshape(2, -1).sum(axis=1) - rows, 0))
    np.testing.assert_array_equal(stats.invalid, [(ids >= matrix_forms.EXPERTS).sum(), 0])
    assert min(stats.dropped.sum(), stats.invalid.sum()) > 0


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("capacity", [24, 40, 8])
def test_rows_of_one_rank(capacity: int, rng: Rng) -> None:
    """Where nothing moves, `indices` name the tokens that would be in the rows, also if some find no room."""
    case = helpers.draw_case(rng, 1, tokens=12, top_k=2, experts=5, hidden=8)
    case.ids[:] = rng.integers(-1, 6, case.ids.shape)
    config = settings.DispatchConfig(1, 5, capacity, alignment=1, wire=None, drop=True)
    _, sizes, routing, indices = jax.jit(xla.dispatch_in_place, static_argnums=0)(config, *(x[0] for x in case))
    expected = oracle.dispatch(*case, num_experts=5, capacity=capacity)
    np.testing.assert_array_equal(sizes, expected.group_sizes[0])
    for name in ("targets", "row_of", "weights", "counts", "dropped", "invalid"):
        np.testing.assert_array_equal(getattr(routing, name).reshape(-1), getattr(expected, name).reshape(-1), name)
    wanted = np.full(capacity, ZERO_ROW)
    for (_, _, token, _), row in np.ndenumerate(expected.row_of):
        wanted[[row] if row >= 0 else []] = token
    np.testing.assert_array_equal(indices, wanted)


@pytest.mark.usefixtures("native")
def test_sums_are_rounded_once(group: Group) -> None:
    """Not at each rank: one sum, 1 + 2^-9, is 1 in bfloat16, and the other is -1."""
    matrix, weights = jnp.ones((2, 1, 1), jnp.bfloat16), jnp.array([[1 + 2**-9, -1]], jnp.float32)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array, matrix: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"group": group, "shared_tokens": True, "activation": lambda x: x}
        return helpers.moe_sums(tokens, ids, weights, None, matrix, matrix, **options)

    mapped = jax.shard_map(body, mesh=group.mesh, in_specs=(P(), P(), P(), P("ep")), out_specs=P())
    assert jax.jit(mapped)(matrix[0], jnp.array([[0, 1]]), weights, matrix) == 2**-9


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("differing", ["tokens", "expert_ids", "weights"])
@pytest.mark.parametrize("dtype", [helpers.DTYPES[0], helpers.DTYPES[2]], ids=str)
def test_operands_that_differ_by_rank(differing: str, dtype: Any, open_group: OpenGroup, rng: Rng) -> None:
    """Without types (check_vma=False) a debug check finds one value, and with types the trace does."""
    group = open_group(2)
    case = helpers.draw_case(rng, 1, tokens=6, top_k=2, experts=4, hidden=8, dtype=dtype)
    names = ("tokens", "expert_ids", "weights")
    given: dict[str, Any] = dict(zip(names, case, strict=True))
    given[differing] = np.repeat(given[differing], 2, axis=0)
    matrix = rng.standard_normal((4, 8, 4)).astype(dtype)

    def body(matrix: jax.Array, operands: dict[str, jax.Array]) -> jax.Array:
        options: Any = {"group": group, "shared_tokens": True, "activation": "relu"}
        tokens, ids, weights = (operands[name][0] for name in names)
        return helpers.moe_sums(tokens, ids, weights, None, matrix, matrix.swapaxes(1, 2), **options)[None]

    def program(check_vma: bool) -> Any:
        specs = {name: P("ep") if name == differing else P() for name in given}
        by, out_specs = {"mesh": group.mesh, "check_vma": check_vma}, P() if check_vma else P("ep")
        return jax.jit(jax.shard_map(body, in_specs=(P("ep"), specs), out_specs=out_specs, **by))

    assert np.isfinite(helpers.wide(helpers.fetch(program(False)(matrix, given)))).all()
    group.check()
    given[differing][1, 5, 0] = 1 - np.round(given[differing][1, 5, 0])
    match = f"moe_mlp: {differing} must be the same on all ranks where shared_tokens is true"
    with helpers.expect_failure(group, MismatchError, match, "xla"):
        assert np.isnan(helpers.wide(helpers.fetch(program(False)(matrix, given)))).all()
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(program(True), matrix, given)


def test_types(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    """What they show is refused, or warned of once."""

    def traced(rows: Any, shared: bool | None, **options: Any) -> None:
        def body(tokens: jax.Array, ids: jax.Array, matrix: jax.Array) -> jax.Array:
            if shared is None:
                return dispatch(tokens, ids, group=group, num_experts=4).rows
            options["shared_tokens"] = shared
            return helpers.moe_sums(tokens, ids, None, None, matrix, matrix, group=group, **options)

        mapped = jax.shard_map(body, mesh=group.mesh, in_specs=(rows, rows, P("ep")), out_specs=P("ep"))
        jax.eval_shape(mapped, jnp.zeros((4, 8)), jnp.zeros((4, 2), jnp.int32), jnp.zeros((2, 8, 8)))

    with pytest.raises(ValueError, match="wire must be None where shared_tokens is true, got 'float8'"):
        traced(P(), True, wire="float8")
    settings.note_same_tokens.cache_clear()
    with caplog.at_level(logging.INFO, logger="jax_ep"):
        for shared in (False, None) * 2:
            traced(P(), shared)
        traced(P("ep"), None)
    alike = "tokens are the same on all 2 ranks, and each"
    assert [(x.levelname, x.getMessage()) for x in caplog.records] == [
        ("WARNING", f"moe_mlp: {alike} computes all of them: pass shared_tokens=True"),
        ("INFO", f"dispatch: {alike} sends all of them"),
    ]
