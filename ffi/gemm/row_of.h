// The types of a product's operands, as kernels that also sum rows of them know them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "comm/dtype.h"

namespace jax_ep {

// The row format that goes by another name here.
template <class T>
struct RowOf {
  using Type = T;
};
template <>
struct RowOf<__nv_bfloat16> {
  using Type = BFloat16;
};
template <>
struct RowOf<__half> {
  using Type = Float16;
};

}  // namespace jax_ep
