"""Pallas kernels: arrays in, arrays out; no runtime, no globals."""

from .index_match import index_match as index_match
