"""What every test file shares: devices, groups that are closed again, implementations and seeds."""

import contextlib
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import environment  # noqa: F401 - before jax
import jax
import numpy as np
import pytest
from helpers import SEED, Rng, mesh_of
from jax.experimental.compilation_cache import compilation_cache

from jax_ep import Group, Implementation
from jax_ep._kit import ffi, gemm

# All before the backend starts. A host's GPUs, where it has some, come before these CPU devices.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would round float32 operands to tf32
os.environ.setdefault("JAX_EP_DEBUG_CHECKS", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # test processes share a GPU

OpenGroup = Callable[..., Group]

# JAX_EP_TEST_WITHOUT_LIBRARY=1: as where no library was built for the devices. What needs it is skipped.
WITHOUT_LIBRARY = bool(os.environ.get("JAX_EP_TEST_WITHOUT_LIBRARY"))
if WITHOUT_LIBRARY:
    _find = ffi._find
    ffi._find = lambda platform: None if platform == ffi.library_name(jax.devices()[0]) else _find(platform)

GPU_WORKERS = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="all cases of matrices, all programs optimized")


def pytest_configure(config: pytest.Config) -> None:
    """For a CPU, one module for each program compiles in five sixths of the CPU time of 32, and XLA's older emitter of
    loops, which jaxlib has until 0.11, in half the time of the new one."""
    flags = ["--xla_cpu_parallel_codegen_split_count=1", os.environ.get("XLA_FLAGS", "")]
    if jax.__version_info__ < (0, 11):  # a newer XLA aborts at a flag it lacks
        flags.insert(0, "--xla_cpu_use_fusion_emitters=false")
    if not config.getoption("nightly"):
        os.environ["XLA_FLAGS"] = " ".join(flags)
    if cache := getattr(config, "cache", None):  # `-p no:cacheprovider` has none
        keep_programs(cache.mkdir("programs"))


def keep_programs(folder: Path) -> None:
    """No test compiles what another test, or an earlier run, has compiled. `--cache-clear` empties the folder."""
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in options.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # of processes that a test starts


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of every test marked `matrix` those cases stay that show a new pair of values of its parameters. With --nightly
    all do.

    JAX_EP_TEST_SEED draws an order of the cases. On a CPU the case that shows the most new pairs comes first, because
    fewer cases show all pairs then. GPUs may be too few for some cases, so they take more. Those of `matrix(1)` show
    every value on a CPU. What is marked `nightly` runs with --nightly alone.
    """
    if config.getoption("nightly"):
        return
    on_cpu = jax.default_backend() == "cpu"
    left_out: set[pytest.Item] = set()
    matrices: dict[str, dict[pytest.Item, set[frozenset[tuple[str, str]]]]] = {}  # what each case of a test shows
    for item in sorted(items, key=lambda item: zlib.crc32(f"{SEED} {item.nodeid}".encode())):
        if item.get_closest_marker("nightly"):
            left_out.add(item)
        elif isinstance(item, pytest.Function) and (marker := item.get_closest_marker("matrix")):
            values = [(name, repr(value)) for name, value in item.callspec.params.items()]
            together = marker.args[0] if on_cpu and marker.args else 2
            shown = set(map(frozenset, itertools.combinations_with_replacement(values, together)))
            matrices.setdefault(item.nodeid.partition("[")[0], {})[item] = shown
    for cases in matrices.values():
        while cases:
            item = max(cases, key=lambda case: len(cases[case])) if on_cpu else next(iter(cases))
            if not (shown := cases.pop(item)):
                left_out.add(item)
            for others in cases.values():
                others -= shown
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_xdist_auto_num_workers() -> int | None:
    """Few processes share a GPU: each has a context there, and a kernel that waits for a peer takes a time slice."""
    return None if jax.default_backend() == "cpu" else GPU_WORKERS


@pytest.fixture(autouse=True)
def optimizations(request: pytest.FixtureRequest) -> None:
    """Compiling takes most of the time of most tests, and half of it is spent on optimizations."""
    optimized = request.config.getoption("nightly") or request.node.get_closest_marker("optimized")
    fast = jax.default_backend() == "cpu" and not optimized
    jax.config.update("jax_disable_most_optimizations", fast)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(fast).lower()  # of processes that a test starts


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Takes no program from the compilation cache. On a CPU JAX cannot serialize those (docs/training.md)."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it was enabled
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> Rng:
    """A stream of random numbers of its own for every test."""
    print(f"JAX_EP_TEST_SEED={SEED}")
    return np.random.default_rng([SEED, zlib.crc32(request.node.name.encode())])


@pytest.fixture
def open_group() -> Iterator[OpenGroup]:
    """Opens groups over the axis "ep" of a mesh of `size` devices, or of the mesh given; closes them after the test."""
    with contextlib.ExitStack() as groups:

        def opened(size: int = 4, *, mesh: jax.sharding.Mesh | None = None, timeout: float = 30.0) -> Group:
            return groups.enter_context(Group(mesh or mesh_of(ep=size), "ep", timeout=timeout))

        yield opened


@pytest.fixture
def group(request: pytest.FixtureRequest, open_group: OpenGroup) -> Group:
    """Over as many devices as the test's module has in SIZE, or over two."""
    return open_group(getattr(request.module, "SIZE", 2))


def require_native() -> None:
    """A missing library fails: a skip would hide a broken build."""
    platform = ffi.library_name(jax.devices()[0])
    if WITHOUT_LIBRARY:
        pytest.skip("needs the library")
    if not ffi.is_built(platform):
        pytest.fail(f"the library for {platform!r} is not built, run `pip install .`", pytrace=False)


@pytest.fixture(params=["kernels", "xla"])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "kernels":
        require_native()
    return request.param


@pytest.fixture
def native() -> None:
    """For what only the compiled libraries have."""
    require_native()


@pytest.fixture(params=["as is", "as on a Hopper GPU", "by Pallas"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also the path that chooses when lowered: on other devices it must come out at `jax.lax`."""
    if request.param == "as is":
        yield
        return
    if request.param == "as on a Hopper GPU":
        require_native()
    jax.clear_caches()  # a program of the same functions and shapes may have been compiled for another core
    if request.param == "by Pallas":
        monkeypatch.setattr(gemm, "has_gemm", lambda: False)
        monkeypatch.setattr(gemm, "pallas_platforms", lambda: ("cpu", "cuda"))
    elif not gemm.has_gemm():
        jax.devices()  # as `has_gemm` does: the backend starts before a library is loaded
        monkeypatch.setattr(gemm, "has_gemm", lambda: True)
    yield
    jax.clear_caches()


@pytest.fixture(params=["as is", "by kernels"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the way of GPUs, on a CPU."""
    if request.param == "by kernels" and jax.default_backend() == "cpu":
        monkeypatch.setattr(gemm, "pallas_platforms", lambda: ("cpu", "cuda"))


@pytest.fixture
def strict() -> Iterator[None]:
    """JAX refuses operands of different ranks or dtypes."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield
