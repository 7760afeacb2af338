"""Programs, random cases and comparisons that several test files use."""

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep import Dispatched, Experts, Group, Implementation, JaxEpError, Unexpanded, combine, dispatch, moe_mlp
from jax_ep.runtime import topology
from jax_ep.runtime.native import NativeGroup

ROOT = Path(__file__).resolve().parents[1]
LATE_TOKENS = 1100  # of a rank: more than set off before their rows are known
SEED = int(os.environ.get("JAX_EP_TEST_SEED", "20260701"))
SIZES = (1, 2, 4, 8)
DTYPES = tuple(map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32)))
BIG = 2**31 - 1
Rng = np.random.Generator

# What a GPU leaves in the results of a dispatch that failed. In targets it is 0x80 in every byte: by it combine knows.
FAILED = {"rows": np.nan, "group_sizes": 0, "targets": np.int32(-0x7F7F7F80), "row_of": -1, "weights": np.nan}
FAILED |= dict.fromkeys(("counts", "dropped", "invalid"), 0)


def mesh_of(**axes: int) -> Mesh:
    """A mesh over the first devices, e.g. `mesh_of(dp=2, ep=4)`; skips the test where there are too few."""
    needed, devices = math.prod(axes.values()), jax.devices()
    if len(devices) < needed:
        pytest.skip(f"needs {needed} devices, this host has {len(devices)}")
    return Mesh(np.array(devices[:needed]).reshape(*axes.values()), tuple(axes))


def native(group: Group) -> NativeGroup:
    native = group._backend.native
    assert native is not None
    return native


def largest_size() -> int:
    return max(size for size in SIZES if size <= len(jax.devices()))


def per_rank(
    function: Callable[..., Any], mesh: Mesh, *, names: Sequence[str] = (), check_vma: bool = True
) -> jax.stages.Wrapped:
    """jit of `function` on every device: its arguments and results get these axes of the mesh, or all, in front."""
    spec = PartitionSpec(*(names or mesh.axis_names))
    axes = len(spec)

    def body(*arguments: Any) -> Any:
        here = jax.tree.map(lambda x: x.reshape(x.shape[axes:]), arguments)
        return jax.tree.map(lambda x: x.reshape((1,) * axes + x.shape), function(*here))

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma))


def sharded(mesh: Mesh, function: Any, in_specs: Any, out_specs: Any, check_vma: bool = True) -> Any:
    """jit of `function` on every device, with these specs."""
    specs: Any = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}
    return jax.jit(jax.shard_map(function, mesh=mesh, **specs))


def run(group: Group, body: Callable[..., Any], *operands: Any) -> Any:
    """What `body` gives on every rank of the group's mesh, in numpy: arrays have the mesh's axes as leading axes."""
    return fetch(per_rank(body, group.mesh)(*operands))


def on_mesh(mesh: Mesh, x: Any) -> Any:
    """[R, ...] with the mesh's axes as leading axes."""
    return jax.tree.map(lambda leaf: leaf.reshape(*mesh.devices.shape, *leaf.shape[1:]), x)


def by_rank(mesh: Mesh, x: Any) -> Any:
    """The reverse of `on_mesh`."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[mesh.devices.ndim :]), x)


def let_kernels_cross_cpu_processes() -> None:
    """Lets groups of several CPU processes run kernels, for tests that run one op at a time."""
    topology.spans_processes = lambda mesh, axes: False


def spread(mesh: Mesh, x: np.ndarray) -> jax.Array:
    """Leading axes are those of the mesh; of several processes each puts the parts of its own devices."""
    sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def trace(group: Group, body: Callable[[], Any]) -> None:
    """Traces `body` on every rank of the group's mesh, without compiling it."""

    def traced(anything: jax.Array) -> jax.Array:
        body()
        return anything

    jax.eval_shape(per_rank(traced, group.mesh), np.zeros(group.mesh.devices.shape))


def vary(x: jax.Array) -> jax.Array:
    """What may not vary over "ep" yet: the result of an all-reduce, a bias."""
    return x if "ep" in jax.typeof(x).manual_axis_type.varying else jax.lax.pcast(x, "ep", to="varying")


def own_threads() -> int:
    """Threads of jax_ep in this process, by their names; on Linux those of the libraries too."""
    native = 0
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            native += (task / "comm").read_text().startswith("jax_ep")
    return native + sum(thread.name.startswith("jax_ep") for thread in threading.enumerate())


def environment(**changes: str) -> dict[str, str]:
    """Of a new process, which has the sources at hand, and no GPUs where this one has none."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    platforms = {"JAX_PLATFORMS": "cpu"} if jax.default_backend() == "cpu" else {}
    return os.environ | {"PYTHONPATH": paths} | platforms | changes


def run_python(*arguments: str, cwd: Path = ROOT, exit_code: int = 0, seconds: float = 240, **variables: str) -> str:
    """All that a new Python prints, which must end with this code."""
    options: Any = {"cwd": cwd, "env": environment(**variables), "timeout": seconds, "text": True, "check": False}
    run = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    assert run.returncode == exit_code, run.stdout
    return run.stdout


def knowing(here: str, script: str) -> str:
    """The script for a new Python, which knows the test module of this name as `here`."""
    folders = [str(ROOT / "tests" / name) for name in ("", "ops", "transforms", "processes", "house")]
    paths = f"import sys; sys.path[:0] = {[*folders, str(ROOT)]}\n"
    return paths + f"import conftest, helpers, jax, {here} as here\nfrom jax_ep import Group\n" + script


def wait_until(condition: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing came about in {seconds} s"
        time.sleep(0.01)


def fetch(results: Any) -> Any:
    """Awaits all results, and copies them to numpy."""
    return jax.device_get(jax.block_until_ready(results))


def fields(out: Dispatched) -> dict[str, Any]:
    """Everything that a dispatch returns, by name."""
    found = {"rows": out.rows, "group_sizes": out.group_sizes}
    return found | {name: getattr(out.routing, name) for name in FAILED.keys() - found.keys()}


def awaiting_failure(
    group: Group, match: str, implementation: Implementation = "kernels"
) -> contextlib.AbstractContextManager[object, bool | None]:
    """Around the awaiting of an op that fails: kernels on the CPU raise there; a GPU's, and XLA, deliver NaN.

    A program of one CPU device runs inline, and XLA's error for a bad argument is a ValueError.
    """
    if group.platform == "cpu" and implementation == "kernels":
        inline = (ValueError,) if group.mesh.size == 1 else ()
        return pytest.raises((jax.errors.JaxRuntimeError, *inline), match=match)
    return contextlib.nullcontext()


@contextlib.contextmanager
def expect_failure(
    group: Group, error: type[JaxEpError], match: str, implementation: Implementation = "kernels"
) -> Iterator[None]:
    """As `awaiting_failure`; afterwards `group.check()` raises the typed error on every platform.

    What follows the awaiting inside the block runs only where that does not raise: there it can look at the results.
    """
    with awaiting_failure(group, match, implementation):
        yield
    with pytest.raises(error, match=match):
        group.check()


def assert_nothing_delivered(out: Dispatched, implementation: Implementation = "kernels") -> None:
    """After a failure on a GPU every result says so; XLA's formulation spoils the rows alone."""
    for name, array in fields(out).items():
        if implementation == "kernels" or name == "rows":
            np.testing.assert_array_equal(wide(array), FAILED[name], name)


def expanded(out: Dispatched | Unexpanded) -> Dispatched:
    """With the rows that `indices` name, if there are any, in their place."""
    if isinstance(out, Dispatched):
        return out
    rows, group_sizes, routing, indices = out

    def take(rows: jax.Array) -> jax.Array:
        nothing = 0xFF if rows.dtype == jnp.uint8 else jnp.nan  # in float8, too
        taken = rows.at[indices].get(mode="fill", fill_value=nothing, wrap_negative_indices=False)
        return jnp.where((indices == -1)[:, None], 0, taken).astype(rows.dtype)

    return Dispatched(jax.tree.map(take, rows), group_sizes, routing)


def round_trip(
    group: Group, *, implementation: Implementation = "auto", experts: Any = lambda rows: rows, **options: Any
) -> Callable[..., tuple[Dispatched, jax.Array]]:
    """On one rank, (tokens, ids, weights) -> (Dispatched, combine of what `experts` make of the rows that arrived)."""

    def both(tokens: jax.Array, ids: jax.Array, weights: jax.Array | None) -> tuple[Dispatched, jax.Array]:
        out = expanded(dispatch(tokens, ids, weights, group=group, implementation=implementation, **options))
        return out, combine(experts(out.rows), out.routing, group=group, implementation=implementation)

    return both


def moe_sums(tokens: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any, **options: Any) -> jax.Array:
    """`moe_mlp` of experts with these matrices, perhaps with biases and an activation, without what it counted."""
    unit = {"biases": options.pop("biases", None), "activation": options.pop("activation", "silu")}
    return moe_mlp(tokens, ids, weights, Experts(gate=gate, up=up, down=down, **unit), **options)[0]


def dispatch_combine(group: Group, **options: Any) -> Callable[..., Any]:
    """The program of `round_trip` for all ranks."""
    return per_rank(round_trip(group, **options), group.mesh)


class Case(NamedTuple):
    """Operands of `dispatch` on all ranks."""

    tokens: np.ndarray  # [R, T, H]
    ids: np.ndarray  # [R, T, K]
    weights: np.ndarray  # [R, T, K]


def draw_case(
    rng: Rng, size: int, tokens: int, top_k: int, experts: int, hidden: int, dtype: np.dtype = DTYPES[2]
) -> Case:
    """Random tokens and weights; every token picks different experts."""
    ids = rng.permuted(np.broadcast_to(np.arange(experts, dtype=np.int32), (size, tokens, experts)), axis=2)
    return Case(
        tokens=rng.standard_normal((size, tokens, hidden)).astype(dtype),
        ids=np.ascontiguousarray(ids[:, :, :top_k]),
        weights=rng.uniform(0.1, 1, (size, tokens, top_k)).astype(np.float32),
    )


def zeros(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    """numpy's, as a leaf of one of our pytrees: jax.numpy's would start a backend where a module is imported."""
    return np.zeros(shape, dtype)


def wide(x: Any) -> np.ndarray:
    """In a dtype that numpy compares: bfloat16 and float16 are float32 too."""
    array = np.asarray(x)
    return array if array.dtype.kind in "iub" else array.astype(np.float32)


def relative(found: Any, expected: np.ndarray) -> float:
    """The distance, of the length of what was expected."""
    return float(np.linalg.norm(wide(found) - expected) / np.linalg.norm(expected))


def bits(results: Any) -> list[bytes]:
    def of_array(x: Any) -> bytes:
        is_key = jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    return [of_array(x) for x in jax.tree.leaves(results)]


def assert_same_bits_again(program: Callable[..., Any], operands: Any, times: int) -> Any:
    """The results of a program, which gives the same ones so many times more."""
    first = fetch(program(*operands))
    for run in range(times):
        assert bits(fetch(program(*operands))) == bits(first), f"run {run + 2} differs"
    return first


def assert_routing(actual: Dispatched, expected: oracle.Expected) -> None:
    for name in ("targets", "row_of", "weights", "counts", "dropped", "invalid"):
        np.testing.assert_array_equal(getattr(actual.routing, name), getattr(expected, name), name)


def assert_combined(
    actual: np.ndarray, outputs: np.ndarray, targets: np.ndarray, weights: np.ndarray, *, roundings: int = 2
) -> None:
    """Within so many roundings: of the partial sums, by rank and by node, and of the result."""
    exact = oracle.combine(outputs, targets, weights)
    magnitude = oracle.combine(np.abs(outputs), targets, np.abs(weights))
    unit = roundings / 2 * float(jnp.finfo(actual.dtype).eps) + 16 * 2.0**-23
    error = np.abs(actual.astype(np.float64) - exact)
    assert actual.dtype == outputs.dtype
    assert np.all(error <= unit * magnitude + float(jnp.finfo(actual.dtype).smallest_subnormal)), error.max()


def assert_round_trip(actual: tuple[Dispatched, np.ndarray], case: Case, **options: Any) -> oracle.Expected:
    """The results of `dispatch_combine` on all ranks are the oracle's; NaN is only where NaN is expected."""
    dispatched, combined = actual
    expected = oracle.dispatch(*case, capacity=dispatched.rows.shape[1], **options)
    for name in ("rows", "group_sizes"):
        np.testing.assert_array_equal(wide(getattr(dispatched, name)), wide(getattr(expected, name)), name)
    assert_routing(dispatched, expected)
    assert_combined(combined, expected.rows, expected.targets, case.weights)
    return expected


class KeyValueStore:
    """The key-value store of jax.distributed."""

    def __init__(self) -> None:
        self.left: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.left
        self.left[key] = value

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        found = [(name, value) for name, value in list(self.left.items()) if name.startswith(key)]
        return [(name, value.encode(errors="surrogateescape")) for name, value in found]
