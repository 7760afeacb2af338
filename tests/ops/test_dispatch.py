"""dispatch and combine against the oracle: large operands, float8, rows that are not expanded."""

import inspect
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from conftest import OpenGroup, Rng
from helpers import LATE_TOKENS

from jax_ep import CapacityError, Group, Implementation, Unexpanded, combine, dispatch, lax
from jax_ep.ops.moe.settings import Options

SIZE, EXPERTS = 4, 16
OTHERS: dict[str, Any] = {
    "num_experts": 32,
    "capacity": 16,
    "capacity_factor": 1.0,
    "alignment": 2,
    "wire": "float8",
    "expand": False,
    "on_overflow": "drop",
}  # values that are not the defaults, of the arguments that are settings


def test_every_argument_reaches_the_settings(group: Group) -> None:
    """A new argument of `dispatch` is in `Options`, for type checkers, and in the settings that its routing keeps."""
    given = {name for name, each in inspect.signature(dispatch).parameters.items() if each.kind == each.KEYWORD_ONLY}
    assert given == {*Options.__annotations__, "wire", "expand"}
    assert given == {*OTHERS, "group", "implementation"}

    def settings(**others: Any) -> Any:
        arguments: dict[str, Any] = {"num_experts": EXPERTS} | others

        def body(tokens: jax.Array, ids: jax.Array) -> Any:
            return dispatch(tokens, ids, group=group, **arguments).routing

        shapes = jax.ShapeDtypeStruct((SIZE, 6, 128), np.float32), jax.ShapeDtypeStruct((SIZE, 6, 3), np.int32)
        return jax.eval_shape(helpers.per_rank(body, group.mesh), *shapes).config

    assert all(settings(**{name: value}) != settings() for name, value in OTHERS.items())


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "hidden"),
    [(700, 8, 64, 8), (LATE_TOKENS, 8, 64, 8), (2, 3, 4096, 8), (3, 8, 256, 7168)],
)
def test_many_tokens_experts_or_values(
    tokens: int, top_k: int, experts: int, hidden: int, implementation: Implementation, group: Group, rng: Rng
) -> None:
    program = helpers.dispatch_combine(group, num_experts=experts, implementation=implementation)
    case = helpers.draw_case(rng, 4, tokens, top_k, experts, hidden)
    helpers.assert_round_trip(helpers.fetch(program(*case)), case, num_experts=experts)


@pytest.mark.parametrize(
    ("ids_dtype", "weights_dtype"), [(np.int8, ml_dtypes.bfloat16), (np.uint32, np.float16), (np.int64, np.float64)]
)
def test_ids_and_weights_are_cast(
    ids_dtype: Any, weights_dtype: Any, implementation: Implementation, group: Group, rng: Rng
) -> None:
    """The gradient comes in the dtype of the weights; an id beyond int32 is invalid, and not wrapped around."""
    case = helpers.draw_case(rng, 4, 6, 3, EXPERTS, 16)
    ids = case.ids.astype(ids_dtype)
    if np.iinfo(ids_dtype).max > 2**31:
        ids[0, 0, 0] = 2**32 - 1  # -1 in 32 bits
    wide = case.weights.astype(weights_dtype)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        def routed(weights: jax.Array) -> Any:
            out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, implementation=implementation)
            sums = combine(out.rows, out.routing, group=group, implementation=implementation)
            return sums.sum(), out.routing.invalid

        return *jax.grad(routed, has_aux=True)(weights), weights

    with jax.enable_x64(True):
        gradient, invalid, weights = helpers.run(group, body, case.tokens, ids, wide)
    assert gradient.dtype == weights.dtype == weights_dtype
    assert invalid.sum() == (np.iinfo(ids_dtype).max > 2**31)
    wanted = np.broadcast_to(case.tokens.sum(axis=2, keepdims=True), gradient.shape) * (ids < EXPERTS)
    np.testing.assert_allclose(helpers.wide(gradient), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("native")
def test_a_search_for_nan_finds_none(open_group: OpenGroup, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backward pass of a layer keeps are results of a program, too."""
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    group, case = open_group(4), helpers.draw_case(rng, 4, 40, 2, EXPERTS, 128)
    matrices = np.ones((4, EXPERTS // 4, 128, 128), case.tokens.dtype)

    def of_rank(tokens: jax.Array, ids: jax.Array, weights: jax.Array, matrix: jax.Array) -> jax.Array:
        return helpers.moe_sums(tokens, ids, weights, matrix, matrix, matrix, group=group)

    program = helpers.per_rank(of_rank, group.mesh)
    with jax.debug_nans(True):
        out, pull = jax.vjp(lambda tokens: program(tokens, case.ids, case.weights, matrices), jnp.asarray(case.tokens))
        (gradient,) = pull(out)
    assert np.isfinite(np.asarray(gradient)).all()


def float8_rows(group: Group, **options: Any) -> Any:
    def rows_of(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        wire: dict[str, Any] = {"wire": "float8_rows"}
        return helpers.expanded(dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, **wire, **options))

    return helpers.per_rank(rows_of, group.mesh)


@pytest.mark.matrix(1)
# Scales that are made of 16-byte words, and others; several messages, whole and not.
@pytest.mark.parametrize(
    ("tokens", "hidden"), [*((6, hidden) for hidden in (128, 384, 512, 2048, 5120)), (helpers.LATE_TOKENS, 256)]
)
@pytest.mark.parametrize("dtype", helpers.DTYPES, ids=str)
@pytest.mark.parametrize("expand", [True, False])
def test_float8_rows(
    expand: bool, tokens: int, hidden: int, dtype: np.dtype, implementation: Implementation, group: Group, rng: Rng
) -> None:
    case = helpers.draw_case(rng, 4, tokens, 3, EXPERTS, hidden, dtype)
    case.tokens[:, 1, :128] = 0  # a block without a largest value
    case.ids[:, 2, 1:] = -1
    program = float8_rows(group, implementation=implementation, alignment=4, expand=expand)
    dispatched = helpers.fetch(program(*case))
    values, scales = np.asarray(dispatched.rows.values), dispatched.rows.scales
    expected = oracle.dispatch(*case, num_experts=EXPERTS, capacity=values.shape[1], alignment=4)
    helpers.assert_routing(dispatched, expected)
    assert values.dtype == jnp.float8_e4m3fn
    assert scales.shape == (*values.shape[:2], hidden // 128)
    filled = np.zeros(values.shape[:2], bool)
    for rank, row_of in enumerate(expected.row_of):
        filled[rank, row_of[row_of >= 0]] = True
    wide = values.astype(np.float32) * np.repeat(scales, 128, axis=2)
    assert not wide[~filled].any()
    assert not scales[~filled].any()
    rounded, expected_scales = oracle.through_fp8(expected.rows.astype(np.float32))
    np.testing.assert_array_equal(scales[filled], expected_scales[filled][:, ::128])
    np.testing.assert_array_equal(wide[filled], rounded[filled])


@pytest.mark.parametrize("wire", [None, "float8", "float8_rows"])
@pytest.mark.parametrize(("options", "slots"), [({}, True), ({"capacity": 40, "on_overflow": "drop"}, False)], ids=str)
def test_a_slot_for_each_token(options: dict[str, Any], slots: bool, wire: Any, group: Group, rng: Rng) -> None:
    """Unless there are more slots than rows: then rows are expanded, and each is itself."""

    def body(*operands: jax.Array) -> Any:
        return dispatch(*operands, group=group, num_experts=EXPERTS, expand=False, wire=wire, **options)

    case = helpers.draw_case(rng, SIZE, 16, 4, EXPERTS, 128)
    out = helpers.run(group, body, *case)
    rows = SIZE * 16 if slots else 40
    assert isinstance(out, Unexpanded)
    assert all(x.shape[1] == rows for x in jax.tree.leaves(out.rows))
    if not slots:
        used = np.arange(40) < out.group_sizes.sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(out.indices, np.where(used, np.arange(40), -1))


def test_failure_makes_products_nan(implementation: Implementation, group: Group, rng: Rng) -> None:
    """Also where rows are gathered by `indices`."""

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        options: Any = {"capacity": 20, "implementation": implementation}
        out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, expand=False, **options)
        return lax.ragged_dot(out.rows, jnp.ones((1, 128, 8)), jnp.array([20]), lhs_indices=out.indices)

    tokens, ids, weights = helpers.draw_case(rng, SIZE, 8, 4, EXPERTS, 128)
    with helpers.expect_failure(group, CapacityError, "capacity is 20", implementation):
        out = helpers.run(group, body, tokens, np.zeros_like(ids), weights)
        assert np.isnan(out).all()
