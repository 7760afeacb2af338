// Arithmetic by instructions that C++ has no word for.
#pragma once

#include "comm/platform.h"

namespace jax_ep::gemm {

// 2^x to within 2 units of the last place; what is subnormal is zero.
JAX_EP_FN float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x to within a unit of the last place. Scaled, so that it is not flushed to zero where x is near the largest
// float.
JAX_EP_FN float reciprocal(float x) {
  constexpr float kScale = 0.25F;
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * kScale));
  return result * kScale;
}

}  // namespace jax_ep::gemm
