"""Checks of the arguments that only `moe_mlp` has, not `dispatch`."""

import dataclasses
import logging
from typing import Any, Literal

import jax

from jax_ep._kit import checks, vary
from jax_ep._kit.checks import PyTree
from jax_ep._kit.float8 import BLOCK, Float8Weights
from jax_ep.group import Group
from jax_ep.ops.matmul.quantize import check_weights, frozen
from jax_ep.ops.moe.experts import ProductFunction
from jax_ep.ops.moe.settings import note_same_tokens
from jax_ep.ops.moe.units import NO_BIASES, Experts

_Expected = tuple[tuple[int, ...], str]  # a shape and its layout


def checked_experts(op: str, tokens: jax.Array, experts: Experts, group: Group, *, any_matrices: bool) -> Experts:
    """`experts` with three biases or None. Differentiating matrices in float8 raises a TypeError.

    Args:
      any_matrices: the matrices are pytrees, for a user's product.
    """
    checks.check_array(op, "tokens", tokens, "[T, H]", checks.TOKEN_DTYPES)
    names = _names_of(op, "experts", experts)
    if any_matrices:
        _check_pytrees(op, experts, names)
    else:
        _check_matrices(op, "experts", tokens, experts, "E / R, ")
    if group.size > 1 and vary.tracks_varying(group.axis_name):
        for name in names:
            if not any(vary.varies(x, group.axis_name) for x in jax.tree.leaves(getattr(experts, name))):
                raise ValueError(
                    f"{op}: experts.{name} must be of the experts that each rank owns, got the same on all ranks: "
                    f"shard its first axis by P({group.axis_name!r}) in in_specs"
                )
    if any_matrices:
        return dataclasses.replace(experts, biases=NO_BIASES)
    matrices = {name: frozen(op, f"experts.{name}", getattr(experts, name)) for name in names}
    return dataclasses.replace(experts, **matrices, biases=experts.biases or NO_BIASES)


def _check_pytrees(op: str, experts: Experts, names: tuple[str, ...]) -> None:
    if experts.biases is not None:
        raise ValueError(f"{op}: experts.biases must be None where product is given, which may add them")
    counts = set[int | None]()
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


def checked_shared(op: str, tokens: jax.Array, experts: Experts) -> Experts:
    """`shared_experts` with three biases or None."""
    _names_of(op, "shared_experts", experts)
    _check_matrices(op, "shared_experts", tokens, experts, "")
    return dataclasses.replace(experts, biases=experts.biases or NO_BIASES)


def _names_of(op: str, of: str, experts: object) -> tuple[str, ...]:
    if not isinstance(experts, Experts):
        raise TypeError(f"{op}: {of} must be a jax_ep.Experts, got {checks.describe(experts)}")
    if not experts.first_names:
        raise ValueError(f"{op}: {of}.gate and {of}.up must not both be None")
    return (*experts.first_names, "down")


def _check_matrices(op: str, of: str, tokens: jax.Array, experts: Experts, lead: str) -> None:
    """Args: `of`, the argument's name; `lead`, "E / R, " if arrays have the rank's experts as their first axis."""
    hidden, (name, *_) = tokens.shape[1], experts.first_names
    first = getattr(experts, name)
    for each in (*experts.first_names, "down"):
        matrix = getattr(experts, each)
        if isinstance(matrix, Float8Weights) and lead:
            checks.check_array(op, f"{of}.{each}.bits", matrix.bits, "[E / R, N, K]")
        else:
            checks.check_array(op, f"{of}.{each}", matrix)
    layout = f"[{lead}H, 2 F]" if experts.up is None else f"[{lead}H, F]"
    if len(first.shape) != (3 if lead else 2):
        raise ValueError(f"{op}: {of}.{name} must have shape {layout}, got {first.shape}")
    *count, _, width = first.shape
    if 0 in count:
        raise ValueError(f"{op}: {of}.{name} must have at least one expert on every rank, got {first.shape}")
    if experts.up is None and width % 2:
        raise ValueError(f"{op}: {of}.gate must have shape {layout} where {of}.up is None, got {first.shape}")
    expected = dict.fromkeys(experts.first_names, ((*count, hidden, width), layout))
    width //= 2 if experts.up is None else 1
    for each, (shape, layout) in (expected | {"down": ((*count, width, hidden), f"[{lead}F, H]")}).items():
        matrix = getattr(experts, each)
        if isinstance(matrix, Float8Weights):
            check_weights(op, f"{of}.{each}", matrix, shape, layout)
        else:
            checks.check_array(op, f"{of}.{each}", matrix, layout, tokens.dtype, shape=shape)
    _check_biases(op, of, experts, tokens, ((*count, width), f"[{lead}F]"), ((*count, hidden), f"[{lead}H]"))


def _check_biases(op: str, of: str, experts: Experts, tokens: jax.Array, inner: _Expected, outer: _Expected) -> None:
    """Args: `inner` and `outer`, the shape and layout of the biases of gate and up, and of the bias of down."""
    biases: Any = experts.biases
    if biases is None:
        return
    if not isinstance(biases, tuple | list) or len(biases) != 3:
        raise TypeError(f"{op}: {of}.biases must be None or a triple (gate, up, down), got {checks.describe(biases)}")
    for i, (bias, (shape, layout)) in enumerate(zip(biases, (inner, inner, outer), strict=True)):
        if bias is not None:
            checks.check_array(op, f"{of}.biases[{i}]", bias, layout, tokens.dtype, shape=shape)
    if experts.gate is None and biases[0] is not None:
        raise ValueError(f"{op}: {of}.biases[0] must be None where {of}.gate is None, got one")


def is_in_float8(op: str, precision: object, wire: object, experts: Experts, product: object) -> bool:
    """Whether the products of routed rows have operands in float8."""
    checks.check_one_of(op, "precision", precision, Literal[None, "float8"])
    checks.check_one_of(op, "wire", wire, Literal[None, "float8"])
    if product is not None:
        if not callable(product):
            raise TypeError(f"{op}: product must be a function of (rows, matrix, group_sizes) or None, got {product!r}")
        if precision is not None:
            raise ValueError(f"{op}: precision must be None where product is given, got {precision!r}")
        return False
    if precision is None:
        for name in (*experts.first_names, "down"):
            if isinstance(getattr(experts, name), Float8Weights):
                raise TypeError(f"{op}: experts.{name} must be an array unless precision='float8', got Float8Weights")
        return False
    width, hidden = experts.down.shape[1:]
    if width % BLOCK or hidden % BLOCK:
        got = f"{precision!r}, H = {hidden}, F = {width}"
        raise ValueError(f"{op}: precision must be None unless {BLOCK} divides H and F, got {got}")
    return True


def check_shared_tokens(op: str, shared_tokens: bool, group: Group, wire: object, **operands: Any) -> None:
    """Also warns once if types show that all ranks compute the same tokens without `shared_tokens`.

    Args:
      operands: tokens, expert_ids and weights, which may be None.
    """
    checks.check_bool(op, "shared_tokens", shared_tokens)
    if not shared_tokens:
        what = "computes all of them: pass shared_tokens=True"
        note_same_tokens(logging.WARNING, op, group, what, operands["tokens"])
        return
    if wire is not None:
        raise ValueError(f"{op}: wire must be None where shared_tokens is true, got {wire!r}")
    if group.size > 1 and vary.tracks_varying(group.axis_name):
        for name, x in operands.items():
            if isinstance(x, jax.Array) and vary.varies(x, group.axis_name):
                raise ValueError(
                    f"{op}: {name} must be the same on all ranks where shared_tokens is true, got {name} that differ "
                    f"by rank: take {group.axis_name!r} out of their in_specs"
                )


def checked_product(op: str, product: ProductFunction) -> ProductFunction:
    """`product`, which raises ValueError unless its result is an array with the rows of its operand."""

    def checked(rows: jax.Array, matrix: PyTree, group_sizes: jax.Array) -> jax.Array:
        made = product(rows, matrix, group_sizes)
        if not isinstance(made, checks.ARRAYS) or made.ndim != 2 or made.shape[0] != rows.shape[0]:
            raise ValueError(f"{op}: product must return an array of {rows.shape[0]} rows, got {checks.describe(made)}")
        return made

    return checked
