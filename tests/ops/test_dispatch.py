"""dispatch and combine against the oracle: large operands, nothing at all, float8, rows that are dropped or not
expanded."""

import inspect
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from chaos.programs import Program
from chaos.routed import Gradients, RoundTrip
from conftest import OpenGroup, Rng
from helpers import DTYPES, LATE_TOKENS

from jax_ep import CapacityError, Group, Implementation, Unexpanded, combine, dispatch, lax
from jax_ep.ops.moe import settings

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
    assert given == {*settings.Options.__annotations__, "wire", "expand"}
    assert given == {*OTHERS, "group", "implementation"}

    def config_of(**others: Any) -> Any:
        arguments: dict[str, Any] = {"num_experts": EXPERTS} | others

        def body(tokens: jax.Array, ids: jax.Array) -> Any:
            return dispatch(tokens, ids, group=group, **arguments).routing

        shapes = jax.ShapeDtypeStruct((SIZE, 6, 128), np.float32), jax.ShapeDtypeStruct((SIZE, 6, 3), np.int32)
        return jax.eval_shape(helpers.per_rank(body, group.mesh), *shapes).config

    assert all(config_of(**{name: value}) != config_of() for name, value in OTHERS.items())


def program_of(
    kind: type[Program],
    size: int,
    shape: tuple[int, int, int, int],
    wire: str | None = None,
    *,
    alignment: int = 1,
    even: float | None = None,
    dtype: np.dtype = DTYPES[2],
    expand: bool = True,
) -> Any:
    """A program of the fuzzer on `size` ranks. `shape`: tokens, experts of a token, all experts, values. `even`: the
    capacity in even loads, which some assignments exceed."""
    tokens, top_k, experts, hidden = shape
    capacity = None if even is None else int(even * tokens * top_k) // alignment * alignment
    given = {"tokens": tokens, "top_k": top_k, "num_experts": experts, "hidden": hidden, "dtype": dtype, "wire": wire}
    how = {"on_overflow": "raise" if even is None else "drop", "expand": expand}
    return kind, size, given | how | {"alignment": alignment, "capacity": capacity}


LARGE = [(700, 8, 64, 8), (LATE_TOKENS, 8, 64, 8), (2, 3, 4096, 8), (3, 8, 256, 7168)]
NOTHING = [(0, 2, 4, 16), (5, 0, 4, 16), (LATE_TOKENS, 0, 4, 16), (5, 2, 4, 0), (0, 0, 4, 0)]
# Ranks, the shape, alignment.
SKEWED = [(1, (40, 3, 12, 16), 4), (2, (40, 3, 6, 16), 1), (4, (40, 3, 36, 16), 8), (4, (500, 4, 20, 16), 1)]
SKEWED += [(8, (40, 2, 72, 16), 2), (2, (LATE_TOKENS, 2, 10, 16), 4), (4, (LATE_TOKENS, 2, 12, 16), 16)]
PROGRAMS = [
    *(program_of(RoundTrip, SIZE, shape) for shape in LARGE),
    *(program_of(kind, 2, shape) for kind in (RoundTrip, Gradients) for shape in NOTHING),
    *(program_of(RoundTrip, 1, shape, expand=False, alignment=8) for shape in NOTHING[:2]),
    *(program_of(RoundTrip, 2, (0, 2, 4, 128), wire) for wire in ("float8", "float8_rows")),
    program_of(RoundTrip, 2, (5, 2, 4, 0), "float8"),
    *(
        program_of(RoundTrip, size, shape, alignment=alignment, even=0.8, expand=expand)
        for size, shape, alignment in SKEWED
        for expand in (True, False)
    ),
    # Scales that are made of 16-byte words, and others; several messages, whole and not.
    *(
        program_of(
            RoundTrip, SIZE, (tokens, 3, EXPERTS, hidden), "float8_rows", alignment=4, dtype=dtype, expand=expand
        )
        for tokens, hidden, dtype in zip(
            (6, 6, 6, 6, 6, LATE_TOKENS), (128, 384, 512, 2048, 5120, 256), DTYPES * 2, strict=True
        )
        for expand in (True, False)
    ),
]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program[0].__name__} {[*program[2].values()]}")
def test_programs(
    program: Any, implementation: Implementation, open_group: OpenGroup, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fuzzer's programs with given options. Rows that nobody writes hold NaN."""
    kind, size, given = program
    if kind is RoundTrip and not given["top_k"] and jax.default_backend() != "cpu":
        pytest.skip("XLA:GPU crashes while it compiles a shard_map of these empty operands (jax 0.11.2)")
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    group = open_group(size)
    run = kind(rng, group, implementation, **given)
    for _ in range(2):
        run.check(rng)
    group.check()


@pytest.mark.parametrize("kind", [RoundTrip, Gradients])
@pytest.mark.parametrize("shape", NOTHING)
@pytest.mark.usefixtures("native")
def test_nothing_on_one_gpu(shape: Any, kind: type[Program], monkeypatch: pytest.MonkeyPatch, rng: Rng) -> None:
    """What a group of one GPU does, on the CPU: nothing is exchanged."""
    monkeypatch.setattr(settings, "is_alone_on_gpu", lambda group: True)
    with Group(helpers.mesh_of(ep=1), "ep") as group:
        kind(rng, group, "kernels", **program_of(kind, 1, shape, expand=False)[2]).check(rng)


@pytest.mark.parametrize(
    ("ids_dtype", "weights_dtype"), [(np.int8, ml_dtypes.bfloat16), (np.uint32, np.float16), (np.int64, np.float64)]
)
def test_ids_and_weights_are_cast(
    ids_dtype: Any, weights_dtype: Any, implementation: Implementation, group: Group, rng: Rng
) -> None:
    """The gradient comes in the dtype of the weights; an id beyond int32 is invalid, and not wrapped around."""
    case = helpers.draw_case(rng, SIZE, 6, 3, EXPERTS, 16)
    ids, beyond = case.ids.astype(ids_dtype), np.iinfo(ids_dtype).max > 2**31
    if beyond:
        ids[0, 0, 0] = 2**32 - 1  # -1 in 32 bits

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        def routed(weights: jax.Array) -> Any:
            out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, implementation=implementation)
            sums = combine(out.rows, out.routing, group=group, implementation=implementation)
            return sums.sum(), out.routing.invalid

        return jax.grad(routed, has_aux=True)(weights)

    with jax.enable_x64(True):
        gradient, invalid = helpers.run(group, body, case.tokens, ids, case.weights.astype(weights_dtype))
    assert gradient.dtype == weights_dtype
    assert invalid.sum() == beyond
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


@pytest.mark.parametrize("wire", [None, "float8", "float8_rows"])
@pytest.mark.parametrize(("options", "slots"), [({}, True), ({"capacity": 40, "on_overflow": "drop"}, False)], ids=str)
def test_a_slot_for_each_token(options: dict[str, Any], slots: bool, wire: Any, group: Group, rng: Rng) -> None:
    """Unless there are more slots than rows: then rows are expanded, and each is itself."""

    def body(*operands: jax.Array) -> Any:
        out = dispatch(*operands, group=group, num_experts=EXPERTS, expand=False, wire=wire, **options)
        assert isinstance(out, Unexpanded)
        assert all(jax.typeof(x).manual_axis_type.varying == {"ep"} for x in jax.tree.leaves(out))
        return out

    out = helpers.run(group, body, *helpers.draw_case(rng, SIZE, 16, 4, EXPERTS, 128))
    assert all(x.shape[1] == (SIZE * 16 if slots else 40) for x in jax.tree.leaves(out.rows))
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
        assert np.isnan(helpers.run(group, body, tokens, np.zeros_like(ids), weights)).all()
