"""`jax.lax.ragged_dot_general` by the kernels of `ragged_dot`, which read a transposed matrix as it lies."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._kit import vary
from jax_ep._kit.batches import batched_alike
from jax_ep.ops.matmul.api import Form, ProductSettings, check_plain_arrays, grouped_product

FORMS: dict[Form, tuple[tuple[int, ...], ...]] = {  # contracted of lhs, of rhs; batches of both; ragged; groups
    "plain": ((1,), (1,), (), (), (0,), (0,)),
    "transposed": ((1,), (2,), (), (), (0,), (0,)),
    "contracted": ((0,), (0,), (), (), (0,), ()),
}


def ragged_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`jax.lax.ragged_dot_general`, on GPUs by the kernels of `ragged_dot` where the table has the dimension numbers.

    | `lhs` | `rhs` | contracted dimensions | result |
    |---|---|---|---|
    | [M, K] | [G, K, N] | 1 and 1, as `ragged_dot` | [M, N] |
    | [M, K] | [G, N, K] | 1 and 2: matrices transposed, of which no copy is made | [M, N] |
    | [M, K] | [M, N] | 0 and 0, over the rows of each group | [G, K, N] |

    The gradients of the three are made of the three (`jax.lax` has none of the last). Other forms are JAX's.

    Raises:
      TypeError, ValueError, NotImplementedError: as `ragged_dot`.
    """
    op = "ragged_dot_general"
    check_plain_arrays(op, group_offset, lhs=lhs, rhs=rhs)
    operands = batched_alike(*map(jnp.asarray, (lhs, rhs, group_sizes)))
    options = {"precision": precision, "out_sharding": out_sharding, "preferred_element_type": preferred_element_type}
    by_xla = partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=ragged_dot_dimension_numbers, **options)
    (contracted, batches), numbers = ragged_dot_dimension_numbers.dot_dimension_numbers, ragged_dot_dimension_numbers
    dimensions = (*contracted, *batches, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)
    form = next((name for name, of in FORMS.items() if of == tuple(map(tuple, dimensions))), None)
    if form is None or out_sharding is not None or operands[0].dtype != operands[1].dtype:
        return by_xla(*operands)
    operands = vary.vary_alike(None, *operands)
    dtype = jax.eval_shape(by_xla, *operands).dtype  # with all its checks
    settings = ProductSettings(precision=precision)
    return grouped_product(form, settings, dtype, *operands[:2], operands[2].astype(jnp.int32))
