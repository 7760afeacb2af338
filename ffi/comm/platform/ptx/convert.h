// Hopper's conversions between number formats, several values at a time. Check kHopper before calling.
#pragma once

#include <cstring>

#include "comm/dtype.h"
#include "comm/platform.h"

namespace jax_ep {

JAX_EP_FN void word_from_floats(const float* from, BFloat16* to) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(from[1]), "f"(from[0]));
  memcpy(to, &pair, sizeof(pair));
}
JAX_EP_FN void word_from_floats(const float* from, Float16* to) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(from[1]), "f"(from[0]));
  memcpy(to, &pair, sizeof(pair));
}
// Saturates. Values are already scaled, so only rounding can exceed the largest value.
JAX_EP_FN void word_from_floats(const float* from, Float8E4M3* to) {
  uint32_t four;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;"
      " mov.b32 %0, {low, high}; }"
      : "=r"(four)
      : "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]));
  memcpy(to, &four, sizeof(four));
}
JAX_EP_FN void floats_from_pair(const BFloat16* from, float* low, float* high) {
  uint32_t pair;
  memcpy(&pair, from, sizeof(pair));
  *low = __uint_as_float(pair << 16);
  *high = __uint_as_float(pair & 0xffff0000u);
}
JAX_EP_FN void floats_from_pair(const Float16* from, float* low, float* high) {
  uint32_t pair;
  memcpy(&pair, from, sizeof(pair));
  asm("cvt.f32.f16 %0, %1;" : "=f"(*low) : "h"(static_cast<uint16_t>(pair)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(*high) : "h"(static_cast<uint16_t>(pair >> 16)));
}
JAX_EP_FN void floats_from_pair(const Float8E4M3* from, float* low, float* high) {
  uint16_t pair;
  memcpy(&pair, from, sizeof(pair));
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  asm("cvt.f32.f16 %0, %1;" : "=f"(*low) : "h"(static_cast<uint16_t>(halves)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(*high) : "h"(static_cast<uint16_t>(halves >> 16)));
}

// The largest magnitudes of `largest` and of two more pairs of 16-bit values, as integers.
template <class T>
JAX_EP_FN uint32_t largest_of_pairs(uint32_t largest, const T* from) {
  uint32_t pairs[2];
  memcpy(pairs, from, sizeof(pairs));
  return __vimax3_u16x2(largest, pairs[0] & 0x7fff7fffu, pairs[1] & 0x7fff7fffu);
}

}  // namespace jax_ep
