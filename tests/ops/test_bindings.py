"""Settings that no op has, and calls that do not fit the op: as a program from a file may make."""

import contextlib
import dataclasses
import re
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import op_names
import pytest

from jax_ep import Group, __version__
from jax_ep._kit import ffi, vary
from jax_ep.errors import PlatformError

pytestmark = pytest.mark.usefixtures("native")

SIZE = 2
RELEASE = {"release": __version__}  # of every call
SIZES = {"num_tokens": 3, "top_k": 2, "hidden": 4, "capacity": 8, "alignment": 1}
SCATTER: dict[str, Any] = {**SIZES, "local_experts": 1, "dtype": "float32", "onto": False, "zero_unused": True}
DISPATCH = {**SIZES, "num_experts": 4, "wire": "plain", "drop": False, "expand": True, "zero_unused": True}


def types_of(name: str, **settings: Any) -> list[tuple[str, str, list[int]]]:
    _, types = ffi.library(ffi.library_name(jax.devices()[0])).call_types(name, SIZE, **settings)
    return [(result, dtype, shape) for result, dtype, shape, _ in types]


def call(name: str, results: list[tuple[int, ...]], group: Group, *operands: Any, **settings: Any) -> Any:
    """Of a program that may have other settings. All ranks have the operands. A setting of None is left out."""
    settings = {"group": helpers.native(group).id, **RELEASE, **settings}
    given = {key: np.int64(x) if type(x) is int else x for key, x in settings.items() if x is not None}

    def body(*operands: jax.Array) -> Any:
        like = [vary.result_type(shape, np.float32, operands[0]) for shape in results]
        return jax.ffi.ffi_call(f"jax_ep_{name}", like)(*operands, **given)

    return helpers.fetch(helpers.per_rank(body, group.mesh)(*(np.stack([each] * SIZE) for each in operands)))


FLOATS = np.zeros((3, 4), np.float32)


def operands_of(top_k: int = 2) -> list[Any]:
    shapes = (3, top_k), (SIZE, 3, 2), (SIZE, 1)
    return [FLOATS, *(np.zeros(shape, np.int32) for shape in shapes)]


@pytest.mark.parametrize("platform", ffi.built_platforms())
def test_the_page_has_the_names_of_every_spec(platform: str) -> None:
    """`python -m tests.op_names` writes the table."""
    names, page = ffi.op_names(platform), op_names.PAGE.read_text()
    assert all(op_names.row(*each) in page for each in names.items())
    assert platform == "hip" or op_names.section(names) in page
    for target, public in op_names.PUBLIC.items():
        op = names.get(target)
        assert op is None or public.keys() <= {*op.settings, *op.operands}, target


def test_settings_that_a_spec_lacks(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "slices", "operand_rows", "output_rows", "depth"
    says = "ragged_all_to_all: settings must be slices, operand_rows, output_rows, row_bytes, got slices, .*, depth$"
    with pytest.raises(PlatformError, match=says):
        ffi.call("ragged_all_to_all", jnp.zeros((4, 4)), ranks=group._ranks, **dict.fromkeys(names, 4))
    monkeypatch.setattr(ffi, "_declared", {})
    record = dataclasses.make_dataclass("RaggedSettings", names)
    assert ffi.settings_of("ragged_all_to_all")(record) is record
    with pytest.raises(PlatformError, match=says):
        ffi.library.__wrapped__(group.platform)


SERIES = __version__.rpartition(".")[0]  # of minor releases


@pytest.mark.parametrize("release", [__version__, f"{SERIES}.0", f"{SERIES}.99", "0.0.9", f"{SERIES}9.0"])
def test_a_call_of_another_release(release: str, group: Group) -> None:
    fits = release.startswith(f"{SERIES}.")
    says = rf"made with jax_ep {re.escape(release)}, but jax_ep {re.escape(__version__)} is installed"
    with contextlib.nullcontext() if fits else pytest.raises(jax.errors.JaxRuntimeError, match=says):
        assert not call("scatter", [(8, 4)], group, *operands_of(), release=release, **SCATTER)[0].any()
    group.check()


IN_PLACE = {"slices": 1, "operand_rows": 3, "output_rows": 3, "row_bytes": 16}
OFFSETS = np.zeros(SIZE, np.int32)
MARK = {"site": "", "begins": True}


@pytest.mark.parametrize(
    ("op", "results", "operands", "settings", "message"),
    [
        ("scatter", [(9, 4)], operands_of(), {}, r"rows must be float32\[8, 4\] in this group, got float32\[9, 4\]"),
        ("scatter", [(8, 4)], operands_of(3), {}, r"targets must be int32\[3, 2\] in this group, got int32\[3, 3\]"),
        (
            *("scatter", [(8, 4)], operands_of(), {"hidden": 5}),
            r"tokens must be float32\[3, 5\] in this group, got float32\[3, 4\]",
        ),
        ("scatter", [(8, 4)], operands_of()[:1], {}, "there must be 4 operands and 1 results, got 1 and 1"),
        ("scatter", [(8, 4)], operands_of(), {"top_k": None}, "top_k must be an integer of at least 0 .*, got none"),
        ("scatter", [(8, 4)], operands_of(), {"alignment": 0}, "alignment must be positive, got 0"),
        (
            *("ragged_all_to_all", [(3, 4)], [FLOATS, *[OFFSETS] * 4, FLOATS + 1], IN_PLACE),
            "output must be the operand that it updates, in place",
        ),
        ("mark", [(3, 4)] * 2, [FLOATS, FLOATS + 1], MARK, "a result must be the operand that it updates"),
        ("mark", [(3, 4)] * 2, [FLOATS], MARK, "there must be 2 operands and 2 results, got 1 and 2"),
    ],
)
def test_a_call_that_does_not_fit_says_what(
    op: str, results: Any, operands: list[Any], settings: dict[str, Any], message: str, group: Group
) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{op}: {message}"):
        call(op, results, group, *operands, **(SCATTER if op == "scatter" else {}) | settings)
    group.check()


# Products that need no group: one op. The library for CPUs has no kernels for them, but checks their calls alike.
# By a name of the test: settings, operands and results.
FLOAT16 = {"dtype": "float16", "operand_dtype": "float16"}
FLOAT8 = {"operand_dtype": "float8_e4m3fn", "rhs_is_k_by_n": False, "n": 256, "k": 128, "columns": 256}
GATED_FLOAT8 = FLOAT8 | {"dtype": "float8_e4m3fn", "formula": "gated", "activation": "relu", "n": 128, "k": 256}
RHS_FLOAT8 = "rhs uint8[2,256,128] rhs_scales float32[2,2,1] group_sizes int32[2]"
GROUPED: dict[str, tuple[dict[str, Any], str, str]] = {
    "rows": (
        {"dtype": "float32"},
        "lhs bfloat16[3,16] rhs bfloat16[2,16,8] group_sizes int32[2]",
        "result float32[3,8] workspace uint8[256]",
    ),
    "contraction": (
        FLOAT16 | {"grouping": "k_grouped", "m": 24, "k": 3},
        "lhs float16[3,24] rhs float16[3,8] group_sizes int32[2]",
        "result float16[2,24,8]",
    ),
    "gathered rows": (
        {"gathered": "lhs", "source_rows": 5},
        "lhs bfloat16[5,16] rhs bfloat16[2,16,8] group_sizes int32[2] indices int32[3]",
        "result bfloat16[3,8] workspace uint8[256]",
    ),
    "gated": (
        {"formula": "gated", "activation": "silu", "columns": 16},
        "lhs bfloat16[3,16] rhs bfloat16[2,16,16] second_rhs bfloat16[2,16,16] group_sizes int32[2]",
        "result bfloat16[3,8] workspace uint8[256]",
    ),
    "summed": (
        FLOAT16 | {"formula": "summed", "rhs_is_k_by_n": False},
        "lhs float16[3,16] rhs float16[2,8,16] second_lhs float16[3,16] "
        "second_rhs float16[2,8,16] group_sizes int32[2]",
        "result float16[3,8] workspace uint8[256]",
    ),
    "float8": (FLOAT8, f"lhs uint8[3,128] lhs_scales float32[3,1] {RHS_FLOAT8}", "result bfloat16[3,256]"),
    "gathered float8": (
        FLOAT8 | {"gathered": "lhs", "source_rows": 5},
        f"lhs uint8[5,128] lhs_scales float32[5,1] {RHS_FLOAT8} indices int32[3]",
        "result bfloat16[3,256]",
    ),
    "gated float8": (
        GATED_FLOAT8,
        "lhs uint8[3,256] lhs_scales float32[3,2] rhs uint8[2,256,256] rhs_scales float32[2,2,2] "
        "second_rhs uint8[2,256,256] second_rhs_scales float32[2,2,2] group_sizes int32[2]",
        "result uint8[3,128] scales float32[3,1]",
    ),
}


def buffers(text: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each."""
    found = re.findall(r"(\w+) (\w+)\[([\d,]+)\]", text)
    return [(name, dtype, tuple(map(int, shape.split(",")))) for name, dtype, shape in found]


def settings_of(case: str, **change: Any) -> dict[str, Any]:
    plain = {"dtype": "bfloat16", "operand_dtype": "bfloat16", "grouping": "m_grouped", "formula": "store"}
    plain |= {"activation": "none", "limit": 0.0, "slope": 0.0, "keeps_products": False, "is_biased": False}
    plain |= {"rhs_is_k_by_n": True, "gathered": "none", "source_rows": 0}
    return {**plain, "m": 3, "n": 8, "k": 16, "groups": 2, "columns": 8, **GROUPED[case][0], **change}


def call_grouped(case: str, operands: list[Any], results: list[jax.ShapeDtypeStruct]) -> Any:
    wide = {int: np.int64, float: np.float32}
    attributes = {key: wide.get(type(value), lambda x: x)(value) for key, value in settings_of(case).items()}
    call = jax.ffi.ffi_call("jax_ep_grouped_matmul", results)
    return jax.jit(lambda *x: call(*x, **attributes, **RELEASE))(*operands)


@pytest.mark.parametrize("case", GROUPED)
def test_grouped_products_are_called_with_what_they_say(case: str) -> None:
    operands, results = map(buffers, GROUPED[case][1:])
    _, dtype, shape = results[0]
    assert types_of("grouped_matmul", **settings_of(case))[0] == ("result", dtype, list(shape))
    result, *others = (jax.ShapeDtypeStruct(shape, dtype) for _, dtype, shape in results)
    arrays = [jnp.zeros(sizes, other) for _, other, sizes in operands]
    for i, (buffer, other, sizes) in enumerate(operands):
        given = list(arrays)
        for shape_given in ((*sizes[:-1], sizes[-1] + 1), (*sizes, 1), sizes[:-1]):
            given[i] = jnp.zeros(shape_given, other)
            text = f"grouped_matmul: {buffer} must be {other}{list(sizes)}, got {other}{list(shape_given)}"
            with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(text)):
                helpers.fetch(call_grouped(case, given, [result, *others]))
    for wrong in (jax.ShapeDtypeStruct((*shape, 1), result.dtype), jax.ShapeDtypeStruct(shape, np.int8)):
        text = f"grouped_matmul: result must be {dtype}{list(shape)}"
        with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(text)):
            helpers.fetch(call_grouped(case, arrays, [wrong, *others]))
    if jax.default_backend() == "cpu":
        with pytest.raises(jax.errors.JaxRuntimeError, match="grouped_matmul: only Hopper GPUs have it"):
            helpers.fetch(call_grouped(case, arrays, [result, *others]))


DTYPES = {"dtype": "float32", "operand_dtype": "bfloat16"}
# Of ops but for grouped products; by name.
SETTINGS: dict[str, dict[str, Any]] = {
    "dispatch": {"dtype": "float32", **DISPATCH},
    "all_gather_matmul": {"m": 4, "n": 8, "k": 8, "transpose_rhs": False, **DTYPES},
    "ragged_all_to_all": {"slices": 1, "operand_rows": 4, "output_rows": 4, "row_bytes": 4},
}


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("dispatch", {"top_k": -1}, "top_k must be an integer of at least 0 and at most 2147483647, got -1"),
        ("dispatch", {"top_k": 2**31}, "top_k must be an integer of at least 0 and at most 2147483647, got 2147483648"),
        ("dispatch", {"drop": 1}, "drop must be True or False, got none"),
        ("dispatch", {"dtype": "int8"}, "dtype must be bfloat16, float16 or float32, got int8"),
        ("dispatch", {"alignment": 0}, "alignment must be positive, got 0"),
        ("dispatch", {"num_experts": 3}, "num_experts must be a multiple of 2 ranks, got 3"),
        ("dispatch", {"num_experts": 5000}, "num_experts must be at most 4096, got 5000"),
        ("dispatch", {"wire": "float8", "hidden": 200}, "hidden must be a multiple of 128 where .* float8, got 200"),
        ("dispatch", {"wire": "int8"}, "wire must be plain, float8 or float8_rows, got int8"),
        ("dispatch", {"alignment": 3}, "capacity must be a multiple of alignment 3, got 8"),
        ("dispatch", {"num_tokens": 2**30}, "num_tokens . top_k must be below .2..31 - 2..20. / 2 ranks, got"),
        ("dispatch", {"hidden": 2**28}, "hidden must be below 2..28, got 268435456"),
        ("dispatch", {"capacity": 2**30}, "capacity must be below .2..31 - 2..20. / 2 ranks, got 1073741824"),
        ("dispatch", {"alignment": 2**30, "capacity": 0}, "rows with their .* fewer than 2..31 - 2..20, got"),
        ("all_gather_matmul", {"m": 0}, "m must be at least 1, got 0"),
        ("all_gather_matmul", {"m": 2**30}, "m must be below .2..31 - 2..20. / 2 ranks, got 1073741824"),
        ("all_gather_matmul", {"dtype": "float16"}, "dtype must be that of the operands, .* float32, got float16"),
        ("ragged_all_to_all", {"operand_rows": 2**31 - 2**20}, "operand_rows must be below 2..31 - 2..20, got"),
        ("ragged_all_to_all", {"row_bytes": 2**32}, "row_bytes must be below 4 GiB, got"),
        ("ragged_all_to_all", {"operand_rows": 2**33, "row_bytes": 2**31}, "operand_rows must be below"),
        ("rows", {"m": 0}, "m must be at least 1, got 0"),
        ("rows", {"n": 12, "columns": 12}, "n must be a multiple of 8, got 12"),
        ("rows", {"operand_dtype": "float32"}, "operand_dtype must be bfloat16, float16 or float8_e4m3fn, got float32"),
        ("rows", {"dtype": "float32", "rhs_is_k_by_n": False}, "rhs_is_k_by_n must be True of .*, got False"),
        ("rows", {"dtype": "float16"}, "dtype must be that of the operands, bfloat16, or float32, got float16"),
        ("rows", {"columns": 16}, "columns must be n, or 2 n if .*, got 16"),
        ("rows", {"activation": "silu"}, "activation must be silu, .* none of any other product, got silu"),
        ("rows", {"keeps_products": True}, "keeps_products must be False but of a gated product .*, got True"),
        ("summed", {"is_biased": True}, "is_biased must be False but of groups of rows of 16 bits, .*, got True"),
        ("rows", {"grouping": "both"}, "grouping must be m_grouped or k_grouped, got both"),
        ("rows", {"gathered": "both"}, "gathered must be none, lhs or rhs, got both"),
        ("rows", {"gathered": "lhs"}, "source_rows must be at least 1, got 0"),
        ("rows", {"gathered": "lhs", "source_rows": 2**31 - 1}, "source_rows must be at most 1073741823, got 2147"),
        ("rows", {"gathered": "rhs", "source_rows": 5}, "gathered must be none or lhs of groups of rows, got rhs"),
        ("rows", {"source_rows": 5}, "source_rows must be 0 if none is gathered, got 5"),
        ("contraction", {"gathered": "rhs", "source_rows": 5, "groups": 2**28}, "groups must be at most 89478485, got"),
        ("contraction", {"m": 12}, "m must be a multiple of 8, got 12"),
        ("contraction", {"dtype": "float32"}, "dtype must be that of the operands, float16, got float32"),
        ("contraction", {"rhs_is_k_by_n": False}, "rhs_is_k_by_n must be True of .*, got False"),
        ("contraction", {"formula": "summed"}, "formula must be store of groups of the contraction, got summed"),
        ("gated", {"columns": 24}, "columns must be n, or 2 n if .*, got 24"),
        ("gated", {"activation": "tanh"}, "activation must be none, silu, gelu, relu or clamped_swiglu, got tanh"),
        ("gated", {"activation": "none"}, "activation must be silu, .* of a gated unit, .*, got none"),
        ("gated", {"dtype": "float32"}, "dtype must be that of the operands, bfloat16, got float32"),
        ("gated", {"rhs_is_k_by_n": False}, "rhs_is_k_by_n must be True of a gated product.*, got False"),
        ("summed", {"k": 12}, "k must be a multiple of 8, got 12"),
        ("summed", {"gathered": "lhs", "source_rows": 5}, "gathered must be none of a sum of products .*, got lhs"),
        ("gated float8", {"gathered": "lhs", "source_rows": 5}, "gathered must be none of .* float8, got lhs"),
        ("summed", {"dtype": "float32"}, "dtype must be that of the operands, float16, got float32"),
        ("float8", {"k": 64}, "k must be a multiple of 128, got 64"),
        ("float8", {"dtype": "float16"}, "dtype must be bfloat16 or float32, .* float8_e4m3fn, got float16"),
        ("float8", {"rhs_is_k_by_n": True}, "rhs_is_k_by_n must be False of operands in float8, got True"),
        ("float8", {"m": 2**31 - 1, "k": 256}, "m must be at most 1073741823, got 2147483647"),
        ("float8", {"formula": "summed"}, "formula must be store or gated of operands in float8, got summed"),
        ("float8", {"grouping": "k_grouped"}, "grouping must be m_grouped of operands in float8, got k_grouped"),
        ("gated float8", {"activation": "clamped_swiglu"}, "activation must be silu, gelu or relu of .* float8, got"),
        ("gated float8", {"n": 64, "columns": 64}, "n must be a multiple of 128, got 64"),
        ("gated float8", {"columns": 384}, "columns must be n, or 2 n if .*, got 384"),
        ("gated float8", {"dtype": "bfloat16"}, "dtype must be bfloat16 or float32, .* float8_e4m3fn, got bfloat16"),
        ("gated float8", {"keeps_products": True}, "keeps_products must be False but of a gated .*, got True"),
        ("gated float8", {"groups": 2**30}, "groups must be at most 536870911, got 1073741824"),
    ],
)
def test_settings_that_cannot_be(case: str, change: dict[str, Any], message: str) -> None:
    op = case if case in SETTINGS else "grouped_matmul"
    settings = SETTINGS[case] | change if case in SETTINGS else settings_of(case, **change)
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        types_of(op, **settings)
