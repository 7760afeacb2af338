"""What Group takes and refuses, and how it ends."""

from typing import Any

import helpers
import numpy as np
import pytest
from conftest import OpenGroup

from jax_ep import Group, GroupClosedError, PlatformError, _native

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
        ({"timeout": None}, TypeError, "timeout must be a number of seconds, got NoneType"),
        ({"timeout": True}, TypeError, "timeout must be a number of seconds, got bool"),
        ({"max_sms": 0}, ValueError, "max_sms must be at least 1, got 0"),
        ({"max_sms": 1.5}, TypeError, "max_sms must be a Python int, .*got float"),
        ({"max_sms": True}, TypeError, "max_sms must be a Python int, .*got bool"),
    ],
    ids=str,
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^Group: {message}"):
        Group(helpers.mesh_of(ep=1), "ep", **options)


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
