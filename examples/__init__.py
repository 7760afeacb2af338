"""Whole programs over jax_ep: `python -m jax_ep demo`, `demo-mlp` and `demo-sparse`."""
