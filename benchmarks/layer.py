"""moe_mlp beside its products alone, and beside XLA's all_to_all: `python -m jax_ep bench layer`."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_ep
from jax_ep.float8 import quantize_weights
from jax_ep.lax import ragged_dot

from . import moe
from .formulations import Formulation, jax_ep_ops, result_and_gradients
from .in_jit_loop import AXIS, CarryingLoop, Loop, Program, check_alike, compile_all, compile_loops, draw, on_ranks
from .moe_cases import MODELS, SEED, Case, Matrices, Model, Shape, capacity, load, make_ids, make_inputs, make_operands
from .runner import Bench, Row, Run

OURS, PADDED, PRODUCTS = "jax_ep", "padded all_to_all", "products"
ROUNDED = "jax_ep, tokens rounded"  # to full tiles of 128 rows, on a CPU of 8, in the call
CANDIDATES = 2  # more of a token, for 256 rows an expert of top-8
FLOAT8, BIASES = "jax_ep, float8", "jax_ep, biases"
GPT_OSS = "jax_ep, biases and the unit of GPT-OSS"
LOOP_SECONDS = 0.02  # an execution
FLOPS_PER_SECOND, BYTES_PER_SECOND = 6e14, 4e12  # roughly what an H200 does: it only chooses how many calls a loop has

# With --biases.
HALVES = [dataclasses.replace(MODELS[name].halved, name=f"{name} half") for name in ("Qwen3-30B", "GPT-OSS")]
CPU_MODELS = [Model("wide", Shape(32, 128, 2, 8), 128), Model("narrow", Shape(32, 128, 4, 16), 32)]
ROUTINGS = ("uniform", "Zipf")

Layer = Callable[..., jax.Array]  # (ids, weights, gate, up, down, and biases, tokens) of one rank -> [T, H]
Pass = tuple[str, bool]  # which of them, and whether its gradients belong to it
FORWARD, STEP = False, True


@dataclasses.dataclass(frozen=True)
class LayerCase:
    model: Model
    routing: str

    def __str__(self) -> str:
        return f"{self.model}, {self.routing}"

    @property
    def quick(self) -> bool:
        return self.routing == "uniform"


class Way(NamedTuple):
    """A layer as it is measured."""

    layer: Layer
    operands: tuple[Any, ...]  # all but the tokens
    of_forward: tuple[Any, ...] = ()  # of a forward pass alone, if it has others
    share: float = 1.0  # of the products of OURS


def ours(group: jax_ep.Group, room: int, precision: Any = None, activation: Any = "silu") -> Layer:
    def layer(ids: jax.Array, weights: jax.Array, gate: Any, up: Any, down: Any, *others: jax.Array) -> jax.Array:
        biases: Any = others[:-1] or None
        experts = jax_ep.Experts(gate=gate, up=up, down=down, biases=biases, activation=activation)
        return jax_ep.moe_mlp(others[-1], ids, weights, experts, group=group, capacity=room, precision=precision)[0]

    return layer


def rounding(shape: Shape, ids: jax.Array, weights: jax.Array) -> jax_ep.nn.Routed:
    how: dict[str, Any] = {"multiple": 8 if jax.default_backend() == "cpu" else 128, "axis_name": AXIS}
    return jax_ep.nn.round_tokens(jax_ep.nn.Routed(ids, weights), shape.top_k, shape.experts, **how)


def by_exchange(exchange: Formulation) -> Layer:
    """An exchange around the products that ours has: XLA's own products take many times as long."""

    def layer(ids: jax.Array, weights: jax.Array, *others: jax.Array) -> jax.Array:
        (gate, up, down, *biases), tokens = others[:-1], others[-1]
        state = exchange.dispatch(tokens, ids, weights)
        sizes = state.group_sizes

        def multiplied(rows: jax.Array, matrices: jax.Array, *bias: jax.Array) -> jax.Array:
            rows = ragged_dot(rows, matrices, sizes)
            if not bias:
                return rows
            of_row = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(rows)), side="right")
            return rows + jnp.take(bias[0], of_row, axis=0, mode="clip")

        of_gate, of_up, of_down = zip(biases) if biases else ((), (), ())
        inner = jax.nn.silu(multiplied(state.rows, gate, *of_gate)) * multiplied(state.rows, up, *of_up)
        return exchange.combine(state._replace(rows=multiplied(inner, down, *of_down)), weights)

    return layer


def step(layer: Layer, cotangent: jax.Array, ids: jax.Array, *others: jax.Array) -> Any:
    """What `layer` returns, and the gradients in all that it takes but ids."""
    return result_and_gradients(partial(layer, ids), cotangent, *others)


def training_step(layer: Layer) -> Callable[..., Any]:
    """Of what `layer` takes; the tokens serve as cotangent, too."""
    return lambda ids, *others: step(layer, others[-1], ids, *others)


def draw_biases(model: Model, mesh: Mesh) -> tuple[jax.Array, ...]:
    """Of gate, up and down."""
    sides, dtype = (model.width, model.width, model.shape.hidden), jnp.dtype(model.shape.dtype)
    return tuple(draw(mesh, SEED + 3 + i, model.shape.experts, side, dtype=dtype) for i, side in enumerate(sides))


def check_layers(ways: dict[str, Way], padded: Layer, tokens: jax.Array, mesh: Mesh, dtype: str) -> None:
    """Raises unless each differs by rounding from `padded` of the same operands, and float8 by some percent."""
    asked: dict[Any, tuple[Layer, tuple[Any, ...]]] = {name: (way.layer, way.operands) for name, way in ways.items()}
    asked |= {len(way.operands): (padded, way.operands) for way in ways.values()}  # with biases, and without
    programs = compile_all([on_ranks(layer, mesh).lower(*operands, tokens) for layer, operands in asked.values()])
    found = {}
    for (key, (_, operands)), program in zip(asked.items(), programs, strict=True):
        found[key] = jax.block_until_ready(program(*operands, tokens))  # one waits for no other
    for name, way in ways.items():
        most = 0.1 if name == FLOAT8 else 16 * float(jnp.finfo(dtype).eps)
        check_alike(name, found[name], found[len(way.operands)], most)


def calls(model: Model, rows: int, ranks: int, passes: int) -> int:
    """In a loop, of a pass that multiplies `passes` times as much as a forward pass."""
    matrices = model.shape.experts // ranks * model.flops_per_row  # bytes: 6 H F an expert, in numbers flops_per_row
    seconds = passes * max(rows * model.flops_per_row / FLOPS_PER_SECOND, matrices / BYTES_PER_SECOND)
    return max(2, min(50, round(LOOP_SECONDS / seconds)))


def loops_of(ways: dict[str, Way], tokens: jax.Array, calls: tuple[int, int], quick: bool) -> dict[Pass, Loop]:
    """`calls`: of the forward pass, and of a training step. PADDED comes first: it heats a GPU for the others."""
    loops: dict[Pass, Loop] = {}
    for name, way in sorted(ways.items(), key=lambda each: each[0] != PADDED):
        kind = CarryingLoop if name == PADDED else Loop
        loops[name, FORWARD] = kind(way.layer, way.of_forward or way.operands, tokens, calls[FORWARD])
    for name, way in sorted(ways.items(), key=lambda each: each[0] == PADDED):
        if name != PADDED or not quick:  # its gradients are too large for CarryingLoop
            loops[name, STEP] = Loop(training_step(way.layer), way.operands, tokens, calls[STEP])
    return loops


def loop_of_products(model: Model, room: int, group: jax_ep.Group, operands: tuple[jax.Array, ...], calls: int) -> Loop:
    """The three of the forward pass, on the rows that a dispatch delivers."""
    ids, weights, gate, up, down, tokens = operands
    dispatch = jax_ep_ops(group, model.shape.experts, room).dispatch
    rows, sizes, _ = on_ranks(dispatch, group.mesh)(tokens, ids, weights)

    def two(sizes: jax.Array, gate: jax.Array, up: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ragged_dot(rows, gate, sizes), ragged_dot(rows, up, sizes)

    def products(sizes: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, inner: jax.Array, rows: Any) -> Any:
        return *two(sizes, gate, up, rows), ragged_dot(inner, down, sizes)

    def gated(*operands: jax.Array) -> jax.Array:
        gate, up = two(*operands)
        return jax.nn.silu(gate) * up

    inner = on_ranks(gated, group.mesh)(sizes, gate, up, rows)
    return Loop(products, (sizes, gate, up, down, inner), rows, calls)


def rows(case: LayerCase, run: Run) -> Iterator[Row]:
    """Checks the layers against each other, then times all in turns."""
    model, group, mesh, options = case.model, run.group, run.mesh, run.options
    shape, of_ids = model.shape, Case(model.shape, case.routing)
    drawn = make_ids(of_ids, group.size)
    needed = load(drawn, shape.experts, group.size)
    room = capacity(of_ids, needed)
    *first, tokens = operands = make_operands(model, drawn, mesh)
    matrices = first[2], first[3], first[4]

    padded = by_exchange(moe.padded_for(of_ids, needed, group))
    ways = {OURS: Way(ours(group, room), tuple(first))}
    if options.float8:  # a step quantizes the matrices itself
        quantized = on_ranks(lambda *each: tuple(map(quantize_weights, each)), mesh)(*matrices)
        ways[FLOAT8] = Way(ours(group, room, "float8"), tuple(first), (*first[:2], *quantized))
    if options.biases:
        ways[BIASES] = Way(ours(group, room), (*first, *draw_biases(model, mesh)))
    check_layers(ways, padded, tokens, mesh, shape.dtype)
    if options.biases:
        ways[GPT_OSS] = Way(ours(group, room, activation="clamped_swiglu"), ways[BIASES].operands)
    if options.round_tokens:
        ways[ROUNDED] = way_of_rounded(of_ids, needed.rows, room, group, matrices)
    ways[PADDED] = Way(padded, tuple(first))

    of_pass = tuple(2 if run.on_cpu else calls(model, needed.rows, group.size, passes) for passes in (1, 3))
    loops = loops_of(ways, tokens, (of_pass[0], of_pass[1]), options.quick)
    loops[PRODUCTS, FORWARD] = loop_of_products(model, room, group, operands, of_pass[0])
    programs = compile_loops(loops, mesh)
    times = run.turns(programs, hot=True)
    alone = times[PRODUCTS, FORWARD]
    for name in (PRODUCTS, *ways):
        share = ways[name].share if name in ways else 1.0
        passes = times.get((name, FORWARD)), times.get((name, STEP), 3 * alone if name == PRODUCTS else None)
        yield {
            "layer": case,
            "of it": name,
            **half("forward", "of products", passes[FORWARD], alone * share),
            **half("step", "of 3 x products", passes[STEP], 3 * alone * share),
            "step, MiB": held(programs.get((name, STEP))),
        }


def way_of_rounded(case: Case, rows: int, room: int, group: jax_ep.Group, matrices: Matrices) -> Way:
    """`rows`: those of a rank without rounding."""
    shape, mesh = case.shape, group.mesh
    more = dataclasses.replace(shape, top_k=shape.top_k + CANDIDATES)
    _, *routed = make_inputs(more, make_ids(Case(more, case.routing), group.size), mesh)
    left = load(np.asarray(on_ranks(partial(rounding, shape), mesh)(*routed).expert_ids), shape.experts, group.size)
    layer = ours(group, max(room, -(-left.rows // 128) * 128))

    def rounded(ids: jax.Array, weights: jax.Array, *others: jax.Array) -> jax.Array:
        return layer(*rounding(shape, ids, weights), *others)

    return Way(rounded, (*routed, *matrices), share=left.rows / rows)


def half(of: str, over: str, time: float | None, products: float) -> Row:
    """The columns of one pass; a step has the products of the forward pass, and twice as many backward."""
    known = ["-"] * 3 if time is None else [f"{time:,.1f}", f"{time - products:,.1f}", f"{time / products:.3f}"]
    return dict(zip((f"{of}, us", f"exposed of {of}, us", over), known, strict=True))


def held(program: Program | None) -> str:
    """MiB at the peak beside the arguments; "-" where XLA does not say."""
    memory = None if program is None else program.compiled.memory_analysis()
    return "-" if memory is None else f"{memory.temp_size_in_bytes / 2**20:,.1f}"


def cases(run: Run) -> Iterator[LayerCase]:
    options = run.options
    for model in CPU_MODELS if run.on_cpu else HALVES if options.biases else MODELS.values():
        shape = model.shape
        sides = {"tokens": options.tokens or shape.tokens, "experts": options.experts or shape.experts}
        for routing in ROUTINGS:
            yield LayerCase(dataclasses.replace(model, shape=dataclasses.replace(shape, **sides)), routing)


def notes(run: Run) -> Iterator[str]:
    yield f"bfloat16; {PRODUCTS}: the three of the forward pass on the very rows; step: the result and all gradients"
    yield f"exposed: what a pass takes longer than its {PRODUCTS}; {PADDED}: XLA's exchange around the same {PRODUCTS}"
    yield "MiB: what a step of a rank holds at its peak beside its operands, results included"
    if run.options.round_tokens:
        yield f"{ROUNDED}: of top-k plus {CANDIDATES}, over all ranks; the rounding is timed, too"
    if run.options.float8:
        yield f"{FLOAT8}: matrices are quantized before a forward pass, and in a step; {PRODUCTS} are bfloat16's"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, help="of each rank, in place of the shapes' own")
    parser.add_argument("--experts", type=int, help="of all ranks, in place of the shapes' own")
    parser.add_argument("--round-tokens", action="store_true", help="also with tokens rounded to full tiles")
    parser.add_argument("--float8", action="store_true", help="also in float8; widths must be multiples of 128")
    parser.add_argument(
        "--biases",
        action="store_true",
        help="also with biases, and with the unit of GPT-OSS; halves of Qwen3-30B and GPT-OSS",
    )


BENCH = Bench(__doc__, cases, rows, notes, arguments, quick=f"uniform routing only, no training step of {PADDED}")
