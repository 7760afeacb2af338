// How a block of values is scaled to float8 e4m3. A stored value is the value times the factor, which makes the largest
// magnitude 448, the format's maximum. Decoding multiplies by the scale. A block of zeros has the scale 1. A block with
// a NaN or an infinity becomes NaN.
#pragma once

#include "comm/platform.h"

namespace jax_ep {

constexpr float kFloat8Max = 448.0f;
constexpr int kScaleBlock = 128;  // values of a row that share a scale; in weights, 128 x 128

// Prevents an infinite factor for a block of tiny values: zero times infinity is NaN.
JAX_EP_FN float finite(float x) { return x > 3.4028235e38f ? 3.4028235e38f : x; }

JAX_EP_FN float factor_for(float largest) { return largest == 0 ? 1.0f : finite(kFloat8Max / largest); }
JAX_EP_FN float scale_for(float largest) { return largest == 0 ? 1.0f : largest / kFloat8Max; }

}  // namespace jax_ep
