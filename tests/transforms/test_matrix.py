"""Every option of `moe_mlp` and of `dispatch`, and the other ops, under every transformation of JAX, against
float64. Without --nightly a ninth of it runs, in test_numbers each form under two transformations or three."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import matmul_cases
import matrix_forms
import matrix_ops
import moe_oracle
import numpy as np
import pytest
from jax.sharding import Mesh
from matrix_forms import DISPATCH, LAYER, Form, Function, Operands
from matrix_ops import LOCAL, RAGGED

from jax_ep import CapacityError, Group
from jax_ep.ops.moe import settings

STEPS, BATCH = 2, 2
SPREAD = "spread vmap"
SHARE = 9  # of which one runs without --nightly

Exact = Callable[[Form], Function]
Result = tuple[Any, ...]  # the sums, and what became of a derivative


def gradient(f: Function, floats: Any, tangents: Any, cotangent: Any) -> Result:
    out, pull = jax.vjp(f, floats)
    return out, pull(cotangent)[0]


def moved(f: Function, floats: Any, tangents: Any, cotangent: Any) -> Result:
    return jax.jvp(f, (floats,), (tangents,))


def linearized(f: Function, floats: Any, tangents: Any, cotangent: Any) -> Result:
    out, linear = jax.linearize(f, floats)
    return out, linear(tangents)


def gradients(f: Function, floats: Any, tangents: Any, cotangent: Any) -> Result:
    """Of a batch of cotangents, as `jax.jacrev` takes them."""
    out, pull = jax.vjp(f, floats)
    return out, in_a_batch(lambda cotangent: pull(cotangent)[0], cotangent)


def tangents_of(f: Function, floats: Any, tangents: Any, cotangent: Any) -> Result:
    """Of a batch of tangents, as `jax.jacfwd` takes them."""
    return f(floats), in_a_batch(lambda d: jax.jvp(f, (floats,), (d,))[1], tangents)


def forward_over_reverse(f: Function, floats: Any, tangents: Any, cotangent: Any) -> Result:
    """The gradient, and how it moves."""
    return linearized(lambda floats: gradient(f, floats, tangents, cotangent)[1], floats, tangents, cotangent)


def wide_dot(x: jax.Array, y: jax.Array) -> jax.Array:
    wide = max(x.dtype, np.dtype(np.float32), key=lambda dtype: dtype.itemsize)
    return jnp.vdot(x.astype(wide), y.astype(wide))


def reverse_over_reverse(f: Function, floats: Any, tangents: Any, cotangent: Any) -> Result:
    """The same, as the gradient of a product of the gradient."""

    def along(floats: Any) -> tuple[Any, Any]:
        pulled = gradient(f, floats, tangents, cotangent)[1]
        return sum(map(wide_dot, *map(jax.tree.leaves, (pulled, tangents)))), pulled

    moved, pulled = jax.grad(along, has_aux=True)(floats)
    return pulled, moved


def derived(
    derive: Callable[..., Result], function: Function, floats: Any, known: Any, tangents: Any, cotangent: Any
) -> Result:
    return derive(lambda floats: function(floats, known), floats, tangents, cotangent)


def in_a_batch(derivative: Callable[..., Any], direction: Any) -> list[Any]:
    both = jax.tree.map(lambda x: jnp.stack([x, x[..., ::-1]]), direction)
    found = jax.vmap(derivative)(both)
    return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(2)]


def as_it_is(function: Function) -> Function:
    return function


def scanned(function: Function) -> Function:
    """A network of as many layers as steps."""

    def network(floats: Any, known: Any) -> jax.Array:
        def step(tokens: jax.Array, _: None) -> tuple[jax.Array, None]:
            return tokens + function(with_tokens(floats, tokens), known), None

        return jax.lax.scan(step, (floats | known)["tokens"], length=STEPS)[0]

    return network


def one_after_the_other(function: Function) -> Function:
    def network(floats: Any, known: Any) -> jax.Array:
        tokens = (floats | known)["tokens"]
        for _ in range(STEPS):
            tokens = tokens + function(with_tokens(floats, tokens), known)
        return tokens

    return network


def with_tokens(floats: Any, tokens: jax.Array) -> Any:
    """Where they are differentiated; else those that are known stay."""
    return floats | {"tokens": tokens} if "tokens" in floats else floats


def one_by_one(function: Function) -> Function:
    """On all ranks: the batch is the axis behind theirs."""

    def looped(floats: Any, known: Any) -> jax.Array:
        each = [function(*jax.tree.map(lambda x, i=i: x[:, i], (floats, known))) for i in range(BATCH)]
        return jnp.stack(each, axis=1)

    return looped


def two_of(name: str, in_a_batch: bool) -> Callable[[Function], Function]:
    """Of one operand as it is, and with its rows the other way round; one by one on all ranks, if not in a batch."""

    def wrap(function: Function) -> Function:
        def both(floats: Any, known: Any) -> jax.Array:
            def once(x: jax.Array) -> jax.Array:
                return function(*({**part, name: x} if name in part else part for part in (floats, known)))

            x = (floats | known)[name]
            one, other = jax.vmap(once)(jnp.stack([x, x[::-1]])) if in_a_batch else (once(x), once(x[:, ::-1]))
            return one + 2 * other

        return both

    return wrap


def under_cond(function: Function) -> Function:
    """The branch that runs and the one that does not, by a predicate that is the same on all ranks."""

    def both(floats: Any, known: Any) -> jax.Array:
        highest = known["ids"].max()
        on = jax.lax.pmax(highest, tuple(jax.typeof(highest).manual_axis_type.varying)) >= 0

        def nothing(floats: Any, known: Any) -> jax.Array:
            return 0 * (floats | known)["tokens"]

        one, other = (jax.lax.cond(p, function, nothing, floats, known) for p in (on, ~on))
        return one + other

    return both


def custom(function: Function) -> Function:
    """A user's own derivative, which keeps what JAX's keeps."""

    @jax.custom_vjp
    def own(floats: Any, known: Any) -> jax.Array:
        return function(floats, known)

    def forward(floats: Any, known: Any) -> Any:
        return jax.vjp(lambda floats: function(floats, known), floats)

    def backward(pull: Any, cotangent: jax.Array) -> Any:
        return pull(cotangent)[0], None

    own.defvjp(forward, backward)
    return own


def kept(policy: Any) -> Callable[[Function], Function]:
    return lambda function: jax.checkpoint(function, policy=policy)  # pyright: ignore[reportPrivateImportUsage]


class Transformation(NamedTuple):
    wrap: Callable[[Function], Function] = as_it_is
    derive: Callable[..., Result] = gradient
    plain: Callable[[Function], Function] = as_it_is  # what `wrap` stands for, of the oracle
    batch: bool = False
    donated: bool = False
    check_vma: bool = True
    outside: bool = False  # derived outside of jax.shard_map
    spread: bool = False  # the batch, over another axis of the mesh
    axes: tuple[str, ...] = ("ep",)  # of the group
    x64: bool = False


P = jax.checkpoint_policies
DISPATCHED, COMBINED, PRODUCTS = (f"jax_ep_{name}" for name in ("dispatch", "combine", "products"))
OFFLOADED = P.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[DISPATCHED, COMBINED, PRODUCTS],
    offload_src="device",
    offload_dst="pinned_host",
)
POLICIES: dict[str, Any] = {
    "everything": P.everything_saveable,
    "nothing": P.nothing_saveable,
    "dots": P.dots_saveable,
    "dispatch": P.save_only_these_names(DISPATCHED),
    "combine": P.save_only_these_names(COMBINED),
    "products": P.save_only_these_names(PRODUCTS),
    "offloaded": OFFLOADED,
}
TRANSFORMATIONS = {
    "grad": Transformation(),
    **{f"remat {name}": Transformation(kept(policy)) for name, policy in POLICIES.items()},
    "scan": Transformation(scanned, plain=one_after_the_other),
    "scan of remat": Transformation(lambda f: scanned(kept(POLICIES["dispatch"])(f)), plain=one_after_the_other),
    "scan without vma": Transformation(scanned, plain=one_after_the_other, check_vma=False),
    "grad outside": Transformation(outside=True),
    "grad outside without vma": Transformation(outside=True, check_vma=False),
    "cond": Transformation(under_cond),
    "vmap": Transformation(jax.vmap, plain=one_by_one, batch=True),
    SPREAD: Transformation(plain=one_by_one, batch=True, spread=True),
    "64 bits": Transformation(x64=True),
    "two axes": Transformation(axes=("context", "expert")),
    "jvp": Transformation(derive=moved),
    "linearize": Transformation(derive=linearized),
    "vmap of vjp": Transformation(derive=gradients),
    "vmap of jvp": Transformation(derive=tangents_of),
    "custom_vjp": Transformation(custom),
    "donation": Transformation(donated=True),
}

ONE_BATCHED = {
    f"vmap of {name}": Transformation(two_of(name, True), plain=two_of(name, False))
    for name in ("tokens", "ids", "weights", "scales", "up")
}
SECOND_ORDER = {
    "forward over reverse": Transformation(derive=forward_over_reverse),
    "reverse over reverse": Transformation(derive=reverse_over_reverse),
}
ALWAYS = {
    *(("precision float8", "remat dispatch"), ("precision matrices", "remat everything")),  # gave NaN
    *(("xla", "reverse over reverse"), *(("default", each) for each in SECOND_ORDER)),
    # Sums that all ranks have: who adds up the cotangents of their copies?
    *(("sparse mean_by_count, drop", "grad outside without vma"), ("sparse sum", "scan without vma")),
    *(("shared_tokens yes", "grad outside"), ("shared_tokens yes", "grad outside without vma")),
    *(("sparse mean_by_count over nodes", "grad outside"), ("matmul_all_reduce", "grad outside without vma")),
    *((name, "two axes") for name in ("default", "sparse mean, sharded", RAGGED, "all_gather_matmul by xla")),
    *(
        (name, SPREAD)
        for name in ("default", "sparse mean, sharded", RAGGED, "matmul_reduce_scatter", f"{LOCAL}, gathered")
    ),
    *((LOCAL, each) for each in ("grad", "scan")),
    *((name, "64 bits") for name in ("default", "nodes all", "nodes capacity", "xla", RAGGED)),
    *((name, "grad outside") for name in ("unvarying tokens", "unvarying ids", "unvarying weights")),
}


class Op(NamedTuple):
    names: list[str]
    form: Callable[[str, helpers.Rng], Form]  # of a name
    draw: Callable[[Form, int, helpers.Rng], Operands]
    body: Callable[[Form, Group], Function]
    exact: Exact


def routed(options: dict[str, dict[str, Form]], body: Any, exact: Exact) -> Op:
    drawn = partial(matrix_forms.draw, layer=options is LAYER)
    return Op(matrix_forms.names(options), partial(matrix_forms.chosen, options), drawn, body, exact)


OPS = {
    "moe_mlp": routed(LAYER, matrix_forms.layer, matrix_forms.exact_layer),
    "dispatch": routed(DISPATCH, matrix_forms.there_and_back, matrix_forms.exact_there_and_back),
    "op": Op(
        [*matrix_ops.FORMS], lambda name, _: matrix_ops.FORMS[name], matrix_ops.draw, matrix_ops.body, matrix_ops.exact
    ),
}
FORMS = [(op, name) for op in OPS for name in OPS[op].names]
# `jax.lax.ragged_dot` has no second derivative.
BENT = [("moe_mlp", name) for name in ("default", "biases all", "activation gated", "shared yes", "matrices one")]
BENT += [("dispatch", name) for name in ("default", "xla", "expand no", "nodes all")]
BENT += [("op", name) for name in (*matmul_cases.OPS, "sparse sum")]
ONE_OF = {"moe_mlp": ("tokens", "ids", "weights", "up"), "dispatch": ("tokens", "ids", "weights", "scales")}
IN_PLACE = [form for form in FORMS if form[0] == "moe_mlp" and not form[1].startswith("nodes")]


def cases(forms: Sequence[tuple[str, str]], transformations: Iterable[str], share: int = SHARE) -> Iterator[Any]:
    """Every `share`th diagonal of the matrix, which JAX_EP_TEST_SEED chooses; the others are marked."""
    for (i, form), (j, transformation) in itertools.product(enumerate(forms), enumerate(transformations)):
        chosen = (i + j + helpers.SEED) % share == 0 or (form[1], transformation) in ALWAYS
        marks = [] if chosen else [pytest.mark.nightly]
        yield pytest.param(*form, transformation, marks=marks, id=" - ".join((*form, transformation)))


CASES = [*cases(FORMS, TRANSFORMATIONS), *cases(BENT, SECOND_ORDER)]
CASES += [
    case
    for op, batched in ONE_OF.items()
    for case in cases([(op, name) for name in ("default", "xla", "nodes all")], map("vmap of {}".format, batched), 2)
]


@pytest.mark.parametrize(("op", "name", "transformation"), CASES)
@pytest.mark.usefixtures("native")
def test_numbers(op: str, name: str, transformation: str, rng: helpers.Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the oracle, or the documented error. JAX refuses operands of different ranks or dtypes."""
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")  # rows that nobody uses hold anything
    under, form = (TRANSFORMATIONS | ONE_BATCHED | SECOND_ORDER)[transformation], OPS[op].form(name, rng)
    in_layers = under.plain is one_after_the_other
    if form.get("activation") == "relu" and matrix_forms.dtype_of(form).itemsize == 2 and in_layers:
        pytest.skip("the first layer's rounding moves the second one's inputs across the kink")
    print(form)
    with contextlib.ExitStack() as around:
        around.enter_context(jax.enable_x64(under.x64))
        around.enter_context(jax.numpy_rank_promotion("raise"))
        around.enter_context(jax.numpy_dtype_promotion("strict"))
        group = around.enter_context(opened(form, under))
        program, ranks, operands, tangents, cotangent = prepared(op, form, under, group, rng)
        given = helpers.on_mesh(ranks, (*operands[:2], tangents, cotangent))
        if refused := matrix_forms.refused(form):
            with pytest.raises((ValueError, TypeError), match=refused):
                jax.eval_shape(program, *given)
            return
        if form.get("capacity") == 2:
            by = "xla" if form.get("shared_tokens") and group.size > 1 else form.get("implementation", "kernels")
            with helpers.expect_failure(group, CapacityError, f"{op}: rank . needs .* rows but capacity is 2", by):
                out = helpers.fetch(program(*given))[0]
                assert not np.isfinite(out).all()
                # XLA's formulation gives zero for what found no row, to which a scan adds the tokens.
                assert in_layers or not np.isfinite(out[out != 0]).any()
            return
        if under.donated:
            given = jax.device_put(given, jax.NamedSharding(group.mesh, jax.P(*group.mesh.axis_names)))
            program = jax.jit(program, donate_argnums=0)
        actual = helpers.fetch(program(*given))
        group.check()
        if under.donated:
            assert all(x.is_deleted() for x in jax.tree.leaves(given[0]))
        actual = helpers.by_rank(ranks, actual)
    wanted = expected(under, OPS[op].exact, form, operands, tangents, cotangent)
    # A scan amplifies the rounding of its first layers: `jax.lax` alone errs by 0.038 in bfloat16.
    assert_near(actual, wanted, lambda where: (1 + in_layers) * matrix_forms.unit_of_error(form, where))


@pytest.mark.parametrize(
    ("op", "name", "transformation"), list(cases(IN_PLACE, ("grad", "remat dispatch", "scan", "vmap", "jvp")))
)
@pytest.mark.usefixtures("native")
def test_in_place(op: str, name: str, transformation: str, rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a group of one GPU, whose rows stay where they are, on the CPU."""
    monkeypatch.setattr(helpers, "largest_size", lambda: 1)
    monkeypatch.setattr(settings, "is_alone_on_gpu", lambda group: group.size == 1)
    test_numbers(op, name, transformation, rng, monkeypatch)


def opened(form: Form, under: Transformation) -> Group:
    size = min(2, helpers.largest_size())
    axes = {"node": 2, "ep": 2} if "nodes" in form else dict.fromkeys(under.axes, size)
    mesh = helpers.mesh_of(**({"dp": 2} if under.spread else {}), **axes)
    options: dict[str, Any] = {"across_nodes": True, "nodes": form["nodes"]} if "nodes" in form else {}
    return Group(mesh, tuple(axes) if len(axes) > 1 else "ep", timeout=30, **options)


def prepared(
    op: str, form: Form, under: Transformation, group: Group, rng: helpers.Rng
) -> tuple[Any, Mesh, Operands, Any, np.ndarray]:
    """(floats, known, tangents, cotangent) -> Result, of all ranks, which are the devices of the mesh; its operands."""
    each = [OPS[op].draw(form, group.size, rng) for _ in range(BATCH if under.batch else 1)]
    operands = jax.tree.map(lambda *x: np.stack(x, axis=1), *each) if under.batch else each[0]
    tangents = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), operands.floats)
    tokens = (operands.floats | operands.known)["tokens"]
    cotangent = rng.standard_normal(tokens.shape).astype(tokens.dtype)
    transformed, ranks = under.wrap(OPS[op].body(form, group)), group.mesh
    if under.spread:
        ranks = Mesh(ranks.devices[0], ranks.axis_names[1:])
    over_ranks = partial(helpers.per_rank, mesh=group.mesh, names=ranks.axis_names, check_vma=under.check_vma)
    if under.outside:
        program = jax.jit(partial(derived, under.derive, over_ranks(transformed)))
    else:
        program, batch = over_ranks(partial(derived, under.derive, transformed)), len(ranks.axis_names)
        program = jax.vmap(program, batch, batch, spmd_axis_name="dp") if under.spread else program
    return program, ranks, operands, tangents, cotangent


def expected(
    under: Transformation, exact: Exact, form: Form, operands: Operands, tangents: Any, cotangent: np.ndarray
) -> Result:
    derive = moved if under.derive is linearized else under.derive
    read = tuple((name, form[name]) for name in matrix_forms.OF_ORACLES if name in form)
    with moe_oracle.exactly():
        wide = jax.tree.map(
            lambda x: x if jnp.issubdtype(x.dtype, jnp.integer) else np.asarray(x, np.float64),
            (operands.floats, operands.exact, tangents, cotangent),
        )
        return helpers.fetch(oracle_of(derive, under.plain, exact, read)(*wide))


@functools.cache
def oracle_of(
    derive: Callable[..., Result],
    plain: Callable[[Function], Function],
    exact: Exact,
    read: tuple[tuple[str, Any], ...],
) -> Callable[..., Result]:
    """One program for all forms and transformations that it stands for."""
    return jax.jit(partial(derived, derive, plain(exact(dict(read)))))


def assert_near(actual: Result, wanted: Result, unit: Callable[[str], float]) -> None:
    """`unit` of its path is the share of its length that each array may be off by."""
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    for (at, found), right in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(wanted), strict=True):
        where = jax.tree_util.keystr(at)
        assert found.dtype.itemsize <= 4, where
        if where.endswith(".base"):  # of low-rank adapters: it does not train
            assert not found.any(), where
            continue
        assert np.linalg.norm(right) > 0, where
        assert helpers.relative(found, right) <= unit(where), where
