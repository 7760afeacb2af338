"""moe_mlp of tokens that all ranks have, against the layer of tokens that are sharded."""

import logging
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest
from conftest import OpenGroup, Rng
from nodes_cases import over

from jax_ep import CapacityError, Experts, Gated, Group, MismatchError, NodeOptions, dispatch, moe_mlp
from jax_ep.ops.moe import settings

P = jax.sharding.PartitionSpec
SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN, WIDTH = 4, 12, 3, 8, 128, 256
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float8": {"precision": "float8"},
    "weighed inputs": {"weigh_inputs": True},
    "drop": {"capacity_factor": 0.7, "on_overflow": "drop"},
    "xla": {"implementation": "xla"},
    "gated": {"activation": Gated(lambda gate, up: jnp.tanh(gate) * (up + 1))},
}


def draw(rng: Rng) -> tuple[Any, ...]:
    """Tokens, weights and matrices, ids, and a cotangent. Some ids are skipped, or invalid."""
    case = helpers.draw_case(rng, 1, TOKENS, TOP_K, EXPERTS, HIDDEN, helpers.DTYPES[2])
    case.ids[0, 0, 0], case.ids[0, 1, 1] = -1, EXPERTS + 3
    _, _, *matrices = moe_oracle.draw_layer(rng, case.tokens, case.weights, EXPERTS, WIDTH)
    floats = (case.tokens[0], case.weights[0], *(x.reshape(EXPERTS, *x.shape[2:]) for x in matrices))
    return floats, case.ids[0], rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)


def layer(group: Group, shared: bool, check_vma: bool = True, **options: Any) -> Any:
    """(floats, ids, cotangent) -> sums, statistics and gradients, of global arrays."""
    activation, rows = options.pop("activation", "silu"), P() if shared else P(group.axis_name)

    def body(tokens: jax.Array, weights: jax.Array, gate: Any, up: Any, down: Any, ids: jax.Array) -> Any:
        experts = Experts(gate=gate, up=up, down=down, activation=activation)
        return moe_mlp(tokens, ids, weights, experts, group=group, shared_tokens=shared, **options)

    mapped = jax.shard_map(
        body,
        mesh=group.mesh,
        in_specs=(rows, rows, *3 * [P(group.axis_name)], rows),
        out_specs=(rows, P(group.axis_name)),
        check_vma=check_vma,
    )

    def both(floats: Any, ids: jax.Array, cotangent: jax.Array) -> Any:
        out, pull, stats = jax.vjp(lambda t, w, g, u, d: mapped(t, w, g, u, d, ids), *floats, has_aux=True)
        return out, stats, pull(cotangent)

    return jax.jit(both)


@pytest.mark.matrix(1)
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_numbers(form: str, check_vma: bool, open_group: OpenGroup, rng: Rng) -> None:
    """Those of a layer on one rank."""
    operands = draw(rng)
    found = helpers.fetch(layer(open_group(SIZE), True, check_vma, **FORMS[form])(*operands))
    alone: dict[str, Any] = {"capacity_factor": 1} if form == "drop" else {}
    wanted = helpers.fetch(layer(open_group(1), False, **FORMS[form] | alone)(*operands))
    if form == "drop":  # other experts have less room
        assert 0 < found[1].dropped.sum() < TOKENS * TOP_K
        np.testing.assert_array_equal(found[1].counts, wanted[1].counts)
        return
    for name, a, b in zip(("sums", "stats", "gradients"), found, wanted, strict=True):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            x = x.sum(keepdims=True) if name == "stats" and y.size == 1 else x
            if form == "float8" and name == "gradients":  # those of products that are rounded at other places
                assert np.linalg.norm(x - y) <= 0.08 * np.linalg.norm(y)
                continue
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * max(1, np.abs(y).max()), err_msg=name)


@pytest.mark.optimized
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("check_vma", [True, False])
def test_one_rank(check_vma: bool, open_group: OpenGroup, rng: Rng) -> None:
    """The bits of the plain layer, also of gradients."""
    floats, ids, cotangent = draw(rng)
    operands = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (floats, cotangent))
    found = [
        helpers.bits(helpers.fetch(layer(open_group(1), shared, check_vma)(operands[0], ids, operands[1])))
        for shared in (True, False)
    ]
    assert found[0] == found[1]


@pytest.mark.usefixtures("native")
def test_sums_are_rounded_once(open_group: OpenGroup) -> None:
    """Not at each rank: one sum, 1 + 2^-9, is 1 in bfloat16, and the other is -1."""
    group, matrix = open_group(2), jnp.ones((2, 1, 1), jnp.bfloat16)
    weights = jnp.array([[1 + 2**-9, -1]], jnp.float32)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array, matrix: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"group": group, "shared_tokens": True, "activation": lambda x: x}
        return helpers.moe_sums(tokens, ids, weights, None, matrix, matrix, **options)

    mapped = jax.shard_map(body, mesh=group.mesh, in_specs=(P(), P(), P(), P("ep")), out_specs=P())
    assert jax.jit(mapped)(matrix[0], jnp.array([[0, 1]]), weights, matrix) == 2**-9


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("shape", [(2, 2), (1, 1)])
def test_node_options_do_not_matter(shape: tuple[int, int], open_group: OpenGroup, rng: Rng) -> None:
    """Tokens do not travel, so that each finds room."""
    operands = draw(rng)
    with over(*shape, nodes=NodeOptions(capacity=1, chunks=2)) as group:
        found, *_ = helpers.fetch(layer(group, True)(*operands))
        group.check()
    wanted, *_ = helpers.fetch(layer(open_group(1), False)(*operands))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * max(1, np.abs(wanted).max()))


@pytest.mark.usefixtures("native")
def test_overflow(open_group: OpenGroup, rng: Rng) -> None:
    group, (floats, ids, cotangent) = open_group(2), draw(rng)
    with helpers.expect_failure(group, CapacityError, "capacity is 8", "xla"):
        out, *_ = helpers.fetch(layer(group, True, capacity=8)(floats, ids, cotangent))
        assert np.isnan(out).all()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("differing", ["tokens", "expert_ids", "weights"])
@pytest.mark.parametrize("dtype", [helpers.DTYPES[0], helpers.DTYPES[2]], ids=str)
def test_operands_that_differ_by_rank(differing: str, dtype: Any, open_group: OpenGroup, rng: Rng) -> None:
    """Without types (check_vma=False) a debug check finds one value, and with types the trace does."""
    group = open_group(2)
    (tokens, weights, *matrices), ids, _ = draw(rng)
    operands = {"tokens": tokens.astype(dtype), "expert_ids": np.maximum(ids, 0), "weights": weights}
    matrix = matrices[1].astype(dtype)

    def program(check_vma: bool) -> Any:
        def body(matrix: jax.Array, **operands: jax.Array) -> jax.Array:
            given: Any = {"group": group, "shared_tokens": True, "activation": "relu"}
            down = matrix.swapaxes(1, 2)
            return helpers.moe_sums(*(operands[name][0] for name in names), None, matrix, down, **given)[None]

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
    given[differing][1, TOKENS - 1, 0] = 1 - np.round(given[differing][1, TOKENS - 1, 0])
    match = f"moe_mlp: {differing} must be the same on all ranks where shared_tokens is true"
    with helpers.expect_failure(group, MismatchError, match, "xla"):
        assert np.isnan(helpers.wide(helpers.fetch(program(False)(matrix, given)))).all()
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(program(True), matrix, given)


def test_types(open_group: OpenGroup, rng: Rng, caplog: pytest.LogCaptureFixture) -> None:
    """What they show is refused, or warned of once."""
    group, operands = open_group(2), draw(rng)
    with pytest.raises(ValueError, match="wire must be None where shared_tokens is true, got 'float8'"):
        jax.eval_shape(layer(group, True, wire="float8"), *operands)

    def body(tokens: jax.Array, ids: jax.Array, matrix: jax.Array, *, shared: bool | None) -> jax.Array:
        if shared is None:
            return dispatch(tokens, ids, group=group, num_experts=4).rows
        return helpers.moe_sums(tokens, ids, None, None, matrix, matrix, group=group, shared_tokens=shared)

    def traced(rows: Any, shared: bool | None) -> None:
        mapped = jax.shard_map(
            lambda *x: body(*x, shared=shared), mesh=group.mesh, in_specs=(rows, rows, P("ep")), out_specs=P("ep")
        )
        jax.eval_shape(mapped, jnp.zeros((4, 8)), jnp.zeros((4, 2), jnp.int32), jnp.zeros((2, 8, 8)))

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
