"""Endurance on NVIDIA GPUs, checked on the devices: ops beside NCCL, thousands of random routings, no CUDA graphs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import OpenGroup

from jax_ep import CapacityError, Group, OnOverflow, combine, dispatch
from jax_ep._kit import ffi

pytestmark = [
    pytest.mark.skipif(ffi.library_name(jax.devices()[0]) != "cuda", reason="needs NVIDIA GPUs"),
    pytest.mark.usefixtures("native"),
    pytest.mark.timeout(600),
]


def multiply_by_expert(group: Group, experts: int, tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    """A mixture of experts: expert e multiplies its rows by e + 1."""
    out = dispatch(tokens, ids, weights, group=group, num_experts=experts, implementation="ffi")
    local = experts // group.size
    factors = 1.0 + jnp.arange(local) + local * jax.lax.axis_index(group.axis_name)
    of_rows = jnp.repeat(factors, out.group_sizes, total_repeat_length=out.rows.shape[0])
    return combine(out.rows * of_rows[:, None], out.routing, group=group, implementation="ffi")


def test_two_branches_among_collectives(open_group: OpenGroup, rng: np.random.Generator) -> None:
    """XLA may run both branches in any order, and its own collectives beside them, 1,000 times."""
    runs, experts, size = 1000, 16, helpers.largest_size()
    group = open_group(size)

    def body(tokens: jax.Array, ids: jax.Array, weights: jax.Array, scale: jax.Array) -> Any:
        sent = tokens * scale
        left = multiply_by_expert(group, experts, sent, ids, weights)
        right = multiply_by_expert(group, experts, 2 * sent, ids[::-1], weights)
        return left, right, jax.lax.psum(sent, "ep"), jax.lax.psum(left, "ep"), jax.lax.psum(left + right, "ep")

    program = helpers.per_rank(body, group.mesh)
    case = helpers.draw_case(rng, size, 64, 4, experts, 256)
    case.tokens[:] = np.round(case.tokens * 4)  # small integers and halves: every sum is exact
    case.weights[:] = 0.5
    left = case.tokens * (case.ids + 1).sum(axis=2, keepdims=True) / 2
    right = case.tokens * (case.ids[:, ::-1] + 1).sum(axis=2, keepdims=True)
    sums = (np.broadcast_to(x.sum(axis=0), x.shape) for x in (case.tokens, left, left + right))
    wanted = (left, right, *sums)
    for run in range(runs):
        scale = run % 7 + 1
        for actual, once in zip(helpers.fetch(program(*case, np.full(size, scale, np.float32))), wanted, strict=True):
            np.testing.assert_array_equal(actual, once * scale, f"run {run}")
    group.check()


def test_without_command_buffers() -> None:
    """Every kernel launched by its handler, none by a CUDA graph."""
    check = f"{__file__}::{test_two_branches_among_collectives.__name__}"
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
            tokens = multiply_by_expert(group, 16, tokens, ids, weights)
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


class Config(NamedTuple):
    """One compiled program. `room`: a rank's rows, as a multiple of their mean number; None where all fit."""

    tokens: int
    top_k: int
    experts: int
    room: float | None
    overflow: OnOverflow
    alignment: int = 1
    dtype: Any = np.float32

    def capacity(self, size: int) -> int:
        mean = self.tokens * self.top_k
        padding = self.experts // size * (self.alignment - 1)
        rows = size * mean + padding if self.room is None else int(self.room * mean)
        return -(-rows // self.alignment) * self.alignment


ROUTINGS = 10_000
CONFIGS = [
    Config(tokens=64, top_k=4, experts=16, room=None, overflow="raise"),
    Config(tokens=37, top_k=2, experts=64, room=0.8, overflow="drop", alignment=8, dtype=ml_dtypes.bfloat16),
    Config(tokens=helpers.LATE_TOKENS, top_k=8, experts=32, room=1.25, overflow="drop", dtype=ml_dtypes.bfloat16),
    Config(tokens=5, top_k=3, experts=8, room=1.0, overflow="raise", dtype=np.float16),
]


def draw(config: Config, hidden: int, key: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Operands of one rank. Some ids skip, some are invalid; in every third routing half of them are one expert's."""
    for_tokens, for_ids, for_weights, for_crowd = jax.random.split(key, 4)
    shape = (config.tokens, config.top_k)
    ids = jax.random.randint(for_ids, shape, -2, config.experts + 1)
    crowded = (index % 3 == 0) & jax.random.bernoulli(for_crowd, 0.5, shape)
    return (
        jax.random.uniform(for_tokens, (config.tokens, hidden), minval=-1, maxval=1).astype(config.dtype),
        jnp.where(crowded, index % config.experts, ids),
        jax.random.uniform(for_weights, shape, minval=0.1, maxval=1),
    )


def count_differences(actual: jax.Array, wanted: jax.Array) -> jax.Array:
    """NaN equals NaN."""
    return jnp.sum(~((actual == wanted) | (jnp.isnan(actual) & jnp.isnan(wanted))), dtype=jnp.int32)


def compare_with_xla(group: Group, config: Config, routings: int) -> Any:
    """On one rank, seed -> values of dispatch and of combine that differ from XLA's, and routings that did not fit."""
    capacity, hidden = config.capacity(group.size), 40
    options: dict[str, Any] = {"group": group, "num_experts": config.experts, "alignment": config.alignment}
    # Twice what the oracle allows, for both sides round; every term is at most 1.
    tolerance = 2 * config.top_k * (float(jnp.finfo(config.dtype).eps) + 16 * 2.0**-23)

    def step(carry: None, at: tuple[jax.Array, jax.Array]) -> tuple[None, Any]:
        operands = draw(config, hidden, *at)
        out = dispatch(*operands, capacity=capacity, on_overflow=config.overflow, implementation="ffi", **options)
        xla = dispatch(*operands, capacity=capacity, on_overflow="drop", implementation="xla", **options)
        failed = (jax.lax.psum(xla.routing.dropped[0], group.axis_name) > 0) & (config.overflow == "raise")
        wanted, actual = helpers.fields(xla), helpers.fields(out)
        dispatched = sum(
            count_differences(actual[name], jnp.where(failed, left.astype(wanted[name].dtype), wanted[name]))
            for name, left in ((name, jnp.asarray(value)) for name, value in helpers.FAILED.items())
        )

        row_factors = jnp.cos(jnp.arange(capacity, dtype=jnp.float32))[:, None]  # no two rows of a token are alike
        outputs = (out.rows * row_factors).astype(config.dtype)
        combined = combine(outputs, out.routing, group=group, implementation="ffi").astype(jnp.float32)
        exact = combine(outputs, xla.routing, group=group, implementation="xla").astype(jnp.float32)
        off = jnp.sum(~(jnp.abs(combined - exact) <= tolerance), dtype=jnp.int32)
        return carry, (dispatched, jnp.where(failed, 0, off), failed.astype(jnp.int32))

    def body(seed: jax.Array) -> Any:
        keys = jax.random.split(jax.random.key(seed), routings)
        _, counts = jax.lax.scan(step, None, (keys, jnp.arange(routings)))
        return jax.tree.map(jnp.sum, counts)

    return body


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.tokens}-{config.overflow}")
def test_random_routings(config: Config, open_group: OpenGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 over all programs, on poisoned buffers; the group goes on after those that did not fit."""
    monkeypatch.setenv("JAX_EP_DEBUG_POISON", "1")
    size, routings = helpers.largest_size(), ROUTINGS // len(CONFIGS)
    group = open_group(size)
    program = helpers.per_rank(compare_with_xla(group, config, routings), group.mesh)
    print(f"JAX_EP_TEST_SEED={helpers.SEED}")
    seeds = np.arange(size, dtype=np.uint32) + np.uint32(helpers.SEED)
    dispatched, combined, failed = (x.tolist() for x in helpers.fetch(program(seeds)))
    assert dispatched == [0] * size
    assert combined == [0] * size
    if config.overflow == "raise" and config.room is not None and size > 1:  # one rank's rows always fit
        assert 0 < failed[0] < routings
        with pytest.raises(CapacityError):
            group.check()
    else:
        assert failed[0] == 0
    group.check()
