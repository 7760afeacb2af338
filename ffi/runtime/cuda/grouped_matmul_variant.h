// A kernel of products in a table.
#pragma once

#include "gemm/mainloops.h"
#include "runtime/cuda/grouped_matmul_kernels.h"

namespace jax_ep::gemm {

template <class Loop, class Epilogue>
constexpr Variant<GroupedMatmulKernel> variant(const Form& form) {
  return {form, &grouped_matmul_kernel<Loop, Epilogue>, int{sizeof(typename Loop::template Memory<>)}};
}

}  // namespace jax_ep::gemm
