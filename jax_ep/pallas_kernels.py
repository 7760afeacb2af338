"""The Pallas kernels in a source tree, where they lie beside jax_ep. In a wheel their package itself has this name."""

from pallas_kernels import index_match as index_match
