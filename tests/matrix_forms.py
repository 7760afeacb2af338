"""Forms of `moe_mlp` and of dispatch and combine, one for each value of every option, and what numbers they must give.

A form is what it changes: options of the op, and keys of its own:

    nodes: the `NodeOptions` of a group across nodes
    frozen: names of the matrices that are `Float8Weights`, which have no gradient
    matrices: "two" (no gate) or "one" (gate holds both)
    biased: which of gate, up and down have a bias
    unvarying: names of the operands that are the same on all ranks
    dtype: of tokens and matrices, if it is not `DTYPE`
    activation, shared, product, unweighted, sent_known, replicas
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import oracle
from nodes_cases import first_for_each_node

from jax_ep import ClampedSwiglu, Experts, Gated, Group, NodeOptions, combine, dispatch, moe_mlp, nn
from jax_ep.__main__ import load
from jax_ep.float8 import quantize_weights

example = load("examples", "expert_products")
EXPERTS, TOKENS, TOP_K, HIDDEN, WIDTH = 8, 6, 2, 128, 256
EVEN = TOKENS * TOP_K  # rows of a rank when all receive as many

# Grouped products on GPUs are kernels in 16 bits alone.
DTYPE = helpers.DTYPES[2 if jax.default_backend() == "cpu" else 0]

Form = dict[str, Any]
Function = Callable[..., jax.Array]  # of floats, in which it is differentiated, and of what else it knows


def squared(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0) ** 2


def bounded(gate: jax.Array, up: jax.Array) -> jax.Array:
    """That of GPT-OSS, but smooth: where a clip begins, one rounding decides over a whole gradient."""
    gate, up = 1.5 * jnp.tanh(gate / 1.5), 1.5 * jnp.tanh(up / 1.5)
    return gate / (1 + jnp.exp(-1.702 * gate)) * (up + 1)


def without_zero(x: jax.Array) -> jax.Array:
    """tanh(x). In float32 its value and gradient at 0 are NaN, which shows a row without an assignment. In 16 bits a
    token's value may be 0."""
    return jnp.tanh(x) + (0 * jnp.log(jnp.abs(x)) if x.dtype.itemsize > 2 else 0)


ACTIVATIONS: dict[Any, Function] = {
    "silu": lambda x: x / (1 + jnp.exp(-x)),
    "gelu": lambda x: x * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: jnp.maximum(x, 0),
}

SHARED: Form = {"shared_tokens": True, "unvarying": ("tokens", "ids", "weights")}
# For every option, its values beside the default by name, and what each changes.
ROUTED: dict[str, dict[str, Form]] = {
    "capacity": {
        "rows": {"capacity": 52},
        "times": {"capacity_factor": 3.9},
        "drop": {"capacity_factor": 0.5, "on_overflow": "drop"},
    },
    "weights": {"none": {"unweighted": True}},
    "wire": {"float8": {"wire": "float8"}},
    "dtype": {name: {"dtype": np.dtype(name)} for name in ("bfloat16", "float16")},
    "nodes": {
        "all": {"nodes": NodeOptions()},
        "chunks": {"nodes": NodeOptions(chunks=2)},
        "capacity": {"nodes": NodeOptions(4, 2), "on_overflow": "drop"},
    },
}
DISPATCH = ROUTED | {
    "alignment": {"4": {"alignment": 4}},
    "unvarying": {" ".join(names): {"unvarying": names} for names in (("tokens",), ("ids",), ("weights",))},
    "expand": {"no": {"expand": False}},
    "rows": {
        "float8": {"wire": "float8_rows", "sent_known": True},
        "float8, differentiated": {"wire": "float8_rows"},
        "float8, too few": {"wire": "float8_rows", "sent_known": True, "capacity": 2},
    },
    "several": {
        "float8 over nodes": {"wire": "float8", "nodes": NodeOptions(chunks=2)},
        "float8 rows over nodes": {"wire": "float8_rows", "sent_known": True, "nodes": NodeOptions()},
        "not expanded over nodes": {"expand": False, "nodes": NodeOptions()},
        "not expanded, float8": {"expand": False, "wire": "float8", "alignment": 4},
        "not expanded, drop": {"expand": False, "capacity_factor": 0.5, "on_overflow": "drop"},
        "drop, aligned": {"capacity_factor": 0.5, "on_overflow": "drop", "alignment": 4},
        "not expanded, by xla": {"expand": False, "implementation": "xla"},
    },
}
LAYER = ROUTED | {
    "precision": {
        "float8": {"precision": "float8"},
        "matrices": {"precision": "float8", "frozen": ("gate", "up", "down")},
        "one matrix": {"precision": "float8", "frozen": ("down",)},
    },
    "shared": {"yes": {"shared": True}, "gelu, biased, in one": {"shared": "gelu"}},
    "shared_tokens": {
        "yes": SHARED,
        "float8": SHARED | {"precision": "float8"},
        "weighed, gated": SHARED | {"weigh_inputs": True, "activation": Gated(bounded)},
        "over nodes": SHARED | {"nodes": NodeOptions(capacity=1, chunks=2)},  # they do not travel
        "too few rows": SHARED | {"capacity": 2},
    },
    "replicas": {"yes": {"replicas": True}},
    "weigh_inputs": {"yes": {"weigh_inputs": True}},
    "product": {"int8": {"product": "int8"}, "low rank": {"product": "low rank"}},
    "activation": {
        "gelu": {"activation": "gelu"},
        "relu": {"activation": "relu"},
        "function": {"activation": squared},
        "clamped": {"activation": ClampedSwiglu(limit=9.0)},  # beyond these values: a clip is no form for differences
        "gated": {"activation": Gated(bounded)},
        "closing over": {"activation": "slopes"},
    },
    "matrices": {"two": {"matrices": "two"}, "one": {"matrices": "one"}},
    "biases": {"all": {"biased": (0, 1, 2)}, "down": {"biased": (2,)}},
    "several": {
        "float8 over nodes": {"wire": "float8", "nodes": NodeOptions(chunks=2)},
        "float8, one matrix, biased": {"precision": "float8", "matrices": "one", "biased": (0, 1, 2)},
        "float8 products over nodes": {"precision": "float8", "matrices": "two", "nodes": NodeOptions()},
        "float8, gated": {"precision": "float8", "activation": Gated(bounded)},
        "shared, two matrices": {"shared": True, "matrices": "two", "activation": "relu"},
        "two matrices, biased": {"matrices": "two", "activation": squared, "biased": (1, 2)},
        "clamped, biased": {"activation": ClampedSwiglu(limit=9.0), "biased": (0, 1, 2)},
        "one matrix, biased, gated": {"matrices": "one", "biased": (0, 1, 2), "activation": Gated(bounded)},
        "weighed, one matrix, biased": {"weigh_inputs": True, "matrices": "one", "biased": (0, 1, 2)},
    },
}
BY_XLA: Form = {"implementation": "xla"}
ALSO_BY_XLA = (
    *("capacity drop", "wire float8", "nodes capacity", "rows float8", "rows float8, too few", "precision float8"),
    *("several one matrix, biased, gated", "several shared, two matrices", "shared_tokens yes"),
)
TOO_FEW_ROWS: Form = {"capacity": 2}
MIXED = "values that are drawn"  # of all options


def alone(options: dict[str, dict[str, Form]]) -> dict[str, Form]:
    """The forms with one value of one option each, by name; some of them "by xla" too."""
    found: dict[str, Form] = {"default": {}, "xla": BY_XLA, "too few rows": TOO_FEW_ROWS}
    found |= {f"{option} {name}": form for option, values in options.items() for name, form in values.items()}
    by_xla = [name for name in ("too few rows", *ALSO_BY_XLA) if name in found]
    return found | {f"{name} by xla": found[name] | BY_XLA for name in by_xla}


def names(options: dict[str, dict[str, Form]]) -> list[str]:
    return [*alone(options), *(f"{MIXED} {i}" for i in range(2))]


def chosen(options: dict[str, dict[str, Form]], name: str, rng: helpers.Rng) -> Form:
    """The form of this name; a mixed one has a value of every other option or so."""
    if not name.startswith(MIXED):
        return alone(options)[name]
    form: Form = {}
    for option, values in (options | {"implementation": {"xla": BY_XLA}}).items():
        if option not in ("shared_tokens", "unvarying", "replicas") and rng.random() < 0.5:
            form |= list(values.values())[rng.integers(len(values))]
    if "product" in form:  # its matrices are the user's own
        form.pop("frozen", None)
    if form.get("activation") == "relu" and ("wire" in form or "precision" in form or dtype_of(form).itemsize == 2):
        form["activation"] = squared  # where relu begins, one rounding decides over a whole gradient
    return form


def dtype_of(form: Form) -> np.dtype:
    return form.get("dtype", DTYPE)


def refused(form: Form) -> str | None:
    """What the error says, where options do not go together."""
    if {"capacity", "capacity_factor"} <= form.keys():
        return "^(dispatch|moe_mlp): capacity must be None where capacity_factor is given"
    if form.get("capacity", 0) % form.get("alignment", 1):
        return "^dispatch: capacity must be a multiple of alignment 4, got 2"
    if form.get("product") and "biased" in form:
        return "^moe_mlp: experts.biases must be None where product is given"
    if form.get("product") and "precision" in form:
        return "^moe_mlp: precision must be None where product is given"
    if form.get("matrices") == "two" and isinstance(form.get("activation"), Gated | ClampedSwiglu):
        return "^moe_mlp: experts.activation must be of one argument where experts.gate is None"
    if form.get("wire") == "float8_rows" and not form.get("sent_known"):
        return "^dispatch: wire='float8_rows' has no gradient; differentiate with wire='float8'"
    return None


def unit_of_error(form: Form, where: str) -> float:
    """What the array at this path may be off by, as a share of its length."""
    if "precision" in form:
        # Tokens or matrices that are not rounded to float8 make 0.029 or more; about 0.016 is seen. Derivatives by
        # weights, along tangents and beside quantized matrices are those of products that are not rounded.
        exact = where == "[0]" or ("frozen" not in form and re.search("tokens|gate|up|down|biases|matrices", where))
        if not exact or "shared_tokens" in form:
            return 0.08
        return 0.035 if dtype_of(form).itemsize == 2 else 0.025 if where == "[0]" else 0.015
    if dtype_of(form).itemsize == 2:
        # Three values carry a row through an adapter: `jax.lax` alone errs by up to 0.071 in a scan of two layers.
        return 0.04 if form.get("product") == "low rank" else 0.03
    return 5e-3 if "wire" in form else 2e-5  # 1e-3 where one of two values that are equally near was taken


class Operands(NamedTuple):
    """On all ranks; each a dict by name."""

    floats: Any  # what is differentiated
    known: Any
    exact: Any  # `known` as an oracle takes it: ids of what arrives alone, matrices that nobody quantized


def draw(form: Form, size: int, rng: helpers.Rng, *, layer: bool) -> Operands:
    """Some assignments are skipped, invalid, or name an expert twice."""
    case = helpers.draw_case(rng, size, TOKENS, TOP_K, EXPERTS, HIDDEN, DTYPE)
    case.ids[0, 0, 0], case.ids[0, 1, 1] = -1, EXPERTS + 3
    case.ids[-1, 2, 1] = case.ids[-1, 2, 0]
    arriving = case._replace(ids=arrives(form, case))
    floats: dict[str, Any] = {"tokens": case.tokens}
    known: dict[str, Any] = {"ids": case.ids}
    exact: dict[str, Any] = {"ids": arriving.ids}
    if not form.get("unweighted"):
        floats["weights"] = case.weights
    if layer:
        _draw_matrices(form, floats, case, rng)
    else:
        floats["scales"] = _normal(rng, size, EXPERTS // size, HIDDEN)
    weights = floats.pop("weights", None)
    floats = jax.tree.map(lambda x: x.astype(dtype_of(form)), floats)
    floats |= {} if weights is None else {"weights": weights}
    for name in ("gate", "up", "down") if form.get("product") else ():
        if (matrix := floats.pop(name, None)) is not None and form["product"] == "int8":
            known[name] = helpers.fetch(jax.vmap(example.quantized)(matrix))
            exact[name] = known[name].values * known[name].scales[:, :, None]
        elif matrix is not None:
            *experts, rows, columns = matrix.shape
            a, b = _normal(rng, *experts, rows, 3), _normal(rng, *experts, 3, columns)
            floats[name] = example.Lora(matrix, *(x.astype(matrix.dtype) for x in (a / rows**0.5, b)))
    for name in form.get("frozen", ()):
        if name in floats:
            exact[name] = floats.pop(name)
            known[name] = helpers.fetch(jax.vmap(quantize_weights)(exact[name]))
    if form.get("sent_known"):
        sent = {name: floats.pop(name) for name in ("tokens", "weights") if name in floats}
        known, exact = known | sent, exact | sent
    return Operands(floats, known, exact)


def _normal(rng: helpers.Rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(DTYPE)


def _draw_matrices(form: Form, floats: Any, case: helpers.Case, rng: helpers.Rng) -> None:
    size = len(case.tokens)
    *_, gate, up, down = moe_oracle.draw_layer(rng, case.tokens, case.weights, EXPERTS, WIDTH)
    matrices = {"gate": gate, "up": up, "down": down}
    if form.get("matrices") == "two":
        del matrices["gate"]
    if form.get("matrices") == "one":
        matrices = {"gate": np.concatenate([gate, matrices.pop("up")], axis=3), "down": down}
    floats |= matrices
    if "biased" in form:
        given = [i in form["biased"] and not (i == 0 and "gate" not in matrices) for i in range(3)]
        sizes = (WIDTH, WIDTH, HIDDEN)
        floats["biases"] = tuple(
            _normal(rng, size, EXPERTS // size, n) / 4 if has else None for has, n in zip(given, sizes, strict=True)
        )
    if form.get("activation") == "slopes":
        floats["slopes"] = rng.uniform(0.5, 1.5, (size, WIDTH)).astype(DTYPE)
    if form.get("shared"):
        shapes = ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
        shared = [(_normal(rng, *shape) / shape[0] ** 0.5).astype(DTYPE) for shape in shapes]
        alike = [np.repeat(x[None], size, axis=0) for x in shared]
        gated = "gate" in matrices
        floats["shared"] = (alike[0] if gated else None, *alike[1:])
        if form["shared"] == "gelu":
            biases = [_normal(rng, size, n) / 4 for n in (WIDTH, WIDTH, HIDDEN)]
            floats["shared_biases"] = (biases[0] if gated else None, *biases[1:])


def arrives(form: Form, case: helpers.Case) -> np.ndarray:
    """The ids of the assignments that find room; -1 for the others."""
    if form.get("on_overflow") != "drop":
        return case.ids
    ids, tight = case.ids, form.get("capacity_factor") == 0.5
    if "nodes" in form and form["nodes"].capacity is not None:
        ids, tight = np.where(first_for_each_node(ids, 2, form["nodes"].capacity, EXPERTS), ids, -1), True
    alignment = form.get("alignment", 1)
    rows = len(ids) * EVEN * alignment  # room for all
    if "capacity_factor" in form:
        rows = min(rows, -int(-form["capacity_factor"] * EVEN // alignment) * alignment)
    elif "capacity" in form:
        rows = form["capacity"]
    found = oracle.dispatch(case.tokens, ids, case.weights, num_experts=EXPERTS, capacity=rows, alignment=alignment)
    assert not tight or (found.targets < 0).sum() > (case.ids < 0).sum() + (case.ids >= EXPERTS).sum()
    return np.where(found.targets >= 0, ids, -1)


OF_OPS = (
    *("capacity", "capacity_factor", "on_overflow", "wire", "expand"),
    *("precision", "weigh_inputs", "alignment", "implementation", "shared_tokens"),
)
OF_ORACLES = ("wire", "precision", "weigh_inputs", "activation", "product", "matrices", "shared", "unvarying")
OF_ORACLES += ("op",)


def expert_of_rows(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    return jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=rows.shape[0])


def layer(form: Form, group: Group, *, stats: bool = False) -> Function:
    """The sums, or what the layer counts."""
    options = {name: form[name] for name in OF_OPS if name in form}
    if form.get("product"):
        options["product"] = {"int8": example.int8_dot, "low rank": example.lora_dot}[form["product"]]

    def sums(floats: Any, known: Any) -> Any:
        given = alike(form, group, floats | known)
        matrices = {name: given.get(name) for name in ("gate", "up", "down")}
        activation = form.get("activation", "silu")
        if activation == "slopes":  # what it closes over is differentiated, too
            activation = lambda x: without_zero(given["slopes"][None] * x)  # noqa: E731
        experts = Experts(**matrices, biases=given.get("biases"), activation=activation)
        shared = None
        if "shared" in given:
            (gate, up, down), own = given["shared"], activation
            if form["shared"] == "gelu":
                own = "gelu"
                gate, up = (gate, up) if gate is None else (jnp.concatenate([gate, up], axis=1), None)
            shared = Experts(gate=gate, up=up, down=down, biases=given.get("shared_biases"), activation=own)
        ids = given["ids"]
        if form.get("replicas"):
            slots = EXPERTS + 2 * group.size
            plan = nn.plan_replicas(np.arange(EXPERTS) + 1.0, num_ranks=group.size, num_slots=slots)
            experts = nn.replicate(experts, plan, group=group)
            ids = nn.physical_ids(ids, plan, offset=jax.lax.axis_index(group.axis_name))
        operands = given["tokens"], ids, given.get("weights"), experts
        out, counted = moe_mlp(*operands, group=group, shared_experts=shared, **options)
        if stats:
            return counted
        return out + 0 * (floats | known)["tokens"] if form.get("shared_tokens") else out  # it varies over ranks

    return sums


def there_and_back(form: Form, group: Group) -> Function:
    """Each row times a scale of its expert, by `without_zero`, and the sums of that."""
    options = {name: form[name] for name in OF_OPS if name in form}
    by = options.get("implementation", "auto")

    def sums(floats: Any, known: Any) -> jax.Array:
        given = alike(form, group, floats | known)
        rows, sizes, routing = helpers.expanded(
            dispatch(given["tokens"], given["ids"], given.get("weights"), group=group, num_experts=EXPERTS, **options)
        )
        if form.get("wire") == "float8_rows":
            rows = (rows.values.astype(jnp.float32) * jnp.repeat(rows.scales, 128, axis=1)).astype(dtype_of(form))
        scaled = rows * given["scales"][expert_of_rows(rows, sizes)]
        scaled = jnp.where(routing.row_mask()[:, None], scaled, jnp.ones((), scaled.dtype))
        return combine(without_zero(scaled), routing, group=group, implementation=by)

    return sums


def alike(form: Form, group: Group, given: Any) -> Any:
    """With sums over ranks of what is to be the same on all of them, as their types say, and the largest ids."""
    named = {name: given[name] for name in form.get("unvarying", ()) if name in given}
    ids = {name: jax.lax.pmax(named.pop(name), group.axis_name) for name in ("ids",) if name in named}
    return given | ids | jax.lax.psum(named, group.axis_name)


def exactly_alike(form: Form, given: Any) -> Any:
    named = {name: given[name] for name in form.get("unvarying", ()) if name in given}
    over_ranks = {name: x.max(axis=0) if name == "ids" else x.sum(axis=0) for name, x in named.items()}
    return given | {name: jnp.broadcast_to(x, given[name].shape) for name, x in over_ranks.items()}


def arrived_tokens(form: Form, given: Any) -> jax.Array:
    in_float8 = "wire" in form or "precision" in form
    return moe_oracle.through_float8(given["tokens"], 128) if in_float8 else given["tokens"]


def exact_layer(form: Form) -> Function:
    """On all ranks, in float64."""
    activation = form.get("activation", "silu")

    def sums(floats: Any, exact: Any) -> jax.Array:
        given = exactly_alike(form, floats | exact)

        def unit(*products: jax.Array, activation: Any = activation) -> jax.Array:
            if isinstance(activation, Gated):
                return activation.function(*products)
            if isinstance(activation, ClampedSwiglu):
                return (products[1] + 1) * products[0] / (1 + jnp.exp(-activation.slope * products[0]))
            if activation == "slopes":
                slopes = given["slopes"]  # of the rank that owns the expert
                experts = products[0].shape[-2]
                first = jnp.tanh(jnp.repeat(slopes, experts // len(slopes), axis=0) * products[0])
            else:
                first = (ACTIVATIONS.get(activation) or activation)(products[0])
            return first if len(products) == 1 else first * products[1]

        matrices = {name: given.get(name) for name in ("gate", "up", "down")}
        if form.get("product") == "low rank":
            loras = {name: lora for name, lora in matrices.items() if lora is not None}
            matrices |= {name: jax.lax.stop_gradient(lora.base) + lora.a @ lora.b for name, lora in loras.items()}
        if form.get("matrices") == "one":
            matrices["gate"], matrices["up"] = jnp.split(matrices["gate"], 2, axis=3)
        tokens, ids, arrived = given["tokens"], given["ids"], arrived_tokens(form, given)
        weights = given.get("weights", jnp.ones(ids.shape))
        biases = given.get("biases", (None,) * 3)
        how: dict[str, Any] = {"weigh_inputs": form.get("weigh_inputs", False), "float8": "precision" in form}
        out = moe_oracle.sums(moe_oracle.Layer(arrived, weights, **matrices), biases, ids, unit=unit, **how)
        if "shared" in given:  # an expert of each rank, which all of the rank's tokens choose
            own = partial(unit, activation="gelu") if form["shared"] == "gelu" else unit
            own_rank = jnp.broadcast_to(jnp.arange(len(tokens))[:, None, None], (*tokens.shape[:2], 1))
            three = given["shared"], given.get("shared_biases", (None,) * 3)
            of_one, biases = jax.tree.map(lambda x: x[:, None], three)
            out += moe_oracle.sums(
                moe_oracle.Layer(tokens, jnp.ones(own_rank.shape), *of_one), biases, own_rank, unit=own
            )
        return out

    return sums


def exact_there_and_back(form: Form) -> Function:
    def sums(floats: Any, exact: Any) -> jax.Array:
        given = exactly_alike(form, floats | exact)
        ids = given["ids"]
        shares = given.get("weights", jnp.ones(ids.shape)) * ((ids >= 0) & (ids < EXPERTS))
        scales = given["scales"].reshape(EXPERTS, -1)[ids % EXPERTS]
        return jnp.einsum("rtk,rtkh->rth", shares, jnp.tanh(arrived_tokens(form, given)[:, :, None] * scales))

    return sums
