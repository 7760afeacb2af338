"""The forms that experts have in models: one matrix for gate and up, biases, other units, weighed inputs."""

from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup
from jax.sharding import PartitionSpec as P

from jax_ep import Group, Implementation, combine, dispatch, moe_mlp
from jax_ep.ops.moe.arguments import balanced_capacity

SIZE, EXPERTS, TOKENS, TOP_K, HIDDEN, WIDTH = 4, 8, 6, 3, 16, 24


def clipped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """That of GPT-OSS."""
    gate, up = jnp.minimum(gate, 1.5), jnp.clip(up, -1.5, 1.5)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def draw(rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
    """What is differentiated, of all ranks, and the ids."""
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    case.ids[0, 0] = -1
    case.ids[2, :, 0] = 7
    tokens, ids, weights = (x.reshape(-1, x.shape[-1]) for x in case)
    shapes = {
        "gate": (HIDDEN, WIDTH),
        "up": (HIDDEN, WIDTH),
        "down": (WIDTH, HIDDEN),
        "bias_gate": (WIDTH,),
        "bias_up": (WIDTH,),
        "bias_down": (HIDDEN,),
    }
    drawn = {name: (rng.standard_normal((EXPERTS, *shape)) / 4).astype(np.float32) for name, shape in shapes.items()}
    return {"tokens": tokens, "weights": weights} | drawn, ids


def dense(model: dict[str, Any], ids: Any, *, gated: Any, biased: tuple[str, ...], weigh_inputs: bool) -> Any:
    """Every expert answers every assignment; a one-hot mask picks."""
    picked, weights = jax.nn.one_hot(ids, EXPERTS), model["weights"][:, :, None]
    rows = jnp.broadcast_to(model["tokens"][:, None], (*ids.shape, HIDDEN)) * (weights if weigh_inputs else 1)

    def multiply(rows: Any, name: str) -> Any:  # [T, K, ...] to [E, T, K, N]
        out = jnp.einsum("tkh,ehf->etkf" if rows.ndim == 3 else "etkh,ehf->etkf", rows, model[name])
        return out + model[f"bias_{name}"][:, None, None] if name in biased else out

    answers = multiply(gated(multiply(rows, "gate"), multiply(rows, "up")), "down")
    return jnp.einsum("tke,etkh->th", picked * (1 if weigh_inputs else weights), answers)


def sharded(group: Group, implementation: Implementation, **form: Any) -> Any:
    biased, one_matrix = form.pop("biased"), form.pop("one_matrix")

    def layer(model: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
        gate, up = model["gate"], model["up"]
        if one_matrix:
            gate, up = jnp.concatenate([gate, up], axis=2), None
        biases: Any = tuple(model[f"bias_{name}"] if name in biased else None for name in ("gate", "up", "down"))
        options: dict[str, Any] = {"biases": biases if biased else None, "implementation": implementation} | form
        return moe_mlp(model["tokens"], ids, model["weights"], gate, up, model["down"], group=group, **options)

    return jax.shard_map(layer, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"))


FORMS = [
    {"one_matrix": True},
    {"one_matrix": True, "biased": ("gate", "up", "down"), "gated": clipped},
    {"gated": clipped},
    {"biased": ("down",)},
    {"biased": ("up",)},
    {"weigh_inputs": True},
    {"weigh_inputs": True, "one_matrix": True, "biased": ("gate", "up", "down"), "gated": clipped},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(form))
def test_forms(
    form: dict[str, Any], implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    """Values and all gradients, by the fused ops where there is something to fuse, and by "xla" without them."""
    model, ids = draw(rng)
    form = {"one_matrix": False, "biased": (), "gated": None, "weigh_inputs": False} | form
    layer = sharded(open_group(SIZE), implementation, **form)
    plain = {name: form[name] for name in ("biased", "weigh_inputs")}
    whole = partial(dense, gated=form["gated"] or (lambda gate, up: jax.nn.silu(gate) * up), **plain)
    target = rng.standard_normal(model["tokens"].shape).astype(np.float32)

    def loss(function: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda m: jnp.sum(function(m, ids) * target)))

    actual, wanted = helpers.fetch(loss(layer)(model)), loss(whole)(model)
    np.testing.assert_allclose(actual[0], wanted[0], rtol=1e-4, atol=1e-4)
    for name, a in actual[1].items():
        w = wanted[1][name]
        np.testing.assert_allclose(a, w, rtol=0, atol=2e-5 * max(float(np.abs(w).max()), 1e-3), err_msg=name)


@pytest.mark.parametrize(
    ("ids_dtype", "weights_dtype"), [(np.int8, jnp.bfloat16), (np.uint32, np.float16), (np.int64, np.float64)]
)
def test_ids_and_weights_are_cast(
    ids_dtype: Any, weights_dtype: Any, implementation: Implementation, open_group: OpenGroup, rng: np.random.Generator
) -> None:
    """The gradient comes in the dtype of the weights; an id beyond int32 is invalid, and not wrapped around."""
    group = open_group(SIZE)
    case = helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    ids = case.ids.astype(ids_dtype)
    if np.iinfo(ids_dtype).max > 2**31:
        ids[0, 0, 0] = 2**32 - 1  # -1 in 32 bits
    wide = case.weights.astype(weights_dtype)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        def routed(weights: jax.Array) -> Any:
            out = dispatch(tokens, ids, weights, group=group, num_experts=EXPERTS, implementation=implementation)
            return combine(
                out.tokens, out.routing, group=group, implementation=implementation
            ).sum(), out.routing.invalid

        return *jax.grad(routed, has_aux=True)(weights), weights

    with jax.enable_x64(True):
        gradient, invalid, weights = helpers.fetch(helpers.per_rank(body, group.mesh)(case.tokens, ids, wide))
    assert gradient.dtype == weights.dtype == weights_dtype
    assert invalid.sum() == (np.iinfo(ids_dtype).max > 2**31)
    wanted = np.broadcast_to(case.tokens.sum(axis=2, keepdims=True), gradient.shape) * (ids < EXPERTS)
    np.testing.assert_allclose(helpers.wide(gradient), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("factor", "alignment", "wanted"),
    [(1, 1, 18), (1.25, 1, 23), (1.25, 8, 24), (0.01, 4, 4), (1e6, 1, 72), pytest.param(10**400, 1, 72, id="huge")],
)
def test_capacity_factor(
    factor: float,
    alignment: int,
    wanted: int,
    implementation: Implementation,
    open_group: OpenGroup,
    rng: np.random.Generator,
) -> None:
    """18 assignments of each rank; 72 of all, which find room whatever the factor."""
    group, case = open_group(SIZE), helpers.draw_case(rng, SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN)
    options: dict[str, Any] = {"capacity_factor": factor, "alignment": alignment, "on_overflow": "drop"}
    program = helpers.dispatch_combine(group, num_experts=2 * EXPERTS, implementation=implementation, **options)
    actual = helpers.fetch(program(*case))
    assert actual[0].tokens.shape[1] == wanted
    helpers.assert_round_trip(actual, case, num_experts=2 * EXPERTS, alignment=alignment)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), True, "2"])
def test_wrong_factors(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^dispatch: capacity_factor must be"):
        balanced_capacity("dispatch", wrong, 18, 1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capacity": 8, "capacity_factor": 1.0}, "capacity_factor must be None where capacity is given, got 1.0"),
        ({"gated": 3}, "gated must be None or a function of two arrays, got 3"),
        ({"gated": clipped, "activation": "gelu"}, "activation must be left out where gated is given, got 'gelu'"),
        ({"biases": 3}, r"biases must be None or those of \(gate, up, down\), got int"),
        (
            {"biases": (None, np.zeros((1, 3), np.float32), None)},
            r"biases\[1\] must have shape \[E / R, F\] = \(2, 24\)",
        ),
        ({"biases": (None, None, np.zeros((2, HIDDEN)))}, r"biases\[2\] must be of dtype float32, got float64"),
        ({"gated": lambda x, y: None}, r"gated must return an array of the shape \(48, 24\) that .*, got NoneType"),
        (
            {"activation": lambda x: x[:1]},
            r"activation must return an array of the shape \(48, 24\) .*, got float32\[1,24\]",
        ),
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
        ({"chunks": 1.5}, "chunks must be a Python int, .* got float"),
        ({"node_capacity": "all"}, "node_capacity must be an int, 'auto' or None, got 'all'"),
        ({"on_overflow": None}, "on_overflow must be one of 'raise', 'drop'; got None"),
        ({"wire_dtype": "foo"}, "wire_dtype must be a dtype or None, got 'foo'"),
        ({"implementation": "nccl"}, "implementation must be one of 'auto', 'ffi', 'xla'; got 'nccl'"),
        ({"fused": np.array(["auto"] * 2)}, "fused must be True, False or 'auto', got array"),
        ({"precision": np.array(["float8"] * 2)}, "precision must be 'float8' or None, got array"),
        ({"weigh_inputs": 1}, "weigh_inputs must be True or False, got 1"),
        ({"group": "ep"}, r"group must be an open jax_ep\.Group\(mesh, axis_name\), got str"),
    ],
)
def test_wrong_options(options: dict[str, Any], match: str, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group, (model, ids) = open_group(SIZE), draw(rng)

    def layer(model: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
        matrices = (model["gate"], model["up"], model["down"])
        given: dict[str, Any] = {"group": group, "implementation": "xla"} | options
        return moe_mlp(model["tokens"], ids, None, *matrices, **given)

    with pytest.raises((ValueError, TypeError), match=f"^moe_mlp: {match}"):
        jax.eval_shape(jax.shard_map(layer, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep")), model, ids)


def test_experts_that_are_not_sharded_are_refused(open_group: OpenGroup, rng: np.random.Generator) -> None:
    """They would be taken for R times as many experts, of which the first ranks own all that tokens name."""
    group, (model, ids) = open_group(SIZE), draw(rng)
    names = ("gate", "up", "down")

    def layer(tokens: jax.Array, ids: jax.Array, *matrices: jax.Array) -> jax.Array:
        gate, up, down = matrices
        return moe_mlp(tokens, ids, None, gate, up, down, group=group, implementation="xla")

    for i, name in enumerate(names):
        specs = (P("ep"), P("ep"), *(P() if i == j else P("ep") for j in range(3)))
        given = [model["tokens"], ids, *(model[each][:2] if i == j else model[each] for j, each in enumerate(names))]
        mapped = jax.shard_map(layer, mesh=group.mesh, in_specs=specs, out_specs=P("ep"))
        with pytest.raises(
            ValueError, match=rf"^moe_mlp: {name} must be of the experts that each rank owns, .*P\('ep'\)"
        ):
            jax.eval_shape(mapped, *given)
