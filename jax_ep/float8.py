"""float8_e4m3fn with a float32 scale per block: its types, how arrays are quantized, and products of both.

weights = float8.quantize_weights(matrices)                # once, where they do not change
product = float8.ragged_dot(rows, weights, group_sizes)    # quantizes what is not quantized yet
"""

from jax_ep._kit.float8 import Float8Rows, Float8Weights
from jax_ep.ops.matmul.float8 import dot, ragged_dot
from jax_ep.ops.matmul.quantize import dequantize, quantize_rows, quantize_weights

__all__ = [
    "Float8Rows", "Float8Weights", "dequantize", "dot", "quantize_rows", "quantize_weights", "ragged_dot",
]  # fmt: skip
