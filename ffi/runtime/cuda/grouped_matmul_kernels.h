// The kernels of products. Each grouped_matmul_*.cu has a table of some, so that they compile in parallel.
#pragma once

#include "gemm/grouped_matmul.h"
#include "gemm/problem.h"
#include "gemm/tensor_map.h"
#include "runtime/cuda/gemm_launch.h"

namespace jax_ep::gemm {

using GroupedMatmulKernel = void (*)(Maps, Problem, GroupedMatmul);

Variants<GroupedMatmulKernel> tile_kernels();
Variants<GroupedMatmulKernel> swapped_kernels();
Variants<GroupedMatmulKernel> gated_kernels();
Variants<GroupedMatmulKernel> gathered_kernels();
Variants<GroupedMatmulKernel> float8_kernels();

}  // namespace jax_ep::gemm
