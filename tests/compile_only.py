"""Programs compiled for H200s where there are none: what XLA:GPU makes of our calls can be read on any machine.

Needs the packages jax-cuda13-pjrt and jax-cuda13-plugin, of the version of jax, but neither a GPU nor CUDA.
"""

import functools
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep._kit import ffi

# What XLA asks of an H200: its limits decide which kernels it emits.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
OPTIONS: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}  # tuning needs a GPU


@functools.cache
def _register_handlers() -> None:
    """XLA asks for the traits of the CPU library's handlers, in place of those for CUDA; it never runs them."""
    for name, handlers in ffi.library("cpu").handlers().items():
        jax.ffi.register_ffi_target(f"jax_ep_{name}", {"execute": handlers["execute"]}, platform="CUDA")


def mesh_of(ranks: int) -> Mesh:
    """H200s of one host, along the axis "ep"."""
    if jax.default_backend() != "cpu" or importlib.util.find_spec("jax_cuda13_plugin") is None:
        assert "JAX_EP_TEST_COMPILE_ONLY" not in os.environ, "jax-cuda13-plugin is not installed"
        pytest.skip("needs jax-cuda13-plugin, and no GPU")
    _register_handlers()
    found = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{ranks}", target_config=H200)
    return Mesh(np.array(found.devices), ("ep",))


class Step(NamedTuple):
    opcode: str
    name: str
    operands: str


def text_of(function: Callable[..., Any], mesh: Mesh, *shapes: Any, specs: Sequence[PartitionSpec]) -> str:
    """The compiled program of `function`, as HLO."""
    operands = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(shapes, specs, strict=True)
    ]
    lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    text = lowered.compile(compiler_options=OPTIONS).as_text()
    assert text is not None
    return text


def schedule(function: Callable[..., Any], mesh: Mesh, *shapes: Any, specs: Sequence[PartitionSpec]) -> list[Step]:
    """Its instructions in the order in which they run: those that do something, outside of loops."""
    text = text_of(function, mesh, *shapes, specs=specs)
    entry = text[text.index("\nENTRY") :]
    steps = re.findall(r"^ +(?:ROOT )?%(\S+) = .*? ([a-z-]+)\((.*?)\)", entry, re.MULTILINE)
    silent = ("parameter", "get-tuple-element", "bitcast", "tuple", "constant")
    return [Step(opcode, name, operands) for name, opcode, operands in steps if opcode not in silent]
