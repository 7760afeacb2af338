// The dtypes of rows.
#pragma once

#include <cstdint>

namespace jax_ep {

enum class DType : int32_t { float32, bfloat16, float16 };

}  // namespace jax_ep
