"""The matrix products with a collective in plain jax.lax: `implementation="xla"`."""

from typing import Any

import jax

from jax_ep._kit.checks import AxisName


def matmul_all_reduce(lhs: jax.Array, rhs: jax.Array, *, dtype: Any, axis_name: AxisName) -> jax.Array:
    return jax.lax.psum(jax.lax.dot(lhs, rhs, preferred_element_type=dtype), axis_name)


def matmul_reduce_scatter(lhs: jax.Array, rhs: jax.Array, *, dtype: Any, axis_name: AxisName) -> jax.Array:
    return jax.lax.psum_scatter(jax.lax.dot(lhs, rhs, preferred_element_type=dtype), axis_name, tiled=True)


def all_gather_matmul(lhs: jax.Array, rhs: jax.Array, *, dtype: Any, axis_name: AxisName) -> jax.Array:
    return jax.lax.dot(jax.lax.all_gather(lhs, axis_name, tiled=True), rhs, preferred_element_type=dtype)
