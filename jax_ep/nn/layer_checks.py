"""What `moe_mlp` asks of its arguments, besides what it asks as a dispatch does."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_ep._kit import checks, vary
from jax_ep._kit.float8 import BLOCK, Float8Weights
from jax_ep.group import Group
from jax_ep.ops.matmul.quantize import check_weights, without_gradient
from jax_ep.ops.moe.units import Experts

NO_BIASES = (None, None, None)


def checked_experts(op: str, tokens: jax.Array, experts: Any, group: Group, *, any_matrices: bool) -> Experts:
    """`experts` with three biases, each may be None; differentiating what is in float8 raises a TypeError.

    Args:
      any_matrices: they are what a function of the user's multiplies by: pytrees.
    """
    if not isinstance(experts, Experts):
        raise TypeError(f"{op}: experts must be a jax_ep.Experts, got {checks.describe(experts)}")
    checks.check_rank(op, "tokens", tokens, 2, "[T, H]")
    checks.check_dtype(op, "tokens", tokens, checks.TOKEN_DTYPES)
    if not experts.names:
        raise ValueError(f"{op}: experts.gate and experts.up must not both be None")
    names = (*experts.names, "down")
    if any_matrices:
        _check_pytrees(op, experts, names)
    else:
        _check_matrices(op, tokens, experts)
    if group.size > 1 and vary.tracks_varying(group.axis_name):
        for name in names:
            if not any(vary.varies(x, group.axis_name) for x in jax.tree.leaves(getattr(experts, name))):
                raise ValueError(
                    f"{op}: experts.{name} must be of the experts that each rank owns, got the same on all ranks: "
                    f"shard its first axis by P({group.axis_name!r}) in in_specs"
                )
    if any_matrices:
        return dataclasses.replace(experts, biases=NO_BIASES)
    frozen = {name: without_gradient(op, f"experts.{name}", getattr(experts, name)) for name in names}
    return dataclasses.replace(experts, **frozen, biases=experts.biases or NO_BIASES)


def local_experts(experts: Experts) -> int:
    """E / R, of experts that were checked."""
    return jax.tree.leaves(experts.down)[0].shape[0]


def _check_pytrees(op: str, experts: Experts, names: tuple[str, ...]) -> None:
    if experts.biases is not None:
        raise ValueError(f"{op}: experts.biases must be None where product is given, which may add them")
    counts = set[Any]()
    for name in names:
        leaves = jax.tree.leaves(getattr(experts, name))
        for leaf in leaves:
            checks.check_array(op, f"each leaf of experts.{name}", leaf)
            counts.add(leaf.shape[0] if leaf.ndim else None)
        if not leaves:
            raise ValueError(f"{op}: experts.{name} must have a leaf, got none")
    if len(counts) != 1 or counts & {None, 0}:
        raise ValueError(
            f"{op}: each leaf of experts must have the rank's experts, one or more, as its first axis, got {counts}"
        )


def _check_matrices(op: str, tokens: jax.Array, experts: Experts) -> None:
    hidden, (name, *_) = tokens.shape[1], experts.names
    first = getattr(experts, name)
    for each in (*experts.names, "down"):
        matrix = getattr(experts, each)
        if isinstance(matrix, Float8Weights):
            checks.check_rank(op, f"experts.{each}.bits", matrix.bits, 3, "[E / R, N, K]")
    if not isinstance(first, Float8Weights):
        checks.check_array(op, f"experts.{name}", first)
    layout = "[E / R, H, 2 F]" if experts.up is None else "[E / R, H, F]"
    if len(first.shape) != 3:
        raise ValueError(f"{op}: experts.{name} must have shape {layout}, got {first.shape}")
    count, _, width = first.shape
    if count == 0:
        raise ValueError(f"{op}: experts.{name} must have at least one expert on every rank, got {first.shape}")
    if experts.up is None and width % 2:
        raise ValueError(
            f"{op}: experts.gate must have shape [E / R, H, 2 F] where experts.up is None, got {first.shape}"
        )
    for each in experts.names:
        _check_matrix(op, each, getattr(experts, each), tokens.dtype, (count, hidden, width), layout)
    width //= 2 if experts.up is None else 1
    _check_matrix(op, "down", experts.down, tokens.dtype, (count, width, hidden), "[E / R, F, H]")
    _check_biases(op, experts, tokens, (count, width, hidden))


def _check_matrix(op: str, name: str, matrix: Any, dtype: Any, shape: tuple[int, ...], layout: str) -> None:
    """`matrix`, of a rank's experts, must be an array in the dtype of the tokens, or `Float8Weights`."""
    if isinstance(matrix, Float8Weights):
        check_weights(op, f"experts.{name}", matrix, shape, layout)
    else:
        checks.check_shape(op, f"experts.{name}", matrix, shape, layout)
        checks.check_dtype(op, f"experts.{name}", matrix, (np.dtype(dtype),))


def _check_biases(op: str, experts: Experts, tokens: jax.Array, sizes: tuple[int, int, int]) -> None:
    biases: Any = experts.biases
    if biases is None:
        return
    if not isinstance(biases, tuple | list) or len(biases) != 3:
        raise TypeError(
            f"{op}: experts.biases must be None or those of (gate, up, down), got {checks.describe(biases)}"
        )
    count, width, hidden = sizes
    wanted = (((count, width), "[E / R, F]"), ((count, width), "[E / R, F]"), ((count, hidden), "[E / R, H]"))
    for i, (bias, (shape, layout)) in enumerate(zip(biases, wanted, strict=True)):
        if bias is not None:
            checks.check_shape(op, f"experts.biases[{i}]", bias, shape, layout)
            checks.check_dtype(op, f"experts.biases[{i}]", bias, (np.dtype(tokens.dtype),))
    if experts.gate is None and biases[0] is not None:
        raise ValueError(f"{op}: experts.biases[0] must be None where experts.gate is None, got one")


def check_shared(op: str, tokens: jax.Array, shared: Any, experts: Experts) -> None:
    if shared is None:
        return
    if not isinstance(shared, tuple | list):
        raise TypeError(f"{op}: shared must be None or (gate, up, down), got {checks.describe(shared)}")
    if len(shared) != 3:
        raise ValueError(
            f"{op}: shared must be None or (gate, up, down), got a {type(shared).__name__} of {len(shared)}"
        )
    if (shared[0] is None) != (experts.gate is None):
        raise ValueError(f"{op}: shared[0] must be None where experts.gate is, and only there")
    checks.check_rank(op, "shared[1]", shared[1], 2, "[H, S]")
    hidden, width = tokens.shape[1], shared[1].shape[1]
    for i, (shape, layout) in enumerate(
        (((hidden, width), "[H, S]"), ((hidden, width), "[H, S]"), ((width, hidden), "[S, H]"))
    ):
        if shared[i] is not None:
            checks.check_shape(op, f"shared[{i}]", shared[i], shape, layout)
            checks.check_dtype(op, f"shared[{i}]", shared[i], (np.dtype(tokens.dtype),))


def is_in_float8(op: str, precision: Any, wire: Any, experts: Experts, product: Any) -> bool:
    """Whether the products of routed rows are of operands in float8."""
    if precision is not None and not (isinstance(precision, str) and precision == "float8"):
        raise ValueError(f"{op}: precision must be 'float8' or None, got {precision!r}")
    if wire is not None and not (isinstance(wire, str) and wire == "float8"):
        raise ValueError(f"{op}: wire must be None or 'float8', got {wire!r}")
    if product is not None:
        if not callable(product):
            raise TypeError(f"{op}: product must be a function of (rows, matrix, group_sizes) or None, got {product!r}")
        if precision is not None:
            raise ValueError(f"{op}: precision must be None where product is given, got {precision!r}")
        return False
    if precision is None:
        for name in (*experts.names, "down"):
            if isinstance(getattr(experts, name), Float8Weights):
                raise TypeError(f"{op}: experts.{name} must be an array unless precision='float8', got Float8Weights")
        return False
    sizes = experts.down.shape[1:]
    if any(size % BLOCK for size in sizes):
        raise ValueError(f"{op}: precision='float8' needs H and F to be multiples of 128, got F, H = {sizes}")
    return True


def checked_product(op: str, product: Any) -> Any:
    """The function, which raises ValueError where it returns no rows."""

    def checked(rows: jax.Array, matrix: Any, group_sizes: jax.Array) -> Any:
        made = product(rows, matrix, group_sizes)
        if not isinstance(made, checks.ARRAYS) or made.ndim != 2 or made.shape[0] != rows.shape[0]:
            raise ValueError(f"{op}: product must return an array of {rows.shape[0]} rows, got {checks.describe(made)}")
        return made

    return checked
