"""What Group takes and refuses, and how it ends."""

import contextlib
import copy
import gc
import logging
import os
import pickle
import threading
from functools import partial
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import OpenGroup, Rng
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from jax_ep import Experts, Group, GroupClosedError, Implementation, PlatformError, dispatch, profiling
from jax_ep._kit import meshes
from jax_ep.group import find_group
from jax_ep.runtime import native as native_module, watchdog

SIZE, EXPERTS = 2, 8
POSITIVE = "timeout must be a positive number of seconds"


@pytest.fixture
def case(rng: Rng) -> helpers.Case:
    return helpers.draw_case(rng, SIZE, 4, 2, EXPERTS, 16)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *(({"timeout": x}, ValueError, f"{POSITIVE}, got {x:g}") for x in (0, -1.0, float("nan"))),
        ({"timeout": "3"}, TypeError, "timeout must be a number of seconds, got str"),
        ({"timeout": True}, TypeError, "timeout must be a number of seconds, got bool"),
        ({"open_timeout": 0}, ValueError, f"open_{POSITIVE}, got 0"),
        ({"open_timeout": "3"}, TypeError, "open_timeout must be a number of seconds, got str"),
        ({"on_lost": "stop"}, ValueError, "on_lost must be .*'raise'.*'exit'.*got 'stop'"),
        ({"max_sms": 0}, ValueError, "max_sms must be at least 1, got 0"),
        ({"max_sms": 1.5}, TypeError, "max_sms must be a Python int, .*got float"),
        ({"max_sms": True}, TypeError, "max_sms must be a Python int, .*got bool"),
    ],
    ids=str,
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^Group: {message}"):
        Group(helpers.mesh_of(ep=1), "ep", **options)


@pytest.mark.parametrize(("variable", "given", "timeout"), [(None, None, 300), ("12.5", None, 12.5), ("12.5", 3, 3)])
def test_default_timeout(variable: Any, given: Any, timeout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_EP_TIMEOUT", raising=False)
    if variable:
        monkeypatch.setenv("JAX_EP_TIMEOUT", variable)
    with Group(helpers.mesh_of(ep=1), "ep", timeout=given) as group:
        assert group.timeout == timeout


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan"])
def test_a_bad_default_timeout(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_EP_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"^Group: JAX_EP_TIMEOUT must be a positive number of seconds, got '{value}'"):
        Group(helpers.mesh_of(ep=1), "ep")


def files_without_threads() -> int:
    """Open files, when no thread of ours is left: a group does not wait for those that hand results back."""
    helpers.wait_until(lambda: not helpers.own_threads(), 10)
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
@pytest.mark.parametrize("step", [(profiling, "group_opened"), (watchdog.Watchdog, "start")], ids=lambda step: step[1])
def test_a_group_that_fails_at_last_leaves_nothing(
    step: tuple[Any, str], native: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("at last")

    with Group(helpers.mesh_of(ep=SIZE), "ep"):
        pass  # starts whatever XLA starts once
    monkeypatch.setattr(*step, fail)
    gc.collect()
    before = files_without_threads()
    kept = []  # the traceback keeps the group: nothing is left to the garbage collector
    for _ in range(3):
        with pytest.raises(RuntimeError, match="at last") as raised:
            Group(helpers.mesh_of(ep=SIZE), "ep")
        kept.append(raised)
    assert files_without_threads() == before


def test_groups_may_open_while_one_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another thread: between a look at one group and a look at the next."""
    mesh = helpers.mesh_of(ep=1)
    with contextlib.ExitStack() as opened:

        def look(other: jax.sharding.Mesh) -> bool:
            opening = threading.Thread(target=lambda: opened.enter_context(Group(mesh, "ep")))
            opening.start()
            opening.join()
            return False

        monkeypatch.setattr(meshes, "check_manual_axis", lambda op, axis_name: None)
        monkeypatch.setattr(meshes, "is_mesh_here", look)
        for _ in range(3):
            opened.enter_context(Group(mesh, "ep"))
        with pytest.raises(ValueError, match=r"no open jax_ep.Group over axis 'ep'"):
            find_group("test", "ep")


@pytest.mark.parametrize("timeout", [np.float32(30), pytest.param(10**400, id="huge"), float("inf")])
def test_long_timeouts_and_any_max_sms(native: None, timeout: float, case: helpers.Case) -> None:
    with Group(helpers.mesh_of(ep=SIZE), "ep", timeout=timeout, max_sms=2**40) as group:
        program = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="kernels")
        helpers.assert_round_trip(helpers.fetch(program(*case)), case, num_experts=EXPERTS)
        group.check()


def test_closed(group: Group, case: helpers.Case) -> None:
    with group:
        assert not group.closed
        assert group.size == SIZE
        assert "'ep'" in repr(group)
        assert f"size={SIZE}" in repr(group)
    group.close()  # twice is fine
    assert group.closed
    assert repr(group) == "Group(axis_name='ep', closed=True)"
    with pytest.raises(GroupClosedError, match="closed"):
        group.check()
    with pytest.raises(GroupClosedError, match="closed"):
        helpers.dispatch_combine(group, num_experts=EXPERTS, implementation="xla")(*case)


@pytest.mark.parametrize("leave", [Group.close, lambda group: group.__exit__(None, None, None)], ids=["close", "with"])
def test_close_awaits_results(leave: Any, native: None, open_group: OpenGroup, case: helpers.Case) -> None:
    """An exception does not, and what did not run says so."""

    def late(rows: jax.Array) -> jax.Array:
        """`rows`, after half a second of one core."""
        slow = jax.lax.fori_loop(0, 100, lambda _, m: jnp.tanh(m @ m), jnp.full((300, 300), rows[0, 0]))
        return rows + 0 * slow[0, 0]

    def program(group: Group) -> Any:
        return helpers.dispatch_combine(group, num_experts=EXPERTS, experts=late)

    group = open_group(SIZE)
    results = program(group)(*case)
    leave(group)
    assert np.isfinite(helpers.fetch(results)[1]).all()

    if jax.default_backend() == "cpu":
        group = open_group(SIZE)
        results = program(group)(*case)
        group.__exit__(KeyError, KeyError(), None)
        with helpers.awaiting_failure(group, "GroupClosedError: the group .*await .*results"):
            helpers.fetch(results)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_arrays_on_explicit_axes(kind: AxisType) -> None:
    """JAX's error for arrays that are not in the shards of in_specs says what to do about the mesh."""
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(kind,), devices=[*helpers.mesh_of(ep=2).devices.flat])
    mapped = jax.jit(jax.shard_map(lambda x: x, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    fails = pytest.raises(ValueError, match="in_specs") if kind == AxisType.Explicit else contextlib.nullcontext()
    with fails as caught, Group(mesh, "ep"):
        mapped(jnp.ones(2))
    if caught is not None:
        assert "axis_types=(jax.sharding.AxisType.Auto,)" in caught.value.__notes__[-1]


def test_results_describe_themselves(group: Group, rng: Rng) -> None:
    """By types, not values."""
    case = helpers.draw_case(rng, SIZE, 4, 2, EXPERTS, 128)
    options: dict[str, Any] = {"num_experts": EXPERTS, "implementation": "xla", "wire": "float8_rows"}
    texts = []

    def arrived(*operands: jax.Array) -> jax.Array:
        out = dispatch(*operands, group=group, **options)
        texts.append(repr(out))
        return out.group_sizes

    helpers.per_rank(arrived, group.mesh)(*case)
    [text] = texts
    assert text.startswith(f"Dispatched(rows=Float8Rows(bits=uint8[{4 * 2 * SIZE},128]")
    assert ", routing=Routing(targets=int32[4,2]" in text
    assert len(text) < 800
    matrix, bias = jnp.zeros((2, 3, 3)), jnp.zeros((2, 3))
    experts = Experts(gate=None, up=matrix, down=matrix, biases=(None, bias, None))
    shapes = "up=float32[2,3,3], down=float32[2,3,3], biases=(None, float32[2,3], None)"
    assert repr(experts) == f"Experts(gate=None, {shapes}, activation='silu')"


@pytest.mark.parametrize("mode", ["CONCURRENT", "CONCURRENT_REGIONS"])
def test_ops_must_not_overlap_in_command_buffers(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = "--xla_gpu_command_buffer_scheduling_mode"
    monkeypatch.setenv("XLA_FLAGS", f"{flag}=SERIALIZE --xla_gpu_autotune_level=1 {flag}={mode}")
    with pytest.raises(PlatformError, match=rf"^Group: XLA_FLAGS must leave {flag} .* got {mode}"):
        native_module.check_xla_flags("cuda")
    native_module.check_xla_flags("cpu")
    monkeypatch.setenv("XLA_FLAGS", f"{flag}={mode} {flag}=SERIALIZE")
    native_module.check_xla_flags("cuda")


def test_a_copy_of_a_module_holds_the_same_group(open_group: OpenGroup) -> None:
    group = open_group(1)
    module = {"group": group, "layers": [group]}
    copied = copy.deepcopy(module)
    assert copied["group"] is copied["layers"][0] is copy.copy(group) is group
    with pytest.raises(TypeError, match=r"^a jax_ep\.Group cannot be pickled: it is memory of this process"):
        pickle.dumps(group)


@pytest.mark.parametrize("trace", [jax.jit, lambda f: partial(jax.eval_shape, f), jax.make_jaxpr])
def test_no_group_is_opened_while_tracing(trace: Any) -> None:
    mesh = helpers.mesh_of(ep=1)

    def body(x: jax.Array) -> jax.Array:
        Group(mesh, "ep").close()
        return x

    with pytest.raises(RuntimeError, match=r"^Group: must be opened outside of traced code"):
        trace(body)(jnp.zeros(3))
    jax.grad(body)(1.0)  # nothing is compiled here


def test_more_devices_than_a_signal_pad_has_flags_for(native: None) -> None:
    mesh = Mesh(np.array([jax.devices()[0]] * 65), ("ep",))
    with pytest.raises(ValueError, match=r"^Group: axis_name must have at most 64 devices, got 65: "):
        Group(mesh, "ep")


def test_arguments_in_another_order() -> None:
    mesh: Any = helpers.mesh_of(ep=1)
    with pytest.raises(
        TypeError, match=r"^Group: mesh must be a jax\.sharding\.Mesh, got str; call Group\(mesh, axis_"
    ):
        Group("ep", mesh)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"^Group: axis_name must be an axis of the mesh or a tuple of axes, got Mesh"):
        Group(mesh, mesh)


def test_what_was_chosen_is_logged(
    implementation: Implementation, group: Group, case: helpers.Case, caplog: pytest.LogCaptureFixture
) -> None:
    why = {"kernels": f"there are kernels for {group.platform}", "xla": "it was asked for"}[implementation]
    program = helpers.dispatch_combine(group, num_experts=EXPERTS, implementation=implementation)
    with caplog.at_level(logging.DEBUG, logger="jax_ep"):
        jax.eval_shape(program, *case)
    wanted = [f"{op}: implementation {implementation!r}, as {why}" for op in ("dispatch", "combine")]
    assert [record.getMessage() for record in caplog.records] == wanted
