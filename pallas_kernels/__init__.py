"""Pallas kernels: arrays in, arrays out; no runtime, no globals."""

from .grouped_matmul import (
    ACTIVATIONS as ACTIVATIONS,
    ActivationName as ActivationName,
    grouped_matmul as grouped_matmul,
    grouped_outer as grouped_outer,
)
from .quantize import BLOCK as BLOCK, quantize_matrices as quantize_matrices, quantized as quantized
