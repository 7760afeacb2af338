"""Every kernel twice at odd sizes, for a memory checker:

XLA_PYTHON_CLIENT_MEM_FRACTION=0.02 compute-sanitizer --tool memcheck --target-processes all --report-api-errors no \
  --launch-skip 20 python -m jax_ep.launch -n 4 tests/memcheck.py [moe] [bitmap] [match] [products]

With two GPUs: `-n 4 --gpus 2` and `moe products`; NCCL refuses two ranks on a GPU, and ids are gathered by it. One
process per rank: the checker lets a process run one kernel at a time, and ours wait for each other. It knows the memory
that was mapped when a kernel started; the first launches are skipped, as peers map the pool while they run. Under it
(2025.3) barrier.cluster.arrive holds up a warp until the whole cluster has arrived, as barrier.cluster.wait would: no
kernel may arrive before it has done what others of the cluster wait for.
"""

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_ep
from jax_ep.ops.sparse.types import Method

AXIS, EXPERTS, SEED = "ep", 16, 0
WARM_UP = 20  # launches of ours
TIMEOUT = 100.0  # seconds; the checker rewrites a library of kernels before the first of them runs


def moe(group: jax_ep.Group, rng: np.random.Generator, tokens: int, hidden: int, dtype: Any, **options: Any) -> None:
    rows = rng.standard_normal((group.size * tokens, hidden), np.float32).astype(dtype)
    ids = np.argsort(rng.random((group.size * tokens, EXPERTS)), axis=1)[:, :4].astype(np.int32)

    def body(rows: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        out = jax_ep.dispatch(rows, ids, weights, group=group, num_experts=EXPERTS, implementation="ffi", **options)
        if options.get("wire") == "float8_rows":
            return out.rows
        return jax_ep.combine(out.rows, out.routing, group=group, implementation="ffi")

    run(group, body, rows, ids, np.ones(ids.shape, np.float32))


def ragged(group: jax_ep.Group, rng: np.random.Generator, times: int = 2) -> None:
    size, each = group.size, 5
    rows = rng.standard_normal((size * size * each, 33), np.float32)
    starts = np.tile(np.arange(size, dtype=np.int32) * each, size)
    here = np.repeat(np.arange(size, dtype=np.int32) * each, size)
    counts = np.full(size * size, each, np.int32)
    op = partial(jax_ep.lax.ragged_all_to_all, axis_name=AXIS)
    run(group, op, rows, np.zeros_like(rows), starts, counts, here, counts, times=times)


def sparse(group: jax_ep.Group, rng: np.random.Generator, method: Method) -> None:
    ids = rng.integers(0, 1000, group.size * 333).astype(np.int32)
    values = rng.standard_normal((ids.size, 65), np.float32)

    def body(ids: jax.Array, values: jax.Array) -> Any:
        rows = jax_ep.SparseRows.from_entries(ids, values, num_rows=1000)
        out = jax_ep.sparse_all_reduce(rows, group=group, capacity=1000, method=method, implementation="ffi")
        return out.indices, out.values

    run(group, body, ids, values)


def products(group: jax_ep.Group, rng: np.random.Generator) -> None:
    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)

    def multiply(op: Any, rows: int, columns: int, contracted: int = 136) -> None:
        a, b = draw(group.size * rows, contracted), draw(group.size * contracted, columns)
        run(group, partial(op, group=group), a, b)

    for op in (jax_ep.matmul_all_reduce, jax_ep.matmul_reduce_scatter, jax_ep.all_gather_matmul):
        multiply(op, group.size * 72, 200)
    multiply(jax_ep.matmul_all_reduce, 3528, 4104)  # more than two ranks exchange: owners fetch
    multiply(jax_ep.matmul_all_reduce, group.size * 72, 200, contracted=1096)  # two CTAs a tile
    run(
        group,
        jax_ep.lax.ragged_dot,
        draw(group.size * 300, 72),
        draw(group.size * 3, 72, 136),
        np.tile(np.array([100, 0, 190], np.int32), group.size),
    )


def run(group: jax_ep.Group, body: Any, *operands: Any, times: int = 2) -> None:
    program = jax.jit(jax.shard_map(body, mesh=group.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))
    sharding = NamedSharding(group.mesh, P(AXIS))
    placed = [jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for x in operands]
    for _ in range(times):
        jax.block_until_ready(program(*placed))
    group.check()
    print(".", end="", flush=True)


def all_moe(group: jax_ep.Group, rng: np.random.Generator) -> None:
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        moe(group, rng, 37, 264, dtype)
    moe(group, rng, 1100, 40, jnp.bfloat16)  # more than set off before their rows are known
    moe(group, rng, 37, 256, jnp.bfloat16, wire="float8")
    moe(group, rng, 1100, 256, jnp.bfloat16, wire="float8_rows")
    moe(group, rng, 61, 136, jnp.bfloat16, capacity=61, on_overflow="drop")
    ragged(group, rng)


PARTS = {
    "moe": all_moe,
    "bitmap": partial(sparse, method="bitmap"),
    "match": partial(sparse, method="match"),
    "products": products,
}


def main() -> int:
    rng = np.random.default_rng(SEED)
    chosen = sys.argv[1:] or list(PARTS)
    with jax_ep.Group(Mesh(np.array(jax.devices()), (AXIS,)), AXIS, timeout=TIMEOUT) as group:
        ragged(group, rng, times=WARM_UP)
        for name in chosen:
            print(name, end="", flush=True)
            PARTS[name](group, rng)
    print(f"\nevery kernel ran: {', '.join(chosen)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
