"""The Pallas kernels of a source tree, where their folder is next to jax_ep. In a wheel their package has this name."""

from pallas_kernels import (
    ACTIVATIONS as ACTIVATIONS,
    BLOCK as BLOCK,
    ZERO_ROW as ZERO_ROW,
    ActivationName as ActivationName,
    blocks_to_float8 as blocks_to_float8,
    grouped_matmul as grouped_matmul,
    grouped_outer as grouped_outer,
    quantize_matrices as quantize_matrices,
)
