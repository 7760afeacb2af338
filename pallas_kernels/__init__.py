"""Pallas kernels: arrays in, arrays out; no runtime, no globals."""

from jax_ep.pallas_kernels.counting_sort import counting_sort as counting_sort
from jax_ep.pallas_kernels.grouped_matmul import (
    ZERO_ROW as ZERO_ROW,
    grouped_matmul as grouped_matmul,
    grouped_outer as grouped_outer,
)
from jax_ep.pallas_kernels.match import places_in_sorted as places_in_sorted
from jax_ep.pallas_kernels.quantize import (
    BLOCK as BLOCK,
    blocks_to_float8 as blocks_to_float8,
    nearest_quotient as nearest_quotient,
    quantize_matrices as quantize_matrices,
)
from jax_ep.pallas_kernels.router import (
    Groups as Groups,
    RouterTiling as RouterTiling,
    best_groups as best_groups,
    can_route as can_route,
    route as route,
)
from jax_ep.pallas_kernels.row_function import RowFunction as RowFunction, trace_rows as trace_rows
from jax_ep.pallas_kernels.row_update import update_rows as update_rows
from jax_ep.pallas_kernels.runs import runs_of_sorted as runs_of_sorted
from jax_ep.pallas_kernels.sums import Cut as Cut, SumTiling as SumTiling, sum_segments as sum_segments
