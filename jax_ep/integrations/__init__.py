"""Layers for neural network libraries, none of which jax_ep itself needs: import the module of the one that you use."""
