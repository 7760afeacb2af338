"""Every wrong argument raises, when the op is traced, an error that names the op and the argument."""

import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import OpenGroup
from helpers import mesh_of, trace
from jax.sharding import AbstractMesh

from jax_ep import CapacityError, Dispatched, Group, JaxEpError, PlatformError, Routing, combine, dispatch
from jax_ep.__main__ import info
from jax_ep._kit import ffi
from jax_ep._kit.logs import log_once
from jax_ep.float8 import Float8Rows
from jax_ep.lax import ragged_all_to_all

SIZE, TOKENS, TOP_K, EXPERTS, HIDDEN = 2, 4, 2, 8, 16


def dispatched(group: Group, /, **changes: Any) -> Dispatched:
    arguments: dict[str, Any] = {"tokens": jnp.zeros((TOKENS, HIDDEN)), "weights": None, "group": group}
    arguments |= {"expert_ids": jnp.zeros((TOKENS, TOP_K), int), "num_experts": EXPERTS, "implementation": "xla"}
    return dispatch(**(arguments | changes))


def combined(group: Group, /, **changes: Any) -> jax.Array:
    """What is changed are functions of a Dispatched."""
    out = dispatched(group)
    arguments: dict[str, Any] = {"expert_outputs": out.rows, "routing": out.routing, "implementation": "xla"}
    return combine(**(arguments | {name: change(out) for name, change in changes.items()}), group=group)


ROWS, INDICES = jnp.zeros((6, 3)), jnp.zeros(SIZE, jnp.int32)


def exchanged(_: Group, /, **changes: Any) -> jax.Array:
    arguments: dict[str, Any] = dict.fromkeys(oracle.Slices._fields, INDICES)
    arguments |= {"operand": ROWS, "output": ROWS, "axis_name": "ep"}
    return ragged_all_to_all(**(arguments | changes))


OPS: dict[str, Callable[..., Any]] = {"dispatch": dispatched, "combine": combined, "ragged_all_to_all": exchanged}


OF_SHAPE: list[tuple[str, str, Any]] = [  # ValueErrors
    *(("dispatch", "tokens", jnp.zeros(shape)) for shape in ((TOKENS,), (1, TOKENS, HIDDEN))),
    *(("dispatch", "expert_ids", jnp.zeros(shape, int)) for shape in ((TOKENS,), (TOKENS + 1, TOP_K))),
    *(("dispatch", "weights", jnp.zeros(shape)) for shape in ((TOKENS,), (TOKENS, TOP_K + 1))),
    *(("dispatch", "num_experts", value) for value in (0, 9, 1 << 20)),
    *(("dispatch", "capacity", value) for value in (0, -1, 2**30)),
    *(("dispatch", "capacity_factor", value) for value in (0, 0.0, -1.0, np.nan, np.inf)),
    *(("dispatch", "wire", value) for value in ("bfloat16", "float8")),  # 16 values are no block of 128
    *(("dispatch", "alignment", 0), ("dispatch", "on_overflow", "ignore"), ("dispatch", "implementation", "nccl")),
    ("combine", "expert_outputs", lambda out: out.rows[0]),
    ("combine", "expert_outputs", lambda out: out.rows[1:]),
    ("combine", "implementation", lambda _: "nccl"),
    ("ragged_all_to_all", "operand", jnp.zeros(())),
    *(("ragged_all_to_all", "output", jnp.zeros(shape)) for shape in ((6, 4), 6)),
    ("ragged_all_to_all", "send_sizes", jnp.zeros(2 * SIZE, jnp.int32)),
    ("ragged_all_to_all", "recv_sizes", jnp.zeros(SIZE + 1, jnp.int32)),
    ("ragged_all_to_all", "implementation", "cuda"),
]
OF_TYPE: list[tuple[str, str, Any]] = [  # TypeErrors
    *(("dispatch", "tokens", jnp.zeros((TOKENS, HIDDEN), dtype)) for dtype in (jnp.int32, jnp.float8_e4m3fn)),
    ("dispatch", "expert_ids", jnp.zeros((TOKENS, TOP_K))),
    ("dispatch", "weights", jnp.zeros((TOKENS, TOP_K), jnp.int32)),
    *(("dispatch", "num_experts", value) for value in (8.0, True)),
    *(("dispatch", "capacity_factor", value) for value in (True, "2", jnp.float32(2))),
    *(("dispatch", "capacity", value) for value in (True, "2", 2.0, jnp.int32(8))),
    *(("dispatch", "alignment", 1.5), ("dispatch", "wire", jnp.float8_e4m3fn)),
    ("dispatch", "on_overflow", np.array(["raise", "drop"])),
    ("combine", "expert_outputs", lambda out: out.rows.astype(jnp.int32)),
    ("ragged_all_to_all", "output", jnp.zeros((6, 3), jnp.bfloat16)),
    ("ragged_all_to_all", "group", "ep"),
]


EIGHT = Float8Rows(jnp.zeros((48, 128), jnp.uint8), jnp.zeros((48, 1)))
KEYS = jax.random.split(jax.random.key(0), (TOKENS, HIDDEN))
MESH = AbstractMesh((SIZE,), ("ep",))  # in place of a group, as in other libraries


MUST: list[tuple[str, str, Any, str]] = [  # TypeErrors that say this
    ("dispatch", "group", MESH, "an open jax_ep.Group(mesh, axis_name), got AbstractMesh"),
    ("dispatch", "tokens", [[1.0]], "an array, got list"),
    ("dispatch", "tokens", KEYS, "of dtype bfloat16, float16, float32, got key<fry>"),
    ("dispatch", "expert_ids", [[1]], "an array, got list"),
    ("dispatch", "weights", 1.0, "an array, got float"),
    ("combine", "expert_outputs", lambda _: EIGHT, "an array, got Float8Rows"),
    ("combine", "routing", lambda _: [0], "the Routing of a dispatch, got list"),
    ("combine", "routing", lambda out: out, "the Routing of a dispatch, got Dispatched"),
    ("ragged_all_to_all", "operand", [1.0], "an array, got list"),
    ("ragged_all_to_all", "output", 1, "an array, got int"),
    ("ragged_all_to_all", "input_offsets", (0, 0), "an array, got tuple"),
    ("ragged_all_to_all", "axis_name", 0, "an axis of the mesh or a tuple of axes, got int"),
    ("ragged_all_to_all", "axis_index_groups", [0, 1], "None, or a sequence of sequences of ranks, got list"),
]
WRONG = [*((*case, "", ValueError) for case in OF_SHAPE), *((*case, "", TypeError) for case in OF_TYPE)]


@pytest.mark.parametrize(("op", "argument", "value", "must", "error"), [*WRONG, *((*case, TypeError) for case in MUST)])
def test_wrong_arguments(op: str, argument: str, value: Any, must: str, error: type[Exception], group: Group) -> None:
    match = re.escape(f"{op}: {argument} must be {must}") if must else rf"{op}:? .*\b{argument}\b"
    with pytest.raises(error, match=f"^{match}"):
        trace(group, lambda: OPS[op](group, **{argument: value}))


BEYOND = r"R \* T .* alignment .* fewer than 2\*\*31, got .* \* 536870912"


def many_tokens() -> dict[str, Any]:
    tokens, ids = jnp.zeros((2**18, HIDDEN)), jnp.zeros((2**18, 2**11), jnp.int32)
    return {"tokens": tokens, "expert_ids": ids, "num_experts": 4096}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (lambda: dict.fromkeys(("capacity", "alignment"), 2**29), BEYOND),
        (lambda: {"capacity": 12, "alignment": 8}, "capacity must be a multiple of alignment 8, got 12"),
        (many_tokens, r"the default capacity must be below .*, got \d+; pass capacity= or capacity_factor="),
        (lambda: many_tokens() | {"capacity_factor": 2.0}, "the capacity by capacity_factor must be below"),
    ],
    ids=["alignment beyond 32 bits", "no multiple", "default capacity beyond 32 bits", "factor beyond 32 bits"],
)
def test_capacities_that_cannot_be(changes: Callable[[], Any], match: str, group: Group) -> None:
    with pytest.raises(ValueError, match=f"^dispatch: {match}"):
        trace(group, lambda: dispatched(group, **changes()))


def test_the_first_of_several_errors_is_kept(group: Group) -> None:
    group._keep_error(CapacityError("first"))
    group._keep_error(JaxEpError("second"))
    with pytest.raises(CapacityError, match="first"):
        group.check()
    group.check()


def test_routing_of_another_group(open_group: OpenGroup) -> None:
    group, larger = open_group(SIZE), open_group(2 * SIZE)
    kept: list[Routing] = []
    trace(group, lambda: kept.append(dispatched(group).routing))

    def body() -> None:
        like = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept[0])
        combine(jnp.zeros((kept[0].config.capacity, HIDDEN)), like, group=larger, implementation="xla")

    with pytest.raises(ValueError, match=r"^combine: routing must be of the 4 ranks of group, got one of 2 ranks"):
        trace(larger, body)


def test_ragged_all_to_all_needs_exactly_one_open_group(open_group: OpenGroup) -> None:
    group = open_group(SIZE)
    other_mesh = open_group(2 * SIZE)
    another = open_group(SIZE)
    with pytest.raises(ValueError, match=r"^ragged_all_to_all: 2 open jax_ep\.Groups over axis 'ep'"):
        trace(group, lambda: exchanged(group))
    another.close()
    group.close()
    with pytest.raises(ValueError, match=r"^ragged_all_to_all: no open jax_ep\.Group over axis 'ep'"):
        trace(group, lambda: exchanged(group))
    with pytest.raises(ValueError, match=r"^ragged_all_to_all: must be called inside jax\.shard_map over axis 'tp'"):
        trace(other_mesh, lambda: exchanged(group, axis_name="tp"))


@pytest.mark.parametrize("op", ["dispatch", "ragged_all_to_all"])
def test_outside_shard_map(op: str, group: Group) -> None:
    with pytest.raises(ValueError, match=rf"^{op}: must be called inside jax\.shard_map over axis 'ep'"):
        OPS[op](group)


def test_no_library(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """XLA exchanges, which a warning says once, and `max_sms` has no effect."""
    monkeypatch.setattr("jax_ep._kit.ffi.is_built", lambda platform: False)
    log_once.cache_clear()
    for _ in range(2):
        with Group(mesh_of(ep=SIZE), "ep", max_sms=8) as group:
            for implementation in ("auto", "xla"):
                trace(group, lambda name=implementation: dispatched(group, implementation=name))
            with pytest.raises(PlatformError, match=r"^dispatch: no jax_ep library is built for platform"):
                trace(group, lambda: dispatched(group, implementation="kernels"))
            group.check()
            assert group.report() == []
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    by, name = ("XLA", "cpu") if jax.default_backend() == "cpu" else ("XLA and Pallas kernels", "cuda")
    assert [record.message for record in said] == [
        f"Group: its ops are computed by {by}, as no jax_ep library is built for platform {name!r} (built: ()): "
        "install jax_ep with it"
    ]


OTHER = "XLA and Pallas kernels, as its library is compiled for {}, and not for X ({}): install jax_ep again here"
OLD = "XLA, as its library needs a compute capability of 8, which X has not"
NARROW = "XLA and Pallas kernels, as its library needs waves of 64 lanes (gfx9), which X (gfx1100) has not"
NOT_BUILT = "no jax_ep library is built for platform {} (built: ()): install jax_ep with it"


@pytest.mark.parametrize(
    ("platform", "version", "kind", "built", "who", "could_be"),
    [
        ("gpu", "cuda 13", "9.0", "90-real", "kernels", False),
        ("gpu", "cuda 13", "12.1", "90a 90-real 120-real", "kernels", False),
        ("gpu", "cuda 13", "8.6", "90a 80-virtual", "kernels", False),
        ("gpu", "cuda 13", "10.0", "90", "kernels", False),
        ("gpu", "cuda 13", "8.0", "all-major", "kernels", False),
        ("gpu", "cuda 13", "8.0", "90a 90", OTHER.format("90a 90", "8.0"), True),
        ("gpu", "cuda 13", "10.0", "90a-real 90-real", OTHER.format("90a-real 90-real", "10.0"), True),
        ("gpu", "rocm 7", "gfx942:xnack-", "gfx950 gfx942", "kernels", False),
        ("gpu", "rocm 7", "gfx90a", "gfx942", OTHER.format("gfx942", "gfx90a"), True),
        ("gpu", "cuda 13", "9.0", None, "XLA and Pallas kernels, as " + NOT_BUILT.format("'cuda'"), True),
        ("gpu", "cuda 12", "7.5", "80-virtual", OLD, False),
        ("gpu", "rocm 7", "gfx942", None, "XLA and Pallas kernels, as " + NOT_BUILT.format("'hip'"), True),
        ("gpu", "rocm 7", "gfx1100", "gfx1100", NARROW, False),
        ("tpu", "", "", None, "XLA, as it has no library for platform 'tpu'", False),
    ],
)
def test_who_computes_the_ops_of_a_device(
    platform: str, version: str, kind: str, built: str | None, who: str, could_be: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """`info` says it. A group warns if there could be a library, and otherwise informs."""
    monkeypatch.setattr(ffi, "is_built", lambda platform: built is not None)
    monkeypatch.setattr(ffi, "_load", lambda platform: SimpleNamespace(architectures=built))
    client = SimpleNamespace(platform_version=version)
    device = SimpleNamespace(platform=platform, client=client, compute_capability=kind, device_kind="X")
    device.id = device.process_index = 0
    missing = ffi.without_kernels(device)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda: [device])
        assert info() == 0
    monkeypatch.undo()
    assert f"; ops: {who}\n" in capsys.readouterr().out
    if missing is not None:
        monkeypatch.setattr(ffi, "without_kernels", lambda device: missing)
        log_once.cache_clear()
        with caplog.at_level(logging.INFO, "jax_ep"), Group(mesh_of(ep=SIZE), "ep"):
            [said] = [record for record in caplog.records if record.message.startswith("Group: its ops")]
        assert said.levelno == (logging.WARNING if could_be else logging.INFO)
    assert could_be == (missing is not None and missing[1])
