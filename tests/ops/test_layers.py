"""What `moe_mlp` keeps, waits for, counts and ignores, and what is special where all ranks have the same tokens.
test_matrix.py compares its numbers."""

import dataclasses
import logging
from functools import partial
from typing import Any

import helpers
import jax
import jax.extend
import jax.numpy as jnp
import matrix_forms
import moe_oracle
import numpy as np
import oracle
import pytest
from conftest import OpenGroup, Rng
from jax.sharding import PartitionSpec as P
from matrix_forms import EXPERTS, LAYER, SHARED, Form, alone

from jax_ep import Experts, Group, Implementation, MismatchError, dispatch, moe_mlp
from jax_ep._kit.logs import log_once
from jax_ep.ops.matmul.rows import ZERO_ROW
from jax_ep.ops.moe import settings, xla


def drawn(form: Form, group: Group, rng: Rng) -> matrix_forms.Operands:
    return matrix_forms.draw(form, group.size, rng, layer=True)


def with_gradient(form: Form, group: Group) -> Any:
    """On one rank, (floats, known) -> the sums, and the function of their cotangent."""
    layer = matrix_forms.layer(form, group)
    return lambda floats, known: jax.vjp(lambda floats: layer(floats, known), floats)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["default", "several clamped, biased", "activation gated", "matrices two"])
def test_rows_are_not_kept(name: str, open_group: OpenGroup, rng: Rng) -> None:
    """What the backward pass of a layer holds: each token where it landed, and the products before the unit."""
    group, form, held = open_group(1), alone(LAYER)[name], []

    def body(floats: Any, known: Any) -> jax.Array:
        out, pull = with_gradient(form, group)(floats, known)
        held.extend(x.shape for x in jax.tree.leaves(pull))
        return out

    jax.eval_shape(helpers.per_rank(body, group.mesh), *drawn(form, group, rng)[:2])
    assert held.count((matrix_forms.TOKENS, matrix_forms.HIDDEN)) == 1
    assert held.count((matrix_forms.EVEN, matrix_forms.HIDDEN)) == 0
    assert held.count((matrix_forms.EVEN, matrix_forms.WIDTH)) == (1 if name == "matrices two" else 2)


@pytest.mark.usefixtures("native")
def test_a_shared_expert_waits_for_no_rows(group: Group, rng: Rng) -> None:
    """Rows do not wait for it either: neither product is an operand of the other until both are added."""
    form = alone(LAYER)["shared yes"]
    traced = jax.make_jaxpr(helpers.per_rank(matrix_forms.layer(form, group), group.mesh))(*drawn(form, group, rng)[:2])
    (jitted,) = traced.eqns
    (mapped,) = (each.params["jaxpr"] for each in jitted.params["jaxpr"].eqns if each.primitive.name == "shard_map")
    behind: dict[Any, set[str]] = {}  # for every value, what it was made of
    for equation in mapped.eqns:
        inputs = [behind.get(x, set()) for x in equation.invars if not isinstance(x, jax.extend.core.Literal)]
        text, made_of = str(equation), set().union(*inputs)
        is_dense = "dot_general[" in text and "ragged" not in text
        kind, other = ("exchange", "shared") if "ffi_call" in text else ("shared", "exchange")
        if is_dense or kind == "exchange":
            assert other not in made_of
            made_of = made_of | {kind}
        behind |= dict.fromkeys(equation.outvars, made_of)
    assert behind[mapped.outvars[0]] == {"exchange", "shared"}


def test_tokens_that_go_nowhere(implementation: Implementation, group: Group, rng: Rng) -> None:
    """Padding tokens may hold anything. Their NaN reaches no sum and no gradient."""
    form: Form = {"implementation": implementation}
    floats, known, _ = drawn(form, group, rng)
    floats["tokens"][:, 3], known["ids"][:, 3] = np.nan, (-1, EXPERTS)

    def body(floats: Any, known: Any) -> Any:
        out, pull = with_gradient(form, group)(floats, known)
        return out, pull(out)[0]

    out, gradient = helpers.run(group, body, floats, known)
    assert all(np.isfinite(helpers.wide(x)).all() for x in jax.tree.leaves((out, gradient)))
    assert not np.any(out[:, 3])
    assert not np.any(gradient["tokens"][:, 3])


@pytest.mark.parametrize("form", [{}, SHARED], ids=["own tokens", "shared tokens"])
def test_stats(form: Form, implementation: Implementation, group: Group, rng: Rng) -> None:
    """A rank counts what was asked of its experts, and what it dropped of its tokens. Of shared ones it drops what its
    experts have no room for, and rank 0 counts ids of no expert."""
    shared, form = bool(form), form | {"capacity": 4, "on_overflow": "drop", "implementation": implementation}
    floats, known, _ = drawn(form, group, rng)
    stats = helpers.run(group, matrix_forms.layer(form, group, stats=True), floats, known)
    ids = known["ids"]
    if shared:
        ids[0], ids[1] = ids.max(axis=0), -1
    expected = oracle.dispatch(floats["tokens"], ids, floats["weights"], num_experts=EXPERTS, capacity=4)
    np.testing.assert_array_equal(stats.counts, expected.counts.sum(axis=1))
    dropped = np.maximum(expected.needed - 4, 0)[:, None] if shared else expected.dropped
    np.testing.assert_array_equal(stats.dropped, dropped)
    np.testing.assert_array_equal(stats.invalid, expected.invalid)
    assert min(dropped.sum(), expected.invalid.sum()) > 0


@pytest.mark.parametrize("implementation", ["auto", "xla"])
@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_no_gradient_of_float8(name: str, implementation: Any, group: Group, rng: Rng) -> None:
    form = {"precision": "float8", "frozen": (name,), "implementation": implementation}

    def body(floats: Any, known: Any) -> Any:
        def loss(scales: jax.Array) -> jax.Array:
            changed = known | {name: dataclasses.replace(known[name], scales=scales)}
            return matrix_forms.layer(form, group)(floats, changed).sum()

        return jax.grad(loss)(known[name].scales)

    with pytest.raises(TypeError, match=rf"^moe_mlp: experts\.{name} in float8 has no gradient"):
        jax.eval_shape(helpers.per_rank(body, group.mesh), *drawn(form, group, rng)[:2])


@pytest.mark.usefixtures("native")
def test_experts_quantized_by_qwix(group: Group, rng: Rng) -> None:
    """The layer is that of the rounded matrices; test_matrix.py has the products of the example."""
    qwix = pytest.importorskip("qwix")
    floats, known, exact = drawn({"dtype": np.dtype(np.float32)}, group, rng)
    quantize = partial(qwix.quantize, qtype=jnp.int8, channelwise_axes=[0, 2])

    def body(floats: Any, known: Any) -> Any:
        matrices = {name: quantize(floats[name]) for name in ("gate", "up", "down")}
        operands = floats["tokens"], known["ids"], floats["weights"], Experts(**matrices)
        out = moe_mlp(*operands, group=group, product=qwix.ragged_dot)[0]
        return out, floats | {name: qwix.dequantize(each) for name, each in matrices.items()}

    found, rounded = helpers.run(group, body, floats, known)
    wanted = moe_oracle.gated_experts(moe_oracle.Layer(**rounded), exact["ids"], floats["tokens"])[0]
    moe_oracle.assert_near(found, wanted, 1e-5)
    assert np.abs(rounded["gate"] - floats["gate"]).max() > 1e-3


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("capacity", [24, 40, 8])
def test_rows_of_one_rank(capacity: int, rng: Rng) -> None:
    """Where nothing moves, `indices` name the tokens that would be in the rows, also if some find no room."""
    case = helpers.draw_case(rng, 1, tokens=12, top_k=2, experts=5, hidden=8)
    case.ids[:] = rng.integers(-1, 6, case.ids.shape)
    config = settings.DispatchConfig(1, 5, capacity, alignment=1, wire=None, drop=True)
    out: Any = jax.jit(xla.dispatch_in_place, static_argnums=0)(config, *(x[0] for x in case))
    expected = oracle.dispatch(*case, num_experts=5, capacity=capacity)
    np.testing.assert_array_equal(out.group_sizes, expected.group_sizes[0])
    helpers.assert_routing(jax.tree.map(lambda x: x[None], out), expected)
    wanted = np.full(capacity, ZERO_ROW)
    for (_, _, token, _), row in np.ndenumerate(expected.row_of):
        wanted[[row] if row >= 0 else []] = token
    np.testing.assert_array_equal(out.indices, wanted)


@pytest.mark.usefixtures("native")
def test_sums_of_shared_tokens_are_rounded_once(group: Group) -> None:
    """Not at each rank: one sum, 1 + 2^-9, is 1 in bfloat16, and the other is -1."""
    matrix, weights = jnp.ones((2, 1, 1), jnp.bfloat16), jnp.array([[1 + 2**-9, -1]], jnp.float32)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array, matrix: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"group": group, "shared_tokens": True, "activation": lambda x: x}
        return helpers.moe_sums(tokens, ids, weights, None, matrix, matrix, **options)

    mapped = helpers.sharded(group.mesh, body, (P(), P(), P(), P("ep")), P())
    assert mapped(matrix[0], jnp.array([[0, 1]]), weights, matrix) == 2**-9


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("differing", ["tokens", "expert_ids", "weights"])
@pytest.mark.parametrize("dtype", [helpers.DTYPES[0], helpers.DTYPES[2]], ids=str)
def test_shared_operands_that_differ_by_rank(differing: str, dtype: Any, group: Group, rng: Rng) -> None:
    """Without types (check_vma=False) a debug check finds one value, and with types the trace does."""
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
        return helpers.sharded(group.mesh, body, (P("ep"), specs), P() if check_vma else P("ep"), check_vma)

    assert np.isfinite(helpers.wide(helpers.fetch(program(False)(matrix, given)))).all()
    group.check()
    given[differing][1, 5, 0] = 1 - np.round(given[differing][1, 5, 0])
    match = f"moe_mlp: {differing} must be the same on all ranks where shared_tokens is true"
    with helpers.expect_failure(group, MismatchError, match, "xla"):
        assert np.isnan(helpers.wide(helpers.fetch(program(False)(matrix, given)))).all()
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(program(True), matrix, given)


def test_types_of_shared_tokens(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    """What they show is refused, or warned of once."""

    def traced(rows: Any, shared: bool | None, **options: Any) -> None:
        def body(tokens: jax.Array, ids: jax.Array, matrix: jax.Array) -> jax.Array:
            if shared is None:
                return dispatch(tokens, ids, group=group, num_experts=4).rows
            options["shared_tokens"] = shared
            return helpers.moe_sums(tokens, ids, None, None, matrix, matrix, group=group, **options)

        mapped = helpers.sharded(group.mesh, body, (rows, rows, P("ep")), P("ep"))
        jax.eval_shape(mapped, jnp.zeros((4, 8)), jnp.zeros((4, 2), jnp.int32), jnp.zeros((2, 8, 8)))

    with pytest.raises(ValueError, match="wire must be None where shared_tokens is true, got 'float8'"):
        traced(P(), True, wire="float8")
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="jax_ep"):
        for shared in (False, None) * 2:
            traced(P(), shared)
        traced(P("ep"), None)
    alike = "tokens are the same on all 2 ranks, and each"
    assert [(x.levelname, x.getMessage()) for x in caplog.records] == [
        ("WARNING", f"moe_mlp: {alike} computes all of them: pass shared_tokens=True"),
        ("INFO", f"dispatch: {alike} sends all of them"),
    ]
