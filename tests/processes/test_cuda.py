"""Endurance on NVIDIA GPUs: ops beside NCCL, with CUDA graphs and without; collective matmuls of two GPUs,
where owners fetch, and beside NCCL, checked on the devices."""

import os
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import mixed_cases
import ml_dtypes
import numpy as np
import pytest
from conftest import OpenGroup, Rng
from jax.sharding import NamedSharding, PartitionSpec as P
from matmul_cases import OPS, Operands, exact

from jax_ep import Group
from jax_ep._kit import ffi, gemm

pytestmark = [
    pytest.mark.skipif(ffi.library_name(jax.devices()[0]) != "cuda", reason="needs NVIDIA GPUs"),
    pytest.mark.usefixtures("native"),
    pytest.mark.timeout(600),
]
needs_core = pytest.mark.skipif(not gemm.has_gemm(), reason="needs GPUs with the GEMM core")


def test_without_command_buffers() -> None:
    """Every kernel launched by its handler, none by a CUDA graph."""
    check = f"{Path(__file__).parent}/test_concurrency.py::test_in_one_program[2-True]"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    options = ("-q", "-n", "0", "-p", "no:cacheprovider")
    assert "1 passed" in helpers.run_python("-m", "pytest", *options, check, seconds=500, XLA_FLAGS=flags.strip())


def test_a_captured_program_of_a_closed_group_delivers_nothing(open_group: OpenGroup, rng: Rng) -> None:
    """Long enough to be captured into a CUDA graph, which runs no handler: the kernels themselves must refuse."""
    size = helpers.largest_size()
    group = open_group(size)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        for _ in range(8):
            tokens = mixed_cases.routed(group, tokens, ids, weights)
        return tokens

    program = helpers.per_rank(body, group.mesh)
    case = helpers.draw_case(rng, size, 64, 4, 16, 256)
    for _ in range(3):  # a graph is captured after a few runs
        assert not np.isnan(np.asarray(program(*case))).any()
    group.close()
    try:
        after = np.asarray(program(*case))
    except jax.errors.JaxRuntimeError:
        return  # it was not captured: its handler ran, and refused
    assert np.isnan(after).all()


# M, K, N. Two ranks exchange smaller products than the first two: see ffi/kernels/collective_matmul/plan.cc.
FETCHED = {"matmul_all_reduce": (4096, 64, 4096), "matmul_reduce_scatter": (4608, 64, 4096)}
SMALL = (528, 64, 264)


def draw(rng: Rng, shape: tuple[int, int, int]) -> Operands:
    """Operands of two ranks in bfloat16, of which every sum of products is exact."""
    m, k, n = shape
    a, b = (rng.integers(-1, 2, (2, *each)).astype(ml_dtypes.bfloat16) for each in ((m, k), (k, n)))
    return a, b


@needs_core
@pytest.mark.parametrize("op", FETCHED)
def test_owners_fetch_large_products(op: str, group: Group, rng: Rng) -> None:
    operands = draw(rng, FETCHED[op])
    program = helpers.per_rank(lambda a, b: OPS[op](a, b, group=group, implementation="kernels"), group.mesh)
    for _ in range(3):
        np.testing.assert_array_equal(helpers.fetch(program(*operands)).astype(np.float32), exact(op, *operands))
    group.check()


@needs_core
def test_branches_among_collectives(group: Group, rng: Rng) -> None:
    """XLA may run the branches in any order, and NCCL beside them, 500 times."""
    runs = 500
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
            actual[name] = OPS[op](a * scale, b, group=group, implementation="kernels")
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
