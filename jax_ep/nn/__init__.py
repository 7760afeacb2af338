"""Layers and optimizers made of the ops."""
