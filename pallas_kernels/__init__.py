"""Pallas kernels: arrays in, arrays out; no runtime, no globals."""

from jax_ep.pallas_kernels.counting_sort import counting_sort
from jax_ep.pallas_kernels.grouped_matmul import ZERO_ROW, grouped_matmul, grouped_outer
from jax_ep.pallas_kernels.match import places_in_sorted
from jax_ep.pallas_kernels.quantize import BLOCK, blocks_to_float8, nearest_quotient, quantize_matrices
from jax_ep.pallas_kernels.router import Groups, RouterTiling, best_groups, can_route, route
from jax_ep.pallas_kernels.row_function import RowFunction, trace_rows
from jax_ep.pallas_kernels.row_update import update_rows
from jax_ep.pallas_kernels.runs import runs_of_sorted
from jax_ep.pallas_kernels.sums import Cut, SumTiling, sum_segments

__all__ = [
    "BLOCK", "ZERO_ROW", "Cut", "Groups", "RouterTiling", "RowFunction", "SumTiling", "best_groups",
    "blocks_to_float8", "can_route", "counting_sort", "grouped_matmul", "grouped_outer", "nearest_quotient",
    "places_in_sorted", "quantize_matrices", "route", "runs_of_sorted", "sum_segments", "trace_rows", "update_rows",
]  # fmt: skip
