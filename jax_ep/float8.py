"""float8_e4m3fn with a float32 scale per block: its types, how arrays are quantized, and products of both.

weights = float8.quantize_weights(matrices)                # once, where they do not change
product = float8.ragged_dot(rows, weights, group_sizes)    # quantizes what is not quantized yet
"""

from jax_ep._kit.float8 import Float8Rows as Float8Rows, Float8Weights as Float8Weights
from jax_ep.ops.matmul.float8 import dot as dot, ragged_dot as ragged_dot
from jax_ep.ops.matmul.quantize import (
    dequantize as dequantize,
    quantize_rows as quantize_rows,
    quantize_weights as quantize_weights,
)
