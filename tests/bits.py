"""Whether two versions compute the same bits: `python -m tests.bits FILE`, then `python -m tests.bits --compare A B`.

A spread of dispatch, combine and moe_mlp, forward and backward, on CPU devices. All cases are written for the arguments
of `Api`; a version with other names is run by its own `Api`, as `save(path, api)`.
"""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import jax_ep

RANKS, EXPERTS, TOKENS, TOP_K, HIDDEN, WIDTH = 4, 8, 24, 3, 128, 256
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


class Api:
    """The ops as this version has them."""

    def dispatch(self, *operands: Any, nodes: dict[str, Any] | None = None, **options: Any) -> Any:
        """Rows, group sizes and the routing."""
        return jax_ep.dispatch(*operands, nodes=jax_ep.NodeOptions(**nodes or {}), **options)

    def row_of(self, routing: Any) -> jax.Array:
        return routing.row_of

    def moe_mlp(
        self, tokens: Any, ids: Any, weights: Any, experts: dict[str, Any], nodes: Any = None, **options: Any
    ) -> Any:
        """The sums and what was counted. `experts` are the arguments of `Experts`; a function of two is "gated"."""
        given: dict[str, Any] = dict(experts)
        if "gated" in given:
            given["activation"] = jax_ep.Gated(given.pop("gated"))
        if "shared" in options:
            options["shared"] = jax_ep.Experts(*options["shared"])
        nodes = jax_ep.NodeOptions(**nodes or {})
        return jax_ep.moe_mlp(tokens, ids, weights, jax_ep.Experts(**given), nodes=nodes, **options)


def clipped(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, 1.5), jnp.clip(up, -1.5, 1.5)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def bent(x: jax.Array) -> jax.Array:
    return jnp.tanh(x) * 2


def drawn(dtype: Any) -> dict[str, Any]:
    """Operands of all ranks."""
    rng = np.random.default_rng(7)
    ids = np.argsort(rng.random((RANKS * TOKENS, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    ids[0], ids[5, 1], ids[7, 2] = -1, EXPERTS + 3, ids[7, 1]
    shapes = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    shapes |= {"bias_gate": (WIDTH,), "bias_up": (WIDTH,), "bias_down": (HIDDEN,)}
    model: dict[str, Any] = {
        name: jnp.asarray(rng.standard_normal((EXPERTS, *shape)) / np.sqrt(HIDDEN), dtype)
        for name, shape in shapes.items()
    }
    model["tokens"] = jnp.asarray(rng.standard_normal((RANKS * TOKENS, HIDDEN)), dtype)
    model["weights"] = jnp.asarray(rng.uniform(0.1, 1, (RANKS * TOKENS, TOP_K)), jnp.float32)
    model["target"] = jnp.asarray(rng.standard_normal((RANKS * TOKENS, HIDDEN)), dtype)
    return model | {"ids": ids}


def experts_of(model: dict[str, Any], form: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Experts` that `form` asks for: "both", "two", "biases" (a tuple of names) and an activation."""
    gate, up, down = model["gate"], model["up"], model["down"]
    if form.get("both"):
        gate, up = jnp.concatenate([gate, up], axis=2), None
    if form.get("two"):
        gate = None
    experts: dict[str, Any] = {"gate": gate, "up": up, "down": down}
    if form.get("biases"):
        names = ("gate", "up", "down")
        experts["biases"] = tuple(model[f"bias_{name}"] if name in form["biases"] else None for name in names)
    return experts | {name: form[name] for name in ("activation", "gated") if name in form}


ALL = ("gate", "up", "down")
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of experts, and options of the layer
    "silu": ({}, {}),
    "gelu in one": ({"both": True, "activation": "gelu"}, {}),
    "a function": ({"activation": bent}, {}),
    "gated": ({"gated": clipped}, {}),
    "gated and biased in one": ({"both": True, "gated": clipped, "biases": ALL}, {}),
    "bias of down": ({"biases": ("down",)}, {}),
    "bias of up": ({"biases": ("up",)}, {}),
    "two matrices": ({"two": True, "activation": jax.nn.gelu}, {}),
    "weighed inputs": ({}, {"weigh_inputs": True}),
    "weighed inputs, biased": ({"biases": ALL, "gated": clipped}, {"weigh_inputs": True}),
    "drops": ({}, {"capacity": 40, "on_overflow": "drop"}),
    "wire": ({}, {"wire": "float8"}),
    "float8": ({}, {"precision": "float8"}),
    "float8, biased": ({"biases": ALL}, {"precision": "float8"}),
    "float8, a function": ({"both": True, "activation": bent}, {"precision": "float8"}),
    "shared": ({}, {"shared": True}),
}
DISPATCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "aligned": {"alignment": 8},
    "drops": {"capacity": 1.0, "on_overflow": "drop"},
    "wire": {"wire": "float8"},
    "rows in float8": {"wire": "float8_rows"},
}
SOME = ("drops", "wire", "rows in float8", "gated and biased in one", "two matrices", "float8", "weighed inputs")


def of_dispatch(api: Api, group: Any, implementation: str, options: dict[str, Any]) -> Callable[..., Any]:
    def body(model: dict[str, Any]) -> Any:
        def routed(tokens: Any, weights: Any) -> Any:
            where: dict[str, Any] = {"group": group, "implementation": implementation}
            rows, sizes, routing = api.dispatch(tokens, model["ids"], weights, num_experts=EXPERTS, **options, **where)
            leaves = (rows, sizes, routing.targets, api.row_of(routing), routing.weights, routing.counts)
            if not isinstance(rows, jax.Array):
                return (), leaves
            return jax_ep.combine(jnp.tanh(rows), routing, **where), leaves

        operands = model["tokens"], model["weights"]
        if options.get("wire") == "float8_rows":
            return routed(*operands)[1]
        out, pull, leaves = jax.vjp(routed, *operands, has_aux=True)
        return out, pull(model["target"]), leaves

    return body


def of_layer(api: Api, group: Any, implementation: str, form: dict[str, Any], options: dict[str, Any]) -> Any:
    options = dict(options)
    shared = options.pop("shared", False)

    def body(model: dict[str, Any]) -> Any:
        given = dict(options)
        if shared:
            given["shared"] = (model["gate"][0], model["up"][0], model["down"][0])

        def layer(model: dict[str, Any]) -> Any:
            experts = experts_of(model, form)
            where: dict[str, Any] = {"group": group, "implementation": implementation}
            return api.moe_mlp(model["tokens"], model["ids"], model["weights"], experts, **given, **where)

        floats = {name: x for name, x in model.items() if name not in ("ids", "target")}
        out, pull, stats = jax.vjp(lambda m: layer(m | {"ids": model["ids"]}), floats, has_aux=True)
        return out, pull(model["target"])[0], stats

    return body


def programs(api: Api, group: Any) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Name, the program of a rank, and its operands: all by kernels inside a node, and some in plain jax.lax and over
    nodes."""
    by_nodes = group.nodes > 1
    for implementation, dtype_name in (("ffi", "bfloat16"), ("ffi", "float32"), ("xla", "float32")):
        model, some = drawn(DTYPES[dtype_name]), by_nodes or implementation == "xla"
        if by_nodes and (implementation, dtype_name) == ("ffi", "float32"):
            continue
        more = {"nodes": {"capacity": 20, "chunks": 2}, "on_overflow": "drop"} if by_nodes else {}
        for name, options in DISPATCHES.items():
            if not some or name in SOME:
                program = of_dispatch(api, group, implementation, options | more)
                yield f"dispatch {name}, {dtype_name}, {implementation}", program, model
        for name, (form, options) in FORMS.items():
            if not some or name in SOME:
                program = of_layer(api, group, implementation, form, options | more)
                yield f"layer {name}, {dtype_name}, {implementation}", program, model


def results(api: Api) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    devices = np.array(jax.devices()[:RANKS])
    of_nodes = Mesh(devices.reshape(2, 2), ("node", "ep"))
    for where, mesh, axis in (("one node", Mesh(devices, "ep"), "ep"), ("nodes", of_nodes, ("node", "ep"))):
        with jax_ep.Group(mesh, axis, across_nodes=where == "nodes") as group:
            for name, body, model in programs(api, group):
                mapped = jax.shard_map(body, mesh=mesh, in_specs=P(axis), out_specs=P(axis))
                for i, x in enumerate(jax.tree.leaves(jax.block_until_ready(jax.jit(mapped)(model)))):
                    array = np.asarray(x)
                    bits = array if array.dtype.kind in "iuf" else array.view(f"u{array.dtype.itemsize}")
                    found[f"{where}, {name}: {i}"] = bits
                print(f"{where}, {name}", flush=True)
    return found


def save(path: str, api: Api) -> None:
    np.savez_compressed(path, **results(api))  # pyright: ignore[reportArgumentType]


def compare(first: str, second: str) -> bool:
    """Prints what differs, and whether in how many units of the largest value; True where nothing does."""
    with np.load(first) as a, np.load(second) as b:
        names = sorted(set(a.files) ^ set(b.files))
        for name in names:
            print("only in one:", name)
        differing = 0
        common = sorted(set(a.files) & set(b.files))
        for name in common:
            x, y = a[name], b[name]
            if x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes():
                continue
            differing += 1
            if x.shape != y.shape:
                print(f"{name}: shapes {x.shape} and {y.shape}")
                continue
            wide = [(v.astype(np.uint32) << 16).view(np.float32) if v.dtype == np.uint16 else v for v in (x, y)]
            off = np.abs(wide[0].astype(np.float64) - wide[1].astype(np.float64)).max()
            print(f"{name}: off by {off / max(np.abs(wide[0].astype(np.float64)).max(), 1e-30):.2e} of the largest")
        print(f"{len(common) - differing} of {len(common)} arrays have the same bits")
        return not differing and not names


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        raise SystemExit(0 if compare(*sys.argv[2:]) else 1)
    save(sys.argv[1], Api())
