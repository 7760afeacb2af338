"""Pallas kernels for matching and reducing rows: arrays in, arrays out; no runtime, no globals."""

from pallas_kernels.index_match import index_match as index_match
from pallas_kernels.reduce import weighted_row_sum as weighted_row_sum
