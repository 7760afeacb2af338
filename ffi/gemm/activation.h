// Activations of gated units. Every step is rounded to the dtype, so results have the bits of jax.nn on XLA:GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "comm/platform.h"
#include "gemm/grouped_matmul.h"
#include "gemm/ptx/arithmetic.h"

namespace jax_ep::gemm {

// The hardware adds and multiplies 16-bit values in pairs.
JAX_EP_FN float2 widened(__nv_bfloat162 x) { return __bfloat1622float2(x); }
JAX_EP_FN float2 widened(__half2 x) { return __half22float2(x); }
JAX_EP_FN __nv_bfloat162 narrowed(float x, float y, __nv_bfloat162) { return __floats2bfloat162_rn(x, y); }
JAX_EP_FN __half2 narrowed(float x, float y, __half2) { return __floats2half2_rn(x, y); }

template <class Pair>
JAX_EP_FN Pair silu(Pair x) {
  constexpr float kLog2E = 1.4426950408889634F;
  const float2 wide = widened(x), one{1, 1};
  const Pair grown = narrowed(exp2_fast(-kLog2E * wide.x), exp2_fast(-kLog2E * wide.y), x);
  const float2 sum = widened(__hadd2(narrowed(one.x, one.y, x), grown));
  return __hmul2(x, narrowed(reciprocal(sum.x), reciprocal(sum.y), x));
}

// The tanh approximation.
template <class Pair>
JAX_EP_FN float gelu(float x) {
  const auto rounded = [](float value) { return widened(narrowed(value, value, Pair{})).x; };
  const float cube = rounded(rounded(x * x) * x);
  const float inner = rounded(x + rounded(rounded(0.044715F) * cube));
  const float bent = rounded(tanhf(rounded(rounded(0.7978845608F) * inner)));
  return x * rounded(0.5F * rounded(1 + bent));
}

template <Activation kActivation, class Pair>
JAX_EP_FN Pair activate(Pair x) {
  if constexpr (kActivation == Activation::silu) {
    return silu(x);
  } else if constexpr (kActivation == Activation::gelu) {
    const float2 wide = widened(x);
    return narrowed(gelu<Pair>(wide.x), gelu<Pair>(wide.y), x);
  } else {
    return __hmax2_nan(x, narrowed(0, 0, x));
  }
}

// activation(gate) * up, of 16 bytes of values.
template <Activation kActivation, class Pair>
JAX_EP_FN uint4 gated(uint4 gate, uint4 up) {
  Pair* const values = reinterpret_cast<Pair*>(&gate);
  const Pair* const factors = reinterpret_cast<const Pair*>(&up);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = __hmul2(activate<kActivation>(values[i]), factors[i]);
  return gate;
}

}  // namespace jax_ep::gemm
