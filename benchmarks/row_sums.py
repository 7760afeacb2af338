"""Weighted sums of picked rows, the local part of `combine`: our kernel, the Pallas kernel and XLA's ways.

`python -m jax_ep bench row_sums`, on one device.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import jax_ep
from jax_ep import Routing
from jax_ep.pallas_kernels import weighted_row_sum

from .in_jit_loop import CarryingLoop, microseconds
from .moe_cases import SEED, Shape
from .provenance import header

GPU_SHAPE = Shape(4096, 7168, 8, 256, "bfloat16")
CPU_SHAPE = Shape(256, 512, 4, 16, "float32")

RowSum = Callable[[Routing, jax.Array], jax.Array]  # and rows [C, H] -> [T, H]


def gather_and_sum(routing: Routing, rows: jax.Array) -> jax.Array:
    """One gather of [T, H] for each k."""
    index, weights = routing.row_of[0], routing.weights[0]
    total = jnp.zeros((index.shape[0], rows.shape[1]), jnp.float32)
    for k in range(index.shape[1]):
        total += weights[:, k, None] * rows[index[:, k]].astype(jnp.float32)
    return total.astype(rows.dtype)


def segment_sum(routing: Routing, rows: jax.Array) -> jax.Array:
    """Every row is scattered to its token."""
    index, weights = routing.row_of[0], routing.weights[0]
    tokens = jnp.broadcast_to(jnp.arange(index.shape[0])[:, None], index.shape)
    token = jnp.zeros(rows.shape[0], jnp.int32).at[index].set(tokens)
    weight = jnp.zeros(rows.shape[0], jnp.float32).at[index].set(weights)
    weighted = weight[:, None] * rows.astype(jnp.float32)
    return jax.ops.segment_sum(weighted, token, index.shape[0]).astype(rows.dtype)


def pallas_kernel(routing: Routing, rows: jax.Array, **options: Any) -> jax.Array:
    return weighted_row_sum(rows, routing.row_of[0], routing.weights[0], **options)


def row_sums(group: jax_ep.Group, on_cpu: bool) -> dict[str, RowSum]:
    ours = partial(jax_ep.combine, group=group)
    # Mosaic GPU loads 16 bytes a thread.
    by_pallas: dict[str, RowSum] = (
        {"Pallas kernel (interpreted)": partial(pallas_kernel, interpret=True)}
        if on_cpu
        else {
            "Pallas kernel by Mosaic GPU": partial(pallas_kernel, backend="mosaic", block=1024),
            "Pallas kernel by Triton": partial(pallas_kernel, backend="triton"),
        }
    )
    return {
        "jax_ep.combine": lambda routing, rows: ours(rows, routing),
        **by_pallas,
        "XLA, a gather for each k": gather_and_sum,
        "XLA, segment_sum": segment_sum,
    }


def dispatched(shape: Shape, group: jax_ep.Group) -> tuple[jax.Array, Routing]:
    """The rows that a dispatch to one rank alone delivers, and where they came from."""
    rng = np.random.default_rng(SEED)
    ids = np.argsort(rng.random((shape.tokens, shape.experts)), axis=1)[:, : shape.top_k].astype(np.int32)
    weights = rng.random((shape.tokens, shape.top_k), np.float32)
    tokens = jnp.asarray(rng.standard_normal((shape.tokens, shape.hidden), np.float32), shape.dtype)
    dispatch = partial(jax_ep.dispatch, group=group, num_experts=shape.experts)
    rows, _, routing = jax.block_until_ready(jax.jit(on_rank(dispatch, group))(tokens, ids, weights))
    return rows, routing


def on_rank(function: Callable[..., Any], group: jax_ep.Group) -> Callable[..., Any]:
    spec = P(group.axis_name)
    return jax.shard_map(function, mesh=group.mesh, in_specs=spec, out_specs=spec, check_vma=False)


def table(group: jax_ep.Group, *, repeats: int) -> str:
    """Checks all sums against the first, times them on the one device of the group, and gives a markdown table."""
    on_cpu = group.platform == "cpu"
    shape = CPU_SHAPE if on_cpu else GPU_SHAPE
    rows, routing = dispatched(shape, group)
    sums = row_sums(group, on_cpu)
    epsilon = float(jnp.finfo(shape.dtype).eps)
    expected = None
    for name, one in sums.items():
        result = np.asarray(jax.jit(on_rank(one, group))(routing, rows), np.float32)
        expected = result if expected is None else expected
        np.testing.assert_allclose(
            result, expected, rtol=4 * epsilon, atol=4 * epsilon * np.abs(result).max(), err_msg=name
        )
    times = microseconds([CarryingLoop(one, (routing,), rows, calls=10) for one in sums.values()], group.mesh, repeats)
    group.check()
    moved = (rows.size + shape.tokens * shape.hidden) * rows.dtype.itemsize
    lines = [f"| weighted row sums: {shape} | us | GB/s |", "|---|---|---|"]
    return "\n".join(
        lines + [f"| {name} | {us:,.1f} | {moved / us / 1e3:,.0f} |" for name, us in zip(sums, times, strict=True)]
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep bench row_sums", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="loops of calls; default: %(default)s")
    options = parser.parse_args(arguments)
    with jax_ep.Group(Mesh(np.array(jax.devices()[:1]), ("ep",)), "ep") as group:
        print(
            header(list(group.mesh.devices.flat), repr(group._resolve("bench", "auto")), ["row_sums", *arguments]),
            flush=True,
        )
        print("\n" + table(group, repeats=options.repeats))
    return 0
