// The kernels of products, in families. grouped_matmul_tables.h lists them.
#pragma once

#include "gemm/grouped_matmul.h"
#include "gemm/problem.h"
#include "gemm/tensor_map.h"
#include "runtime/cuda/gemm_launch.h"

namespace jax_ep::gemm {

using GroupedMatmulKernel = void (*)(Maps, Problem, GroupedMatmul);

enum class Family { tiles, swapped, gated, gathered, float8 };

template <Family>
struct Kernels {
  static Variants<GroupedMatmulKernel> all();
};

}  // namespace jax_ep::gemm
