// Activations of gated units. Every step is rounded to the dtype, so results have the bits of jax.nn on XLA:GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "comm/platform.h"
#include "gemm/grouped_matmul.h"
#include "gemm/ptx/arithmetic.h"

namespace jax_ep::gemm {

// The hardware adds and multiplies 16-bit values in pairs.
JAX_EP_FN float2 widened(__nv_bfloat162 x) { return __bfloat1622float2(x); }
JAX_EP_FN float2 widened(__half2 x) { return __half22float2(x); }
JAX_EP_FN __nv_bfloat162 narrowed(float x, float y, __nv_bfloat162) { return __floats2bfloat162_rn(x, y); }
JAX_EP_FN __half2 narrowed(float x, float y, __half2) { return __floats2half2_rn(x, y); }

// The tanh approximation.
template <class Pair>
JAX_EP_FN float gelu(float x) {
  const auto rounded = [](float value) { return widened(narrowed(value, value, Pair{})).x; };
  const float cube = rounded(rounded(x * x) * x);
  const float inner = rounded(x + rounded(rounded(0.044715F) * cube));
  const float bent = rounded(tanhf(rounded(rounded(0.7978845608F) * inner)));
  return x * rounded(0.5F * rounded(1 + bent));
}

// 1 / (1 + exp(-x))
template <class Pair>
JAX_EP_FN Pair sigmoid(Pair x) {
  constexpr float kLog2E = 1.4426950408889634F;
  const float2 wide = widened(x);
  const Pair grown = narrowed(exp2_fast(-kLog2E * wide.x), exp2_fast(-kLog2E * wide.y), x);
  const float2 sum = widened(__hadd2(narrowed(1, 1, x), grown));
  return narrowed(reciprocal(sum.x), reciprocal(sum.y), x);
}

template <Activation kActivation, class Pair>
JAX_EP_FN Pair activate(Pair x) {
  if constexpr (kActivation == Activation::silu) {
    return __hmul2(x, sigmoid(x));
  } else if constexpr (kActivation == Activation::gelu) {
    const float2 wide = widened(x);
    return narrowed(gelu<Pair>(wide.x), gelu<Pair>(wide.y), x);
  } else {
    return __hmax2_nan(x, narrowed(0, 0, x));
  }
}

template <Activation kActivation, class Pair>
JAX_EP_FN Pair gated(Pair gate, Pair up, float limit, float slope) {
  if constexpr (kActivation == Activation::clamped_swiglu) {
    const Pair most = narrowed(limit, limit, gate), least = narrowed(-limit, -limit, gate);
    const Pair clipped = __hmin2_nan(__hmax2_nan(up, least), most), bounded = __hmin2_nan(gate, most);
    const Pair unit = __hmul2(bounded, sigmoid(__hmul2(narrowed(slope, slope, gate), bounded)));
    return __hmul2(__hadd2(clipped, narrowed(1, 1, gate)), unit);
  } else {
    return __hmul2(activate<kActivation>(gate), up);
  }
}

// The same for 16 bytes of values.
template <Activation kActivation, class Pair>
JAX_EP_FN uint4 gated(uint4 gate, uint4 up, float limit, float slope) {
  Pair* const values = reinterpret_cast<Pair*>(&gate);
  const Pair* const factors = reinterpret_cast<const Pair*>(&up);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = gated<kActivation>(values[i], factors[i], limit, slope);
  return gate;
}

}  // namespace jax_ep::gemm
