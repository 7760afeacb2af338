"""What crosses nodes in dispatch and combine, and where their time goes: `python -m jax_ep bench nodes`.

The devices of one process are split into `--nodes`. In several processes (`python -m jax_ep.launch`, or however
jax.distributed starts) a node has those of neighbours.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_ep
from jax_ep._kit.checks import Implementation
from jax_ep.ops.moe import gradients, xla
from jax_ep.ops.moe.types import NodeRouting
from jax_ep.runtime.topology import sum_over_nodes

from .collective_bytes import to_other_nodes
from .in_jit_loop import Loop, compile_loops, draw, on_ranks, take_turns
from .layer import MODELS
from .moe_cases import SEED, Case, Model, Shape, capacity, load, make_operands
from .node_model import Exchange, planned, table as model_table
from .provenance import command_line, header, heading, row

AXES = ("node", "ep")
V3 = MODELS[0]
SMALL = Model("small", Shape(512, 2048, 8, 64, "bfloat16"), 512)
TINY = Model("tiny", Shape(64, 256, 2, 16, "float32"), 32)  # XLA on a CPU sends 16-bit values as float32
GPUS_OF_A_HOST = 8

BYTES = (
    "experts of | way | B | dispatch, B | least, B | ratio | combine, B | least, B | ratio | step, B | formulas say, B"
)
PHASES = ("rows to nodes", "rows inside", "dispatch", "sums inside", "sums from nodes", "combine", "layer", "step")


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
        """The layer and all gradients; its result serves as cotangent, too."""
        out, backward = jax.vjp(partial(self.layer, ids), *others)
        return out, backward(out)

    # The parts: the collective alone, the rows packed before, and the kernel alone, along a routing that is known.

    def to_nodes(self, rows: jax.Array) -> jax.Array:
        """[T, W], or [N B, W] of what each node is sent."""
        if self.exchange.dense:
            return jax.lax.all_gather(rows, self.group.node_axes, tiled=True)
        parts = rows.reshape(self.exchange.nodes, -1, rows.shape[1])
        return jax.lax.all_to_all(parts, self.group.node_axes, 0, 0).reshape(rows.shape)

    def inside(self, routing: NodeRouting, arrived: jax.Array) -> jax.Array:
        assert self.group.intranode is not None
        if self.implementation == "xla":
            return xla.scatter(arrived, routing.local, axis_name=self.group.intranode.axis_name)
        return gradients.scatter(self.group.intranode, arrived, routing.local)

    def sums_inside(self, routing: NodeRouting, rows: jax.Array) -> jax.Array:
        assert self.group.intranode is not None
        if self.implementation == "xla":
            return xla.combine(rows, routing.local, axis_name=self.group.intranode.axis_name)
        return gradients.combine(self.group.intranode, rows, routing.weights, routing.local)

    def from_nodes(self, sums: jax.Array) -> jax.Array:
        return sum_over_nodes(sums.reshape(self.exchange.nodes, -1, sums.shape[1]), self.group.node_axes)


class Setup(NamedTuple):
    """What all measurements share."""

    group: jax_ep.Group
    model: Model
    implementation: Implementation
    phases: Sequence[str]
    calls: int  # in a loop
    repeats: int
    float8: bool  # too
    chunks: Sequence[int]

    @property
    def ranks(self) -> int:
        return self.group.size // self.group.nodes


def ways(setup: Setup, ids: np.ndarray, top_nodes: int | None) -> list[Way]:
    """Dense, and by the planned capacity, or what these ids need where that is more; each in float8 too."""
    group, shape = setup.group, setup.model.shape
    room = capacity(Case(shape), load(ids, shape.experts, group.size))
    dense = Exchange(group.nodes, setup.ranks, shape, top_nodes=top_nodes)
    most = int(tokens_for_nodes(ids, shape.experts, group.nodes, setup.ranks).max())
    exchanges = [dense]
    if most < shape.tokens:
        plan = planned(dense)
        exchanges.append(dataclasses.replace(dense, node_capacity=most if plan.dense else max(most, plan.room)))
    if setup.float8:
        exchanges += [dataclasses.replace(one, float8=True) for one in exchanges]
    return [Way(one, room, group, setup.implementation, chunks) for one in exchanges for chunks in setup.chunks]


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


def bytes_line(way: Way, counted: dict[str, int], rows: float, kind: str) -> str:
    """Per token; `rows` that a rank must send at least."""
    exchange = way.exchange
    tokens = exchange.shape.tokens

    def beside(name: str, least: float) -> list[str]:
        ratio = f"{counted[name] / least:.2f}" if least else "-"
        return [f"{counted[name] / tokens:,.0f}", f"{least / tokens:,.0f}", ratio]

    said = {name: getattr(exchange, name) for name in counted}
    return row(
        kind,
        way,
        exchange.room,
        *beside("dispatch", exchange.least(rows)),
        *beside("combine", rows * exchange.row),
        f"{counted['step'] / tokens:,.0f}",
        "the same" if said == counted else str({name: round(value / tokens) for name, value in said.items()}),
    )


def loops(way: Way, operands: Operands, state: jax_ep.Dispatched, calls: int) -> dict[str, Loop]:
    """By the names in PHASES."""
    mesh, exchange = way.group.mesh, way.exchange
    ids, weights, *matrices, tokens = operands
    size, hidden = way.group.size, exchange.shape.hidden
    routing = state.routing
    own = partial(draw, mesh, SEED + 5)
    width, dtype = (hidden // 4 + hidden // 128, jnp.float32) if exchange.float8 else (hidden, tokens.dtype)
    sent = exchange.shape.tokens if exchange.dense else exchange.nodes * exchange.room
    taken_in = size * exchange.nodes * exchange.room
    return {
        "rows to nodes": Loop(way.to_nodes, (), own(size * sent, width, dtype=dtype), calls),
        "rows inside": Loop(way.inside, (routing,), own(taken_in, width, dtype=dtype), calls),
        "dispatch": Loop(way.dispatch, (ids, weights), tokens, calls),
        "sums inside": Loop(way.sums_inside, (routing,), state.rows, calls),
        "sums from nodes": Loop(way.from_nodes, (), own(taken_in, hidden, dtype=tokens.dtype), calls),
        "combine": Loop(way.combine, (routing,), state.rows, calls),
        "layer": Loop(way.layer, (ids, weights, *matrices), tokens, calls),
        "step": Loop(way.step, (ids, weights, *matrices), tokens, calls),
    }


def measure(setup: Setup, top_nodes: int | None) -> Iterator[tuple[str, str]]:
    """For each way its line of bytes and its line of times."""
    group, shape = setup.group, setup.model.shape
    ids = draw_ids(shape, group.nodes, setup.ranks, top_nodes)
    operands = make_operands(setup.model, ids, group.mesh)
    rows = rows_for_others(tokens_for_nodes(ids, shape.experts, group.nodes, setup.ranks))
    kind = "any node" if top_nodes is None else f"{top_nodes} of {group.nodes} nodes"
    for way in ways(setup, ids, top_nodes):
        state = on_ranks(way.dispatch, group.mesh)(*operands[:2], operands[-1])
        counted = count_bytes(way, operands, state)
        made = loops(way, operands, state, setup.calls)
        times = take_turns(compile_loops({name: made[name] for name in setup.phases}, group.mesh), setup.repeats)
        group.check()
        in_digits = [f"{time:,.0f}" for time in times.values()]
        yield bytes_line(way, counted, rows, kind), row(kind, way, way.exchange.room, *in_digits)


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


def print_tables(setup: Setup, kinds: Sequence[int | None], arguments: Sequence[str]) -> None:
    """The first process prints; all measure."""
    show: Callable[..., None] = partial(print, flush=True) if jax.process_index() == 0 else lambda *_: None
    group, note = setup.group, repr(setup.implementation)
    show(header(list(group.mesh.devices.flat), note, ["nodes", *arguments]))
    show(f"- {setup.model}; {group.nodes} nodes x {setup.ranks} ranks; processes: {jax.process_count()}")
    show("- B: tokens of a rank that have room on the way to each node")
    show("- bytes: what a rank sends to other nodes, and takes from them, per token, in the compiled programs")
    show("- least: a row for each token and other node that needs it")
    show(f"- us per call in one jitted loop, median of {setup.repeats}; parts: the collective, or the kernel, alone\n")
    show(heading(BYTES))
    times: list[str] = []
    for top_nodes in kinds:
        for of_bytes, of_times in measure(setup, top_nodes):
            show(of_bytes)
            times.append(of_times)
    show("\n" + heading(f"experts of | way | B | {' | '.join(f'{name}, us' for name in setup.phases)}"))
    show("\n".join(times))


def main(arguments: list[str]) -> int:
    parser = command_line("nodes", __doc__)
    parser.add_argument("--nodes", type=int, help="default: the processes, or 2")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES, metavar="NAME", help="what is timed")
    parser.add_argument("--chunks", nargs="+", type=int, default=[1], metavar="N", help="into how many tokens are cut")
    parser.add_argument("--quick", action="store_true", help="no float8, experts of any node; GPU: a smaller model")
    parser.add_argument("--model", action="store_true", help="only print the formulas' tables, for 2 to 64 hosts")
    options = parser.parse_args(arguments)
    if options.model:
        print_model(V3.shape)
        return 0
    with jax_ep.Group(mesh_of_nodes(options.nodes), AXES, across_nodes=True) as group:
        on_cpu = group.platform == "cpu"
        setup = Setup(
            group,
            TINY if on_cpu else SMALL if options.quick else V3,
            group._resolve("bench", "auto", serves_nodes=True),
            options.phases,
            2 if on_cpu else 10,
            options.repeats,
            not options.quick,
            options.chunks,
        )
        kinds = [None] if options.quick or group.nodes < 2 else [None, math.ceil(group.nodes / 2)]
        print_tables(setup, kinds, arguments)
    return 0
