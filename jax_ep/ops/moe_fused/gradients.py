"""The fused ops with their derivatives: backward, five products and two exchanges for a layer of gate, up and down.

Kept for the backward pass, each once: dispatched rows and their routing, the products before the activation, and what
it makes of them; where both halves are one op (`experts`) not even that, which elementwise work makes again. Products
by the transposed right operands go with the exchanges (chain.py); the gradients of the right operands, grouped by the
contraction, wait for nothing but their operands. Forward, tangents go by the ops of the chain. An operand in float8 has
none.

The product that is combined is not kept. Its rows are weighed when they are summed up, so backward a row's weight w may
as well scale what its cotangent c becomes: where x is the row's left operand and M its matrix, the cotangent of x is
w (c M^T), that of M sums (w x)^T c, and that of w is (x M) c = x (c M^T). All that is elementwise has F columns then,
and not H (SonicMoE: Guo et al., 2025, for the last of the three).
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import zero_from_primal

from jax_ep._kit.float8 import Float8, Float8Rows, Float8Weights
from jax_ep._kit.linear import linear
from jax_ep.ops.matmul.api import ragged_dot, rhs_gradient
from jax_ep.ops.matmul.quantize import widened
from jax_ep.ops.matmul.straight_through import product_tangent
from jax_ep.ops.moe.gradients import (
    combine_tangent,
    dispatch_tangent,
    inner_products,
    of_assignments,
    of_rows,
    weighed,
)
from jax_ep.ops.moe.types import Dispatched, Routing
from jax_ep.ops.moe_fused import chain
from jax_ep.ops.moe_fused.types import Counted, FirstCall, LastCall, Matrices, Matrix, Rows, outcome


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def dispatch_dot(
    call: FirstCall,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    rhs: Matrices,
    beside: jax.Array | None,
) -> tuple[Any, Dispatched, jax.Array | None]:
    """`beside` is returned as it is: see `chain.dispatch_multiply`."""
    operands = (tokens, expert_ids, weights, rhs, beside)
    out, _, dispatched, beside = chain.dispatch_multiply(call, *operands, keep_products=False)
    return out, _delivered(call, tokens.dtype, dispatched), beside


@dispatch_dot.defjvp
def _dispatch_dot_jvp(call: FirstCall, primals: Any, tangents: Any) -> Any:
    (tokens, _, _, rhs, _), (d_tokens, _, d_weights, d_rhs, d_beside) = primals, tangents
    keep = call.activation is not None
    out, products, dispatched, beside = chain.dispatch_multiply(call, *primals, keep_products=keep)
    kept = (rhs, products if keep else None, dispatched)
    changes = (d_tokens, d_weights, tuple(map(_tangent, rhs, d_rhs)))
    d_out, d_rows, d_arrived = linear(partial(_dispatch_dot_on, call), partial(_dispatch_dot_back, call), kept, changes)
    delivered = _delivered(call, tokens.dtype, dispatched)
    nothing = zero_from_primal(delivered)  # for its integers
    routing = dataclasses.replace(nothing.routing, weights=d_arrived)
    return (out, delivered, beside), (d_out, nothing._replace(tokens=d_rows, routing=routing), d_beside)


def _delivered(call: FirstCall, dtype: Any, dispatched: Dispatched) -> Dispatched:
    """What was dispatched, with the rows in `dtype`: XLA leaves them out where nobody looks at them."""
    routing = dataclasses.replace(dispatched.routing, config=call.dispatch.config)
    return dispatched._replace(tokens=widened(dispatched.tokens, dtype), routing=routing)


def _tangent(operand: Any, tangent: Any) -> Any:
    return None if isinstance(operand, Float8) else tangent


def _dispatch_dot_on(call: FirstCall, kept: Any, changes: Any) -> Any:
    (rhs, products, dispatched), (d_tokens, d_weights, d_rhs) = kept, changes
    d_rows, d_arrived = dispatch_tangent(call.dispatch.group, d_tokens, d_weights, dispatched.routing)
    d_out = tuple(
        product_tangent(dispatched.tokens, matrix, dispatched.group_sizes, d_rows, d_matrix)
        for matrix, d_matrix in zip(rhs, d_rhs, strict=True)
    )
    if call.activation is not None:
        d_out = jax.jvp(partial(outcome, call.activation), (products,), (d_out,))[1]
    return d_out, d_rows, d_arrived


def _dispatch_dot_back(call: FirstCall, kept: Any, cotangents: Any) -> Any:
    (rhs, products, dispatched), (d_products, d_rows, d_arrived) = kept, cotangents
    if call.activation is not None:
        (d_products,) = jax.vjp(partial(outcome, call.activation), products)[1](d_products)
    d_rhs = tuple(
        _rhs_gradient(dispatched.tokens, matrix, each, dispatched.group_sizes)
        for matrix, each in zip(rhs, d_products, strict=True)
    )
    d_tokens, d_weights = chain.multiply_return(
        call.dispatch.group, d_products, rhs, d_rows, d_arrived, dispatched.routing
    )
    return d_tokens, d_weights, d_rhs


def _rhs_gradient(rows: Rows, rhs: Matrix, cotangent: jax.Array, group_sizes: jax.Array) -> jax.Array | None:
    """None of a matrix in float8."""
    if isinstance(rhs, Float8Weights):
        return None
    return rhs_gradient(widened(rows, cotangent.dtype), cotangent, group_sizes)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def dot_combine(
    call: LastCall, lhs: Rows, rhs: Matrix, weights: jax.Array, routing: Routing, beside: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """`beside` is returned as it is: see `chain.scatter_multiply`."""
    return chain.multiply_combine(call, lhs, rhs, weights, routing), beside


@dot_combine.defjvp
def _dot_combine_jvp(call: LastCall, primals: Any, tangents: Any) -> Any:
    (lhs, rhs, weights, routing, beside), (d_lhs, d_rhs, d_weights, _, d_beside) = primals, tangents
    combined = chain.multiply_combine(call, lhs, rhs, weights, routing)
    kept = (lhs, rhs, weights, routing)
    changes = (_tangent(lhs, d_lhs), _tangent(rhs, d_rhs), d_weights, d_beside)
    d_out = linear(partial(_dot_combine_on, call), partial(_dot_combine_back, call), kept, changes)
    return (combined, beside), d_out


def _dot_combine_on(call: LastCall, kept: Any, changes: Any) -> Any:
    (lhs, rhs, weights, routing), (d_lhs, d_rhs, d_weights, d_beside) = kept, changes
    left, right = (widened(x, jnp.bfloat16 if isinstance(lhs, Float8Rows) else lhs.dtype) for x in (lhs, rhs))
    product = ragged_dot(left, right, routing.group_sizes)
    if d_lhs is None:
        d_product = jnp.zeros_like(product)
    else:
        d_product = product_tangent(lhs, rhs, routing.group_sizes, d_lhs, d_rhs)
    return combine_tangent(call.group, product, weights, routing, d_product, d_weights)[0], d_beside


def _dot_combine_back(call: LastCall, kept: Any, cotangents: Any) -> Any:
    (lhs, rhs, weights, routing), (cotangent, d_beside) = kept, cotangents
    arrived, product, d_beside = chain.scatter_multiply(call.group, cotangent, rhs, routing, d_beside)
    rows, row_weights = widened(lhs, product.dtype), of_rows(weights, routing)
    d_lhs = _tangent(lhs, weighed(product, row_weights))
    d_rhs = _rhs_gradient(weighed(rows, row_weights), rhs, arrived, routing.group_sizes)
    return d_lhs, d_rhs, of_assignments(inner_products(product, rows), routing), d_beside


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def experts(
    first: FirstCall,
    last: LastCall,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    rhs: Matrices,
    down: Matrix,
    beside: jax.Array | None,
) -> tuple[jax.Array, Counted, jax.Array | None]:
    """`dispatch_dot` with an activation, and `dot_combine` of its result."""
    operands = (tokens, expert_ids, weights, rhs, beside)
    options: Any = {"keep_products": False, "quantize": last.in_float8}
    inner, _, dispatched, beside = chain.dispatch_multiply(first, *operands, **options)
    routing = dispatched.routing
    return chain.multiply_combine(last, inner, down, routing.weights, routing), _counted(routing), beside


@experts.defjvp
def _experts_jvp(first: FirstCall, last: LastCall, primals: Any, tangents: Any) -> Any:
    (tokens, ids, weights, rhs, down, beside), (d_tokens, _, d_weights, d_rhs, d_down, d_beside) = primals, tangents
    operands = (tokens, ids, weights, rhs, beside)
    inner, products, dispatched, beside = chain.dispatch_multiply(first, *operands, keep_products=True)
    routing = dispatched.routing
    combined = chain.multiply_combine(last, inner, down, routing.weights, routing)
    kept = (rhs, down, products, dispatched)
    changes = (d_tokens, d_weights, tuple(map(_tangent, rhs, d_rhs)), _tangent(down, d_down), d_beside)
    d_out, d_beside = linear(partial(_experts_on, first, last), partial(_experts_back, first, last), kept, changes)
    counted = _counted(routing)
    return (combined, counted, beside), (d_out, zero_from_primal(counted), d_beside)


def _counted(routing: Routing) -> Counted:
    return Counted(routing.counts, routing.dropped, routing.invalid)


def _kept_of_last(first: FirstCall, kept: Any) -> Any:
    """What `dot_combine` would keep."""
    _, down, products, dispatched = kept
    return outcome(first.activation, products), down, dispatched.routing.weights, dispatched.routing


def _experts_on(first: FirstCall, last: LastCall, kept: Any, changes: Any) -> Any:
    (rhs, _, products, dispatched), (d_tokens, d_weights, d_rhs, d_down, d_beside) = kept, changes
    d_inner, _, d_arrived = _dispatch_dot_on(first, (rhs, products, dispatched), (d_tokens, d_weights, d_rhs))
    return _dot_combine_on(last, _kept_of_last(first, kept), (d_inner, d_down, d_arrived, d_beside))


def _experts_back(first: FirstCall, last: LastCall, kept: Any, cotangents: Any) -> Any:
    rhs, _, products, dispatched = kept
    d_inner, d_down, d_arrived, d_beside = _dot_combine_back(last, _kept_of_last(first, kept), cotangents)
    d_rows = jnp.zeros_like(d_inner, shape=jnp.shape(jax.tree.leaves(dispatched.tokens)[0]))  # nobody else has them
    d_tokens, d_weights, d_rhs = _dispatch_dot_back(first, (rhs, products, dispatched), (d_inner, d_rows, d_arrived))
    return d_tokens, d_weights, d_rhs, d_down, d_beside
