"""Endurance on NVIDIA GPUs: ops beside NCCL, with CUDA graphs and without."""

import os
import subprocess
import sys
from pathlib import Path

import helpers
import jax
import mixed_cases
import numpy as np
import pytest
from conftest import OpenGroup

from jax_ep._kit import ffi

pytestmark = [
    pytest.mark.skipif(ffi.library_name(jax.devices()[0]) != "cuda", reason="needs NVIDIA GPUs"),
    pytest.mark.usefixtures("native"),
    pytest.mark.timeout(600),
]


def test_without_command_buffers() -> None:
    """Every kernel launched by its handler, none by a CUDA graph."""
    check = f"{Path(__file__).parent}/test_beside_collectives.py::test_in_one_program[both-True]"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", check],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"XLA_FLAGS": flags.strip()},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout


def test_a_captured_program_of_a_closed_group_delivers_nothing(open_group: OpenGroup, rng: np.random.Generator) -> None:
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
