"""Sums of bags of rows, and their gradients, in which all entries of a bag share a row.

A gradient of a table has a row for each entry. `RowOptimizer.step` reads the shared rows instead, if the gradient has
them. Then XLA does not compute the values.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal as Constant, jaxpr_as_fun

from jax_ep._kit import checks
from jax_ep._kit.linear import linear
from jax_ep._kit.sums import sum_by_ids
from jax_ep._kit.vary import vary_alike
from jax_ep.ops.sparse.types import Shared

T = TypeVar("T")  # a pytree
Combiner = Literal["sum", "mean", "sqrtn"]


def bag(
    rows: jax.Array,
    ids: jax.Array,
    weights: jax.Array | None = None,
    *,
    combiner: Combiner = "sum",
    bag_of: jax.Array | None = None,
    num_bags: int | None = None,
) -> jax.Array:
    """One row per bag of ids: the sum of the rows that `lookup` found. Differentiable in `rows` and `weights`.

    Args:
      rows: [..., L, D], the rows of `ids`.
      ids: [..., L] ints, a bag of at most L ids each; negative ids are padding. Or [N], with `bag_of`.
      weights: [..., L] floats, or None for 1.
      combiner: "sum", of weight times row; "mean", the sum divided by the sum of weights; "sqrtn", divided by the root
        of the sum of squared weights (as in `tf.nn.embedding_lookup_sparse`). An empty bag is zero.
      bag_of: [N] ints: the bag of each of N ids, for bags of different lengths. Numbers outside [0, num_bags) are
        padding.
      num_bags: M; only with `bag_of`.

    Returns:
      [..., D], or [M, D], in the dtype of `rows`; added up in float32.
    """
    op = "bag"
    checks.check_array(op, "ids", ids, dtype=np.integer)
    if not ids.ndim:
        raise ValueError(f"{op}: ids must have shape [..., L], got ()")
    checks.check_array(op, "rows", rows, dtype=np.floating)
    layout = "[..., L, D] for ids [..., L]"
    checks.check_array(op, "rows", rows, layout, shape=(*ids.shape, *rows.shape[-1:]))
    checks.check_one_of(op, "combiner", combiner, Combiner)
    if weights is not None:
        checks.check_array(op, "weights", weights, "that of ids", shape=ids.shape)
    if (bag_of is None) != (num_bags is None):
        raise ValueError(f"{op}: num_bags must be given with bag_of and not without it, got {num_bags}")
    if bag_of is not None:
        checks.check_array(op, "ids", ids, "[N] with bag_of")
        checks.check_array(op, "bag_of", bag_of, "that of ids", np.integer, shape=ids.shape)
        checks.check_int(op, "num_bags", cast(int, num_bags), least=0, below_32_bits=True)

    def total(x: jax.Array, weight: jax.Array | None = None) -> jax.Array:  # [..., L, W] -> [..., W]
        if bag_of is None or num_bags is None:
            if weight is None:
                return x.sum(axis=-2)
            return linear(_sum_of_bag, _to_entries, *vary_alike(None, weight, x.astype(jnp.float32)))
        return sum_by_ids(x, jnp.where(ids >= 0, checks.to_int32(bag_of), num_bags), num_bags, jnp.float32, weight)

    weight = jnp.where(ids >= 0, 1.0 if weights is None else weights, 0).astype(jnp.float32)
    summed = total(rows, weight if weights is not None or bag_of is None else None)
    if combiner != "sum":
        divisor = total((weight if combiner == "mean" else weight**2)[..., None])
        divisor = jnp.where(divisor != 0, divisor, 1)
        summed /= divisor if combiner == "mean" else jnp.sqrt(divisor)
    return summed.astype(rows.dtype)


def _sum_of_bag(weight: jax.Array, rows: jax.Array) -> jax.Array:
    return (weight[..., None] * rows).sum(axis=-2)


def _to_entries(weight: jax.Array, cotangent: jax.Array) -> jax.Array:
    return weight[..., None] * cotangent[..., None, :]


def with_shared_rows(
    gradients: Callable[[list[jax.Array]], tuple[list[jax.Array], T]],
) -> Callable[[list[jax.Array]], tuple[list[jax.Array], T, list[Shared | None]]]:
    """Also returns the shared rows of each gradient [N, D] that is the cotangent of one float32 bag."""

    def run(rows: list[jax.Array]) -> tuple[list[jax.Array], T, list[Shared | None]]:
        traced, shapes = jax.make_jaxpr(gradients, return_shape=True)(rows)
        jaxpr, structure = traced.jaxpr, jax.tree.structure(shapes)
        made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        bags = [_cotangent_of_bag(made_by, var) for var in jaxpr.outvars[: len(rows)]]
        more = [var for bag in bags if bag for var in bag]
        outvars = [*jaxpr.outvars, *more]
        extended = jaxpr.replace(outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names())
        results = jaxpr_as_fun(ClosedJaxpr(extended, traced.consts))(*rows)
        by_row, others = structure.unflatten(results[: len(jaxpr.outvars)])
        found = iter(results[len(jaxpr.outvars) :])
        return by_row, others, [_shared(next(found), next(found)) if bag else None for bag in bags]

    return run


def _cotangent_of_bag(made_by: dict[Any, Any], var: Any) -> list[Any] | None:
    """The variables of weight and cotangent, if `_to_entries` made `var`."""

    def maker(x: Any) -> Any:
        return None if isinstance(x, Constant) else made_by.get(x)

    eqn = maker(var)
    while eqn is not None and eqn.primitive.name == "reshape":
        eqn = maker(eqn.invars[0])
    if eqn is None or getattr(eqn.params.get("forward"), "__wrapped__", None) is not _to_entries:
        return None
    weight, cotangent = (x.aval for x in eqn.invars)
    is_alike = var.aval.shape == (weight.size, cotangent.shape[-1]) and var.aval.dtype == np.float32
    return eqn.invars if is_alike else None


def _shared(weight: jax.Array, cotangent: jax.Array) -> Shared:
    bag = jax.lax.iota(np.int32, weight.size) // np.int32(weight.shape[-1])
    return Shared(cotangent.reshape(-1, cotangent.shape[-1]), bag, weight.reshape(-1))
