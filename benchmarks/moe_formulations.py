"""The formulations of dispatch and combine that the MoE benchmark compares, as functions of one rank's arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

import jax_ep

from . import padded_all_to_all as padded, ragged_formulation as ragged

AXIS = "ep"


@dataclasses.dataclass(frozen=True)
class Formulation:
    """`dispatch(tokens, ids, weights)` returns a state whose first two leaves are the rows and their group sizes;
    `combine(state, weights)` brings those very rows back."""

    name: str
    dispatch: Callable[..., Any]
    combine: Callable[..., jax.Array]


def jax_ep_ops(
    group: jax_ep.Group, experts: int, capacity: int, implementation: jax_ep.Implementation, **options: Any
) -> Formulation:
    def dispatch(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> jax_ep.Dispatched:
        return jax_ep.dispatch(
            tokens,
            ids,
            weights,
            group=group,
            num_experts=experts,
            capacity=capacity,
            implementation=implementation,
            **options,
        )

    def combine(state: tuple[Any, ...], weights: jax.Array) -> jax.Array:
        del weights  # they travelled with the dispatch
        rows, _, routing = state
        return jax_ep.combine(rows, routing, group=group, implementation=implementation)

    return Formulation("jax_ep", dispatch, combine)


def padded_all_to_all(experts: int, block: int) -> Formulation:
    def dispatch(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[Any, ...]:
        del weights
        return padded.dispatch(tokens, ids, axis_name=AXIS, num_experts=experts, block=block)

    def combine(state: tuple[Any, ...], weights: jax.Array) -> jax.Array:
        rows, _, sent = state
        return padded.combine(rows, sent, weights, axis_name=AXIS)

    return Formulation("padded all_to_all", dispatch, combine)


def ragged_all_to_all(experts: int, capacity: int, exchange: ragged.Exchange) -> Formulation:
    def dispatch(tokens: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[Any, ...]:
        del weights
        return ragged.dispatch(tokens, ids, axis_name=AXIS, num_experts=experts, capacity=capacity, exchange=exchange)

    def combine(state: tuple[Any, ...], weights: jax.Array) -> jax.Array:
        rows, _, sent = state
        return ragged.combine(rows, sent, weights, axis_name=AXIS, exchange=exchange)

    return Formulation("ragged_all_to_all", dispatch, combine)
