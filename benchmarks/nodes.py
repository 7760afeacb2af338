"""What crosses nodes in dispatch and combine, and where their time goes: `python -m jax_ep bench nodes`.

The devices of one process are split into `--nodes`. In several processes (`python -m jax_ep.launch`, or however
jax.distributed starts) a node has those of neighbours.
"""

import argparse
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
from .in_jit_loop import Loop, on_ranks
from .moe_cases import MODELS, SEED, Case, Model, Shape, capacity, load, make_operands
from .node_model import Exchange, planned, rows as model_rows
from .runner import Bench, Row, Run

AXES = ("node", "ep")
V3 = MODELS["V3"]
SMALL = Model("small", Shape(512, 2048, 8, 64), 512)
TINY = Model("tiny", Shape(64, 256, 2, 16, "float32"), 32)  # XLA on a CPU sends 16-bit values as float32
GPUS_OF_A_HOST = 8

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

    exchange: Exchange  # its `node_capacity` is that of the group
    capacity: int
    group: jax_ep.Group
    implementation: Implementation

    def __str__(self) -> str:
        return ("dense" if self.exchange.dense else "by capacity") + (", float8" if self.exchange.float8 else "")

    @property
    def options(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "capacity": self.capacity,
            "wire": "float8" if self.exchange.float8 else None,
            "implementation": self.implementation,
        }

    def dispatch(self, ids: jax.Array, weights: jax.Array, tokens: jax.Array) -> jax_ep.Dispatched:
        return jax_ep.dispatch(tokens, ids, weights, num_experts=self.exchange.shape.experts, **self.options)

    def combine(self, routing: NodeRouting, rows: jax.Array) -> jax.Array:
        return jax_ep.combine(rows, routing, group=self.group, implementation=self.implementation)

    def layer(self, ids: jax.Array, weights: jax.Array, *others: jax.Array) -> jax.Array:
        gate, up, down, tokens = others
        return jax_ep.moe_mlp(tokens, ids, weights, jax_ep.Experts(gate=gate, up=up, down=down), **self.options)[0]

    def step(self, ids: jax.Array, *others: jax.Array) -> Any:
        """The layer and all gradients. Its result serves as cotangent: XLA would send the tokens only once."""
        out, backward = jax.vjp(partial(self.layer, ids), *others)
        return out, backward(out)


def exchanges_of(dense: Exchange, ids: np.ndarray, float8: bool) -> list[Exchange]:
    """Dense, and by the planned capacity, or what these ids need where that is more; with `float8` each in it too."""
    shape = dense.shape
    most = int(tokens_for_nodes(ids, shape.experts, dense.nodes, dense.ranks).max())
    exchanges = [dense]
    if most < shape.tokens:
        plan = planned(dense)
        exchanges.append(dataclasses.replace(dense, node_capacity=most if plan.dense else max(most, plan.room)))
    if float8:
        exchanges += [dataclasses.replace(one, float8=True) for one in exchanges]
    return exchanges


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


def in_bytes(exchange: Exchange, counted: dict[str, int], needed: float) -> Row:
    """Per token, beside the least and the formulas; `needed`: rows that a rank must send at least."""
    least = {"dispatch": exchange.least(needed), "combine": needed * exchange.row}
    cells: Row = {}
    for name, count in counted.items():
        cells[f"{name}, B"] = f"{count / exchange.shape.tokens:,.0f}"
        if name in least:
            cells[f"{name}, of the least"] = f"{count / least[name]:.2f}" if needed else "-"
    said = {name: getattr(exchange, name) for name in counted}
    by_tokens = {name: round(value / exchange.shape.tokens) for name, value in said.items()}
    return cells | {"formulas say, B": "the same" if said == counted else str(by_tokens)}


def rows(top_nodes: int | None, run: Run) -> Iterator[Row]:
    """A row for each exchange, with a group of its own."""
    model, nodes = model_of(run), run.group.nodes
    shape, dense = model.shape, Exchange(nodes, run.group.size // nodes, model.shape, top_nodes=top_nodes)
    drawn = draw_ids(shape, dense.nodes, dense.ranks, top_nodes)
    ids, weights, *matrices, tokens = operands = make_operands(model, drawn, run.mesh)
    needed = rows_for_others(tokens_for_nodes(drawn, shape.experts, dense.nodes, dense.ranks))
    kind = "any node" if top_nodes is None else f"{top_nodes} of {dense.nodes} nodes"
    rows_of_rank, calls = capacity(Case(shape), load(drawn, shape.experts, run.group.size)), 2 if run.on_cpu else 10
    implementation = run.group._resolve("bench", "auto", serves_nodes=True)
    for exchange in exchanges_of(dense, drawn, not run.options.quick):
        with open_group(run.mesh, jax_ep.NodeOptions(exchange.node_capacity)) as group:
            way = Way(exchange, rows_of_rank, group, implementation)
            state = on_ranks(way.dispatch, run.mesh)(ids, weights, tokens)
            counted = count_bytes(way, operands, state)
            loops = {
                "dispatch": Loop(way.dispatch, (ids, weights), tokens, calls),
                "combine": Loop(way.combine, (state.routing,), state.rows, calls),
                "layer": Loop(way.layer, (ids, weights, *matrices), tokens, calls),
                "step": Loop(way.step, (ids, weights, *matrices), tokens, calls),
            }
            times = {f"{name}, us": f"{time:,.0f}" for name, time in run.time(loops).items()}
            group.check()
        yield {"experts of": kind, "way": way, "B": way.exchange.room} | in_bytes(way.exchange, counted, needed) | times


def model_of(run: Run) -> Model:
    return TINY if run.on_cpu else SMALL if run.options.quick else V3


def open_group(mesh: Mesh, nodes: jax_ep.NodeOptions | None = None) -> jax_ep.Group:
    return jax_ep.Group(mesh, AXES, across_nodes=True, nodes=nodes)


def open_nodes(options: argparse.Namespace) -> jax_ep.Group | None:
    """Of the devices in the order of their processes, with --nodes along the first axis; none for --model."""
    if options.model:
        return None
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    nodes = options.nodes or max(2, jax.process_count())
    if len(devices) % nodes:
        raise SystemExit(f"--nodes must divide the {len(devices)} devices, got {nodes}")
    return open_group(Mesh(np.array(devices).reshape(nodes, -1), AXES))


def cases(run: Run) -> list[Any]:
    """How many nodes a token's experts are of; of the model also how the tokens travel."""
    if run.options.model:
        return [(top_nodes, float8) for top_nodes in (None, 4) for float8 in (False, True)]
    return [None] if run.options.quick or run.group.nodes < 2 else [None, math.ceil(run.group.nodes / 2)]


def rows_of_case(case: Any, run: Run) -> Iterator[Row]:
    if run.options.model:
        return model_rows(V3.shape, GPUS_OF_A_HOST, float8=case[1], top_nodes=case[0])
    return rows(case, run)


def notes(run: Run) -> Iterator[str]:
    if run.options.model:
        yield f"a model, not a measurement: {V3.shape}; {GPUS_OF_A_HOST} GPUs a host; KB: 1000 bytes per token, forward"
        return
    ranks = run.group.size // run.group.nodes
    yield f"{model_of(run)}; {run.group.nodes} nodes of {ranks} ranks; processes: {jax.process_count()}"
    yield "B: tokens of a rank that have room on the way to each node"
    yield "bytes: what a rank sends to other nodes, and takes from them, per token, in the compiled programs"
    yield "least: a row for each token and other node that needs it"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, help="default: the processes, or 2")
    parser.add_argument("--quick", action="store_true", help="no float8, experts of any node; GPU: a smaller model")
    parser.add_argument("--model", action="store_true", help="only print what the formulas say, for 2 to 64 hosts")


BENCH = Bench(__doc__, cases, rows_of_case, notes, arguments, open=open_nodes)
