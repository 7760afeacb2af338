"""What crosses nodes in dispatch and combine, and where their time goes: `python -m jax_ep bench nodes`.

The devices of one process are split into `--nodes`. In several processes (`python -m jax_ep.launch`, or however
jax.distributed starts) a node has those of neighbours.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import jax_ep
from jax_ep._kit.checks import Implementation
from jax_ep.ops.moe.types import NodeRouting

from .collective_bytes import to_other_nodes
from .in_jit_loop import Loop, compile_loops, on_ranks, take_turns
from .layer import MODELS
from .moe_cases import SEED, Case, Model, Shape, capacity, load, make_operands
from .node_model import Exchange, planned, table as model_table
from .provenance import command_line, header, heading, row

AXES = ("node", "ep")
V3 = MODELS[0]
SMALL = Model("small", Shape(512, 2048, 8, 64, "bfloat16"), 512)
TINY = Model("tiny", Shape(64, 256, 2, 16, "float32"), 32)  # XLA on a CPU sends 16-bit values as float32
GPUS_OF_A_HOST = 8

COLUMNS = (
    "experts of | way | B | dispatch, B | least, B | ratio | combine, B | least, B | ratio | step, B | formulas say, B "
    "| dispatch, us | combine, us | layer, us | step, us"
)

Operands = tuple[jax.Array, ...]  # of all ranks: ids, weights, gate, up, down, tokens


def draw_ids(shape: Shape, nodes: int, ranks: int, top_nodes: int | None) -> np.ndarray:
    """[R T, K] different experts, drawn alike from those of `top_nodes` nodes of each token, drawn alike."""
    rng, tokens = np.random.default_rng(SEED), nodes * ranks * shape.tokens
    arrivals = rng.random((tokens, shape.experts))
    if top_nodes is not None:
        barred = np.argsort(rng.random((tokens, nodes)), axis=1) >= top_nodes
        arrivals += np.repeat(barred, shape.experts // nodes, axis=1)
    return np.argsort(arrivals, axis=1)[:, : shape.top_k].astype(np.int32)


def tokens_for_nodes(ids: np.ndarray, experts: int, nodes: int, ranks: int) -> np.ndarray:
    """[R, N]: the tokens of each rank that need each node."""
    needs = (ids[..., None] // (experts // nodes) == np.arange(nodes)).any(axis=1)
    return needs.reshape(nodes * ranks, -1, nodes).sum(axis=1)


def rows_for_others(wanted: np.ndarray) -> float:
    """What a rank must send at least, on average: a row for each token and other node."""
    nodes = wanted.shape[1]
    own = np.repeat(np.arange(nodes), len(wanted) // nodes)
    return float(np.mean(wanted.sum(axis=1) - wanted[np.arange(len(wanted)), own]))


class Way(NamedTuple):
    """A dispatch and its combine as they are measured."""

    exchange: Exchange
    capacity: int
    group: jax_ep.Group
    implementation: Implementation
    chunks: int

    def __str__(self) -> str:
        chunks = f", {self.chunks} chunks" if self.chunks > 1 else ""
        return (
            ("dense" if self.exchange.dense else "by capacity") + (", float8" if self.exchange.float8 else "") + chunks
        )

    @property
    def options(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "capacity": self.capacity,
            "nodes": jax_ep.NodeOptions(self.exchange.node_capacity, self.chunks),
            "wire": "float8" if self.exchange.float8 else None,
            "implementation": self.implementation,
        }

    def dispatch(self, ids: jax.Array, weights: jax.Array, tokens: jax.Array) -> jax_ep.Dispatched:
        return jax_ep.dispatch(tokens, ids, weights, num_experts=self.exchange.shape.experts, **self.options)

    def combine(self, routing: NodeRouting, rows: jax.Array) -> jax.Array:
        return jax_ep.combine(rows, routing, group=self.group, implementation=self.implementation)

    def layer(self, ids: jax.Array, weights: jax.Array, *others: jax.Array) -> jax.Array:
        gate, up, down, tokens = others
        return jax_ep.moe_mlp(tokens, ids, weights, jax_ep.Experts(gate, up, down), **self.options)[0]

    def step(self, ids: jax.Array, *others: jax.Array) -> Any:
        """The layer and all gradients. Its result serves as cotangent: XLA would send the tokens only once."""
        out, backward = jax.vjp(partial(self.layer, ids), *others)
        return out, backward(out)


def ways(dense: Exchange, ids: np.ndarray, group: jax_ep.Group, float8: bool) -> list[Way]:
    """Dense, and by the planned capacity, or what these ids need where that is more; with `float8` each in it too."""
    shape = dense.shape
    room = capacity(Case(shape), load(ids, shape.experts, group.size))
    most = int(tokens_for_nodes(ids, shape.experts, dense.nodes, dense.ranks).max())
    exchanges = [dense]
    if most < shape.tokens:
        plan = planned(dense)
        exchanges.append(dataclasses.replace(dense, node_capacity=most if plan.dense else max(most, plan.room)))
    if float8:
        exchanges += [dataclasses.replace(one, float8=True) for one in exchanges]
    implementation = group._resolve("bench", "auto", serves_nodes=True)
    return [Way(one, room, group, implementation, 1) for one in exchanges]


def count_bytes(way: Way, operands: Operands, state: jax_ep.Dispatched) -> dict[str, int]:
    """What a rank sends to other nodes in a dispatch, a combine and a step of the layer, by the compiled programs."""
    mesh, ranks = way.group.mesh, way.exchange.ranks
    nodes = [device // ranks for device in range(way.group.size)]
    ids, weights, *_, tokens = operands

    def counted(function: Callable[..., Any], *arguments: Any) -> int:
        return to_other_nodes(on_ranks(function, mesh).lower(*arguments).compile().as_text(), nodes)

    return {
        "dispatch": counted(way.dispatch, ids, weights, tokens),
        "combine": counted(way.combine, state.routing, state.rows),
        "step": counted(way.step, *operands),
    }


def in_bytes(exchange: Exchange, counted: dict[str, int], rows: float) -> list[str]:
    """Per token, beside the least and the formulas; `rows` that a rank must send at least."""
    tokens = exchange.shape.tokens

    def beside(name: str, least: float) -> list[str]:
        ratio = f"{counted[name] / least:.2f}" if least else "-"
        return [f"{counted[name] / tokens:,.0f}", f"{least / tokens:,.0f}", ratio]

    said = {name: getattr(exchange, name) for name in counted}
    return [
        *beside("dispatch", exchange.least(rows)),
        *beside("combine", rows * exchange.row),
        f"{counted['step'] / tokens:,.0f}",
        "the same" if said == counted else str({name: round(value / tokens) for name, value in said.items()}),
    ]


def measure(model: Model, group: jax_ep.Group, top_nodes: int | None, repeats: int, float8: bool) -> Iterator[str]:
    """The row of each way."""
    shape, mesh, calls = model.shape, group.mesh, 2 if group.platform == "cpu" else 10
    dense = Exchange(group.nodes, group.size // group.nodes, shape, top_nodes=top_nodes)
    drawn = draw_ids(shape, dense.nodes, dense.ranks, top_nodes)
    ids, weights, *matrices, tokens = operands = make_operands(model, drawn, mesh)
    rows = rows_for_others(tokens_for_nodes(drawn, shape.experts, dense.nodes, dense.ranks))
    kind = "any node" if top_nodes is None else f"{top_nodes} of {dense.nodes} nodes"
    for way in ways(dense, drawn, group, float8):
        state = on_ranks(way.dispatch, mesh)(ids, weights, tokens)
        counted = count_bytes(way, operands, state)
        loops = {
            "dispatch": Loop(way.dispatch, (ids, weights), tokens, calls),
            "combine": Loop(way.combine, (state.routing,), state.rows, calls),
            "layer": Loop(way.layer, (ids, weights, *matrices), tokens, calls),
            "step": Loop(way.step, (ids, weights, *matrices), tokens, calls),
        }
        times = take_turns(compile_loops(loops, mesh), repeats)
        group.check()
        cells = [*in_bytes(way.exchange, counted, rows), *(f"{time:,.0f}" for time in times.values())]
        yield row(kind, way, way.exchange.room, *cells)


def mesh_of_nodes(nodes: int | None) -> Mesh:
    """The devices in the order of their processes, `nodes` along the first axis."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    nodes = nodes or max(2, jax.process_count())
    if len(devices) % nodes:
        raise SystemExit(f"--nodes must divide the {len(devices)} devices, got {nodes}")
    return Mesh(np.array(devices).reshape(nodes, -1), AXES)


def print_model(shape: Shape) -> None:
    for top_nodes in (None, 4):
        for float8 in (False, True):
            limit = "any host" if top_nodes is None else f"at most {top_nodes} hosts"
            wire = "in float8" if float8 else f"in {shape.dtype}"
            print(f"\n**A token's experts on {limit}, dispatched {wire}** ({shape}; {GPUS_OF_A_HOST} GPUs a host)\n")
            print(model_table(shape, GPUS_OF_A_HOST, float8=float8, top_nodes=top_nodes))


def main(arguments: list[str]) -> int:
    """Every process measures; the first prints."""
    parser = command_line("nodes", __doc__)
    parser.add_argument("--nodes", type=int, help="default: the processes, or 2")
    parser.add_argument("--quick", action="store_true", help="no float8, experts of any node; GPU: a smaller model")
    parser.add_argument("--model", action="store_true", help="only print the formulas' tables, for 2 to 64 hosts")
    options = parser.parse_args(arguments)
    if options.model:
        print_model(V3.shape)
        return 0
    show: Callable[..., None] = partial(print, flush=True) if jax.process_index() == 0 else lambda *_: None
    with jax_ep.Group(mesh_of_nodes(options.nodes), AXES, across_nodes=True) as group:
        model = TINY if group.platform == "cpu" else SMALL if options.quick else V3
        note = repr(group._resolve("bench", "auto", serves_nodes=True))
        show(header(list(group.mesh.devices.flat), note, ["nodes", *arguments]))
        show(f"- {model}; {group.nodes} nodes of {group.size // group.nodes} ranks; processes: {jax.process_count()}")
        show("- B: tokens of a rank that have room on the way to each node")
        show("- bytes: what a rank sends to other nodes, and takes from them, per token, in the compiled programs")
        show("- least: a row for each token and other node that needs it")
        show(f"- us per call in one jitted loop, median of {options.repeats}\n")
        show(heading(COLUMNS))
        for top_nodes in [None] if options.quick or group.nodes < 2 else [None, math.ceil(group.nodes / 2)]:
            for line in measure(model, group, top_nodes, options.repeats, not options.quick):
                show(line)
    return 0
