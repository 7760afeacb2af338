"""Weighted sums of picked rows, what `combine` does on one rank: our kernel, the Pallas kernel and XLA's ways.

Part of `python -m jax_ep bench sparse`.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import moe_formulations as forms
import numpy as np
from in_jit_loop import CarryingLoop, microseconds
from jax.sharding import Mesh, PartitionSpec as P
from moe_cases import SEED, Shape

import jax_ep
from jax_ep import Routing
from pallas_kernels import weighted_row_sum

GPU_SHAPE = Shape(4096, 7168, 8, 256, "bfloat16")
CPU_SHAPE = Shape(256, 512, 4, 16, "float32")

RowSum = Callable[[Routing, jax.Array], jax.Array]  # and rows [C, H] -> [T, H]


def gather_and_sum(routing: Routing, rows: jax.Array) -> jax.Array:
    """One gather of [T, H] for each k."""
    index, weights = routing.rows[0], routing.weights[0]
    total = jnp.zeros((index.shape[0], rows.shape[1]), jnp.float32)
    for k in range(index.shape[1]):
        total += weights[:, k, None] * rows[index[:, k]].astype(jnp.float32)
    return total.astype(rows.dtype)


def segment_sum(routing: Routing, rows: jax.Array) -> jax.Array:
    """Every row is scattered to its token."""
    index, weights = routing.rows[0], routing.weights[0]
    tokens = jnp.broadcast_to(jnp.arange(index.shape[0])[:, None], index.shape)
    token = jnp.zeros(rows.shape[0], jnp.int32).at[index].set(tokens)
    weight = jnp.zeros(rows.shape[0], jnp.float32).at[index].set(weights)
    weighted = weight[:, None] * rows.astype(jnp.float32)
    return jax.ops.segment_sum(weighted, token, index.shape[0]).astype(rows.dtype)


def pallas_kernel(routing: Routing, rows: jax.Array, *, interpret: bool) -> jax.Array:
    return weighted_row_sum(rows, routing.rows[0], routing.weights[0], interpret=interpret)


def table(mesh: Mesh, *, repeats: int = 5) -> str:
    """Checks all sums against each other, times them on one device of the mesh, and gives a markdown table."""
    mesh = Mesh(mesh.devices.flat[:1], (forms.AXIS,))
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    shape = CPU_SHAPE if on_cpu else GPU_SHAPE
    rng = np.random.default_rng(SEED)
    ids = np.argsort(rng.random((shape.tokens, shape.experts)), axis=1)[:, : shape.top_k].astype(np.int32)
    weights = rng.random((shape.tokens, shape.top_k), np.float32)
    tokens = jnp.asarray(rng.standard_normal((shape.tokens, shape.hidden), np.float32), shape.dtype)
    with jax_ep.Group(mesh, forms.AXIS) as group:
        ours = forms.jax_ep_ops(group, shape.experts, shape.tokens * shape.top_k, "auto")
        per_rank = partial(jax.shard_map, mesh=mesh, in_specs=P(forms.AXIS), out_specs=P(forms.AXIS), check_vma=False)
        rows, _, routing = jax.block_until_ready(jax.jit(per_rank(ours.dispatch))(tokens, ids, weights))
        sums: dict[str, RowSum] = {
            f"jax_ep.combine, one rank ({group.resolve('bench', 'auto')!r})": lambda routing, rows: jax_ep.combine(
                rows, routing, group=group
            ),
            "Pallas kernel" + " (interpreted)" * on_cpu: partial(pallas_kernel, interpret=on_cpu),
            "XLA, a gather for each k": gather_and_sum,
            "XLA, segment_sum": segment_sum,
        }
        results = [np.asarray(jax.jit(per_rank(one))(routing, rows), np.float32) for one in sums.values()]
        epsilon = float(jnp.finfo(shape.dtype).eps)
        for result in results[1:]:
            np.testing.assert_allclose(result, results[0], rtol=4 * epsilon, atol=4 * epsilon * np.abs(result).max())
        times = microseconds([CarryingLoop(one, (routing,), rows, calls=10) for one in sums.values()], mesh, repeats)
        group.check()
    moved = (rows.size + tokens.size) * rows.dtype.itemsize
    lines = [f"| weighted row sums: {shape} | us | GB/s |", "|---|---|---|"]
    return "\n".join(
        lines + [f"| {name} | {us:,.1f} | {moved / us / 1e3:,.0f} |" for name, us in zip(sums, times, strict=True)]
    )
