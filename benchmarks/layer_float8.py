"""moe_mlp in float8 beside bfloat16: `python -m jax_ep bench layer_float8`."""

import argparse
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jax_ep
from jax_ep import float8
from jax_ep.float8 import Float8Rows, quantize_rows, quantize_weights
from jax_ep.lax import ragged_dot

from . import layer, moe
from .in_jit_loop import Loop, compile_loops, describe_pause, in_digits, median_microseconds, teraflops
from .layer import Model
from .moe_cases import Case, Shape, capacity, load, make_ids
from .moe_formulations import AXIS, jax_ep_ops
from .provenance import header

COLUMNS = "layer | of it | precision | us | bfloat16, us | TFLOP/s | times as fast"
CPU_MODEL = Model("small", Shape(32, 128, 2, 8, "bfloat16"), 128)
PRODUCTS = {"layer": 1, "products": 1, "step": 3}  # of each part, as many times those of a forward pass


def moe_mlp(group: jax_ep.Group, room: int, precision: str | None) -> Any:
    def one(ids: jax.Array, weights: jax.Array, matrices: Any, tokens: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"group": group, "capacity": room, "precision": precision}
        return jax_ep.moe_mlp(tokens, ids, weights, jax_ep.Experts(*matrices), **options)[0]

    return one


def products(sizes: jax.Array, matrices: Any, inner: Any, rows: Any) -> tuple[jax.Array, ...]:
    multiply: Any = float8.ragged_dot if isinstance(rows, Float8Rows) else ragged_dot
    gate, up, down = matrices
    return layer.products(sizes, gate, up, down, inner, rows, multiply)


def check_alike(layers: list[Loop], mesh: Mesh) -> None:
    """Raises unless both layers agree as far as float8 holds values: to some percent."""
    found, expected = (layer.on_ranks(one.op, mesh)(*one.operands, one.own) for one in layers)
    difference = np.linalg.norm(np.asarray(found - expected, np.float32))
    relative = float(difference / np.linalg.norm(np.asarray(expected, np.float32)))
    if not relative <= 0.1:
        raise AssertionError(f"the layer in float8 differs from bfloat16's by {relative} of its norm")


def measure(model: Model, group: jax_ep.Group, repeats: int) -> tuple[float, dict[str, dict[str, float]]]:
    """The operations of the busiest rank's products; microseconds of each part by the precision of its products."""
    case, mesh = Case(model.shape, "uniform"), group.mesh
    ids = make_ids(case, group.size)
    needed = load(ids, model.shape.experts, group.size)
    room = capacity(case, needed)
    inputs, matrices = moe.make_inputs(model.shape, ids, group), layer.draw_matrices(model, mesh)
    tokens, *routed = inputs
    quantized = layer.on_ranks(lambda *all_of_them: tuple(map(quantize_weights, all_of_them)), mesh)(*matrices)
    state = layer.on_ranks(jax_ep_ops(group, model.shape.experts, room, "auto").dispatch, mesh)(*inputs)
    inner = layer.on_ranks(layer.gated, mesh)(state.group_sizes, *matrices[:2], state.rows)
    both = [layer.on_ranks(quantize_rows, mesh)(rows) for rows in (inner, state.rows)]

    calls = 2 if group.platform == "cpu" else layer.calls(model, needed.rows, group.size, 1)
    loops = {
        ("layer", "float8"): Loop(moe_mlp(group, room, "float8"), (*routed, quantized), tokens, calls),
        ("layer", "bfloat16"): Loop(moe_mlp(group, room, None), (*routed, matrices), tokens, calls),
        ("products", "float8"): Loop(products, (state.group_sizes, quantized, both[0]), both[1], calls),
        ("products", "bfloat16"): Loop(products, (state.group_sizes, matrices, inner), state.rows, calls),
    }
    for precision in ("float8_dgrad", "float8", "bfloat16"):
        step = layer.training_step(moe_mlp(group, room, precision if precision != "bfloat16" else None))
        loops["step", precision] = Loop(step, (*routed, matrices), tokens, max(2, calls // 3))
    check_alike(list(loops.values())[:2], mesh)
    programs = compile_loops(list(loops.values()), mesh)
    measured = median_microseconds(list(loops.values()), programs, repeats, hot=group.platform != "cpu")
    group.check()
    times: dict[str, dict[str, float]] = {part: {} for part in PRODUCTS}
    for (part, precision), time in zip(loops, measured, strict=True):
        times[part][precision] = time
    return needed.rows * model.flops_per_row, times


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep bench layer_float8", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="timed loops of each [%(default)s]")
    parser.add_argument("--tokens", type=int, help="of each GPU, in place of the shape's own")
    parser.add_argument(
        "--experts", type=int, help="of all ranks: so many as a rank of a larger group has, for one GPU"
    )
    options = parser.parse_args(arguments)
    on_cpu = jax.default_backend() == "cpu"
    model = CPU_MODEL if on_cpu else layer.chosen_models(on_cpu, "V3", options.tokens, options.experts)[0]

    with jax_ep.Group(Mesh(np.array(jax.devices()), (AXIS,)), AXIS) as group:
        note = repr(group._resolve("bench", "auto"))
        print(header(list(group.mesh.devices.flat), note, ["layer_float8", *arguments]))
        print(f"- per call inside one jitted loop, median of {options.repeats} loops, all in turns")
        print(f"- {'cold, on a CPU' if on_cpu else describe_pause(0)}")
        print("- matrices of experts are quantized before, but in a step; rows are quantized, but not for the products")
        print("- step: the result and all gradients; float8_dgrad: three of its six products backward in float8, too\n")
        print(f"| {COLUMNS} |\n|{'---|' * (COLUMNS.count('|') + 1)}", flush=True)
        flops, times = measure(model, group, options.repeats)
        for part, of_part in times.items():
            other = of_part.pop("bfloat16")
            for precision, ours in of_part.items():
                rate = in_digits(teraflops(PRODUCTS[part] * flops, ours))
                cells = [str(model), part, precision, f"{ours:,.1f}", f"{other:,.1f}", rate, f"{other / ours:.2f}"]
                print(f"| {' | '.join(cells)} |", flush=True)
    return 0
