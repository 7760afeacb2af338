"""Products with a collective of two NVIDIA GPUs: where owners fetch, and beside NCCL, checked on the devices."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import OpenGroup
from jax.sharding import NamedSharding, PartitionSpec as P
from matmul_cases import OPS, Operands, exact

from jax_ep._kit import ffi, gemm

pytestmark = [
    pytest.mark.skipif(
        ffi.library_name(jax.devices()[0]) != "cuda" or not gemm.has_gemm(), reason="needs GPUs with the GEMM core"
    ),
    pytest.mark.usefixtures("native"),
]

# M, K, N. Two ranks exchange smaller products than the first two: see ffi/kernels/matmul/reduce_config.cc.
FETCHED = {"matmul_all_reduce": (4096, 64, 4096), "matmul_reduce_scatter": (4608, 64, 4096)}
SMALL = (528, 64, 264)


def draw(rng: np.random.Generator, shape: tuple[int, int, int]) -> Operands:
    """Operands of two ranks in bfloat16, of which every sum of products is exact."""
    m, k, n = shape
    a, b = (rng.integers(-1, 2, (2, *each)).astype(ml_dtypes.bfloat16) for each in ((m, k), (k, n)))
    return a, b


@pytest.mark.parametrize("op", FETCHED)
def test_owners_fetch_large_products(op: str, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(2)
    operands = draw(rng, FETCHED[op])
    program = helpers.per_rank(lambda a, b: OPS[op](a, b, group=group, implementation="ffi"), group.mesh)
    for _ in range(3):
        np.testing.assert_array_equal(helpers.fetch(program(*operands)).astype(np.float32), exact(op, *operands))
    group.check()


def test_branches_among_collectives(open_group: OpenGroup, rng: np.random.Generator) -> None:
    """XLA may run the branches in any order, and NCCL beside them, 500 times."""
    runs, group = 500, open_group(2)
    place = NamedSharding(group.mesh, P(group.axis_name))
    cases = {
        "exchanged": ("matmul_all_reduce", draw(rng, SMALL)),
        "fetched": ("matmul_all_reduce", draw(rng, FETCHED["matmul_all_reduce"])),
        "gathered": ("all_gather_matmul", draw(rng, SMALL)),
    }
    operands = jax.device_put({name: pair for name, (_, pair) in cases.items()}, place)
    wanted = jax.device_put(
        {name: exact(op, *pair).astype(ml_dtypes.bfloat16) for name, (op, pair) in cases.items()}, place
    )

    def body(operands: Any, wanted: Any, scale: jax.Array) -> Any:
        """Values that differ, by branch."""
        actual, expected = {}, {}
        for name, (op, _) in cases.items():
            a, b = operands[name]
            actual[name] = OPS[op](a * scale, b, group=group, implementation="ffi")
            expected[name] = wanted[name] * scale
            for psum, x, y in (("before", a * scale, a), ("after", actual[name], wanted[name])):
                actual[f"psum {psum} {name}"] = jax.lax.psum(x, group.axis_name)
                expected[f"psum {psum} {name}"] = jax.lax.psum(y, group.axis_name) * scale
        return {name: jnp.sum(actual[name] != expected[name]) for name in actual}

    program = helpers.per_rank(body, group.mesh)
    scales = [jax.device_put(np.full(2, 2**power).astype(ml_dtypes.bfloat16), place) for power in range(3)]
    results = [program(operands, wanted, scales[run % len(scales)]) for run in range(runs)]
    for run, wrong in enumerate(helpers.fetch(results)):
        assert not any(counts.any() for counts in wrong.values()), f"run {run}: {wrong}"
    group.check()
