"""The Pallas kernels of a source tree, where their folder is next to jax_ep. In a wheel their package has this name."""

from pallas_kernels import (
    ACTIVATIONS as ACTIVATIONS,
    BLOCK as BLOCK,
    ActivationName as ActivationName,
    grouped_matmul as grouped_matmul,
    grouped_outer as grouped_outer,
    quantize_matrices as quantize_matrices,
    quantized as quantized,
)
