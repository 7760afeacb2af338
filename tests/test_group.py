"""What Group takes and refuses, and how it ends."""

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from conftest import OpenGroup
from jax.sharding import PartitionSpec as P

from jax_ep import Group, GroupClosedError, PlatformError, _native, group as group_module, profiling

SIZE, EXPERTS = 2, 8


def test_axis() -> None:
    with pytest.raises(ValueError, match=r"^Group: axis_name 'tp' is not an axis of the mesh"):
        Group(helpers.mesh_of(ep=1), "tp")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"timeout": 0}, ValueError, "timeout must be a positive number of seconds, got 0"),
        ({"timeout": -1.0}, ValueError, "timeout must be a positive number of seconds, got -1"),
        ({"timeout": float("nan")}, ValueError, "timeout must be a positive number of seconds, got nan"),
        ({"timeout": "3"}, TypeError, "timeout must be a number of seconds, got str"),
        ({"timeout": True}, TypeError, "timeout must be a number of seconds, got bool"),
        ({"open_timeout": 0}, ValueError, "open_timeout must be a positive number of seconds, got 0"),
        ({"open_timeout": "3"}, TypeError, "open_timeout must be a number of seconds, got str"),
        ({"max_sms": 0}, ValueError, "max_sms must be at least 1, got 0"),
        ({"max_sms": 1.5}, TypeError, "max_sms must be a Python int, .*got float"),
        ({"max_sms": True}, TypeError, "max_sms must be a Python int, .*got bool"),
    ],
    ids=str,
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^Group: {message}"):
        Group(helpers.mesh_of(ep=1), "ep", **options)


def test_default_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_EP_TIMEOUT", raising=False)
    with Group(helpers.mesh_of(ep=1), "ep") as group:
        assert group.timeout == 300
    monkeypatch.setenv("JAX_EP_TIMEOUT", "12.5")
    with Group(helpers.mesh_of(ep=1), "ep") as group:
        assert group.timeout == 12.5
    with Group(helpers.mesh_of(ep=1), "ep", timeout=3) as group:
        assert group.timeout == 3


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan"])
def test_a_bad_default_timeout(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_EP_TIMEOUT", value)
    with pytest.raises(
        ValueError, match=rf"^Group: JAX_EP_TIMEOUT must be a positive number of seconds, got '{value}'"
    ):
        Group(helpers.mesh_of(ep=1), "ep")


def threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_any_max_sms(native: None) -> None:
    with Group(helpers.mesh_of(ep=SIZE), "ep", max_sms=2**40) as group:
        group.check()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_a_group_that_fails_at_last_leaves_nothing(native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: Group) -> None:
        raise RuntimeError("at last")

    with Group(helpers.mesh_of(ep=SIZE), "ep"):
        pass  # starts whatever XLA starts once
    monkeypatch.setattr(profiling, "group_opened", fail)
    before = threads_and_files()
    kept = []  # the traceback keeps the group: nothing is left to the garbage collector
    for _ in range(3):
        with pytest.raises(RuntimeError, match="at last") as raised:
            Group(helpers.mesh_of(ep=SIZE), "ep")
        kept.append(raised)
    assert threads_and_files() == before


def test_groups_open_while_others_are_looked_for() -> None:
    """Threads that open and close groups, while this one looks through them, slowly enough to be overtaken."""
    over, looked = threading.Event(), 0

    def open_and_close() -> None:
        while not over.is_set():
            with Group(mesh, "another"):
                pass

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("another",))
    body = jax.shard_map(lambda x: look(x), mesh=helpers.mesh_of(ep=1), in_specs=P("ep"), out_specs=P("ep"))

    def look(x: jax.Array) -> jax.Array:
        nonlocal looked
        for _ in range(300):
            assert group_module.find_open_group("test", "ep") is group
            looked += 1
        return x

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=open_and_close) for _ in range(3)]
    try:
        with Group(helpers.mesh_of(ep=1), "ep") as group, contextlib.ExitStack() as crowd:
            for _ in range(40):
                crowd.enter_context(Group(mesh, "another"))
            for thread in threads:
                thread.start()
            jax.eval_shape(body, jax.ShapeDtypeStruct((1,), np.float32))
            over.set()
            for thread in threads:
                thread.join()
    finally:
        over.set()
        sys.setswitchinterval(interval)
    assert looked == 300


@pytest.mark.parametrize("timeout", [np.float32(30), 10**10, float("inf")])
def test_long_timeouts(native: None, timeout: float, open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(SIZE, timeout=timeout)
    case = helpers.draw_case(rng, SIZE, 4, 2, EXPERTS, 16)
    program = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="ffi")
    helpers.assert_round_trip(helpers.fetch(program(*case)), case, num_experts=EXPERTS)
    group.check()


def test_closed(open_group: OpenGroup, rng: np.random.Generator) -> None:
    group = open_group(SIZE)
    with group:
        assert not group.closed
    group.close()  # twice is fine
    assert group.closed
    with pytest.raises(GroupClosedError, match="closed"):
        group.check()
    case = helpers.draw_case(rng, SIZE, 4, 2, EXPERTS, 16)
    with pytest.raises(GroupClosedError, match="closed"):
        helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="xla")(*case)


def test_describes_itself(open_group: OpenGroup) -> None:
    group = open_group(SIZE)
    assert group.size == SIZE
    assert "'ep'" in repr(group)
    assert f"size={SIZE}" in repr(group)


@pytest.mark.parametrize("mode", ["CONCURRENT", "CONCURRENT_REGIONS"])
def test_ops_must_not_overlap_in_command_buffers(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = "--xla_gpu_command_buffer_scheduling_mode"
    monkeypatch.setenv("XLA_FLAGS", f"{flag}=SERIALIZE --xla_gpu_autotune_level=1 {flag}={mode}")
    with pytest.raises(PlatformError, match=rf"^Group: XLA_FLAGS must leave {flag} .* got {mode}"):
        _native.check_xla_flags("cuda")
    _native.check_xla_flags("cpu")
    monkeypatch.setenv("XLA_FLAGS", f"{flag}={mode} {flag}=SERIALIZE")
    _native.check_xla_flags("cuda")
