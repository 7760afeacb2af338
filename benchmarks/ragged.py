"""ragged_all_to_all beside `jax.lax`'s and the dense all_to_all of as many bytes: `python -m jax_ep bench ragged`."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_ep

from .in_jit_loop import AXIS, ChainedLoop, Loop, draw
from .moe_cases import MODELS, SEED, Case, Shape, make_ids
from .runner import Bench, Row, Run

GPU_CASE = Case(MODELS["V3"].shape)
CPU_CASE = Case(Shape(tokens=128, hidden=256, top_k=4, experts=64))


def exchange_plan(case: Case, ranks: int) -> tuple[np.ndarray, ...]:
    """Offsets and sizes [ranks * ranks] of the assignments of all ranks, sorted by the rank that owns their expert."""
    owners = (make_ids(case, ranks) // (case.shape.experts // ranks)).reshape(ranks, -1)
    counts = np.stack([np.bincount(row, minlength=ranks) for row in owners]).astype(np.int32)  # [source, destination]

    def starts(axis: int) -> np.ndarray:
        return np.cumsum(counts, axis, dtype=np.int32) - counts

    return tuple(x.reshape(-1) for x in (starts(1), counts, starts(0), counts.T))


def by(exchange: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda operand, *rest: exchange(operand, rest[-1], *rest[:-1], axis_name=AXIS)


def dense(last: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(last, AXIS, 0, 0, tiled=True)


def rows(case: Case, run: Run) -> Iterator[Row]:
    mesh, ranks, shape = run.mesh, run.group.size, case.shape
    sharding = NamedSharding(mesh, P(AXIS))
    plan = exchange_plan(case, ranks)
    counts = plan[1].reshape(ranks, ranks)
    room = int(counts.sum(axis=0).max())
    sent = draw(mesh, SEED, ranks * shape.tokens * shape.top_k, shape.hidden, dtype=jnp.dtype(shape.dtype))
    empty = jnp.zeros((ranks * room, shape.hidden), shape.dtype, device=sharding)
    operands = (sent, *(jax.device_put(x, sharding) for x in plan))
    run.note(f"{shape}; remote: what the busiest rank sends to others")
    remote = int((counts.sum(axis=1) - counts.diagonal()).max()) * shape.hidden * jnp.dtype(shape.dtype).itemsize

    loops: dict[str, Loop] = {
        "jax_ep.lax.ragged_all_to_all": ChainedLoop(by(jax_ep.lax.ragged_all_to_all), operands, empty, calls=50)
    }
    if not run.on_cpu:  # jax.lax has none on the CPU
        loops["jax.lax.ragged_all_to_all"] = ChainedLoop(by(jax.lax.ragged_all_to_all), operands, empty, calls=2)
    loops["dense all_to_all"] = ChainedLoop(dense, (), sent, calls=50)
    for name, time in run.time(loops).items():
        yield {"exchange": name, "us": f"{time:,.0f}", "remote GB/s": f"{remote / time / 1e3:,.0f}"}


BENCH = Bench(__doc__, lambda run: [CPU_CASE if run.on_cpu else GPU_CASE], rows)
