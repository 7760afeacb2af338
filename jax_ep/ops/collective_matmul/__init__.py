"""Collective matmuls."""
