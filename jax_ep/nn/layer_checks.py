"""What `moe_mlp` asks of its arguments."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep._kit import checks, vary
from jax_ep._kit.float8 import BLOCK, Float8Weights
from jax_ep.group import Group
from jax_ep.ops.matmul.quantize import check_weights
from jax_ep.ops.moe.arguments import dispatch_config, node_chunks, node_tokens
from jax_ep.ops.moe_fused.types import ACTIVATIONS, elementwise, wants_float8

Experts = jax.Array | Float8Weights


def check_experts(op: str, tokens: jax.Array, gate: Experts, up: Experts | None, down: Experts, group: Group) -> None:
    checks.check_rank(op, "tokens", tokens, 2, "[T, H]")
    checks.check_dtype(op, "tokens", tokens, checks.TOKEN_DTYPES)
    for name, matrix in (("gate", gate), ("up", up), ("down", down)):
        if isinstance(matrix, Float8Weights):
            checks.check_rank(op, f"{name}.bits", matrix.bits, 3, "[E / R, N, K]")
    if not isinstance(gate, Float8Weights):
        checks.check_array(op, "gate", gate)
    if len(gate.shape) != 3:
        raise ValueError(f"{op}: gate must have shape [E / R, H, F], got {gate.shape}")
    if gate.shape[0] == 0:
        raise ValueError(f"{op}: gate must have at least one expert on every rank, got {gate.shape}")
    experts, hidden, width = gate.shape[0], tokens.shape[1], gate.shape[2]
    named = {"gate": (gate, (experts, hidden, width), "[E / R, H, F]")}
    if up is None:
        if width % 2:
            raise ValueError(f"{op}: gate must have shape [E / R, H, 2 F] where up is None, got {gate.shape}")
        named["gate"] = (gate, (experts, hidden, width), "[E / R, H, 2 F]")
        width //= 2
    else:
        named["up"] = (up, (experts, hidden, width), "[E / R, H, F]")
    named["down"] = (down, (experts, width, hidden), "[E / R, F, H]")
    for name, (matrix, shape, layout) in named.items():
        _check_matrix(op, name, matrix, tokens.dtype, shape, layout)
    if group.size == 1 or not vary.tracks_varying(group.axis_name):
        return
    for name, (matrix, _, _) in named.items():
        held = matrix.bits if isinstance(matrix, Float8Weights) else matrix
        if not vary.varies(held, group.axis_name):
            raise ValueError(
                f"{op}: {name} must be of the experts that each rank owns, got the same on all ranks: shard its first "
                f"axis by P({group.axis_name!r}) in in_specs"
            )


def _check_matrix(op: str, name: str, matrix: Any, dtype: Any, shape: tuple[int, ...], layout: str) -> None:
    """`matrix`, of a rank's experts, must be an array in the dtype of the tokens, or `Float8Weights`."""
    if isinstance(matrix, Float8Weights):
        check_weights(op, name, matrix, shape, layout)
    else:
        checks.check_shape(op, name, matrix, shape, layout)
        checks.check_dtype(op, name, matrix, (np.dtype(dtype),))


def check_dispatch(
    op: str,
    tokens: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array | None,
    group: Group,
    *,
    num_experts: int,
    node_capacity: Any,
    chunks: int,
    **options: Any,
) -> None:
    """The ops that the layer is made of would refuse what is wrong, too, but by their own names."""
    dispatch_config(op, tokens, expert_ids, weights, group=group, num_experts=num_experts, **options)
    node_tokens(op, node_capacity, group, num_experts, expert_ids)
    node_chunks(op, chunks, group, by_kernels=True)


def check_biases(op: str, biases: Any, tokens: jax.Array, down: Experts) -> None:
    if biases is None:
        return
    if not isinstance(biases, tuple | list) or len(biases) != 3:
        raise TypeError(f"{op}: biases must be None or those of (gate, up, down), got {checks.describe(biases)}")
    experts, width, hidden = down.shape
    for i, (bias, shape, layout) in enumerate(
        zip(
            biases,
            ((experts, width), (experts, width), (experts, hidden)),
            ("[E / R, F]",) * 2 + ("[E / R, H]",),
            strict=True,
        )
    ):
        if bias is not None:
            checks.check_shape(op, f"biases[{i}]", bias, shape, layout)
            checks.check_dtype(op, f"biases[{i}]", bias, (np.dtype(tokens.dtype),))


def check_shared(op: str, tokens: jax.Array, shared: Any) -> None:
    if shared is None:
        return
    if not isinstance(shared, tuple | list):
        raise TypeError(f"{op}: shared must be None or (gate, up, down), got {checks.describe(shared)}")
    if len(shared) != 3:
        raise ValueError(
            f"{op}: shared must be None or (gate, up, down), got a {type(shared).__name__} of {len(shared)}"
        )
    checks.check_rank(op, "shared[0]", shared[0], 2, "[H, S]")
    hidden, width = tokens.shape[1], shared[0].shape[1]
    for i, (shape, layout) in enumerate(
        (((hidden, width), "[H, S]"), ((hidden, width), "[H, S]"), ((width, hidden), "[S, H]"))
    ):
        checks.check_shape(op, f"shared[{i}]", shared[i], shape, layout)
        checks.check_dtype(op, f"shared[{i}]", shared[i], (np.dtype(tokens.dtype),))


def check_precision(
    op: str, precision: Any, wire_dtype: DTypeLike | None, gate: Experts, up: Experts | None, down: Experts
) -> None:
    if not wants_float8(op, precision):
        for name, matrix in (("gate", gate), ("up", up), ("down", down)):
            if isinstance(matrix, Float8Weights):
                raise TypeError(f"{op}: {name} must be an array unless precision='float8', got Float8Weights")
        return
    if checks.canonical_dtype(op, "wire_dtype", wire_dtype) not in (None, np.dtype(jnp.float8_e4m3fn)):
        raise ValueError(f"{op}: wire_dtype must be None or float8_e4m3fn with precision='float8', got {wire_dtype!r}")
    if any(size % BLOCK for size in down.shape[1:]):
        raise ValueError(f"{op}: precision='float8' needs H and F to be multiples of 128, got F, H = {down.shape[1:]}")


def check_activation(op: str, activation: Any, gated: Any) -> tuple[Any, Any]:
    """Both as given, but that functions which are not known by name check what they return."""
    if gated is not None:
        if not callable(gated):
            raise TypeError(f"{op}: gated must be None or a function of two arrays, got {gated!r}")
        if activation is not jax.nn.silu:
            raise ValueError(f"{op}: activation must be left out where gated is given, got {activation!r}")
        return activation, elementwise(op, "gated", gated)
    if isinstance(activation, str):
        checks.check_one_of(op, "activation", activation, tuple(ACTIVATIONS))
        return activation, None
    if not callable(activation):
        names = ", ".join(map(repr, ACTIVATIONS))
        raise TypeError(f"{op}: activation must be a function or one of {names}, got {activation!r}")
    known = any(activation is function for function in ACTIVATIONS.values())
    return activation if known else elementwise(op, "activation", activation), None
