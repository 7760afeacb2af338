"""Pallas kernels for matching and reducing rows: arrays in, arrays out; no runtime, no globals."""

from .index_match import index_match as index_match
from .reduce import weighted_row_sum as weighted_row_sum
