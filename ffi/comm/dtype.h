// The dtypes of rows, and the formats that C++ does not have.
#pragma once

#include <cstdint>

#include "comm/platform.h"

namespace jax_ep {

enum class DType : int32_t { float32, bfloat16, float16 };

JAX_EP_CONSTANT_FN int size_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};

}  // namespace jax_ep
