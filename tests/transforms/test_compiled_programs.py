"""Programs that were compiled before: kept in a file, exported, cached, or older than the group that serves them."""

import contextlib
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from conftest import OpenGroup
from jax import export
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep import Group, combine, dispatch

EXPERTS = 8
OPTIONS: dict[str, Any] = {"num_experts": EXPERTS, "implementation": "kernels"}

SIZE = min(4, helpers.largest_size())

pytestmark = pytest.mark.usefixtures("native", "compiled_anew")


def case_of(size: int) -> helpers.Case:
    return helpers.draw_case(np.random.default_rng(helpers.SEED), size, 6, 2, EXPERTS, 16)


def compiled(group: Group, case: helpers.Case) -> Any:
    return jax.jit(helpers.dispatch_combine(group, **OPTIONS)).lower(*case).compile()


def assert_right(program: Callable[..., Any], case: helpers.Case) -> None:
    helpers.assert_round_trip(helpers.fetch(program(*case)), case, num_experts=EXPERTS)


def in_new_process(script: str, *arguments: str) -> str:
    helpers.mesh_of(ep=4)  # or the test is skipped
    opening = "open_group = lambda size: Group(helpers.mesh_of(ep=size), 'ep', timeout=10.0)\n"
    return helpers.run_python("-c", helpers.knowing(__name__, opening + script), *arguments)


OTHER_GROUP_FIRST = """
import pickle, pytest
from jax.experimental import serialize_executable
open_group(2).close()
other = open_group(4)
saved = pickle.loads(open(sys.argv[1], 'rb').read())
program = serialize_executable.deserialize_and_load(*saved, execution_devices=jax.devices()[:2])
case = here.case_of(2)
with pytest.raises(jax.errors.JaxRuntimeError, match='open a jax_ep.Group over the mesh and axis'):
    helpers.fetch(program(*case))
group = open_group(2)
here.assert_right(program, case)
print('right')
"""
CACHED = """
jax.config.update('jax_compilation_cache_dir', sys.argv[1])
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
groups = [open_group(size) for size in map(int, sys.argv[2])]
group = next(group for group in groups if group.size == 2)
program = helpers.dispatch_combine(group, **here.OPTIONS)
here.assert_right(program, here.case_of(2))
print('right')
"""
FORKED = """
import gc, os, signal
case = here.case_of(2)
program = here.compiled(open_group(2), case)
jax.clear_caches()
gc.collect()
if (child := os.fork()) == 0:
    signal.alarm(20)
    del program
    gc.collect()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
here.assert_right(program, case)
print('right')
"""


def test_a_saved_program_says_which_group_to_open_and_finds_it(open_group: OpenGroup, tmp_path: Path) -> None:
    """Where ids were counters, a group of 4 ranks got the calls of one of 2, and wrote beyond their buffers."""
    path = tmp_path / "program"
    path.write_bytes(pickle.dumps(serialize_executable.serialize(compiled(open_group(2), case_of(2)))))
    assert "right" in in_new_process(OTHER_GROUP_FIRST, str(path))


def test_the_compilation_cache_serves_another_process(tmp_path: Path) -> None:
    assert "right" in in_new_process(CACHED, str(tmp_path), "2")
    kept = {path.name for path in tmp_path.rglob("*-cache")}
    assert kept
    assert "right" in in_new_process(CACHED, str(tmp_path), "42")
    assert {path.name for path in tmp_path.rglob("*-cache")} == kept  # nothing was compiled anew


def test_an_exported_program(open_group: OpenGroup) -> None:
    group, other = open_group(2), open_group(4)
    body = helpers.round_trip(group, **OPTIONS)
    program = helpers.per_rank(lambda *operands: body(*operands)[1], group.mesh)
    operands = jax.device_put(tuple(case_of(2)), NamedSharding(group.mesh, PartitionSpec("ep")))
    wanted = helpers.fetch(program(*operands))
    names = ("jax_ep_dispatch", "jax_ep_combine")
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    data = export.export(jax.jit(program), disabled_checks=checks)(*operands).serialize(vjp_order=0)
    group.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"open a jax_ep\.Group"):
        helpers.fetch(jax.jit(export.deserialize(data).call)(*operands))
    again = open_group(2)
    np.testing.assert_array_equal(helpers.fetch(jax.jit(export.deserialize(data).call)(*operands)), wanted)
    again.check()
    other.check()


def test_calls_inside_a_host_ask_nobody(open_group: OpenGroup) -> None:
    """Only those between CPU processes do, by callbacks (`jax_ep.runtime.agreement`)."""
    text = jax.jit(helpers.dispatch_combine(open_group(2), **OPTIONS)).lower(*case_of(2)).as_text()
    assert "jax_ep_dispatch" in text
    assert "callback" not in text


@pytest.mark.parametrize("another_is_open", [False, True])
def test_a_new_group_serves_programs_of_a_closed_one(another_is_open: bool, open_group: OpenGroup) -> None:
    """Another group of the same content does not: it serves its own."""
    group, case = open_group(SIZE), case_of(SIZE)
    others = [compiled(open_group(SIZE), case)] if another_is_open else []
    programs = [helpers.dispatch_combine(group, **OPTIONS), compiled(group, case)]
    for _ in range(5):  # on a GPU a captured graph, whose replays call none of our handlers
        assert_right(programs[0], case)
    group.close()
    for each in programs:
        with pytest.raises(jax.errors.JaxRuntimeError, match="closed"):
            helpers.fetch(each(*case))
    for each in others:
        assert_right(each, case)
    open_group(SIZE)
    for each in programs + others:
        assert_right(each, case)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a captured graph of a GPU calls no handler")
@pytest.mark.parametrize("between", [False, True])
def test_a_run_of_a_closed_group_leaves_the_next_one_alone(between: bool, open_group: OpenGroup) -> None:
    """Rank 0 came to its op before the close, and rank 1 comes after the next group has opened: nobody joins it there.
    So an exception that leaves `with Group(...)` may be followed by another attempt. Between two ops both come late."""
    case, began, goes_on = case_of(2), threading.Event(), threading.Event()
    running: list[Any] = []
    group = Group(helpers.mesh_of(ep=2), "ep")

    def hold(rank: np.ndarray, _: Any) -> np.ndarray:
        if rank == 0:
            began.set()
        if between or rank:
            goes_on.wait(30)
        return np.ones((), np.float32)

    def held(x: jax.Array) -> jax.Array:
        rank = jax.lax.axis_index("ep")
        return x * jax.pure_callback(hold, jax.ShapeDtypeStruct((), np.float32), rank, x[0, 0])

    def body(tokens: jax.Array, *routing: jax.Array) -> jax.Array:
        rows, _, sent = dispatch(tokens if between else held(tokens), *routing, group=group, **OPTIONS)
        return combine(held(rows) if between else rows, sent, group=group)

    program = helpers.per_rank(body, group.mesh, check_vma=False)
    with contextlib.suppress(KeyError), group:
        running.append(program(*case))
        assert began.wait(30)
        time.sleep(0.2)
        raise KeyError
    another = open_group(2, timeout=1.0)
    goes_on.set()
    with pytest.raises(jax.errors.JaxRuntimeError, match="closed"):
        helpers.fetch(running)
    time.sleep(2.0)
    another.check()


def test_a_program_compiled_ahead_keeps_its_group() -> None:
    group = Group(helpers.mesh_of(ep=SIZE), "ep")
    case = case_of(SIZE)
    native_id, program = helpers.native(group).id, compiled(group, case)
    dropped = weakref.ref(group)
    del group
    jax.clear_caches()
    gc.collect()
    assert dropped() is None
    assert_right(program, case)
    with Group(helpers.mesh_of(ep=SIZE), "ep") as another:  # in another place than the one that lives on
        assert helpers.native(another).id != native_id
    del program

    def is_in_its_place() -> bool:
        gc.collect()
        with Group(helpers.mesh_of(ep=SIZE), "ep") as another:  # in the place of the one that has ended now
            return helpers.native(another).id == native_id

    helpers.wait_until(is_in_its_place, 10)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA aborts a child that drops a GPU's program")
def test_a_forked_child_drops_the_program_that_keeps_a_group() -> None:
    """Where the group was destroyed with it, the child joined threads that it does not have."""
    assert "right" in in_new_process(FORKED)
