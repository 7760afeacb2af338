"""The Pallas kernels in a source tree, where they lie beside jax_ep. In a wheel their package itself has this name."""

from pallas_kernels import (
    ACTIVATIONS as ACTIVATIONS,
    ActivationName as ActivationName,
    grouped_matmul as grouped_matmul,
    grouped_outer as grouped_outer,
)
