"""Experts of other formats in `jax_ep.moe_mlp`, by `product=`: int8 with a scale per channel, low-rank adapters, qwix.

A product is a function (rows [C, K], matrix, group_sizes [E / R]) -> [C, N]. The matrix may be any pytree whose leaves
have the rank's experts as their first axis. The `QArray` of qwix is one, so `moe_mlp(..., product=qwix.ragged_dot)`
takes `qwix.quantize(matrix, jnp.int8, channelwise_axes=[0, 2])` as it is.
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import jax_ep
from jax_ep.lax import ragged_dot


class Int8(NamedTuple):
    """Matrices [E / R, K, N]: int8 `values`, and a float32 scale [E / R, N] for each column."""

    values: jax.Array
    scales: jax.Array


def quantized(matrix: jax.Array) -> Int8:
    scales = jnp.maximum(jnp.abs(matrix).max(axis=1), 1e-30).astype(jnp.float32) / 127
    return Int8(jnp.round(matrix.astype(jnp.float32) / scales[:, None]).astype(jnp.int8), scales)


def int8_dot(rows: jax.Array, matrix: Int8, group_sizes: jax.Array) -> jax.Array:
    """int8 is exact in every dtype of rows; the sums are scaled, and rounded once."""
    product = ragged_dot(rows, matrix.values.astype(rows.dtype), group_sizes, preferred_element_type=jnp.float32)
    expert = jnp.repeat(jnp.arange(len(group_sizes)), group_sizes, total_repeat_length=len(rows))
    return (product * matrix.scales[expert]).astype(rows.dtype)


class Lora(NamedTuple):
    """`base` + `a` `b` (Hu et al., 2021): [E / R, K, N], which does not train, [E / R, K, r] and [E / R, r, N]."""

    base: jax.Array
    a: jax.Array
    b: jax.Array


def adapted(matrix: jax.Array, key: jax.Array, rank: int) -> Lora:
    experts, k, n = matrix.shape
    a = jax.random.normal(key, (experts, k, rank), matrix.dtype) / k**0.5
    return Lora(matrix, a, jnp.zeros((experts, rank, n), matrix.dtype))


def lora_dot(rows: jax.Array, matrix: Lora, group_sizes: jax.Array) -> jax.Array:
    low = ragged_dot(ragged_dot(rows, matrix.a, group_sizes), matrix.b, group_sizes)
    return ragged_dot(rows, jax.lax.stop_gradient(matrix.base), group_sizes) + low


def layer_of(group: jax_ep.Group, product: Any) -> Any:
    """(tokens [N, H], ids [N, K], weights [N, K], `Experts` of all ranks) -> [N, H], of whole arrays."""

    def layer(tokens: jax.Array, ids: jax.Array, weights: jax.Array, experts: jax_ep.Experts) -> jax.Array:
        return jax_ep.moe_mlp(tokens, ids, weights, experts, group=group, product=product)[0]

    return jax.jit(jax.shard_map(layer, mesh=group.mesh, in_specs=P(group.axis_name), out_specs=P(group.axis_name)))


def main() -> int:
    """Prints what int8 changes, and trains adapters towards a layer. Returns 0 if they come nearer."""
    h, f, k, rank = 64, 128, 2, 8
    keys = jax.random.split(jax.random.key(0), 6)
    with jax_ep.Group(Mesh(np.array(jax.devices()), ("ep",)), "ep") as group:
        e = 2 * group.size
        shapes = (e, h, f), (e, h, f), (e, f, h)
        gate, up, down = (jax.random.normal(keys[i], s) / s[1] ** 0.5 for i, s in enumerate(shapes))
        experts = jax_ep.Experts(gate=gate, up=up, down=down)
        tokens = jax.random.normal(keys[3], (64 * group.size, h))
        ids, weights = jax_ep.nn.softmax_top_k(jax.random.normal(keys[4], (len(tokens), e)), k)
        wanted = layer_of(group, None)(tokens, ids, weights, experts)
        found = layer_of(group, int8_dot)(tokens, ids, weights, jax.tree.map(quantized, experts))
        print(f"int8: differs by {jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted):.1e}")

        trained = jax.tree.map(lambda x: adapted(x + 0.01, keys[5], rank), experts)
        layer = layer_of(group, lora_dot)

        @jax.jit
        def step(experts: jax_ep.Experts) -> tuple[jax_ep.Experts, jax.Array]:
            def loss(experts: jax_ep.Experts) -> jax.Array:
                return jnp.mean((layer(tokens, ids, weights, experts) - wanted) ** 2)

            value, gradient = jax.value_and_grad(loss)(experts)
            return jax.tree.map(lambda x, g: x - 20 * g, experts, gradient), value

        values = []
        for _ in range(20):
            trained, value = step(trained)
            values.append(float(value))
        group.check()
        print(f"adapters of rank {rank}: loss {values[0]:.4f} at the start, {values[-1]:.4f} at the end")
    return 0 if values[-1] < values[0] else 1


if __name__ == "__main__":
    sys.exit(main())
