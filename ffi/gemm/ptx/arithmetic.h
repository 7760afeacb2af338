// Arithmetic instructions that C++ does not have.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "comm/platform.h"

namespace jax_ep::gemm {

// 2^x to within 2 units of the last place. Subnormal numbers count as zero.
JAX_EP_FN float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x to within a unit of the last place. The instruction counts subnormal numbers as zero, and 1 / x of the largest
// floats is one: hence the scale.
JAX_EP_FN float reciprocal(float x) {
  constexpr float kScale = 0.25F;
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * kScale));
  return result * kScale;
}

// Two values times `factor` as e4m3, the first in the low byte, limited to the largest e4m3 value.
JAX_EP_FN uint16_t scaled_to_float8(__nv_bfloat162 pair, float factor) {
  const float2 wide = __bfloat1622float2(pair);
  uint16_t quantized;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(quantized) : "f"(wide.y * factor), "f"(wide.x * factor));
  return quantized;
}

}  // namespace jax_ep::gemm
