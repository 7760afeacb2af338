"""Ops beside other work, in order and asynchronous: `python -m jax_ep bench overlap`."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_ep
from jax_ep.lax import ragged_dot

from . import sparse
from .device_events import timeline
from .formulations import AXIS
from .in_jit_loop import Loop, compile_loops, draw, median_microseconds, on_ranks
from .layer import chosen_models, gated, ours, training_step
from .moe_cases import SEED, Case, Model, capacity, draw_matrices, load, make_ids, make_inputs
from .provenance import command_line, group_header
from .tables import heading, row

HEAD = 128  # values of an attention head
SEQUENCE = 1024  # tokens
CALLS = 10
COLUMNS = "beside | exchange alone, us | of few SMs, us | work alone, us | in order, us | asynchronous, us | hidden"

Op = Callable[..., Any]  # of one rank: its operands -> arrays


class Overlap(NamedTuple):
    """An exchange, work that does not need it, and the program that has both. All take the same operands."""

    name: str
    operands: tuple[Any, ...]
    exchange: Callable[[jax_ep.Group], Op]
    work: Op
    both: Callable[[jax_ep.Group], Op]


class Layer(NamedTuple):
    """Operands of an MoE block, and what a dispatch of them brings: rows and the sizes of their groups."""

    ids: jax.Array
    weights: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    shared: jax_ep.Experts
    attention: jax.Array
    rows: jax.Array
    sizes: jax.Array


def products(layer: Layer, tokens: jax.Array) -> jax.Array:
    inner = gated(layer.sizes, layer.gate, layer.up, layer.rows)
    return ragged_dot(inner, layer.down, layer.sizes)


def routed(group: jax_ep.Group, room: int, layer: Layer, tokens: jax.Array, **options: Any) -> jax.Array:
    experts = jax_ep.Experts(layer.gate, layer.up, layer.down)
    return jax_ep.moe_mlp(tokens, layer.ids, layer.weights, experts, group=group, capacity=room, **options)[0]


def shared_expert(layer: Layer, tokens: jax.Array) -> jax.Array:
    shared = layer.shared
    return (jax.nn.silu(tokens @ shared.gate) * (tokens @ shared.up)) @ shared.down


def attend(layer: Layer, tokens: jax.Array) -> jax.Array:
    """Causal attention in sequences of SEQUENCE tokens; queries, keys and values are the same, to have one matrix."""
    length = min(SEQUENCE, len(tokens))
    size = min(HEAD, tokens.shape[1])
    heads = (tokens @ layer.attention).reshape(-1, length, tokens.shape[1] // size, size)
    out = jax.nn.dot_product_attention(heads, heads, heads, is_causal=True)
    return tokens + out.reshape(tokens.shape)


def halves(block: Callable[[Layer, jax.Array], Any], layer: Layer, tokens: jax.Array) -> list[Any]:
    """Two micro-batches, each with attention and its half of the rows."""
    found = []
    for part in range(2):
        ids, weights, own = (jnp.split(x, 2)[part] for x in (layer.ids, layer.weights, tokens))
        rows = layer.rows[: len(layer.rows) // 2]  # where the groups are: behind the last one lies padding
        mine = layer._replace(ids=ids, weights=weights, sizes=layer.sizes // 2, rows=rows)
        found.append(block(mine, own))
    return found


def moe_overlaps(model: Model, group: jax_ep.Group) -> Iterator[Overlap]:
    shape, mesh = model.shape, group.mesh
    case = Case(shape)
    ids = make_ids(case, group.size)
    room = 2 * capacity(case, load(ids, shape.experts, group.size))  # halves are less even
    tokens, ids, weights = make_inputs(shape, ids, mesh)

    def exchange(group: jax_ep.Group, ids: jax.Array, weights: jax.Array, tokens: jax.Array) -> jax.Array:
        out = jax_ep.dispatch(tokens, ids, weights, group=group, num_experts=shape.experts, capacity=room)
        return jax_ep.combine(out.rows, out.routing, group=group)

    def exchanges(group: jax_ep.Group, layer: Layer, tokens: jax.Array) -> jax.Array:
        return exchange(group, layer.ids, layer.weights, tokens)

    def deliver(tokens: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = jax_ep.dispatch(tokens, ids, group=group, num_experts=shape.experts, capacity=room)
        return out.rows, out.group_sizes

    def draw_matrix(seed: int, rows: int, columns: int) -> jax.Array:
        dtype = jnp.dtype(shape.dtype)
        return draw(mesh, seed, group.size * rows, columns, dtype=dtype, scale=rows**-0.5)

    sides = ((shape.hidden, model.width), (shape.hidden, model.width), (model.width, shape.hidden))
    gate, up, down = (draw_matrix(SEED + i, *side) for i, side in enumerate(sides))
    rows, sizes = on_ranks(deliver, mesh)(tokens, ids)
    attention = draw_matrix(SEED + 3, shape.hidden, shape.hidden)
    layer = Layer(ids, weights, *draw_matrices(model, mesh), jax_ep.Experts(gate, up, down), attention, rows, sizes)

    yield Overlap(
        f"{model.name}: shared expert",
        (layer, tokens),
        lambda group: partial(exchanges, group),
        lambda layer, tokens: (products(layer, tokens), shared_expert(layer, tokens)),
        lambda group: lambda layer, tokens: routed(group, room, layer, tokens, shared=layer.shared),
    )

    def block(group: jax_ep.Group) -> Op:
        return partial(halves, lambda layer, tokens: routed(group, room, layer, attend(layer, tokens)))

    yield Overlap(
        f"{model.name}: two micro-batches with attention",
        (layer, tokens),
        lambda group: partial(halves, partial(exchanges, group)),
        partial(halves, lambda layer, tokens: (products(layer, tokens), attend(layer, tokens))),
        block,
    )

    # `training_step` differentiates in all operands but the first: ids, and the sizes of known groups.
    def of_exchange(group: jax_ep.Group) -> Op:
        step = training_step(partial(exchange, group))
        return lambda layer, tokens: step(layer.ids, layer.weights, tokens)

    def of_products(layer: Layer, _: jax.Array) -> Any:
        step = training_step(lambda sizes, gate, up, down, rows: ragged_dot(gated(sizes, gate, up, rows), down, sizes))
        return step(layer.sizes, layer.gate, layer.up, layer.down, layer.rows)

    def of_layer(group: jax_ep.Group) -> Op:
        step = training_step(ours(group, room))
        return lambda layer, tokens: step(layer.ids, layer.weights, layer.gate, layer.up, layer.down, tokens)

    name = f"{model.name}: training step, weight gradients"
    yield Overlap(name, (layer, tokens), of_exchange, of_products, of_layer)


def sparse_overlap(group: jax_ep.Group, *, on_cpu: bool) -> Overlap:
    """The gradient of an embedding, and the backward pass of the dense layers above it."""
    shape = sparse.CPU_SHAPE if on_cpu else sparse.GPU_SHAPE
    rows, width = (64, 128) if on_cpu else (8192, 8192)
    ids = sparse.draw_ids("uniform", shape, group.size)
    room = sparse.round_up(sparse.load(ids, shape.num_rows).largest_share)
    x, matrix = (draw(group.mesh, SEED, group.size * side, width, dtype=jnp.bfloat16) for side in (rows, width))

    def reduce(group: jax_ep.Group) -> Op:
        def op(ids: jax.Array, values: jax.Array, matrix: jax.Array, x: jax.Array) -> Any:
            entries = jax_ep.SparseRows.from_entries(ids, values, num_rows=shape.num_rows)
            summed = jax_ep.sparse_all_reduce(entries, group=group, capacity=room, sharded=True)
            return summed.indices, summed.values

        return op

    def dense(ids: jax.Array, values: jax.Array, matrix: jax.Array, x: jax.Array) -> Any:
        def stack(matrix: jax.Array, x: jax.Array) -> jax.Array:
            for _ in range(4):
                x = jax.nn.silu(x @ matrix) * width**-0.5
            return x

        out, backward = jax.vjp(stack, matrix, x)
        return backward(out)

    return Overlap(
        f"sparse_all_reduce, {shape}: backward pass of four layers",
        (*sparse.place_entries(ids, shape.width, group.mesh), matrix, x),
        reduce,
        dense,
        lambda group: lambda *operands: (reduce(group)(*operands), dense(*operands)),
    )


def line(one: Overlap, in_order: jax_ep.Group, apart: jax_ep.Group, calls: int, repeats: int) -> str:
    """Checks that both programs agree, then times all in turns."""
    mesh = in_order.mesh
    found, other = (on_ranks(one.both(group), mesh)(*one.operands) for group in (in_order, apart))
    jax.tree.map(partial(check_close, one.name), found, other)
    ops = (one.exchange(in_order), one.exchange(apart), one.work, one.both(in_order), one.both(apart))
    loops = [Loop(op, one.operands[:-1], one.operands[-1], calls) for op in ops]
    times = median_microseconds(loops, compile_loops(loops, mesh), repeats, hot=in_order.platform != "cpu")
    for group in (in_order, apart):
        group.check()
    hidden = (times[3] - times[4]) / times[0]
    return row(one.name, *(f"{time:,.1f}" for time in times), f"{100 * hidden:.0f} %")


def check_close(name: str, found: jax.Array, other: jax.Array) -> None:
    """Raises unless they differ by rounding: XLA may multiply by another kernel where it fuses otherwise."""
    error = float(jnp.max(jnp.abs(found - other)) / jnp.max(jnp.abs(found)))
    if not error <= 16 * float(jnp.finfo(jnp.bfloat16).eps):
        raise AssertionError(f"{name}: in order and asynchronous differ by {error} of the largest value")


def trace(one: Overlap, apart: jax_ep.Group) -> Iterator[str]:
    """The table of one asynchronous execution, which another one precedes."""
    program = on_ranks(one.both(apart), apart.mesh)
    jax.block_until_ready(program(*one.operands))
    return timeline(lambda: program(*one.operands))


def main(arguments: list[str]) -> int:
    parser = command_line("overlap", __doc__, "the first model only")
    parser.add_argument("--max-sms", type=int, help="of the asynchronous ops [64 of 132, sparse_all_reduce 24]")
    parser.add_argument("--trace", action="store_true", help="also when each GPU ran exchanges, and other kernels")
    options = parser.parse_args(arguments)
    on_cpu = jax.default_backend() == "cpu"
    models = chosen_models(on_cpu, options.shapes, None)[: 1 if options.quick else 2]
    mesh = Mesh(np.array(jax.devices()), (AXIS,))

    with jax_ep.Group(mesh, AXIS) as group, jax_ep.Group(mesh, AXIS, async_ops=True, max_sms=options.max_sms) as apart:
        print(group_header(group, "overlap", *arguments))
        print(f"- per call inside one jitted loop, median of {options.repeats} loops, all in turns")
        print("- in order: a group as it is; asynchronous: Group(async_ops=True), whose ops take few SMs")
        print("- hidden: how much shorter the asynchronous program is, of the exchange alone\n")
        print(heading(COLUMNS), flush=True)
        timelines: list[str] = []
        for overlaps in (*(moe_overlaps(model, group) for model in models), [sparse_overlap(group, on_cpu=on_cpu)]):
            for one in overlaps:
                print(line(one, group, apart, 2 if on_cpu else CALLS, options.repeats), flush=True)
                if options.trace:
                    timelines += ["", one.name, "", *trace(one, apart)]
        print("\n".join(timelines))
    return 0
