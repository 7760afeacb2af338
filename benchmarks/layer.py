"""moe_mlp beside its products alone, and beside XLA's all_to_all: `python -m jax_ep bench layer`."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_ep
from jax_ep.float8 import quantize_weights
from jax_ep.lax import ragged_dot

from . import moe
from .formulations import Formulation, jax_ep_ops, result_and_gradients
from .in_jit_loop import (
    AXIS,
    CarryingLoop,
    Loop,
    Program,
    check_alike,
    compile_all,
    compile_loops,
    describe_pause,
    on_ranks,
    take_turns,
)
from .moe_cases import Case, Matrices, Model, Shape, capacity, load, make_ids, make_inputs, make_operands
from .provenance import command_line, heading, open_group, row

OURS, PADDED, PRODUCTS = "jax_ep", "padded all_to_all", "products"
ROUNDED = "jax_ep, tokens rounded"  # to full tiles of 128 rows, on a CPU of 8, in the call
CANDIDATES = 2  # more of a token, for 256 rows an expert of top-8
FLOAT8 = "jax_ep, float8"
LOOP_SECONDS = 0.02  # an execution
FLOPS_PER_SECOND, BYTES_PER_SECOND = 6e14, 4e12  # roughly what an H200 does: it only chooses how many calls a loop has

COLUMNS = "layer | of it | forward, us | of products | step, us | of 3 x products | step, MiB"

MODELS = [
    Model("V3", Shape(4096, 7168, 8, 256, "bfloat16"), 2048),
    Model("Qwen3-30B", Shape(8192, 2048, 8, 128, "bfloat16"), 768),
    Model("Mixtral", Shape(8192, 4096, 2, 8, "bfloat16"), 14336),
    Model("GPT-OSS", Shape(8192, 2880, 4, 128, "bfloat16"), 2880),
]
CPU_MODELS = [
    Model("wide", Shape(32, 128, 2, 8, "bfloat16"), 128),
    Model("narrow", Shape(32, 128, 4, 16, "bfloat16"), 32),
]
ROUTINGS = ("uniform", "Zipf")

Layer = Callable[..., jax.Array]  # (ids, weights, gate, up, down, tokens) of one rank -> [T, H]
Pass = tuple[str, bool]  # which of them, and whether its gradients belong to it
FORWARD, STEP = False, True


@dataclasses.dataclass(frozen=True)
class Result:
    """Microseconds per call; bytes that a step of a rank holds at its peak beside the operands, results included."""

    model: Model
    routing: str
    times: dict[Pass, float]
    held: dict[str, int | None]
    rounded: float = 1.0  # times as many operations where tokens are rounded

    def __str__(self) -> str:
        return f"{self.model}, {self.routing}"

    def products(self, training: bool) -> float:
        """What the products of a pass take alone: a step has those of the forward pass, and twice as many backward."""
        return self.times[PRODUCTS, FORWARD] * (3 if training else 1)


def ours(group: jax_ep.Group, room: int, precision: Any = None) -> Layer:
    def layer(ids: jax.Array, weights: jax.Array, gate: Any, up: Any, down: Any, tokens: jax.Array) -> jax.Array:
        experts = jax_ep.Experts(gate, up, down)
        return jax_ep.moe_mlp(tokens, ids, weights, experts, group=group, capacity=room, precision=precision)[0]

    return layer


def rounded(layer: Layer, shape: Shape) -> Layer:
    """`layer` with its rounding of tokens."""

    def one(ids: jax.Array, weights: jax.Array, *others: jax.Array) -> jax.Array:
        return layer(*rounding(shape, ids, weights), *others)

    return one


def rounding(shape: Shape, ids: jax.Array, weights: jax.Array) -> jax_ep.nn.Routed:
    how: dict[str, Any] = {"multiple": 8 if jax.default_backend() == "cpu" else 128, "axis_name": AXIS}
    return jax_ep.nn.round_tokens(jax_ep.nn.Routed(ids, weights), shape.top_k, shape.experts, **how)


def by_exchange(exchange: Formulation) -> Layer:
    """An exchange around the products that ours has: XLA's own products take many times as long."""

    def layer(
        ids: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, tokens: jax.Array
    ) -> jax.Array:
        state = exchange.dispatch(tokens, ids, weights)
        inner = gated(state.group_sizes, gate, up, state.rows)
        return exchange.combine(state._replace(rows=ragged_dot(inner, down, state.group_sizes)), weights)

    return layer


def gated(sizes: jax.Array, gate: jax.Array, up: jax.Array, rows: jax.Array) -> jax.Array:
    return jax.nn.silu(ragged_dot(rows, gate, sizes)) * ragged_dot(rows, up, sizes)


def products(
    sizes: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, inner: jax.Array, rows: jax.Array
) -> tuple[jax.Array, ...]:
    return ragged_dot(rows, gate, sizes), ragged_dot(rows, up, sizes), ragged_dot(inner, down, sizes)


def step(layer: Layer, cotangent: jax.Array, ids: jax.Array, *others: jax.Array) -> Any:
    """What `layer` returns, and the gradients in all that it takes but ids."""
    return result_and_gradients(partial(layer, ids), cotangent, *others)


def training_step(layer: Layer) -> Callable[..., Any]:
    """Of what `layer` takes; the tokens serve as cotangent, too."""
    return lambda ids, *others: step(layer, others[-1], ids, *others)


def quantized(matrices: Matrices, mesh: Mesh) -> tuple[Any, ...]:
    return on_ranks(lambda *each: tuple(map(quantize_weights, each)), mesh)(*matrices)


def check_layers(layers: dict[str, Layer], operands: tuple[jax.Array, ...], mesh: Mesh, dtype: str) -> None:
    """Raises unless PADDED differs from ours by rounding, and float8 by some percent."""
    programs = compile_all([on_ranks(layer, mesh).lower(*operands) for layer in layers.values()])
    results = [jax.block_until_ready(program(*operands)) for program in programs]  # one waits for no other
    allowed = {OURS: 0.0, PADDED: 16 * float(jnp.finfo(dtype).eps), FLOAT8: 0.1}
    for name, result in zip(layers, results, strict=True):
        check_alike(name, result, results[0], allowed[name])


def calls(model: Model, rows: int, ranks: int, passes: int) -> int:
    """In a loop, of a pass that multiplies `passes` times as much as a forward pass."""
    matrices = model.shape.experts // ranks * model.flops_per_row  # bytes: 6 H F an expert, in numbers flops_per_row
    seconds = passes * max(rows * model.flops_per_row / FLOPS_PER_SECOND, matrices / BYTES_PER_SECOND)
    return max(2, min(50, round(LOOP_SECONDS / seconds)))


def loops_of_layers(
    layers: dict[str, Layer], operands: tuple[Any, ...], narrow: tuple[Any, ...], calls: tuple[int, int], quick: bool
) -> dict[Pass, Loop]:
    """`calls`: of the forward pass, and of a training step. PADDED comes first: it heats a GPU for the others.

    `narrow`: the matrices in float8, of a forward pass in it. A step quantizes them itself.
    """
    ids, weights, *matrices, tokens = operands
    wide, own = (ids, weights, *matrices), [name for name in layers if name != PADDED]
    loops: dict[Pass, Loop] = {(PADDED, FORWARD): CarryingLoop(layers[PADDED], wide, tokens, calls[FORWARD])}
    for name in own:
        of_it = (ids, weights, *narrow) if name == FLOAT8 else wide
        loops[name, FORWARD] = Loop(layers[name], of_it, tokens, calls[FORWARD])
    for name in own if quick else [*own, PADDED]:  # PADDED's gradients are too large for CarryingLoop
        loops[name, STEP] = Loop(training_step(layers[name]), wide, tokens, calls[STEP])
    return loops


def loop_of_products(model: Model, room: int, group: jax_ep.Group, operands: tuple[jax.Array, ...], calls: int) -> Loop:
    """The three of the forward pass, on the rows that a dispatch delivers."""
    ids, weights, *matrices, tokens = operands
    dispatch = jax_ep_ops(group, model.shape.experts, room).dispatch
    rows, sizes, _ = on_ranks(dispatch, group.mesh)(tokens, ids, weights)
    inner = on_ranks(gated, group.mesh)(sizes, *matrices[:2], rows)
    return Loop(products, (sizes, *matrices, inner), rows, calls)


def measure(
    model: Model,
    routing: str,
    group: jax_ep.Group,
    *,
    repeats: int = 1,
    quick: bool = False,
    round_tokens: bool = False,
    in_float8: bool = False,
) -> Result:
    """Checks the layers against each other, then times all in turns."""
    shape, mesh, on_cpu = model.shape, group.mesh, group.platform == "cpu"
    case = Case(shape, routing)
    drawn = make_ids(case, group.size)
    needed = load(drawn, shape.experts, group.size)
    room = capacity(case, needed)
    operands = make_operands(model, drawn, mesh)
    _, _, gate, up, down, tokens = operands

    layers = {OURS: ours(group, room), PADDED: by_exchange(moe.padded_for(case, needed, group))}
    narrow: tuple[Any, ...] = ()
    if in_float8:
        narrow = quantized((gate, up, down), mesh)
        layers[FLOAT8] = ours(group, room, "float8")
    check_layers(layers, operands, mesh, shape.dtype)

    forward_calls, step_calls = (2 if on_cpu else calls(model, needed.rows, group.size, passes) for passes in (1, 3))
    loops = loops_of_layers(layers, operands, narrow, (forward_calls, step_calls), quick)
    loops[PRODUCTS, FORWARD] = loop_of_products(model, room, group, operands, forward_calls)
    share = 1.0
    if round_tokens:
        more = dataclasses.replace(shape, top_k=shape.top_k + CANDIDATES)
        _, *chosen = make_inputs(more, make_ids(Case(more, routing), group.size), mesh)
        left = load(np.asarray(on_ranks(partial(rounding, shape), mesh)(*chosen).expert_ids), shape.experts, group.size)
        share = left.rows / needed.rows
        one, of_it = rounded(ours(group, max(room, -(-left.rows // 128) * 128)), shape), (*chosen, gate, up, down)
        loops[ROUNDED, FORWARD] = Loop(one, of_it, tokens, forward_calls)
        loops[ROUNDED, STEP] = Loop(training_step(one), of_it, tokens, step_calls)
    programs = compile_loops(loops, mesh)
    times = take_turns(programs, repeats, hot=not on_cpu)
    group.check()
    held = {name: held_bytes(program) for (name, training), program in programs.items() if training}
    return Result(model, routing, times, held, share)


def held_bytes(program: Program) -> int | None:
    """At its peak, beside its arguments; None where XLA does not say."""
    memory = program.compiled.memory_analysis()
    return None if memory is None else memory.temp_size_in_bytes


def table(result: Result) -> Iterator[str]:
    """A line for the products, and for each layer."""
    for name in (PRODUCTS, OURS, ROUNDED, FLOAT8, PADDED):
        if (name, FORWARD) in result.times:
            passes = [*half(result, name, FORWARD), *half(result, name, STEP)]
            yield row(result, name, *passes, mebibytes(result.held.get(name)))


def half(result: Result, name: str, training: bool) -> list[str]:
    """The columns of one pass: microseconds; over those of its products."""
    products = result.products(training) * (result.rounded if name == ROUNDED else 1)
    time = products if name == PRODUCTS else result.times.get((name, training))
    return ["-", "-"] if time is None else [f"{time:,.1f}", f"{time / products:.3f}"]


def mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.1f}"


def chosen_models(on_cpu: bool, name_contains: str, tokens: int | None, experts: int | None = None) -> list[Model]:
    def changed(shape: Shape) -> Shape:
        return dataclasses.replace(shape, tokens=tokens or shape.tokens, experts=experts or shape.experts)

    models = [dataclasses.replace(model, shape=changed(model.shape)) for model in (CPU_MODELS if on_cpu else MODELS)]
    chosen = [model for model in models if name_contains in str(model)]
    if not chosen:
        raise SystemExit(f"no shape's name has {name_contains!r}")
    return chosen


def main(arguments: list[str]) -> int:
    parser = command_line("layer", __doc__, f"uniform routing only, no training step of {PADDED}")
    parser.add_argument("--tokens", type=int, help="of each rank, in place of the shapes' own")
    parser.add_argument("--experts", type=int, help="of all ranks, in place of the shapes' own")
    parser.add_argument("--round-tokens", action="store_true", help="also with tokens rounded to full tiles")
    parser.add_argument("--float8", action="store_true", help="also in float8; widths must be multiples of 128")
    options = parser.parse_args(arguments)
    models = chosen_models(jax.default_backend() == "cpu", options.shapes, options.tokens, options.experts)

    with open_group(["layer", *arguments]) as group:
        print(f"- bfloat16; per call inside one jitted loop, median of {options.repeats} loops, all in turns")
        print(f"- {describe_pause(0, group.platform == 'cpu')}")
        print(f"- {PRODUCTS}: the three of the forward pass on the very rows; step: the result and all gradients")
        if options.round_tokens:
            print(f"- {ROUNDED}: of top-k plus {CANDIDATES}, over all ranks; the rounding is timed, too")
        if options.float8:
            print(f"- {FLOAT8}: matrices are quantized before a forward pass, and in a step; {PRODUCTS} are bfloat16's")
        print(f"- {PADDED}: XLA's exchange around the same grouped {PRODUCTS}")
        print("- MiB that a step of a rank holds at the peak beside operands, results included\n")
        print(heading(COLUMNS), flush=True)
        how = {name: getattr(options, name) for name in ("repeats", "quick", "round_tokens")}
        for model in models:
            for routing in ROUTINGS[: 1 if options.quick else None]:
                print("\n".join(table(measure(model, routing, group, in_float8=options.float8, **how))), flush=True)
    return 0
