// Converts number formats to float32, and back with round-to-nearest-even, in integer arithmetic that every platform
// vectorises.
#pragma once

#include <cstdint>
#include <cstring>

#include "comm/dtype.h"
#include "comm/platform.h"
#if JAX_EP_HAS_PTX
#include "comm/platform/ptx/convert.h"
#endif

namespace jax_ep {

template <class To, class From>
JAX_EP_FN To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// |x| rounded to a format with kMantissa bits and the given exponent bias. NaN and overflow are left to the caller.
template <int kMantissa, int kBias>
JAX_EP_FN uint32_t narrow(uint32_t magnitude) {
  constexpr uint32_t kSmallestNormal = (128 - kBias) << 23;
  constexpr uint32_t kAlign = (127 + 23 - kMantissa + 1 - kBias) << 23;  // adding it makes the FPU round subnormals
  constexpr int kDrop = 23 - kMantissa;
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + bit_cast<float>(kAlign)) - kAlign;
  const uint32_t odd = (magnitude >> kDrop) & 1;
  const uint32_t normal = (magnitude - ((127u - kBias) << 23) + (1u << (kDrop - 1)) - 1 + odd) >> kDrop;
  return magnitude < kSmallestNormal ? subnormal : normal;
}

template <int kMantissa, int kBias>
JAX_EP_FN float widen(uint32_t magnitude) {
  return bit_cast<float>(magnitude << (23 - kMantissa)) * bit_cast<float>((254u - kBias) << 23);
}

JAX_EP_FN float to_float(float x) { return x; }
JAX_EP_FN float to_float(BFloat16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }
JAX_EP_FN float to_float(Float16 x) {
  const uint32_t magnitude = x.bits & 0x7fffu, sign = (x.bits & 0x8000u) << 16;
  const uint32_t value = bit_cast<uint32_t>(widen<10, 15>(magnitude));
  return bit_cast<float>(sign | (magnitude >= 0x7c00u ? value | 0x7f800000u : value));
}
JAX_EP_FN void from_float(float x, float* out) { *out = x; }
JAX_EP_FN void from_float(float x, BFloat16* out) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
}
JAX_EP_FN void from_float(float x, Float16* out) {
  const uint32_t bits = bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  const uint32_t rounded = narrow<10, 15>(magnitude);
  const uint32_t finite = magnitude >= 0x47800000u || rounded > 0x7c00u ? 0x7c00u : rounded;
  out->bits = static_cast<uint16_t>(((bits >> 16) & 0x8000u) | (magnitude > 0x7f800000u ? 0x7e00u : finite));
}
JAX_EP_FN float to_float(Float8E4M3 x) {
  const uint32_t magnitude = x.bits & 0x7fu, sign = (x.bits & 0x80u) << 24;
  const uint32_t value = bit_cast<uint32_t>(widen<3, 7>(magnitude));
  return bit_cast<float>(sign | (magnitude == 0x7fu ? 0x7fc00000u : value));
}

// Out of range is NaN, as this format has no infinity.
JAX_EP_FN void from_float(float x, Float8E4M3* out) {
  const uint32_t bits = bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  const uint32_t rounded = narrow<3, 7>(magnitude);
  const bool nan = magnitude >= 0x43f00000u || rounded > 0x7eu;
  out->bits = static_cast<uint8_t>(((bits >> 24) & 0x80u) | (nan ? 0x7fu : rounded));
}

// A platform may have instructions that convert several values at a time.
template <int kCount, class T>
JAX_EP_FN void from_floats(const float (&from)[kCount], T* to) {
  constexpr int kPerWord = sizeof(float) / sizeof(T);
  if constexpr (kHopper && kPerWord > 1 && kCount % kPerWord == 0) {
    for (int i = 0; i < kCount; i += kPerWord) word_from_floats(from + i, to + i);
  } else {
    for (int i = 0; i < kCount; ++i) from_float(from[i], &to[i]);
  }
}
template <int kCount, class T>
JAX_EP_FN void to_floats(const T* from, float (&to)[kCount]) {
  if constexpr (kHopper && kCount % 2 == 0 && sizeof(T) < sizeof(float)) {
    for (int i = 0; i < kCount; i += 2) floats_from_pair(from + i, &to[i], &to[i + 1]);
  } else {
    for (int i = 0; i < kCount; ++i) to[i] = to_float(from[i]);
  }
}

// The largest magnitude of some values, as the bits of a float32: as integers, NaN is the largest.
template <int kCount, class T>
JAX_EP_FN uint32_t largest_magnitude(const T* values) {
  if constexpr (kHopper && kCount % 4 == 0 && sizeof(T) == 2) {
    uint32_t pair = 0;
    for (int i = 0; i < kCount; i += 4) pair = largest_of_pairs(pair, values + i);
    T largest;
    largest.bits = static_cast<uint16_t>((pair & 0xffff) > pair >> 16 ? pair : pair >> 16);
    return bit_cast<uint32_t>(to_float(largest));
  } else {
    float each[kCount];
    to_floats(values, each);
    uint32_t largest = 0;
    for (int i = 0; i < kCount; ++i) {
      const uint32_t magnitude = bit_cast<uint32_t>(each[i]) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
  }
}

}  // namespace jax_ep
