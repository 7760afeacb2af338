"""The experts between a dispatch and a combine, forward, and their one derivative.

Let x [H] be a dispatched row, and w the weight by which combine scales its output y. Forward:

    g = x G + b_G,  u = x U + b_U      products by gate and up, saved
    a = unit(g, u)                     computed again in the backward pass
    y = a D + b_D                      not saved

Backward, let c be the cotangent of w y, which one exchange sends to the row. Sums are over the rows of an expert.

    e = c D^T
    (dg, du) = unit'(w e)              the transpose of the unit's derivative
    dw = a . e + b_D . c               which is y . c
    dD = sum (w a)^T c,  db_D = sum w c
    dG = sum x^T dg,     db_G = sum dg,     and so for U
    dx = dg G^T + du U^T               which the other exchange brings back and adds up

We do not save y: since combine only scales its rows, w scales e and a [F] instead of c and y [H] (SonicMoE: Guo et al.,
2025). Matrices in float8 have no gradient.

JAX differentiates the plain chain of these ops instead if the layer spans several nodes, runs in plain jax.lax, scales
its inputs, or has a `product` function.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import zero_from_primal

from jax_ep._kit import gemm, vary
from jax_ep._kit.checks import PyTree
from jax_ep._kit.float8 import Float8Rows, Float8Weights
from jax_ep._kit.linear import linear
from jax_ep.group import Group
from jax_ep.ops.matmul import api as matmul
from jax_ep.ops.matmul.float8 import gated_product_to_float8, quantize_and_multiply, straight_through_product
from jax_ep.ops.matmul.gated import ACTIVATIONS
from jax_ep.ops.matmul.quantize import as_array, as_float8_weights, quantize_rows
from jax_ep.ops.matmul.rows import GatheredRows, Rows, dense_rows, matrix_and_indices
from jax_ep.ops.moe import kernels
from jax_ep.ops.moe.api import run_combine, run_dispatch
from jax_ep.ops.moe.kernels import inner_products, of_assignments, weighed
from jax_ep.ops.moe.layout import expert_of_rows
from jax_ep.ops.moe.settings import DispatchCall
from jax_ep.ops.moe.types import COMBINED, MoeStats, Routing, Unexpanded
from jax_ep.ops.moe.units import (
    Biases,
    Experts,
    Unit,
    bias_of_rows,
    closed_over,
    product_biases,
    sums_by_expert,
    with_bias,
)

ProductFunction = Callable[[jax.Array, PyTree, jax.Array], jax.Array]  # (rows, matrices, group sizes)
Products = tuple[jax.Array, ...]  # by gate and up, by both in one, or by up alone
Parameters = tuple[jax.Array, ...]  # of the unit (`closed_over`)
_Ids = TypeVar("_Ids")  # jax.Array; None among tangents and cotangents

# The name of the products with gate and up for policies of `jax.checkpoint`; in the plain chain also the product with
# down.
PRODUCTS = "jax_ep_products"


class ExpertsCall(NamedTuple):
    dispatch: DispatchCall
    unit: Unit
    in_float8: bool  # products are in float8: arrays are quantized
    weigh_inputs: bool
    product: ProductFunction | None

    @property
    def has_own_derivative(self) -> bool:
        plain = self.weigh_inputs or self.product is not None or self.dispatch.group.intranode is not None
        return self.dispatch.by_kernels and not plain


class Operands(NamedTuple, Generic[_Ids]):
    """The arrays of a layer, or their tangents or cotangents, which may be None."""

    tokens: jax.Array
    expert_ids: _Ids
    weights: jax.Array
    experts: Experts
    parameters: Parameters = ()


def experts_of_tokens(call: ExpertsCall, operands: Operands[jax.Array]) -> tuple[jax.Array, MoeStats]:
    """Each token's weighted sum [T, H'] of its experts' outputs, and the layer's counts."""
    tokens, _, _, experts, _ = operands
    dispatch = call.dispatch
    if not call.has_own_derivative:
        out = run_dispatch(dispatch, *operands[:3])
        answers, weighed_routing = plain_answers(call, out.rows, out.group_sizes, out.routing, experts)
        combined = run_combine(dispatch.group, answers, weighed_routing, by_kernels=dispatch.by_kernels)
        return combined, stats_of(out.routing)
    shape = (dispatch.config.capacity, experts.down.shape[1])
    unit, parameters = closed_over(call.unit, vary.result_type(shape, tokens.dtype, tokens))
    zeroed = _zeroes_unused(call)
    # With several ranks a gather costs products more than expansion costs the exchange (docs/negative-results.md).
    if dispatch.group.size == 1 and not (zeroed or call.in_float8):
        dispatch = dispatch.unexpanded(tokens.shape[0])
    config = dataclasses.replace(
        dispatch.config,
        wire="float8_rows" if call.in_float8 else dispatch.config.wire,
        zero_unused=zeroed or bool(parameters),  # gradients of parameters add up all rows
    )
    call = call._replace(dispatch=dispatch._replace(config=config), unit=unit)
    return _experts(call, operands._replace(parameters=parameters))


def _zeroes_unused(call: ExpertsCall) -> bool:
    """Whether unused rows are zeroed. Libraries that XLA calls on old GPUs may add them to the last group, and
    `jax.debug_nans` reads all rows. Our kernels, and XLA on CPUs, do not read them."""
    others_multiply = call.dispatch.group.platform != "cpu" and not (gemm.has_gemm() or gemm.pallas_platforms())
    return others_multiply or jax.debug_nans.value or jax.debug_infs.value


def plain_answers(
    call: ExpertsCall,
    rows: jax.Array,
    sizes: jax.Array,
    routing: Routing,
    experts: Experts,
    parameters: Parameters = (),
) -> tuple[jax.Array, Routing]:
    """The experts' outputs for expanded rows, and the routing for combine. JAX differentiates this function."""
    multiply: Callable[..., jax.Array] = call.product or partial(
        matmul.ragged_dot, implementation="auto" if call.dispatch.by_kernels else "xla"
    )
    if call.in_float8:  # rows were dequantized, and are quantized again
        multiply = partial(straight_through_product, np.dtype(rows.dtype))
    if call.weigh_inputs:
        rows = weighed(rows, routing.weight_of_row())
        routing = dataclasses.replace(routing, weights=(routing.row_of >= 0).astype(jnp.float32))
    first_biases, down_bias = product_biases(experts)
    first = zip(experts.first_matrices, first_biases, strict=True)
    products = tuple(with_bias(multiply(rows, matrix, sizes), bias, sizes) for matrix, bias in first)
    inner = _unit_of_rows(call, routing, checkpoint_name(products, PRODUCTS), parameters).astype(rows.dtype)
    answers = checkpoint_name(multiply(inner, experts.down, sizes), PRODUCTS).astype(rows.dtype)
    return with_bias(answers, down_bias, sizes), routing


def _unit_of_rows(call: ExpertsCall, routing: Routing, products: Products, parameters: Parameters) -> jax.Array:
    """The unit of the products. A user's function gets 1 in rows without an assignment: its slope at 0 may be infinite,
    and gradients of its parameters add up all rows."""
    if call.unit.known is None:
        mask = routing.row_mask()[:, None]
        products = tuple(jnp.where(mask, each, jnp.ones((), each.dtype)) for each in products)
    return call.unit(products, parameters)


def stats_of(routing: Routing) -> MoeStats:
    return MoeStats(routing.counts.sum(axis=0, dtype=jnp.int32), routing.dropped, routing.invalid)


class Residuals(NamedTuple):
    rows: Rows | Float8Rows  # [C, H], as dispatched: expanded, or where the tokens landed
    sizes: jax.Array
    routing: Routing
    products: Products
    experts: Experts
    parameters: Parameters


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _experts(call: ExpertsCall, operands: Operands[jax.Array]) -> tuple[jax.Array, MoeStats]:
    combined, residuals = _forward(call, operands, keep_products=False)
    return combined, stats_of(residuals.routing)


@_experts.defjvp
def _experts_jvp(call: ExpertsCall, primals: tuple[Operands[jax.Array]], tangents: tuple[Operands[PyTree]]) -> PyTree:
    combined, residuals = _forward(call, *primals, keep_products=True)
    [d_operands] = tangents
    d_matrices = {
        name: None if isinstance(getattr(residuals.experts, name), Float8Weights) else getattr(d_operands.experts, name)
        for name in ("gate", "up", "down")
    }
    d_operands = d_operands._replace(expert_ids=None, experts=dataclasses.replace(d_operands.experts, **d_matrices))
    d_combined = linear(partial(_tangents, call), partial(_cotangents, call), residuals, d_operands)
    stats = stats_of(residuals.routing)
    return (combined, stats), (d_combined, zero_from_primal(stats))


def _forward(call: ExpertsCall, operands: Operands[jax.Array], *, keep_products: bool) -> tuple[jax.Array, Residuals]:
    group = call.dispatch.group
    out = run_dispatch(call.dispatch, *operands[:3])
    rows, routing = out.rows, out.routing
    if isinstance(out, Unexpanded):
        gathered = GatheredRows(rows, out.indices)
        rows = gathered if keep_products else rows_to_multiply(gathered, out.group_sizes)
    residuals = Residuals(rows, out.group_sizes, routing, (), operands.experts, operands.parameters)
    answers, products = answers_of(call, residuals, operands.tokens.dtype, keep_products=keep_products)
    combined = checkpoint_name(kernels.intranode_combine(group, answers, routing.weights, routing), COMBINED)
    return combined, residuals._replace(products=products)


def rows_to_multiply(rows: GatheredRows, sizes: jax.Array) -> Rows:
    """The rows, or a copy of few rows. Products of few rows wait for their weights, and a kernel that gathers has room
    for fewer weights: the gated product of 256 rows and 128 experts of Qwen3-30B takes 194 us on an H200, and 168 us
    after a copy."""
    return dense_rows(rows) if rows.indices.size <= 16 * sizes.size else rows


def answers_of(
    call: ExpertsCall, residuals: Residuals, dtype: np.dtype, *, keep_products: bool
) -> tuple[jax.Array, Products]:
    """The experts' outputs for dispatched rows, and the products with gate and up if `keep_products`."""
    inner, products = _up_and_gate(call, residuals, dtype, keep_products=keep_products)
    down, sizes, (_, bias) = residuals.experts.down, residuals.sizes, product_biases(residuals.experts)
    if call.in_float8 or isinstance(inner, Float8Rows):
        return with_bias(quantize_and_multiply(inner, down, sizes), bias, sizes), products
    if bias is None:
        return matmul.ragged_dot(inner, down, sizes), products

    def composed(inner: jax.Array, sizes: jax.Array, down: jax.Array, bias: jax.Array) -> jax.Array:
        return with_bias(matmul.ragged_dot(inner, down, sizes), bias, sizes)

    return matmul.biased_product(composed, inner, sizes, down, bias), products


def _up_and_gate(
    call: ExpertsCall, residuals: Residuals, dtype: np.dtype, *, keep_products: bool
) -> tuple[jax.Array | Float8Rows, Products]:
    """The unit of the products with gate and up, and these products.

    On Hopper one kernel computes a known unit. In float8 the kernel takes no biases, keeps no products, and quantizes
    its result.
    """
    rows, sizes, routing, _, experts, parameters = residuals
    matrices, (biases, _) = experts.first_matrices, product_biases(experts)

    def product(rows: Rows | Float8Rows, matrix: PyTree, sizes: jax.Array) -> jax.Array:
        if isinstance(rows, Float8Rows):
            return quantize_and_multiply(rows, matrix, sizes, dtype=dtype)
        dense, indices = matrix_and_indices(rows)
        return matmul.ragged_dot(dense, matrix, sizes, lhs_indices=indices)

    def composed(rows: Rows | Float8Rows, sizes: jax.Array, *operands: PyTree) -> tuple[jax.Array, Products]:
        split = len(matrices)
        added = operands[split:] or (None,) * split
        products = tuple(
            with_bias(product(rows, matrix, sizes), bias, sizes)
            for matrix, bias in zip(operands[:split], added, strict=True)
        )
        inner = _unit_of_rows(call, routing, products, parameters)
        return inner, products if keep_products else ()

    def composed_to_float8(*operands: PyTree) -> Float8Rows:
        return quantize_rows(composed(*operands)[0])

    added: tuple[jax.Array, ...] = ()
    if given := [bias for bias in biases if bias is not None]:  # a kernel takes all biases or none
        zeros = jnp.zeros_like(given[0])
        added = tuple(zeros if bias is None else bias for bias in biases)
    known = call.unit.known
    if known is not None and not isinstance(rows, Float8Rows):
        inner, products = matmul.gated_product(
            known, composed, rows, sizes, matrices, added, keep_products=keep_products
        )
        return inner, checkpoint_name(products, PRODUCTS)
    kernel_takes = not (added or keep_products) and dtype == jnp.bfloat16
    if isinstance(rows, Float8Rows) and known is not None and kernel_takes and known.activation in ACTIVATIONS:
        in_float8 = map(as_float8_weights, matrices)
        return gated_product_to_float8(known.activation, composed_to_float8, rows, sizes, *in_float8), ()
    inner, products = composed(rows, sizes, *matrices, *added)
    return inner, checkpoint_name(products, PRODUCTS)


def _tangents(call: ExpertsCall, residuals: Residuals, d_operands: Operands[None]) -> jax.Array:
    rows, sizes, routing, _, experts, parameters = residuals
    group, d_experts = call.dispatch.group, d_operands.experts
    d_rows = dense_rows(_at_rows(group, d_operands.tokens, rows, routing))
    names = [name for name in (*experts.first_names, "down") if getattr(d_experts, name) is not None]

    def sums(rows: jax.Array, weights: jax.Array, matrices: PyTree, biases: PyTree, parameters: PyTree) -> jax.Array:
        moved = dataclasses.replace(experts, **dict(zip(names, matrices, strict=True)), biases=biases)
        answers, _ = plain_answers(call, rows, sizes, routing, moved, parameters)
        return kernels.intranode_combine(group, answers, weights, routing)

    def operands_of(rows: jax.Array, weights: jax.Array, experts: Experts, parameters: PyTree) -> tuple[PyTree, ...]:
        return rows, weights, [getattr(experts, name) for name in names], experts.biases, parameters

    wide = dense_rows(rows) if isinstance(rows, GatheredRows) else as_array(rows, d_operands.tokens.dtype)
    primals = operands_of(wide, routing.weights, experts, parameters)
    d_weights = kernels.sent_weights(group, d_operands.weights, routing)
    tangents = operands_of(d_rows, d_weights, d_experts, d_operands.parameters)
    return jax.jvp(sums, primals, tangents)[1]


def _cotangents(call: ExpertsCall, residuals: Residuals, d_combined: jax.Array) -> Operands[None]:
    """The equations at the top of this file, in their order."""
    x, sizes, routing, products, experts, parameters = residuals
    group, dtype, (b_first, b_down) = call.dispatch.group, d_combined.dtype, product_biases(experts)
    c = _at_rows(group, d_combined, x, routing)
    w = routing.weight_of_row()
    a, transposed_unit = jax.vjp(partial(_unit_of_rows, call, routing), products, parameters)

    e = matmul.lhs_gradient(c, as_array(experts.down, dtype), sizes)
    d_products, d_parameters = transposed_unit(weighed(e, w))
    wa, dw = weighed(a, w), inner_products(e, a)
    d_down, db_down = _matrix_gradient(wa, experts.down, c, sizes), None
    if b_down is not None:
        db_down, by_bias = _down_bias_cotangents(b_down, c, sizes, w, routing)
        dw += by_bias
    wide = x if isinstance(x, GatheredRows) else as_array(x, dtype)
    d_matrices = {
        name: _matrix_gradient(wide, getattr(experts, name), each, sizes)
        for name, each in zip(experts.first_names, d_products, strict=True)
    }
    dx = matmul.sum_of_lhs_gradients(d_products, tuple(as_array(m, dtype) for m in experts.first_matrices), sizes)
    d_tokens, d_weights = kernels.return_rows(group, routing, (dx, of_assignments(dw, routing)))
    db_first = tuple(
        None if bias is None else sums_by_expert(sizes, each) for bias, each in zip(b_first, d_products, strict=True)
    )
    d_biases = _bias_cotangents(experts, db_first, db_down)
    d_experts = dataclasses.replace(experts, **d_matrices, down=d_down, biases=d_biases)
    return Operands(d_tokens, None, d_weights, d_experts, d_parameters)


def _at_rows(group: Group, tokens: jax.Array, like: Rows | Float8Rows, routing: Routing) -> Rows:
    """Tangents or cotangents [T, H] of tokens, moved to the rows of `like`."""
    if isinstance(like, GatheredRows):
        return dataclasses.replace(like, matrix=tokens)
    return kernels.scatter(group, tokens, routing)


def _bias_cotangents(experts: Experts, d_first: Sequence[jax.Array | None], d_down: jax.Array | None) -> Biases:
    """The cotangents of `experts.biases` from those of `product_biases`."""

    def arranged(biases: Biases | None) -> tuple[Sequence[jax.Array | None], jax.Array | None]:
        return product_biases(dataclasses.replace(experts, biases=biases))

    return jax.vjp(arranged, experts.biases)[1]((d_first, d_down))[0]


def _down_bias_cotangents(
    bias: jax.Array, d_answers: Rows, sizes: jax.Array, row_weights: jax.Array, routing: Routing
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of the bias of down [E / R, H] and, by the bias, of the rows' weights [C]."""
    if not isinstance(d_answers, GatheredRows):
        both = jnp.pad(jnp.stack(_summands(row_weights, bias.dtype), axis=1), ((0, 0), (0, 6)))
        d_bias = matmul.rhs_gradient(both, d_answers, sizes)[:, :2].astype(jnp.float32).sum(axis=1)
        by_weight = inner_products(d_answers, bias_of_rows(bias, sizes, row_weights.shape[0]))
        return d_bias.astype(bias.dtype), by_weight
    # All rows belong to this rank's tokens. Products with the tokens' cotangents [T, H] read fewer bytes than sums of
    # rows [C, H].
    product = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    tokens, expert_of_row = d_answers.matrix, expert_of_rows(sizes, row_weights.shape[0])
    expert = of_assignments(expert_of_row, routing)[0]
    weight = of_assignments(row_weights, routing)[0]
    is_expert = expert[:, :, None] == jnp.arange(bias.shape[0], dtype=expert.dtype)[None, None]
    weights = jnp.sum(jnp.where(is_expert, weight[:, :, None], 0), axis=1)
    high, low = (product("te,th->eh", part, tokens) for part in _summands(weights, bias.dtype))
    by_weight = product("th,eh->te", tokens, bias).at[d_answers.indices, expert_of_row].get(mode="clip")
    return (high + low).astype(bias.dtype), by_weight


def _summands(weights: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Two arrays of `dtype` whose sum is `weights` to within 2^-16, because products of 16-bit operands are exact."""
    high = weights.astype(dtype)
    return high, (weights - high.astype(weights.dtype)).astype(dtype)


def _matrix_gradient(rows: Rows, matrix: PyTree, cotangent: Rows, sizes: jax.Array) -> jax.Array | None:
    return None if isinstance(matrix, Float8Weights) else matmul.rhs_gradient(rows, cotangent, sizes)
