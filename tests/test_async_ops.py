"""Group(async_ops=True): the same values everywhere, and on GPUs calls that XLA overlaps with other work."""

import logging
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import compile_only
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_only import Step
from jax.sharding import Mesh, PartitionSpec as P

import jax_ep
from jax_ep import Experts, Group, combine, dispatch
from jax_ep._kit import collective_stream, ffi, vary
from jax_ep.runtime import opening

RANKS, EXPERTS, T, H, K = 2, 8, 2048, 1024, 4
C = 2 * T * K  # rows of a rank


# Values: on the CPU, and on GPUs, the ops of both groups are compared with numpy.


@pytest.mark.optimized
def test_values_and_bits(native: None, rng: np.random.Generator) -> None:
    mesh = helpers.mesh_of(ep=RANKS)
    case = helpers.draw_case(rng, RANKS, 32, 2, EXPERTS, 16)
    found = []
    for async_ops in (False, True):
        with Group(mesh, "ep", async_ops=async_ops) as group:
            both = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="ffi")
            actual = helpers.fetch(both(*case))
            helpers.assert_round_trip(actual, case, num_experts=EXPERTS)
            found.append(helpers.bits(actual))
    assert found[0] == found[1]


@pytest.mark.optimized
def test_layer_and_gradients(native: None, rng: np.random.Generator) -> None:
    """A layer with a shared expert, under jax.checkpoint."""
    mesh = helpers.mesh_of(ep=RANKS)
    case = helpers.draw_case(rng, RANKS, 32, 2, EXPERTS, 16)
    square = rng.normal(size=(RANKS, EXPERTS // RANKS, 16, 16)).astype(np.float32)
    found = []
    for async_ops in (False, True):
        with Group(mesh, "ep", async_ops=async_ops) as group:

            def loss(tokens: jax.Array, ids: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
                shared = Experts(experts[0], -experts[1], experts[0])
                own = partial(helpers.moe_sums, group=group, shared=shared)
                return jnp.sum(jax.checkpoint(own)(tokens, ids, weights, experts, experts, experts) ** 2)

            step = helpers.per_rank(jax.value_and_grad(loss, argnums=(0, 2, 3)), mesh)
            found.append(helpers.bits(helpers.fetch(step(*case, square))))
    assert found[0] == found[1]


def test_gradients_and_batches(native: None, rng: np.random.Generator) -> None:
    mesh = helpers.mesh_of(ep=RANKS)
    tokens = rng.normal(size=(RANKS, 3, 16, 8)).astype(np.float32)
    ids = rng.integers(-1, EXPERTS, size=(RANKS, 3, 16, 2)).astype(np.int32)
    with Group(mesh, "ep", async_ops=True) as group:

        def loss(tokens: jax.Array, ids: jax.Array) -> jax.Array:
            out = dispatch(tokens, ids, group=group, num_experts=EXPERTS)
            return jnp.sum(combine(out.rows, out.routing, group=group) ** 2)

        grads = helpers.fetch(helpers.per_rank(jax.vmap(jax.grad(loss)), mesh)(tokens, ids))
    sent = (ids >= 0).sum(-1, keepdims=True)  # each copy comes back with weight 1
    np.testing.assert_allclose(grads, 2 * sent**2 * tokens, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batched", [False, True])
def test_what_is_packed(rng: np.random.Generator, batched: bool) -> None:
    """The mark means nothing to XLA:CPU, so what is packed and taken apart again can be looked at."""
    rows = rng.normal(size=(3, 4, 5)).astype(np.float32)
    counts = rng.integers(-(2**31), 2**31, size=(3, 7)).astype(np.int32)

    def call(rows: jax.Array, counts: jax.Array) -> tuple[jax.Array, ...]:
        nothing = jnp.full((2, 0), 1.0, jnp.float32)
        return rows.astype(jnp.bfloat16), counts, rows.at[0, 0].set(jnp.nan), nothing, counts[0]

    def packed(rows: jax.Array, counts: jax.Array) -> list[jax.Array]:
        types = jax.eval_shape(call, rows, counts)
        return collective_stream.on_collective_stream(call, types, rows, counts)

    operands = (rows, counts) if batched else (rows[0], counts[0])
    found = jax.jit(jax.vmap(packed) if batched else packed)(*operands)
    wanted = [rows.astype(jnp.bfloat16), counts, rows.copy(), np.ones((3, 2, 0), np.float32), counts[:, 0]]
    wanted[2][:, 0, 0] = np.nan
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one), other if batched else other[0])
        assert one.dtype == other.dtype


@pytest.mark.parametrize(
    ("since", "flags", "warning"),
    [
        ((0, 0), "--xla_gpu_enable_latency_hiding_scheduler=False", "nothing overlaps them, as XLA_FLAGS turns "),
        ((99, 0), "", f"the XLA of jax {jax.__version__} does not overlap them"),
        (
            (0, 0),
            "--xla_gpu_enable_latency_hiding_scheduler=false --xla_gpu_enable_latency_hiding_scheduler=true",
            None,
        ),
    ],
)
def test_warns_once(
    since: tuple[int, int],
    flags: str,
    warning: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(collective_stream, "SCHEDULED_SINCE", since)
    monkeypatch.setenv("XLA_FLAGS", flags)
    collective_stream.warn_unless_scheduled.cache_clear()
    with caplog.at_level(logging.WARNING, "jax_ep"):
        for _ in range(2):
            collective_stream.warn_unless_scheduled()
    collective_stream.warn_unless_scheduled.cache_clear()
    assert len(caplog.records) == (warning is not None)
    for record in caplog.records:
        assert record.message.startswith(f"async_ops: {warning}")


# Schedules: of programs compiled for GPUs.


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Mesh:
    """GPUs that are not there, for which groups can be opened and programs compiled."""
    mesh = compile_only.mesh_of(RANKS)
    cpu = ffi.library("cpu")
    opened = SimpleNamespace(id=1, close=lambda: None, release=lambda: None, take_error=lambda: None)
    opened.await_failure = lambda seconds: (cpu.ErrorKind.GroupClosedError, "")
    monkeypatch.setattr(ffi, "is_built", lambda platform: True)
    monkeypatch.setattr(ffi, "library", lambda platform: cpu)
    monkeypatch.setattr(ffi, "library_name", lambda device: "cuda")
    monkeypatch.setattr(opening, "open_native", lambda *args, **options: (opened, lambda: None))
    return mesh


def overlapped(test: Any) -> Any:
    """Before jax 0.12 XLA:GPU puts the end of a call right behind its start."""
    return pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="needs jax 0.12")(test)


@pytest.fixture
def group(mesh: Mesh) -> Iterator[Group]:
    with Group(mesh, "ep", async_ops=True) as group:
        yield group


SHAPES = (
    jax.ShapeDtypeStruct((RANKS * T, H), jnp.bfloat16),
    jax.ShapeDtypeStruct((RANKS * T, K), jnp.int32),
    jax.ShapeDtypeStruct((RANKS * T, K), jnp.float32),
    jax.ShapeDtypeStruct((EXPERTS, H, H), jnp.bfloat16),
    jax.ShapeDtypeStruct((RANKS * H, H), jnp.bfloat16),
)


def steps_of(function: Any, mesh: Mesh, *shapes: Any) -> list[Step]:
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    return compile_only.schedule(mapped, mesh, *shapes, specs=[P("ep")] * len(shapes))


def products_beside(steps: list[Step]) -> list[int]:
    """How many products run while each asynchronous call is under way, in the order of the calls."""
    found = []
    for begin, step in enumerate(steps):
        if step.opcode == "call-start":
            (end,) = [i for i, s in enumerate(steps) if (s.opcode, s.operands) == ("call-done", f"%{step.name}")]
            found.append(sum("dot" in s.name for s in steps[begin:end]))
    return found


def layer(group: Group, tokens: jax.Array, ids: jax.Array, weights: jax.Array, experts: Any, shared: Any) -> jax.Array:
    return helpers.moe_sums(
        tokens,
        ids,
        weights,
        experts,
        experts,
        experts,
        group=group,
        capacity=C,
        shared=Experts(shared, -shared, shared),
    )


def test_in_place(group: Group) -> None:
    """Where an op updates an operand it stays in order: XLA sees no alias inside of what is marked."""

    def step(rows: jax.Array, offsets: jax.Array) -> tuple[jax.Array, jax.Array]:
        output, indices = jnp.zeros_like(rows), offsets[:RANKS, 0]
        return (
            jax_ep.lax.ragged_all_to_all(rows, output, *[indices] * 4, axis_name="ep", group=group),
            jax_ep.lax.ragged_all_to_all(-rows, output, *[indices] * 4, axis_name="ep", group=group),
        )

    steps = steps_of(step, group.mesh, *SHAPES[:2])
    assert [s.opcode for s in steps if "call" in s.opcode] == ["custom-call", "custom-call"]


@overlapped
def test_beside_a_collective_of_xla(group: Group) -> None:
    """Neither overlaps the other: they share XLA's stream for collectives."""

    def step(tokens: jax.Array, ids: jax.Array, work: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = dispatch(tokens, ids, group=group, num_experts=EXPERTS, capacity=C)
        return combine(out.rows, out.routing, group=group), jax.lax.all_gather(work, "ep")

    steps = [s for s in steps_of(step, group.mesh, *SHAPES[:2], SHAPES[4]) if s.opcode.endswith(("-start", "-done"))]
    assert len(steps) == 6
    for start, done in zip(steps[::2], steps[1::2], strict=True):
        assert done.operands == f"%{start.name}"


def test_of_synchronous_groups(mesh: Mesh) -> None:
    with Group(mesh, "ep") as group:
        steps = steps_of(partial(layer, group), mesh, *SHAPES)
    assert [s.opcode for s in steps if "call" in s.opcode] == ["custom-call", "custom-call"]


@overlapped
def test_micro_batches(group: Group) -> None:
    """The exchanges of one half run beside the products of the other, but for the first and the last."""

    def halves(tokens: jax.Array, *others: jax.Array) -> tuple[jax.Array, jax.Array]:
        return layer(group, tokens, *others), layer(group, tokens + 1, *others)

    beside = products_beside(steps_of(halves, group.mesh, *SHAPES))
    assert len(beside) == 4
    assert sum(count > 0 for count in beside) >= 2


@overlapped
@pytest.mark.parametrize("sharded", [False, True])
def test_sparse_all_reduce(group: Group, sharded: bool) -> None:
    """The gradient of an embedding is summed beside products that do not need it."""

    def step(ids: jax.Array, values: jax.Array, x: jax.Array, w: jax.Array) -> Any:
        rows = jax_ep.SparseRows.from_entries(ids[:, 0], values, num_rows=10**6)
        summed = jax_ep.sparse_all_reduce(rows, group=group, capacity=4096, sharded=sharded)
        for _ in range(4):
            x = jnp.tanh(x @ w)
        found = vary.vary_alike("ep", summed.indices, summed.values)
        return *found, x

    shapes = (SHAPES[1], SHAPES[0], SHAPES[0], SHAPES[4])
    beside = products_beside(steps_of(step, group.mesh, *shapes))
    assert len(beside) == 2
    assert sum(beside) >= 2


@overlapped
@pytest.mark.parametrize("transform", ["vmap", "scan", "remat"])
def test_transforms(group: Group, transform: str) -> None:
    """They compile; a batch is one call after the other, in a loop."""

    def each(tokens: jax.Array, *others: jax.Array) -> jax.Array:
        return layer(group, tokens, *others)

    def transformed(tokens: jax.Array, *others: jax.Array) -> jax.Array:
        both = jnp.stack([tokens, -tokens])
        if transform == "vmap":
            return jax.vmap(lambda x: each(x, *others))(both).sum(0)
        if transform == "scan":
            return jax.lax.scan(lambda c, x: (c + each(x, *others), None), jnp.zeros_like(tokens), both)[0]
        return jax.grad(lambda x: jnp.sum(jax.checkpoint(each)(x, *others).astype(jnp.float32)))(tokens)

    text = compile_only.text_of(
        jax.shard_map(transformed, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep")),
        group.mesh,
        *SHAPES,
        specs=[P("ep")] * len(SHAPES),
    )
    assert text.count(" call-start(") >= 2
