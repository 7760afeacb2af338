"""What is special of moe_mlp of tokens that all ranks have; test_matrix.py looks at its numbers."""

import logging
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import matrix_forms
import numpy as np
import pytest
from conftest import OpenGroup, Rng

from jax_ep import Experts, Group, MismatchError, dispatch, moe_mlp
from jax_ep.ops.matmul.rows import ZERO_ROW
from jax_ep.ops.moe import settings, xla

P = jax.sharding.PartitionSpec


@pytest.mark.usefixtures("native")
def test_drops(group: Group, rng: Rng) -> None:
    """A rank drops what its experts have no room for, and counts all that was asked of them."""
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
    assert stats.dropped.sum() > 0


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("capacity", [24, 40, 8])
def test_rows_of_one_rank(capacity: int, rng: Rng) -> None:
    """Where nothing moves, tokens are in the order of experts, also if some find no room."""
    tokens, experts = rng.standard_normal((12, 8)).astype(np.float32), 5
    ids, weights = rng.integers(-1, experts + 1, size=(12, 2), dtype=np.int32), rng.random((12, 2), np.float32)
    config = settings.DispatchConfig(1, experts, capacity, alignment=1, wire=None, drop=True)
    found = jax.jit(xla.dispatch_in_place, static_argnums=0)(config, tokens, ids, weights)
    flat = ids.reshape(-1)
    order = np.argsort(np.where((flat >= 0) & (flat < experts), flat, experts), kind="stable")
    sizes = np.bincount(flat[(flat >= 0) & (flat < experts)], minlength=experts)
    np.testing.assert_array_equal(found.routing.counts.reshape(-1), sizes)
    if capacity >= flat.size:
        np.testing.assert_array_equal(found.group_sizes, sizes)
        rows = np.where(np.arange(capacity) < sizes.sum(), np.resize(order // 2, capacity), ZERO_ROW)
        np.testing.assert_array_equal(found.indices, rows)
    kept = found.group_sizes.sum()
    assert kept == min(capacity, sizes.sum())
    assert found.routing.dropped == sizes.sum() - kept
    named = np.asarray(found.routing.row_of[0])
    for (token, k), row in np.ndenumerate(named):
        if row >= 0:
            assert found.indices[row] == token
            assert np.searchsorted(np.cumsum(found.group_sizes), row, side="right") == ids[token, k]
    assert sorted(named[named >= 0]) == list(range(kept))


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
    tokens, matrix = rng.standard_normal((6, 8)).astype(dtype), rng.standard_normal((4, 8, 4)).astype(dtype)
    ids, weights = rng.integers(4, size=(6, 2), dtype=np.int32), rng.random((6, 2), np.float32)
    operands = {"tokens": tokens, "expert_ids": ids, "weights": weights}

    def program(check_vma: bool) -> Any:
        def body(matrix: jax.Array, **operands: jax.Array) -> jax.Array:
            given: Any = {"group": group, "shared_tokens": True, "activation": "relu"}
            tokens, ids, weights = (operands[name][0] for name in names)
            return helpers.moe_sums(tokens, ids, weights, None, matrix, matrix.swapaxes(1, 2), **given)[None]

        names = ("tokens", "expert_ids", "weights")
        specs = {name: P("ep") if name == differing else P() for name in names}
        mapped = jax.shard_map(
            lambda matrix, operands: body(matrix, **operands),
            mesh=group.mesh,
            in_specs=(P("ep"), specs),
            out_specs=P() if check_vma else P("ep"),
            check_vma=check_vma,
        )
        return jax.jit(mapped)

    given = {name: np.stack([x, x]) if name == differing else x[None] for name, x in operands.items()}
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
    with pytest.raises(ValueError, match="tokens must be the same on all ranks where shared_tokens is true"):
        traced(P("ep"), True)
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
