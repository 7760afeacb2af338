"""The experts between a dispatch and a combine, forward, and their one derivative.

Forward: dispatch, the products by gate and up, the unit, the product by down, combine. Backward: five products and two
exchanges. Kept for it are the dispatched rows and their routing, and the products before the unit; what the unit makes
of them is made again. A matrix in float8 has no gradient.

The product that is combined is not kept. Its rows are weighed when they are summed up, so backward a row's weight w may
as well scale what its cotangent c becomes: where x is the row's left operand and M its matrix, the cotangent of x is
w (c M^T), that of M sums (w x)^T c, and that of w is (x M) c = x (c M^T). All that is elementwise has F columns then,
and not H (SonicMoE: Guo et al., 2025, for the last of the three). A bias b of the product adds b c to that of w.

Over several nodes, in plain jax.lax, where inputs are weighed, and for products of the user's, the layer is the plain
chain of these ops, which JAX differentiates.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import zero_from_primal

from jax_ep._kit import gemm, vary
from jax_ep._kit.float8 import Float8Rows, Float8Weights
from jax_ep._kit.linear import linear
from jax_ep.ops.matmul.api import (
    add_lhs_gradients,
    gated_product,
    lhs_gradient,
    plain_ragged_dot,
    ragged_dot,
    rhs_gradient,
)
from jax_ep.ops.matmul.float8 import quantized_gated_product, quantized_product, quantized_weights
from jax_ep.ops.matmul.quantize import dequantized, quantize_rows
from jax_ep.ops.matmul.straight_through import product_tangent, ragged_dot as float8_ragged_dot
from jax_ep.ops.moe.api import run_combine, run_dispatch
from jax_ep.ops.moe.gradients import (
    combine,
    combine_tangent,
    dispatch,
    dispatch_tangent,
    inner_products,
    of_assignments,
    of_rows,
    return_rows,
    scatter_all,
    weighed,
)
from jax_ep.ops.moe.types import COMBINED, DISPATCHED, DispatchCall, Dispatched, MoeStats, Routing
from jax_ep.ops.moe.units import Experts, Unit, bias_of_rows, closed_over, with_bias

Product = Callable[[Any, Any, jax.Array], jax.Array]  # of rows, matrices and group sizes
Products = tuple[jax.Array, ...]  # by gate and up, by both in one, or by up alone

# The name by which a policy of `jax.checkpoint` keeps the products before the unit, and where JAX differentiates the
# chain, that before the combine, too.
PRODUCTS = "jax_ep_products"


class ExpertsCall(NamedTuple):
    """A validated call of a layer but for its arrays. Its experts have biases (gate, up, down), each may be None."""

    dispatch: DispatchCall
    unit: Unit
    in_float8: bool  # products of operands that are quantized, if not yet
    weigh_inputs: bool
    product: Product | None

    @property
    def has_own_derivative(self) -> bool:
        plain = self.weigh_inputs or self.product is not None or self.dispatch.group.intranode is not None
        return self.dispatch.by_kernels and not plain


def experts_of_tokens(
    call: ExpertsCall,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    experts: Experts,
    overlapped: jax.Array | None,
) -> tuple[jax.Array, MoeStats, jax.Array | None]:
    """Each token's weighted sum [T, H'] of its experts' answers, what was counted, and `overlapped`.

    `overlapped` is returned as it is. Rows that a dispatch brings are used only once it is there: otherwise XLA would
    compute it behind an asynchronous exchange. Backward, that holds for its cotangent.
    """
    operands = (tokens, expert_ids, weights, experts)
    if not call.has_own_derivative:
        return _plain(call, *operands, overlapped)
    config = call.dispatch.config
    shape = (config.capacity, experts.down.shape[1])
    unit, parameters = closed_over(call.unit, vary.result_type(shape, tokens.dtype, tokens))
    zeroed = bool(parameters) or _zeroes_unused(call)  # gradients of parameters add up all rows
    wire = "float8_rows" if call.in_float8 else config.wire
    config = dataclasses.replace(config, wire=wire, zero_unused=zeroed)
    call = call._replace(dispatch=call.dispatch._replace(config=config), unit=unit)
    return _experts(call, *operands, parameters, overlapped)


def _zeroes_unused(call: ExpertsCall) -> bool:
    """Whether rows that nobody else sees are zeroed. The GEMM core and XLA on CPUs use none of them; libraries that XLA
    calls on other GPUs may take them for the last group's, and whoever looks for NaN looks at all that is kept."""
    others_multiply = call.dispatch.group.platform != "cpu" and not gemm.has_gemm()
    return others_multiply or jax.debug_nans.value or jax.debug_infs.value


def _plain(
    call: ExpertsCall,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    experts: Experts,
    overlapped: jax.Array | None,
) -> tuple[jax.Array, MoeStats, jax.Array | None]:
    multiply: Product = call.product or (ragged_dot if call.dispatch.by_kernels else plain_ragged_dot)
    if call.in_float8:  # rows were dequantized, and are quantized again
        multiply = float8_ragged_dot
    rows, sizes, routing = run_dispatch(call.dispatch, tokens, expert_ids, weights)
    if overlapped is not None:
        rows, overlapped = jax.lax.optimization_barrier((rows, overlapped))
    stats = _stats(routing)
    if call.weigh_inputs:
        rows = weighed(rows, of_rows(routing.weights, routing))
        routing = dataclasses.replace(routing, weights=(routing.row_of >= 0).astype(jnp.float32))
    products = checkpoint_name(tuple(multiply(rows, matrix, sizes) for matrix in experts.first), PRODUCTS)
    first_biases, down_bias = _split(experts, experts.biases)
    inner = call.unit(products, first_biases, sizes).astype(tokens.dtype)
    answers = checkpoint_name(multiply(inner, experts.down, sizes), PRODUCTS).astype(tokens.dtype)
    answers = with_bias(answers, down_bias, sizes)
    by_kernels = call.dispatch.by_kernels
    return run_combine(call.dispatch.group, answers, routing, by_kernels=by_kernels), stats, overlapped


def _split(experts: Experts, biases: Any) -> tuple[tuple[jax.Array | None, ...], jax.Array | None]:
    """The biases of the first products of `experts`, and that of down; or their tangents."""
    return (biases[1:2] if experts.gate is None else biases[:2]), biases[2]


def _stats(routing: Routing) -> MoeStats:
    return MoeStats(routing.counts.sum(axis=0, dtype=jnp.int32), routing.dropped, routing.invalid)


class _Kept(NamedTuple):
    """What derivatives need besides cotangents or tangents, each once."""

    dispatched: Dispatched
    products: Products
    experts: Experts
    parameters: tuple[jax.Array, ...]


class _Changes(NamedTuple):
    """Tangents or cotangents of all floats; None of what has none."""

    tokens: jax.Array
    weights: jax.Array
    experts: Experts
    parameters: tuple[jax.Array, ...]
    overlapped: jax.Array | None


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _experts(
    call: ExpertsCall,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    experts: Experts,
    parameters: tuple[jax.Array, ...],
    overlapped: jax.Array | None,
) -> tuple[jax.Array, MoeStats, jax.Array | None]:
    operands = (tokens, expert_ids, weights, experts, parameters, overlapped)
    combined, kept, overlapped = _forward(call, *operands, keep_products=False)
    return combined, _stats(kept.dispatched.routing), overlapped


@_experts.defjvp
def _experts_jvp(call: ExpertsCall, primals: Any, tangents: Any) -> Any:
    combined, kept, overlapped = _forward(call, *primals, keep_products=True)
    d_tokens, _, d_weights, d_experts, d_parameters, d_overlapped = tangents
    d_matrices = {
        name: None if isinstance(getattr(kept.experts, name), Float8Weights) else getattr(d_experts, name)
        for name in ("gate", "up", "down")
    }
    d_experts = dataclasses.replace(d_experts, **d_matrices)
    changes = _Changes(d_tokens, d_weights, d_experts, d_parameters, d_overlapped)
    d_combined, d_overlapped = linear(partial(_tangents, call), partial(_cotangents, call), kept, changes)
    stats = _stats(kept.dispatched.routing)
    return (combined, stats, overlapped), (d_combined, zero_from_primal(stats), d_overlapped)


def _forward(
    call: ExpertsCall,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    experts: Experts,
    parameters: tuple[jax.Array, ...],
    overlapped: jax.Array | None,
    *,
    keep_products: bool,
) -> tuple[jax.Array, _Kept, jax.Array | None]:
    """The sums, what derivatives need (without `keep_products` no products), and `overlapped`."""
    group, config = call.dispatch.group, call.dispatch.config
    dispatched = dispatch(group, config, tokens, expert_ids, weights)
    if overlapped is not None:
        rows, overlapped = jax.lax.optimization_barrier((dispatched.rows, overlapped))
        dispatched = dispatched._replace(rows=rows)
    dispatched = checkpoint_name(dispatched, DISPATCHED)
    kept = _Kept(dispatched, (), experts, parameters)
    inner, products = _up_and_gate(call, kept, tokens.dtype, keep_products=keep_products)
    _, sizes, routing = dispatched
    multiply: Any = quantized_product if call.in_float8 else ragged_dot
    answers = multiply(inner, experts.down, sizes)
    answers = with_bias(answers, _split(experts, experts.biases)[1], sizes)
    combined = checkpoint_name(combine(group, answers, routing.weights, routing), COMBINED)
    return combined, kept._replace(products=products), overlapped


def _up_and_gate(
    call: ExpertsCall, kept: _Kept, dtype: Any, *, keep_products: bool
) -> tuple[jax.Array | Float8Rows, Products]:
    """What the unit makes of the products of dispatched rows, and these.

    On Hopper both are one kernel where the unit is known and without biases; but in float8 that keeps no products, and
    quantizes the result, as the product by down would.
    """
    (rows, sizes, _), experts = kept.dispatched, kept.experts
    biases, _ = _split(experts, experts.biases)
    matrices: Any = experts.first
    known = call.unit.known if all(bias is None for bias in biases) else None
    if known is not None and not call.in_float8:

        def gated(rows: jax.Array, sizes: jax.Array, *matrices: jax.Array) -> tuple[jax.Array, Products]:
            products = tuple(ragged_dot(rows, matrix, sizes) for matrix in matrices)
            return call.unit(products, biases, sizes), products if keep_products else ()

        inner, products = gated_product(known, gated, rows, sizes, *matrices, keep_products=keep_products)
        return inner, checkpoint_name(products, PRODUCTS)
    if known is not None and not keep_products and dtype == jnp.bfloat16:

        def quantized(rows: Float8Rows, sizes: jax.Array, *matrices: Float8Weights) -> Float8Rows:
            products = tuple(quantized_product(rows, matrix, sizes) for matrix in matrices)
            return quantize_rows(call.unit(products, biases, sizes))

        return quantized_gated_product(known, quantized, rows, sizes, *map(quantized_weights, matrices)), ()
    multiply = partial(quantized_product, dtype=dtype) if call.in_float8 else ragged_dot
    products = checkpoint_name(tuple(multiply(rows, matrix, sizes) for matrix in matrices), PRODUCTS)
    return call.unit(products, biases, sizes, kept.parameters), products if keep_products else ()


def _unit_of_kept(call: ExpertsCall, kept: _Kept) -> Callable[..., jax.Array]:
    """The unit as a function of what is differentiated in it: products, biases and parameters."""
    return lambda products, biases, parameters: call.unit(products, biases, kept.dispatched.group_sizes, parameters)


def _tangents(call: ExpertsCall, kept: _Kept, changes: _Changes) -> tuple[jax.Array, jax.Array | None]:
    (rows, sizes, routing), products, experts, parameters = kept
    d_experts = changes.experts
    first_biases, down_bias = _split(experts, experts.biases)
    d_first_biases, d_down_bias = _split(experts, d_experts.biases)
    d_rows, d_arrived = dispatch_tangent(call.dispatch.group, changes.tokens, changes.weights, routing)
    d_products = tuple(
        product_tangent(rows, getattr(experts, name), sizes, d_rows, getattr(d_experts, name)) for name in experts.names
    )
    inner, d_inner = jax.jvp(
        _unit_of_kept(call, kept),
        (products, first_biases, parameters),
        (d_products, d_first_biases, changes.parameters),
    )
    answers = with_bias(ragged_dot(inner, dequantized(experts.down, inner.dtype), sizes), down_bias, sizes)
    d_answers = product_tangent(inner, experts.down, sizes, d_inner, d_experts.down)
    d_answers = with_bias(d_answers, d_down_bias, sizes)
    changed = (d_answers, d_arrived)
    return combine_tangent(call.dispatch.group, answers, routing.weights, routing, *changed)[0], changes.overlapped


def _cotangents(call: ExpertsCall, kept: _Kept, cotangents: tuple[jax.Array, jax.Array | None]) -> _Changes:
    (rows, sizes, routing), products, experts, parameters = kept
    arrived, d_overlapped = cotangents
    group, (first_biases, down_bias) = call.dispatch.group, _split(experts, experts.biases)

    arrived = scatter_all(group, [arrived], [routing])
    if d_overlapped is not None:
        arrived, d_overlapped = jax.lax.optimization_barrier((arrived, d_overlapped))
    dtype, row_weights = arrived.dtype, of_rows(routing.weights, routing)
    inner, pull = jax.vjp(_unit_of_kept(call, kept), products, first_biases, parameters)
    back = lhs_gradient(arrived, dequantized(experts.down, dtype), sizes)
    d_products, d_biases, d_parameters = pull(weighed(back, row_weights))
    d_down = _matrix_gradient(weighed(inner, row_weights), experts.down, arrived, sizes)
    d_row_weights, d_down_bias = inner_products(back, inner), None
    if down_bias is not None:
        d_row_weights, d_down_bias = _down_bias_gradients(row_weights, down_bias, arrived, sizes, d_row_weights)

    wide = dequantized(rows, dtype)
    d_matrices = {
        name: _matrix_gradient(wide, getattr(experts, name), each, sizes)
        for name, each in zip(experts.names, d_products, strict=True)
    }
    d_rows = jnp.zeros_like(inner, shape=wide.shape)
    matrices = tuple(dequantized(matrix, dtype) for matrix in experts.first)
    d_rows = add_lhs_gradients(d_rows, d_products, matrices, sizes)
    d_tokens, d_weights = return_rows(group, d_rows, of_assignments(d_row_weights, routing), routing)
    d_biases = (*d_biases, d_down_bias) if len(d_biases) == 2 else (None, *d_biases, d_down_bias)
    d_experts = dataclasses.replace(experts, **d_matrices, down=d_down, biases=d_biases)
    return _Changes(d_tokens, d_weights, d_experts, d_parameters, d_overlapped)


def _matrix_gradient(rows: jax.Array, matrix: Any, cotangent: jax.Array, sizes: jax.Array) -> jax.Array | None:
    return None if isinstance(matrix, Float8Weights) else rhs_gradient(rows, cotangent, sizes)


def _down_bias_gradients(
    row_weights: jax.Array, bias: jax.Array, arrived: jax.Array, sizes: jax.Array, d_row_weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`d_row_weights` plus what the bias of down adds to it, and the cotangent of that bias."""

    def share(row_weights: jax.Array, bias: jax.Array) -> jax.Array:
        return row_weights[:, None] * bias_of_rows(bias, sizes, row_weights.shape[0])

    by_bias, d_bias = jax.vjp(share, row_weights, bias)[1](arrived.astype(jnp.float32))
    return d_row_weights + by_bias, d_bias
