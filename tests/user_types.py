# pyright: strict
"""A user's code: the types of what `jax_ep` exports say what these return. Never run; pyright and mypy check it."""

from typing import assert_type

import jax
import numpy as np
from jax.sharding import Mesh

import jax_ep
from jax_ep import embedding, float8, lax


def layer(mesh: Mesh, tokens: jax.Array, ids: jax.Array, weights: jax.Array, matrices: list[jax.Array]) -> jax.Array:
    nodes = jax_ep.NodeOptions(capacity="auto")
    with jax_ep.Group(mesh, ("node", "ep"), nodes=nodes, timeout=60) as group:
        gate, up, down = matrices
        out, stats = jax_ep.moe_mlp(
            tokens, ids, weights, jax_ep.Experts(gate=gate, up=up, down=down), group=group, capacity_factor=2
        )
        return out + stats.dropped.sum()


def by_hand(group: jax_ep.Group, tokens: jax.Array, ids: jax.Array, matrix: jax.Array) -> jax.Array:
    out = jax_ep.dispatch(tokens, ids, group=group, num_experts=8)
    counts: jax.Array = out.routing.counts
    group.check()
    product = lax.ragged_dot(out.rows, matrix, out.group_sizes)
    return jax_ep.combine(product, out.routing, group=group) + counts.sum()


def of_rows(group: jax_ep.Group, tokens: jax.Array, ids: jax.Array, scales: jax.Array) -> jax.Array:
    out = jax_ep.dispatch(tokens, ids, group=group, num_experts=8, expand=False)
    return scales[out.routing.expert_of_row()] * out.routing.weight_of_row()


def of_wires(group: jax_ep.Group, tokens: jax.Array, ids: jax.Array, weights: float8.Float8Weights) -> jax.Array:
    decoded: jax_ep.Dispatched[jax.Array] = jax_ep.dispatch(tokens, ids, group=group, num_experts=8, wire="float8")
    rows, sizes, routing = jax_ep.dispatch(tokens, ids, None, group=group, num_experts=8, wire="float8_rows")
    kept: float8.Float8Rows = rows
    product = float8.ragged_dot(kept, weights, sizes) + decoded.rows
    return jax_ep.combine(product, routing, group=group)


def unexpanded(group: jax_ep.Group, tokens: jax.Array, ids: jax.Array, weights: float8.Float8Weights) -> None:
    rows, sizes, _, indices = jax_ep.dispatch(tokens, ids, group=group, num_experts=8, wire="float8_rows", expand=False)
    assert_type(float8.ragged_dot(rows, weights, sizes, lhs_indices=indices), jax.Array)
    out = jax_ep.dispatch(tokens, ids, group=group, num_experts=8, expand=False)
    assert_type(out, jax_ep.Unexpanded[jax.Array])


def of_tables(group: jax_ep.Group, table: jax.Array, ids: dict[str, jax.Array], rows: jax_ep.SparseRows) -> jax.Array:
    found = embedding.sharded_lookup(table, embedding.stacked_ids(ids, {"a": 3, "b": 5}), group=group)
    optimizer: embedding.RowOptimizer = embedding.rowwise_adagrad(0.1)
    clipped = embedding.clip_by_global_norm(embedding.add(rows, rows, capacity=8), 1.0)
    updates, _ = optimizer.update(clipped, optimizer.init(table), table)
    return embedding.apply_updates(table, updates) + embedding.bag(found["a"], ids["a"], combiner="mean")


def of_lookups(table: jax.Array, ids: jax.Array, scale: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    def loss(rows: jax.Array, scale: jax.Array) -> jax.Array:
        return (rows * scale).sum()

    def with_aux(rows: jax.Array, scale: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return loss(rows, scale), {"mean": rows.mean()}

    value, gradient = embedding.sparse_value_and_grad(loss)(table, ids, scale)
    (_, aux), (rows, by_scale) = embedding.sparse_value_and_grad(with_aux, 1, has_aux=True)(table, ids, scale)
    assert_type(gradient, jax_ep.SparseRows)
    assert_type(rows, jax_ep.SparseRows)
    dense: jax.Array = by_scale
    return assert_type(value, jax.Array) + dense, assert_type(aux, dict[str, jax.Array])


def replicas(
    group: jax_ep.Group, load: np.ndarray, experts: jax_ep.Experts, tokens: jax.Array, ids: jax.Array
) -> jax.Array:
    plan: jax_ep.nn.ReplicaPlan = jax_ep.nn.plan_replicas(load, num_ranks=group.size, num_slots=64, num_nodes=2)
    there: jax_ep.Experts = jax_ep.nn.replicate(experts, plan, group=group)
    return jax_ep.moe_mlp(tokens, jax_ep.nn.physical_ids(ids, plan), None, there, group=group)[0]


def in_float8(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    weights: float8.Float8Weights = float8.quantize_weights(matrices)
    return float8.ragged_dot(rows, weights, sizes) + float8.dequantize(float8.quantize_rows(rows))


def gradients(group: jax_ep.Group, rows: jax_ep.SparseRows, x: jax.Array, w: jax.Array) -> jax.Array:
    summed = jax_ep.coalesce(jax_ep.sparse_all_reduce(rows, capacity=64, group=group))
    return summed.values.sum() + jax_ep.matmul_all_reduce(x, w, group=group)


def waited(group: jax_ep.Group) -> dict[int, list[int]]:
    return {rank.rank: rank.waited_ns for rank in group.report()}
