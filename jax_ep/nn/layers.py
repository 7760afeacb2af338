"""Whole layers made of the ops."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep._kit import checks
from jax_ep._kit.checks import Implementation, OnOverflow
from jax_ep.group import Group, check_group
from jax_ep.nn import layer_checks
from jax_ep.nn.layer_checks import Experts
from jax_ep.ops.matmul.api import plain_ragged_dot, ragged_dot
from jax_ep.ops.matmul.straight_through import ragged_dot as float8_ragged_dot
from jax_ep.ops.moe.api import combine, dispatch
from jax_ep.ops.moe.gradients import of_rows, weighed
from jax_ep.ops.moe.types import Routing
from jax_ep.ops.moe_fused.api import combine_beside, dispatch_beside, experts_beside
from jax_ep.ops.moe_fused.types import ACTIVATIONS, ActivationName, Counted, Precision, activated, gate_and_up

Activation = ActivationName | Callable[[jax.Array], jax.Array]
Gated = Callable[[jax.Array, jax.Array], jax.Array]  # of the products by gate and up
Matrices = tuple[jax.Array, jax.Array, jax.Array]  # gate, up, down
Biases = tuple[jax.Array | None, jax.Array | None, jax.Array | None]  # of gate, up, down


class MoeStats(NamedTuple):
    """What a layer counted. Under `jax.shard_map` it goes out by `P(axis_name)`: all experts, and one count per rank.

    Attributes:
      counts: [E / R] int32. Assignments of every rank to each expert of this one, before drops.
      dropped: [1] int32. Assignments of this rank's tokens that found no room (`on_overflow="drop"`).
      invalid: [1] int32. Assignments of this rank's tokens whose expert id was neither -1 nor in [0, E).
    """

    counts: jax.Array
    dropped: jax.Array
    invalid: jax.Array


@overload
def moe_mlp(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None,
    gate: Experts,
    up: Experts | None,
    down: Experts,
    *,
    group: Group,
    activation: Activation = jax.nn.silu,
    gated: Gated | None = None,
    biases: Biases | None = None,
    shared: Matrices | None = None,
    weigh_inputs: bool = False,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    node_capacity: int | Literal["auto"] | None = None,
    chunks: int = 1,
    precision: Precision | None = None,
    wire_dtype: DTypeLike | None = None,
    on_overflow: OnOverflow = "raise",
    with_stats: Literal[True],
    fused: bool | Literal["auto"] = "auto",
    implementation: Implementation = "auto",
) -> tuple[jax.Array, MoeStats]: ...


@overload
def moe_mlp(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None,
    gate: Experts,
    up: Experts | None,
    down: Experts,
    *,
    group: Group,
    activation: Activation = jax.nn.silu,
    gated: Gated | None = None,
    biases: Biases | None = None,
    shared: Matrices | None = None,
    weigh_inputs: bool = False,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    node_capacity: int | Literal["auto"] | None = None,
    chunks: int = 1,
    precision: Precision | None = None,
    wire_dtype: DTypeLike | None = None,
    on_overflow: OnOverflow = "raise",
    with_stats: Literal[False] = False,
    fused: bool | Literal["auto"] = "auto",
    implementation: Implementation = "auto",
) -> jax.Array: ...


def moe_mlp(
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None,
    gate: Experts,
    up: Experts | None,
    down: Experts,
    *,
    group: Group,
    activation: Activation = jax.nn.silu,
    gated: Gated | None = None,
    biases: Biases | None = None,
    shared: Matrices | None = None,
    weigh_inputs: bool = False,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    node_capacity: int | Literal["auto"] | None = None,
    chunks: int = 1,
    precision: Precision | None = None,
    wire_dtype: DTypeLike | None = None,
    on_overflow: OnOverflow = "raise",
    with_stats: bool = False,
    fused: bool | Literal["auto"] = "auto",
    implementation: Implementation = "auto",
) -> jax.Array | tuple[jax.Array, MoeStats]:
    """A mixture of gated MLPs: each token's weighted sum of (activation(x gate_e) * (x up_e)) down_e over its experts.

    Called on every rank, inside `jax.shard_map` over the group's axis, with the matrices of the rank's own experts:
    rank r owns experts [r E/R, (r + 1) E/R). Differentiable in `tokens`, `weights` and all matrices. (Gated MLPs:
    Shazeer, "GLU Variants Improve Transformer", 2020; shared experts: DeepSeekMoE, 2024.)

    Args:
      tokens: [T, H] bfloat16, float16 or float32.
      expert_ids: [T, K] integers in [0, E); -1 skips.
      weights: [T, K] floats, or None for 1.
      gate, up: [E / R, H, F] in the dtype of `tokens`; or `gate` is both, [E / R, H, 2 F] with gate in front, and `up`
        None: then they are one product.
      down: [E / R, F, H] in the dtype of `tokens`.
      group: the open group of the ranks.
      activation: "silu", "gelu" or "relu", which stand for the functions of `jax.nn`, or an elementwise function with
        activation(0) finite.
      gated: instead of `activation`: a function of the products by gate and up, elementwise, gated(0, 0) finite.
      biases: of gate [E / R, F], of up [E / R, F] and of down [E / R, H], each an array in the dtype of `tokens` or
        None; added to the products.
      weigh_inputs: the experts' inputs are multiplied by the weights, and not their outputs (as in Llama 4).
      shared: (gate [H, S], up [H, S], down [S, H]) of an expert that every token visits, in the dtype of `tokens`, the
        same on all ranks. What it adds needs nothing of the routed rows, so it can be computed while they travel.
        Several shared experts are one whose S is the sum of theirs.
      capacity, capacity_factor, node_capacity, chunks, wire_dtype, on_overflow: as for `jax_ep.dispatch`.
      precision: None, or "float8": rows travel to the experts in float8 (`wire_dtype`), and the products of routed rows
        are of operands that are quantized first (`jax_ep.float8`): H and F must be
        multiples of 128. Rows come back, shared experts are computed, and gradients pass straight through the rounding,
        in the dtype of `tokens`. Matrices that are `Float8Weights` already are not quantized at every call; they have
        no gradient.
      with_stats: also returns what was counted.
      fused: True: by `dispatch_ragged_dot` and `ragged_dot_combine`. False: by `dispatch`, `jax_ep.lax.ragged_dot` and
        `combine`, differentiated by JAX. The results have the same bits, gradients differ by rounding; the fused ops
        are faster backward, and keep less. "auto": True, but for implementation="xla": see `uses_fused_ops`. Where
        something stands between the parts of a fused op (`weigh_inputs`, a bias of down), True too takes them one by
        one. With precision="float8", rows that a `dispatch` alone brought are then quantized a second time, and bits
        may differ.
      implementation: as for `jax_ep.dispatch`; "xla" also takes `jax.lax.ragged_dot`.

    Returns:
      [T, H] in the dtype of `tokens`; with `with_stats` a pair of it and `MoeStats`.

    Raises:
      ValueError, TypeError: an argument is wrong; raised when the op is traced.
      JaxEpError: as for `jax_ep.dispatch`.
    """
    op = "moe_mlp"
    check_group(op, group)
    layer_checks.check_experts(op, tokens, gate, up, down, group)
    layer_checks.check_biases(op, biases, tokens, down)
    layer_checks.check_shared(op, tokens, shared)
    activation, gated = layer_checks.check_activation(op, activation, gated)
    checks.check_bool(op, "with_stats", with_stats)
    checks.check_bool(op, "weigh_inputs", weigh_inputs)
    layer_checks.check_precision(op, precision, wire_dtype, gate, up, down)
    checks.check_one_of(op, "implementation", implementation, checks.IMPLEMENTATIONS)
    if precision == "float8":
        wire_dtype = jnp.float8_e4m3fn
    sending: dict[str, Any] = {
        "num_experts": group.size * gate.shape[0],
        "capacity": capacity,
        "capacity_factor": capacity_factor,
        "node_capacity": node_capacity,
        "chunks": chunks,
        "wire_dtype": wire_dtype,
        "on_overflow": on_overflow,
    }
    layer_checks.check_dispatch(op, tokens, expert_ids, weights, group, **sending)
    by_xla = group._resolve(op, implementation, across_nodes=True) == "xla"
    by_fused_ops = uses_fused_ops(fused, by_xla=by_xla)
    one_by_one = weigh_inputs or not by_fused_ops
    apart = group.async_ops and not by_xla
    function = activation if callable(activation) else ACTIVATIONS[activation]
    glu = partial(activated, function) if gated is None else gated
    bias_gate, bias_up, bias_down = biases or (None, None, None)
    activates = one_by_one or gated is not None or bias_gate is not None or bias_up is not None
    multiply: Callable[..., jax.Array] = plain_ragged_dot if by_xla else ragged_dot
    if precision == "float8":
        multiply = float8_ragged_dot
    where: dict[str, Any] = {"group": group, "implementation": implementation}

    hidden = None  # of the shared expert: if apart, two products beside the dispatch, the third beside the combine
    if shared is not None:
        hidden = glu(jnp.dot(tokens, shared[0]), jnp.dot(tokens, shared[1])).astype(tokens.dtype)
    beside = hidden if apart else None

    matrices = (gate,) if up is None else (gate, up)
    rhs: Any = gate if up is None else matrices
    if not activates and bias_down is None:
        options = {"activation": activation, "precision": precision, **sending, **where}
        out, routing, beside = experts_beside(tokens, expert_ids, weights, rhs, down, beside, **options)
    else:
        products: Any  # by gate and up, or what the fused op made of them
        if one_by_one:
            rows, sizes, routing = dispatch(tokens, expert_ids, weights, **sending, **where)
            if beside is not None:
                rows, beside = _both(rows, beside)
            if weigh_inputs:
                rows, routing = _weighed(rows, routing)
            products = tuple(multiply(rows, matrix, sizes) for matrix in matrices)
        else:
            options = {"activation": None if activates else activation, "precision": precision, **sending, **where}
            products, (_, sizes, routing), beside = dispatch_beside(tokens, expert_ids, weights, rhs, beside, **options)
        inner = products
        if activates:
            of_gate, of_up = gate_and_up(products if isinstance(products, tuple) else (products,))
            inner = glu(_biased(of_gate, bias_gate, sizes), _biased(of_up, bias_up, sizes)).astype(tokens.dtype)
        if by_fused_ops and bias_down is None:
            out, beside = combine_beside(inner, down, routing, beside, precision=precision, **where)
        else:
            out = combine(_biased(multiply(inner, down, sizes), bias_down, sizes), routing, **where)
    hidden = beside if apart else hidden
    if shared is not None and hidden is not None:
        always = jnp.dot(hidden, shared[2])
        if apart:  # else XLA adds in the product's epilogue, which then waits for the combine
            out, always = _both(out, always)
        out = out + always
    return (out, _stats(routing)) if with_stats else out


def uses_fused_ops(fused: bool | Literal["auto"], *, by_xla: bool) -> bool:
    """What `moe_mlp` does for its argument `fused`: a function of what is known when it is traced, alike on all ranks.

    "auto" takes the fused ops wherever kernels run: their backward pass is shorter than JAX's own derivative, and holds
    less. implementation="xla" stays the plain formulation that others are checked against.
    """
    if not isinstance(fused, bool) and not (isinstance(fused, str) and fused == "auto"):
        raise ValueError(f"moe_mlp: fused must be True, False or 'auto', got {fused!r}")
    return not by_xla if fused == "auto" else bool(fused)


def _both(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both, once both are there."""
    return jax.lax.optimization_barrier((x, y))


def _biased(product: jax.Array, bias: jax.Array | None, sizes: jax.Array) -> jax.Array:
    """Each row plus the bias [E / R, N] of its expert."""
    if bias is None:
        return product
    return product + jnp.repeat(bias, sizes, axis=0, total_repeat_length=product.shape[0])


def _weighed(rows: jax.Array, routing: Routing) -> tuple[jax.Array, Routing]:
    """Rows times their weights, and a routing by which they are summed up as they are."""
    rows = weighed(rows, of_rows(routing.weights, routing))
    return rows, dataclasses.replace(routing, weights=(routing.rows >= 0).astype(jnp.float32))


def _stats(routing: Routing | Counted) -> MoeStats:
    return MoeStats(routing.counts.sum(axis=0, dtype=jnp.int32), routing.dropped, routing.invalid)
