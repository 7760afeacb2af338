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
from collections.abc import Iterator
from functools import partial
from typing import Any

import helpers
import jax
import matmul_cases
import numpy as np
from chaos.faulty_ops import Op, float8_rows, product, products, ragged, round_trip, sparse
from chaos.worker import Prepared

from jax_ep import Group

BFLOAT16 = helpers.DTYPES[0]
WARM_UP = 20  # launches of ours
TIMEOUT = 100.0  # seconds; the checker rewrites a library of kernels before the first of them runs


def all_moe(rng: helpers.Rng, group: Group) -> Iterator[Op]:
    many: Any = {"tokens": helpers.LATE_TOKENS, "dtype": BFLOAT16}
    for dtype in helpers.DTYPES:
        yield round_trip(rng, group, hidden=264, dtype=dtype)
    yield round_trip(rng, group, hidden=40, **many)
    yield round_trip(rng, group, hidden=256, dtype=BFLOAT16, fp8=True)
    yield float8_rows(rng, group, **many)
    yield round_trip(rng, group, tokens=61, hidden=136, dtype=BFLOAT16, capacity=61, on_overflow="drop")
    yield ragged(rng, group)


def all_sparse(rng: helpers.Rng, group: Group, method: str) -> Iterator[Op]:
    yield sparse(rng, group, num_rows=1000, entries=333, width=65, method=method)


def all_products(rng: helpers.Rng, group: Group) -> Iterator[Op]:
    rows = group.size * 72
    for op in matmul_cases.OPS:
        yield product(rng, group, op, (rows, 136, 200))
    yield product(rng, group, "matmul_all_reduce", (3528, 136, 4104))  # more than two ranks exchange: owners fetch
    yield product(rng, group, "matmul_all_reduce", (rows, 1096, 200))  # two CTAs a tile
    yield products(rng, group, tokens=100, hidden=72, width=136)


PARTS = {
    "moe": all_moe,
    "bitmap": partial(all_sparse, method="bitmap"),
    "match": partial(all_sparse, method="match"),
    "products": all_products,
}


def run(name: str, op: Op, group: Group, times: int = 2) -> None:
    prepared = Prepared(name, op, group.mesh)
    for _ in range(times):
        prepared.verify(prepared())
    group.check()
    print(".", end="", flush=True)


def main() -> int:
    rng = np.random.default_rng(helpers.SEED)
    chosen = sys.argv[1:] or list(PARTS)
    with Group(helpers.mesh_of(ep=jax.device_count()), "ep", timeout=TIMEOUT) as group:
        run("warm up", ragged(rng, group), group, WARM_UP)
        for name in chosen:
            print(name, end="", flush=True)
            for op in PARTS[name](rng, group):
                run(name, op, group)
    print(f"\nevery kernel ran: {', '.join(chosen)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
