"""Products where a user's model is quantized by qwix: by qwix on every platform, or an error."""

from functools import partial
from typing import Any

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest
from conftest import OpenGroup

from jax_ep import Experts, Group, all_gather_matmul, lax, moe_mlp
from jax_ep._kit import gemm

qwix = pytest.importorskip("qwix")
BFLOAT16, _, FLOAT32 = helpers.DTYPES
FLOAT8 = jnp.float8_e4m3fn
P = jax.sharding.PartitionSpec
EVERYWHERE, ELSEWHERE = ".*", "elsewhere"


class Model(nn.Module):
    """A model of a user's, which runs the program."""

    program: Any

    def __call__(self, *operands: Any) -> Any:
        return self.program(*operands)


def quantized(program: Any, modules: str = EVERYWHERE, dtype: Any = FLOAT8, provider: Any = qwix.QtProvider) -> Any:
    """The program in a model of which the provider quantizes `modules`."""
    rule = qwix.QuantizationRule(module_path=modules, weight_qtype=dtype, act_qtype=dtype)
    model = qwix.quantize_model(Model(program), provider([rule]))
    return jax.jit(lambda *operands: model.apply({}, *operands))


@pytest.mark.matrix(1)
@pytest.mark.usefixtures("native", "core")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("options", [{}, {"implementation": "kernels"}, {"weigh_inputs": True}], ids=str)
@pytest.mark.parametrize("modules", [EVERYWHERE, ELSEWHERE])
def test_layer(modules: str, options: Any, check_vma: bool, open_group: OpenGroup, rng: helpers.Rng) -> None:
    """Forward and backward, of which JAX takes the derivative after the model has returned; a rule for other modules
    changes nothing. Float32 decides few roundings to float8 otherwise than float64."""
    case = helpers.draw_case(rng, 4, 6, 3, 8, 16)
    model, cotangent = moe_oracle.draw_layer(rng, case.tokens, case.weights, 8, 24), case.tokens[:, ::-1]
    case.ids[0, 0], case.ids[1, :, 1] = (-1, 8, helpers.BIG), case.ids[1, :, 0]
    group, check_vma = open_group(), check_vma and "cpu" not in gemm.pallas_platforms()

    def layer(model: Any, ids: jax.Array) -> jax.Array:
        return helpers.moe_sums(model.tokens, ids, *model[1:], group=group, **options)

    run = quantized(helpers.per_rank(layer, group.mesh, check_vma=check_vma), modules)
    out, pull = jax.vjp(lambda m: run(m, case.ids), jax.tree.map(jnp.asarray, model))
    found = helpers.fetch((out, pull(jnp.asarray(cotangent))[0]))
    plain, in_float8 = (
        moe_oracle.gated_experts(model, case.ids, cotangent, weigh_inputs="weigh_inputs" in options, qwix=qwix)
        for qwix in (False, True)
    )
    right, wrong = (in_float8, plain) if modules == EVERYWHERE else (plain, in_float8)
    for mine, x, y in zip(*map(jax.tree.leaves, (found, right, wrong)), strict=True):
        assert helpers.relative(mine, x) < 1e-4 < 1e-2 < helpers.relative(mine, y)


@pytest.mark.usefixtures("native", "core")
@pytest.mark.parametrize("op", ["lax.ragged_dot", "lax.ragged_dot_general", "moe_mlp"])
def test_programs_for_gpus(op: str, group: Group) -> None:
    """None of our kernels multiplies, also where this host has no GPU."""
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
    products = {
        "lax.ragged_dot": lax.ragged_dot,
        "lax.ragged_dot_general": partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers),
        "moe_mlp": lambda x, m, _: layer(x, m, group),
    }
    program = jax.grad(lambda x, m: products[op](x, m, jnp.array([9, 7])).astype(jnp.float32).sum(), argnums=(0, 1))
    operands = jnp.ones((32, 32), BFLOAT16), jnp.ones((4, 32, 32), BFLOAT16)

    def text(program: Any) -> str:
        mapped = jax.shard_map(program, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
        return jax.jit(mapped).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()

    def kernels(text: str) -> list[str]:
        return [kernel for kernel in ("jax_ep_grouped_matmul", "triton") if kernel in text]

    plain, by_qwix = text(program), text(quantized(program, dtype=jnp.int8))
    assert len(kernels(plain)) == (gemm.has_gemm() or bool(gemm.pallas_platforms()))
    assert "xi8>" in by_qwix
    assert not kernels(by_qwix)


def layer(x: jax.Array, matrix: jax.Array, group: Group, **options: Any) -> jax.Array:
    """Without a gated unit, with the matrices [E / R, H, H], for tokens without weights."""
    ids = jnp.zeros((len(x), 1), jnp.int32)
    return helpers.moe_sums(x, ids, None, None, matrix, matrix, activation=jnp.tanh, group=group, **options)


@pytest.mark.usefixtures("native")
@pytest.mark.filterwarnings("ignore:'VariableState' was removed")  # which qwix uses
def test_refusals(group: Group) -> None:
    """Of what qwix would not quantize."""
    x, matrix = jnp.ones((8, 128)), jnp.ones((4, 128, 128))
    refused: list[tuple[Any, Any, str]] = [
        (qwix.PtqProvider, partial(layer, group=group), "moe_mlp: products must be those of jax.lax.ragged_dot"),
        (qwix.QtProvider, partial(layer, group=group, precision="float8"), "moe_mlp: precision must not be given"),
        (
            qwix.QtProvider,
            lambda x, m: lax.ragged_dot(x, m, jnp.array([2, 2]), implementation="pallas"),
            "ragged_dot: implementation must not be given .*, got 'pallas'",
        ),
        (
            qwix.QtProvider,
            lambda x, m: all_gather_matmul(x, m[0], group=group, implementation="kernels"),
            "all_gather_matmul: implementation must not be given .*, got 'kernels'",
        ),
    ]
    for provider, program, match in refused:
        mapped = helpers.per_rank(lambda x, m, program=program: program(x, m), group.mesh)
        with pytest.raises(ValueError, match=f"{match}.* product="):
            jax.eval_shape(quantized(mapped, provider=provider), x[None].repeat(2, 0), matrix[None].repeat(2, 0))
    for provider in (qwix.PtqProvider, qwix.QtProvider):
        program = helpers.per_rank(partial(layer, group=group, product=qwix.ragged_dot), group.mesh)
        jax.eval_shape(quantized(program, provider=provider), x[None].repeat(2, 0), matrix[None].repeat(2, 0))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("op", ["all_gather_matmul", "shared experts"])
def test_dense_products(op: str, group: Group, rng: helpers.Rng) -> None:
    """Those of jax.lax.dot_general, also after a program of the same shapes without qwix."""
    x, first, second = (rng.standard_normal((2, *shape)).astype(FLOAT32) for shape in ((8, 32), (32, 16), (16, 32)))

    def program(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        if op == "all_gather_matmul":
            return all_gather_matmul(x, first, group=group)
        ids, shared = jnp.full((len(x), 1), -1), Experts(gate=None, up=first, down=second, activation="relu")
        unused = Experts(gate=None, up=jnp.stack([first] * 2), down=jnp.stack([second] * 2))
        return moe_mlp(x, ids, None, unused, group=group, shared_experts=shared)[0]

    plain, by_qwix = (
        helpers.fetch(run(*map(jnp.asarray, (x, first, second))))
        for run in (helpers.per_rank(program, group.mesh), quantized(helpers.per_rank(program, group.mesh)))
    )
    rounded = moe_oracle.through_float8
    with moe_oracle.exactly():
        wide = [jnp.asarray(each, jnp.float64) for each in (x, first, second)]
        if op == "all_gather_matmul":
            wide[0] = jnp.broadcast_to(wide[0].reshape(1, 16, 32), (2, 16, 32))
        wanted = rounded(wide[0], 32) @ rounded(wide[1], 32, 1)
        if op == "shared experts":
            wanted = rounded(jax.nn.relu(wanted), 16) @ rounded(wide[2], 16, 1)
    assert helpers.relative(by_qwix, np.asarray(wanted)) < 1e-4 < 1e-2 < helpers.relative(plain, np.asarray(wanted))
